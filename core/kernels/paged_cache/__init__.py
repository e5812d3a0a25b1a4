"""The paged cache of keys and values: writes in place, and attention of tokens over the pages of their sequences."""
