"""Reductions, ArgMax and ArgMin."""
