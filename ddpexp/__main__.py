"""The command: `python -m ddpexp key=value ...`, and its verbs."""

# `from __future__ import ...` would be the first import, and thus be looked for in the current folder.
import os
import sys

try:
    _here, _package = os.getcwd(), os.path.dirname(os.path.abspath(__file__))
except FileNotFoundError:
    sys.stderr.write("ddpexp: the current folder has been removed: change to another one.\n")
    sys.exit(2)

if __name__ == "__main__" and __spec__ is None and sys.path[0] == os.path.realpath(_package):
    # Run as a file, whose folder Python has put in front: the package is in the folder above.
    del sys.path[0]
    sys.path.append(os.path.dirname(_package))
elif (
    __name__ == "__main__"
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] == _here != os.path.dirname(_package)
):
    # `python -m` has put the current folder in front, which may be anybody's. It stays where it is the checkout that
    # runs.
    del sys.path[0]

from ddpexp.system import start


def run() -> None:
    """Run the command line and end this process with its exit code."""
    start.stop_on_signals()  # before the imports, which take most of the time until something is started
    try:
        from ddpexp.cli import main
    except MemoryError:
        sys.stderr.write("ddpexp: there is no memory left to start (ulimit -v shows a limit of this shell).\n")
        sys.exit(1)
    main.run()


if __name__ == "__main__":
    run()
