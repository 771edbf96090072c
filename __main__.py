"""`python -m ddpexp` in the folder above a clone named ddpexp comes here when ddpexp is not installed."""

import os
import sys

_clone = os.path.relpath(os.path.dirname(os.path.abspath(__file__)))
print(
    f"ddpexp: not installed in {sys.prefix}: the folder {_clone} here is a clone of the repository, not the package. "
    f"Install it with pip install -e {_clone} -c {_clone}/constraints.txt, or run the command inside {_clone}.",
    file=sys.stderr,
)
sys.exit(2)
