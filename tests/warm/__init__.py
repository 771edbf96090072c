"""Real commands without the seconds that importing torch takes: a process that has imported it forks their servers.

The process (`zygote.py`) has done what every fork server does before its first request. A command whose environment
names the process's socket, and whose `PYTHONPATH` has this folder (`sitecustomize.py`), gets a fork of it in place of a
new interpreter, as each job of a sweep gets a fork of the sweep's server. The rest is the command as users run it. A
command in which a new interpreter would differ from the process (`state.py`: variables that libraries read, limits,
namespaces, ignored signals, ...) starts its own server.

This is for tests of what a run does: their folder or file overrides the fixture `environ` with `warm_environ`. Tests of
how servers start, end and fail keep the plain one, and so do those of equal results whose runs must not share the seed
of Python's hashes.
"""
