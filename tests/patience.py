"""How long tests wait for processes that should end."""

PATIENCE = 900.0
"""Seconds after which a process is taken for one that hangs. A slow and busy processor stays far
below it."""
