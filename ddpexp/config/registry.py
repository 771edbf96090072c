"""ddpexp's own parts: the key by which a configuration names each of them, and where its code is.

Keys are the names of the options in `conf`. Nothing else depends on where a module is or what it is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_PARTS: Mapping[str, Mapping[str, str]] = {
    "launcher": {
        "spawn": "ddpexp.launch.launchers.local.Spawn",
        "inline": "ddpexp.launch.launchers.inline.Inline",
        "torchrun-env": "ddpexp.launch.launchers.torchrun_env.TorchrunEnv",
        "mpi": "ddpexp.launch.launchers.mpi.Mpi",
        "slurm": "ddpexp.launch.launchers.slurm.Slurm",
        "elastic": "ddpexp.launch.launchers.elastic.Elastic",
    },
    "scheduler": {
        "constant": "ddpexp.train.schedule.Constant",
        "constant_with_warmup": "ddpexp.train.schedule.Constant",
        "cosine": "ddpexp.train.schedule.Cosine",
        "exponential": "ddpexp.train.schedule.Exponential",
        "linear": "ddpexp.train.schedule.Linear",
        "multi_step": "ddpexp.train.schedule.MultiStep",
        "onecycle": "ddpexp.train.schedule.OneCycle",
        "plateau": "ddpexp.train.plateau.Plateau",
        "polynomial": "ddpexp.train.schedule.Polynomial",
        "torch": "ddpexp.train.torch_schedule.TorchSchedule",
        "wsd": "ddpexp.train.schedule.WSD",
    },
    "optimizer": {
        "muon": "ddpexp.train.combined_optimizer.muon",
        "sparse_adam": "ddpexp.train.combined_optimizer.sparse_adam",
    },
    "logger": {
        "tensorboard": "ddpexp.loggers.tensorboard.TensorBoard",
        "csv": "ddpexp.loggers.csv_files.CsvFiles",
        "wandb": "ddpexp.loggers.remote.wandb.WandB",
        "mlflow": "ddpexp.loggers.remote.mlflow.MLflow",
    },
    "callbacks": {
        "early_stopping": "ddpexp.train.callbacks.early_stopping.EarlyStopping",
        "find_nonfinite": "ddpexp.train.callbacks.find_nonfinite.FindNonFinite",
        "histograms": "ddpexp.train.callbacks.histograms.Histograms",
        "lr_monitor": "ddpexp.train.callbacks.lr_monitor.LRMonitor",
    },
    "strategy": {
        "ddp": "ddpexp.strategy.ddp_options.DDPOptions",
        "fsdp": "ddpexp.strategy.fsdp.options.FSDPOptions",
        "local_sgd": "ddpexp.strategy.local.options.LocalOptions",
        "diloco": "ddpexp.strategy.local.options.DiLoCoOptions",
        "pipeline": "ddpexp.strategy.pipeline.options.PipelineOptions",
    },
    "data": {
        "arrays": "ddpexp.data.arrays.dataset.load",
        "hf": "ddpexp.data.arrays.dataset.load",
        "mixture": "ddpexp.data.mixture.dataset.mix",
        "mnist": "ddpexp.data.mnist.dataset.load",
        "cifar10": "ddpexp.data.images.dataset.load",
        "images": "ddpexp.data.images.dataset.load",
        "image_folder": "ddpexp.data.image_folder.dataset.load",
        "tar_shards": "ddpexp.data.tar_shards.dataset.load",
        "text": "ddpexp.data.text.dataset.load",
    },
    "data.prepare": {
        "arrays": "ddpexp.data.arrays.prepare.prepare",
        "hf": "ddpexp.data.hf.prepare.prepare",
        "mnist": "ddpexp.data.mnist.prepare.prepare",
        "cifar10": "ddpexp.data.cifar10.prepare.prepare",
        "images": "ddpexp.data.images.files.prepare",
        "image_folder": "ddpexp.data.image_folder.prepare.prepare",
        "tar_shards": "ddpexp.data.tar_shards.prepare.prepare",
        "text": "ddpexp.data.text.prepare.prepare",
    },
    # Of kinds that read other data by the schema, or the facts, of the data that was trained on.
    "data.predict": {
        "arrays": "ddpexp.data.arrays.to_predict.prepare",
        "hf": "ddpexp.data.hf.prepare.prepare_by",
        "image_folder": "ddpexp.data.image_folder.to_predict.prepare",
    },
}

# The names of the same parts in configurations of version 0.1 and earlier, such as those of old run directories.
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


REMOTE_LOGGERS = ("wandb", "mlflow")
"""Our loggers on other machines, whose classes are free of torch."""

_LISTED = re.compile(r"(logger|callbacks)\.[^.\[]+")  # the place of a logger or a callback, whose key is any name
_SOURCE = re.compile(r"(data)\.sources\.[^.\[]+(\.prepare)?")  # likewise of a source of a mixture

# Former names of options: section, part, former name, name. Kept for one release; `deprecation_warnings` reports them.
_RENAMED = (("data", "images", "deviation", "std"),)


def section_of(where: str) -> str:
    """Return the section in whose terms a part at the key `where` is named: `logger` for `logger.tensorboard`."""
    listed, source = _LISTED.fullmatch(where), _SOURCE.fullmatch(where)
    if source is not None:
        return source[1] + (source[2] or "")
    return listed[1] if listed is not None else where


def keys_of(where: str) -> tuple[str, ...]:
    """Return the keys of the parts that a place such as `launcher` or `logger.tensorboard` may name."""
    return tuple(_PARTS.get(section_of(where), ()))


def key_of(where: str, target: object) -> str | None:
    """Return the key of one of our own parts, given that or its name of an earlier version; None for all else."""
    if not isinstance(target, str):
        return None
    section = section_of(where)
    return target if target in _PARTS.get(section, ()) else _FORMER.get(section, {}).get(target)


def names_the_same(section: str, one: object, other: object) -> bool:
    """Return whether two names, the values of `_target_` in a section, are of the same part."""
    return one == other or (key_of(section, one) is not None and key_of(section, one) == key_of(section, other))


def path_of(where: str, key: str) -> str:
    """Return the full name, `module.name`, of one of our own parts."""
    return _PARTS[section_of(where)][key]


def key_of_class(section: str, kind: type) -> str | None:
    """Return the key of one of our own classes."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    return next((key for key, known in _PARTS[section].items() if known == path), None)


