"""Checks of text generation against other engines, and of the server under callers that come and go."""
