"""Passes that fuse several nodes into one, which one kernel computes."""
