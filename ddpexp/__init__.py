"""ddpexp: one experiment, any launcher, any number of workers, the same numbers."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, `conf` and `recipes` lie beside this folder; an installed wheel holds them inside it. Looking in the
# checkout too makes `python -m ddpexp` work there before (or without) an installation.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "conf" / "config.yaml").is_file() and (_checkout / "recipes").is_dir():
    __path__.append(str(_checkout))
