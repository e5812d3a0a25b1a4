"""Scripts: graphs that the references run, in which some nodes stand for parts in native code."""

from __future__ import annotations

# The operator of such a node. Attributes: `part`, the index of the part; `supposed`, dimensions that must not be
# negative when it runs.
PART = "Part"
