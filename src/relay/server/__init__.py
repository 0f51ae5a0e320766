"""Listener, sessions and scheduling. Knows no model's name and imports no torch."""
