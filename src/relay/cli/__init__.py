"""The `relay` command."""
