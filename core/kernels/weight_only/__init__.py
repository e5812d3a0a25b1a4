"""Matrix products with weights of few bits."""
