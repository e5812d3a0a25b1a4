"""Passes that change the memory layout of images: channels last, batch last."""
