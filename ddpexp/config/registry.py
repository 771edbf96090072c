"""ddpexp's own parts: the key by which a configuration names each of them, and where its code is.

Keys are the names of the options in `conf`. Nothing else depends on where a module is or what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARTS: Mapping[str, Mapping[str, str]] = {
    "launcher": {
        "spawn": "ddpexp.launch.launchers.local.Spawn",
        "torchrun-env": "ddpexp.launch.launchers.torchrun_env.TorchrunEnv",
        "mpi": "ddpexp.launch.launchers.mpi.Mpi",
        "slurm": "ddpexp.launch.launchers.slurm.Slurm",
        "elastic": "ddpexp.launch.launchers.elastic.Elastic",
    },
    "scheduler": {
        "constant": "ddpexp.train.schedule.Constant",
        "cosine": "ddpexp.train.schedule.Cosine",
        "onecycle": "ddpexp.train.schedule.OneCycle",
    },
    "data": {"mnist": "ddpexp.data.mnist.dataset.load", "images": "ddpexp.data.images.dataset.load"},
    "data.prepare": {"mnist": "ddpexp.data.mnist.prepare.prepare", "images": "ddpexp.data.images.files.prepare"},
}

# The names that configurations of version 0.1 and earlier give the same parts, run directories among them.
_FORMER: Mapping[str, Mapping[str, str]] = {
    "launcher": {
        "ddpexp.launch.spawn.Spawn": "spawn",
        "ddpexp.launch.torchrun_env.TorchrunEnv": "torchrun-env",
        "ddpexp.launch.mpi.Mpi": "mpi",
        "ddpexp.launch.slurm.Slurm": "slurm",
        "ddpexp.launch.elastic.Elastic": "elastic",
    },
    "scheduler": {
        "ddpexp.schedule.Constant": "constant",
        "ddpexp.schedule.Cosine": "cosine",
        "ddpexp.schedule.OneCycle": "onecycle",
    },
    "data": {"ddpexp.data.mnist.load": "mnist", "ddpexp.data.images.load": "images"},
    "data.prepare": {"ddpexp.data.mnist_files.prepare": "mnist", "ddpexp.data.image_files.prepare": "images"},
}


def keys_of(section: str) -> tuple[str, ...]:
    """Return the keys of the parts that a section such as `launcher` may name."""
    return tuple(_PARTS.get(section, ()))


def key_of(section: str, target: object) -> str | None:
    """Return the key of one of our own parts, given that or its name of an earlier version; None for all else."""
    if not isinstance(target, str):
        return None
    return target if target in _PARTS.get(section, ()) else _FORMER.get(section, {}).get(target)


def names_the_same(section: str, one: object, other: object) -> bool:
    """Return whether two names, the values of `_target_` in a section, are of the same part."""
    return one == other or (key_of(section, one) is not None and key_of(section, one) == key_of(section, other))


def path_of(section: str, key: str) -> str:
    """Return the full name, `module.name`, of one of our own parts."""
    return _PARTS[section][key]


def key_of_class(section: str, kind: type) -> str | None:
    """Return the key of one of our own classes."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    return next((key for key, known in _PARTS[section].items() if known == path), None)


def with_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with our own parts named by their keys.

    Which an earlier version may have named otherwise.
    """
    found = dict(values)
    for where in _PARTS:
        section, _, name = where.partition(".")
        name = name or "_target_"
        held = found.get(section)
        if isinstance(held, Mapping) and (key := key_of(where, held.get(name))) not in (None, held.get(name)):
            found[section] = {one: key if one == name else value for one, value in held.items()}
    return found