def with_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in today's names: former names of ddpexp's own parts and of their options are replaced."""
    current = dict(values)
    for where in _PARTS:
        section, _, name = where.partition(".")
        name = name or "_target_"
        options = current.get(section)
        if isinstance(options, Mapping) and (key := key_of(where, options.get(name))) not in (None, options.get(name)):
            current[section] = {option: key if option == name else value for option, value in options.items()}
    for section, part, former, option in _RENAMED:
        options = current.get(section)
        if isinstance(options, Mapping) and options.get("_target_") == part and former in options:
            renamed = {key: value for key, value in options.items() if key != former}
            value = options[former]  # null: the key was not set
            current[section] = renamed if value is None else {**renamed, option: value}
    if isinstance(logger := current.get("logger"), Mapping) and logger.get("kind") in ("none", "tensorboard"):
        current["logger"] = _without_kind(logger)
    return current


def _without_kind(logger: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `logger` without its former key `kind`, which decided whether there was TensorBoard."""
    others = {name: value for name, value in logger.items() if name not in ("kind", "tensorboard")}
    return {"tensorboard": {"_target_": "tensorboard"}, **others} if logger["kind"] == "tensorboard" else others


def deprecation_warnings(values: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return a warning for each override that uses the former name of an option; `values` is the configuration."""
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    kind = "logger.kind is deprecated and will be removed in the next release: use logger=tensorboard or logger=none."
    return [kind] * ("logger.kind" in keys) + [
        f"{section}.{former} is deprecated and will be removed in the next release: use {section}.{option}."
        for section, part, former, option in _RENAMED
        if f"{section}.{former}" in keys and with_keys(values).get(section, {}).get("_target_") == part
    ]
