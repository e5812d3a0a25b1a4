"""The wire format of inference: JSON and raw tensors."""
