"""The networks that a name chooses."""
