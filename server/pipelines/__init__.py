"""Pipelines: several models and built-in steps that are served as one model."""
