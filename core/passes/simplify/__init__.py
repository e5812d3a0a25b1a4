"""Passes that remove work: constant folding, common subexpressions, dead code, algebra."""
