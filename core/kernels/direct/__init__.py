"""Direct convolutions of few channels."""
