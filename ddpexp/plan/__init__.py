"""What a run would take, in memory, on disk and in time, at any number of workers, without running it."""
