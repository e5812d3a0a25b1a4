"""Access control: API keys, tokens, scopes, rate limits, and the table of all routes with the scopes they need."""
