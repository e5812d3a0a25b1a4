"""Matrix products by Strassen's algorithm."""
