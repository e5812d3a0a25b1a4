"""A loaded version that answers requests, and the data plane in front of all versions."""
