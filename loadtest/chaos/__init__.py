"""Chaos test: random clients of a server that is killed repeatedly, and checks of the recorded history."""
