"""This process's rank among the workers, their collectives, and their random numbers."""
