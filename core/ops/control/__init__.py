"""Control flow and sequences."""
