"""The launchers: one module for each option of the config group `launcher`, with their helpers."""
