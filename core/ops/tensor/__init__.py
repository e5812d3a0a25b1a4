"""Operators on tensors: arithmetic, indexing, movement, reductions."""
