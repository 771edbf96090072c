"""Data: its order, its sets, and one rank's batches of it."""
