"""An inference request from its body to its reply."""
