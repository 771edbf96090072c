"""ddpexp: one experiment, any launcher, any number of workers, the same numbers."""

# Nothing is imported here that Python has not imported already: under `python -m ddpexp` it would look in the current
# folder.
import os as _os
import sys as _sys

__version__ = "0.1.0"
PYTHONS = ((3, 10), (3, 13))
"""The oldest and the newest Python that the tests are run with; they are run with those in between too."""
TESTED_PYTHONS = "{}.{} to {}.{}".format(*PYTHONS[0], *PYTHONS[1])

if not PYTHONS[0] <= _sys.version_info[:2] <= PYTHONS[1]:
    _text = "this is Python {}.{} ({}), and ddpexp runs on Python ".format(*_sys.version_info[:2], _sys.executable)
    if _sys.argv[:1] == ["-m"]:  # the command, whose package Python imports first
        _sys.stderr.write("ddpexp: " + _text + TESTED_PYTHONS + ": make an environment with one of them.\n")
        _sys.exit(2)
    raise ImportError(_text + TESTED_PYTHONS)

TYPE_CHECKING = False  # what type checkers take for true, without an import of `typing`
if TYPE_CHECKING:
    from ddpexp.cli.api.composed import Composed as Composed
    from ddpexp.cli.api.composed import compose as compose
    from ddpexp.cli.api.diff import diff as diff
    from ddpexp.cli.api.errors import RunFailedError as RunFailedError
    from ddpexp.cli.api.errors import RunInterruptedError as RunInterruptedError
    from ddpexp.cli.api.opened import Run as Run
    from ddpexp.cli.api.opened import SavedCheckpoint as SavedCheckpoint
    from ddpexp.cli.api.opened import open_run as open_run
    from ddpexp.cli.api.opened_sweep import Sweep as Sweep
    from ddpexp.cli.api.opened_sweep import open_sweep as open_sweep
    from ddpexp.cli.api.start import run as run
    from ddpexp.cli.api.start import sweep as sweep
    from ddpexp.errors import DdpexpError as DdpexpError
    from ddpexp.errors import RefusedError as RefusedError
    from ddpexp.task import metric_update as metric_update
    from ddpexp.train.callbacks.base import Callback as Callback
    from ddpexp.train.callbacks.base import RunView as RunView

# The public names and their modules, which are imported when a name is first used.
_PUBLIC = {
    "run": "ddpexp.cli.api.start",
    "sweep": "ddpexp.cli.api.start",
    "compose": "ddpexp.cli.api.composed",
    "diff": "ddpexp.cli.api.diff",
    "open_run": "ddpexp.cli.api.opened",
    "open_sweep": "ddpexp.cli.api.opened_sweep",
    "Run": "ddpexp.cli.api.opened",
    "SavedCheckpoint": "ddpexp.cli.api.opened",
    "Sweep": "ddpexp.cli.api.opened_sweep",
    "Composed": "ddpexp.cli.api.composed",
    "RunFailedError": "ddpexp.cli.api.errors",
    "RunInterruptedError": "ddpexp.cli.api.errors",
    "DdpexpError": "ddpexp.errors",
    "RefusedError": "ddpexp.errors",
    "metric_update": "ddpexp.task",
    "Callback": "ddpexp.train.callbacks.base",
    "RunView": "ddpexp.train.callbacks.base",
}
__all__ = ["__version__", *_PUBLIC]

# In a checkout, `conf` and `recipes` lie beside this folder; an installed wheel holds them inside it. Looking in the
# checkout too makes `python -m ddpexp` work there before (or without) an installation.
_checkout = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.isfile(_os.path.join(_checkout, "conf", "config.yaml")) and _os.path.isdir(
    _os.path.join(_checkout, "recipes")
):
    __path__.append(_checkout)


class _Package(type(_sys)):  # type: ignore[misc]
    """This module, in which `run` and `sweep` are the functions of these names and not the packages."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, unless it is a package of a public name, which Python's import would set here."""
        if name not in _PUBLIC or not isinstance(value, type(_sys)):
            super().__setattr__(name, value)


if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(__import__(_PUBLIC[name], fromlist=[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


_sys.modules[__name__].__class__ = _Package
