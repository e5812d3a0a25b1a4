"""Drawings as SVG text: charts, and graphs of models."""
