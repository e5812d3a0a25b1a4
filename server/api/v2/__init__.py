"""The routes of the Open Inference Protocol except inference itself."""
