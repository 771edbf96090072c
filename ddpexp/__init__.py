"""ddpexp: one experiment, any launcher, any number of workers, the same numbers."""

# Nothing is imported here that Python has not imported already: under `python -m ddpexp` it would look in the current
# folder.
import os as _os

__version__ = "0.1.0"

# In a checkout, `conf` and `recipes` lie beside this folder; an installed wheel holds them inside it. Looking in the
# checkout too makes `python -m ddpexp` work there before (or without) an installation.
_checkout = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.isfile(_os.path.join(_checkout, "conf", "config.yaml")) and _os.path.isdir(
    _os.path.join(_checkout, "recipes")
):
    __path__.append(_checkout)
