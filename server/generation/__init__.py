"""Texts of language models on the event loop: admission, streams, statistics and metrics."""
