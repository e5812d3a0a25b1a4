"""The built-in steps of pipelines."""
