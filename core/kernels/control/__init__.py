"""Control flow as one kernel."""
