"""Load tests of a running server (`python -m loadtest`) and of the engine (`python -m loadtest.engine`)."""
