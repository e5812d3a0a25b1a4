"""Products by Intel's matrix tiles (AMX)."""
