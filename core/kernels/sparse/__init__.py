"""Products with constant weights of many zeros, over the weights that are not zero."""
