"""Lathe's service: a versioned model repository behind the Open Inference Protocol."""
