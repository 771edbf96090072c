"""Strategies whose ranks train on their own for several steps, and then average their weights."""
