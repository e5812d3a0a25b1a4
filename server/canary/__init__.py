"""Canary releases: a candidate version gets a share of the requests, and statistics promote it or roll it back."""
