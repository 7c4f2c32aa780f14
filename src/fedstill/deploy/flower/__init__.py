"""Flower between the server and its sites: a transport over its grid, its two apps, and the files that operators get.

Nothing here imports flwr when it is imported, because only a deployment over Flower installs it: fedstill[flower].
"""
