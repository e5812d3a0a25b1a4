"""Convolutions as implicit matrix products and of batch-last images, and their gradients."""
