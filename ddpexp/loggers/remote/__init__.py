"""Loggers on other machines: each is fed by a process of its own that follows the files of the run directory."""
