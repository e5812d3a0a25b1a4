"""Other engines that `python -m loadtest generate` measures: modules for a Python that has the engine and NumPy."""
