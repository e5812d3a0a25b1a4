"""Graph to graph: every pass keeps what the model computes, up to float rounding."""
