"""Kernels of the simulated device, which run the NumPy references."""
