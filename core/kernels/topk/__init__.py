"""TopK."""
