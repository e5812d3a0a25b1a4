"""What jobs learn from: uploaded files, kept by what they hold and known by name."""
