"""What runs in every worker process: the entry points, the run loop, and its parts."""
