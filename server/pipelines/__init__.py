"""Several models and steps served as one."""
