"""Copies: Transpose, Slice, Concat, Pad and others."""
