"""Operators on images: resizing, sampling, detection, decoding."""
