"""Runs a training from start to end: its work folder, events, checkpoints, evaluation and result."""
