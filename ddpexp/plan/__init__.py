"""Estimating what a run needs, in memory, disk space and time, at any number of workers, without running it."""
