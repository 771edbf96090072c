"""`python -m ddpexp` in the folder above a clone named ddpexp comes here when ddpexp is not installed."""

import os
import sys

_clone = os.path.relpath(os.path.dirname(os.path.abspath(__file__)))
print(
    f"ddpexp: it is not installed in {sys.prefix}, and {_clone} here is a clone, not the package. "
    f"Install it with pip install -e {_clone} -c {_clone}/constraints.txt, or change into {_clone} first.",
    file=sys.stderr,
)
sys.exit(2)
