"""GridSample and RoiAlign."""
