"""Versions on disk, what is live, and how one gets there.

``names`` and ``manifest`` and ``aliases`` say what a repository holds, ``fs`` and ``journal`` and ``store`` keep it
durable, ``lifecycle`` and ``policy`` and ``registry`` say what is served, ``rollout`` moves between the two.
"""
