"""Convolutions as implicit matrix products, in batches, and in chains."""
