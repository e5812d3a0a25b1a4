"""Layouts, tiles and cost models that the specs of several kernel families share; no code generation."""
