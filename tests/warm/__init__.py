"""Real commands without the seconds that imports take: processes that have imported all fork them and their servers.

One process (`zygote.py`) has imported torch, as every fork server does before its first request. A command whose
environment names its socket, and whose `PYTHONPATH` has this folder (`sitecustomize.py`), gets a fork of it in place of
a new interpreter, as each job of a sweep gets a fork of the sweep's server. Another one (`commands.py`) has
imported what `python -m ddpexp` imports before it reads its arguments, and forks the commands that tests start
(`popen.py`). The rest is as users run it. Where a new interpreter would differ from the process (`state.py`: variables
that libraries read, limits, namespaces, ignored signals, ...), a new interpreter it is.

This is for tests of what a run does: their folder or file overrides the fixture `environ` with `warm_environ`. Tests of
how commands and servers start, end and fail keep the plain one, and so do those of equal results whose runs must not
share the seed of Python's hashes.
"""
