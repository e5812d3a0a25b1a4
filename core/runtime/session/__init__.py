"""A model ready to run: sessions, and how they choose code for the shapes of a run."""
