"""The machine and the texts that go to it.

Processes, limits, network, hardware, the terminal, secrets, schedulers' commands.
"""
