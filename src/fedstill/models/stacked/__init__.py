"""Convolutions of many clients in one kernel."""
