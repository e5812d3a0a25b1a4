"""Generation of text: pages of the cache, continuous batching, streams of text, chat templates."""
