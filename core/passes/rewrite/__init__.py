"""The toolkit of the passes: the graph editor, the pattern matcher, and helpers."""
