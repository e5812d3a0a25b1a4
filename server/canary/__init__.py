"""A candidate version takes a share of the traffic and is promoted, or rolled back, on what it shows."""
