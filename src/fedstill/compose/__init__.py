"""How parts become methods."""
