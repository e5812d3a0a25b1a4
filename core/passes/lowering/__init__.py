"""Passes that replace an operator with simpler operators."""
