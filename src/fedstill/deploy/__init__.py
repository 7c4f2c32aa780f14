"""Runs between organisations: a folder that an operator reads, sites that keep their data, a server without rows.

It imports nothing, because a process is started for each message that needs `deploy.socket` alone.
"""
