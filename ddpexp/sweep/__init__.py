"""Many experiments from one command: slots, resume, tables and plots."""
