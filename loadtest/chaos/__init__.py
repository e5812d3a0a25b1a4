"""Random clients of a server that is killed again and again, and what their history must obey."""
