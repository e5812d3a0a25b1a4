"""Running a plan on a GPU, or on a simulated device."""
