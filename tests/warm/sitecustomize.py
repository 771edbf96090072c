"""Python imports this at its start, where PYTHONPATH has this folder; see the package's docstring."""

from __future__ import annotations

import os
import sys

if "DDPEXP_TESTS_ZYGOTE" in os.environ and sys.orig_argv[1:3] == ["-m", "ddpexp"]:
    from tests.warm import forks

    forks.install()
