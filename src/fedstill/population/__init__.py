"""Clients that live elsewhere: orders and questions leave as bytes, and answers come back as bytes."""

from fedstill.population.desk import Desk as Desk
from fedstill.population.desk import held_by as held_by
from fedstill.population.loopback import Loopback as Loopback
from fedstill.population.loopback import over_loopback as over_loopback
from fedstill.population.remote import Remote as Remote
from fedstill.population.remote import Transport as Transport
from fedstill.population.remote import without_rows as without_rows
