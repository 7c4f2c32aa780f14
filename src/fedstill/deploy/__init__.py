"""Runs between organisations: a folder that an operator reads, sites that keep their data, a server without rows."""

from fedstill.deploy.folder import Deployment as Deployment
from fedstill.deploy.folder import Member as Member
from fedstill.deploy.folder import SiteFolder as SiteFolder
from fedstill.deploy.folder import read_deployment as read_deployment
from fedstill.deploy.folder import read_site as read_site
from fedstill.deploy.server import federate_over as federate_over
