"""Graph-to-graph rewrites: every pass preserves the results of the model, up to float rounding."""
