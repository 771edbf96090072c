"""Who this worker is among the others, how they reduce, and their random numbers."""
