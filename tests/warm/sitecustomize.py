"""Python imports this at its start, where PYTHONPATH has this folder; see the package's docstring."""

from __future__ import annotations

import os
import sys

_options = [word for word in sys.orig_argv[1:4] if word != "-u"]  # torchrun starts `python -u -m ddpexp`

if "DDPEXP_TESTS_ZYGOTE" in os.environ and _options[:2] == ["-m", "ddpexp"]:
    from tests.warm import forks

    forks.install()
