"""Proofs about a graph: which rows are independent, and which tokens may share a run."""
