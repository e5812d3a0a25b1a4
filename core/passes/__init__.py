"""Graph-to-graph rewrites: every pass preserves the results of the model, up to rounding in the chosen precision."""
