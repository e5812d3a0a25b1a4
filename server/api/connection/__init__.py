"""The HTTP connection of the fast path."""
