"""Many experiments from one command: slots, resume, table; sits beside `__main__`."""
