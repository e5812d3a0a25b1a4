"""Child processes of the server: started with limits, watched, and killed with their process group."""
