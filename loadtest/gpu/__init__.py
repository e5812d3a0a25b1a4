"""A measuring run on a GPU that a time limit cannot waste: `python -m loadtest.gpu --minutes 9`, see docs/gpu.md."""
