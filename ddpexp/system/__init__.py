"""The machine and the texts that go to it: processes, limits, network, hardware, the terminal, secrets, schedulers' commands."""
