"""The management API: models, versions, jobs, datasets, canaries."""
