"""A benchmark run on a GPU that resumes after a time limit: `python -m loadtest.gpu --minutes 9`, see docs/gpu.md."""
