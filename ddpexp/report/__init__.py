"""The report of runs and sweeps: one HTML page that needs no network."""
