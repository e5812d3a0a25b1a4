"""Operators of the domain ai.onnx.ml: trees, linear models, support vector machines, labels."""
