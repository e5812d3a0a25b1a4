"""One training step: its graph, losses, optimizers, schedules and state."""
