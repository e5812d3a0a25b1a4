"""Fused elementwise operators."""
