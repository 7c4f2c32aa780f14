"""Explanations of a method, and a check of this installation."""
