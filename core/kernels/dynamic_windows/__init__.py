"""Depthwise convolutions and pooling for dynamic image sizes."""
