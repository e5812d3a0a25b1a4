"""Datasets for jobs: uploaded files, stored by their content's digest and known by name."""
