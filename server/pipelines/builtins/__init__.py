"""The steps a pipeline may have beside models of the repository."""
