"""Who may do what: keys, scopes, and one table of every route."""
