"""The host and the operating system: processes, limits, network, hardware, terminal, secrets, job schedulers."""
