"""Chains of 1x1 and depthwise convolutions as one kernel."""
