"""Language models: readers of checkpoint files, and the decoder that they fill, written with `lathe.core.nn`."""
