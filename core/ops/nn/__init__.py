"""Operators of neural networks: products, convolutions, pooling, normalization, recurrence, optimizers."""
