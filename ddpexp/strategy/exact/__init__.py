"""Exact reduction: the same sum at every number of workers."""
