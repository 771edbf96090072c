"""The run on disk: its directory, lock, preparation, resumption, and what a command asks a launcher to run."""
