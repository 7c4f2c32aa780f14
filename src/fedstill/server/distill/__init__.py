"""Distillation on the server: teachers answer, answers become targets, a student learns them."""
