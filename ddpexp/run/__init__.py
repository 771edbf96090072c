"""The run on disk: its directory, lock, data preparation, resume, and the jobs that launchers run."""
