"""ddpexp's own parts: the key by which a configuration names each of them, and where its code is.

Keys are the names of the options in `conf`. Nothing else depends on where a module is or what it is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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

REMOTE_LOGGERS = ("wandb", "mlflow")
"""Our loggers on other machines, whose classes are free of torch."""

_LISTED = re.compile(r"(logger|callbacks)\.[^.\[]+")  # the place of a logger or a callback, whose key is any name
_SOURCE = re.compile(r"(data)\.sources\.[^.\[]+(\.prepare)?")  # likewise of a source of a mixture


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
    """Return the key of one of our own parts; None for all else."""
    return target if isinstance(target, str) and target in _PARTS.get(section_of(where), ()) else None


def path_of(where: str, key: str) -> str:
    """Return the full name, `module.name`, of one of our own parts."""
    return _PARTS[section_of(where)][key]


def key_of_class(section: str, kind: type) -> str | None:
    """Return the key of one of our own classes."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    return next((key for key, known in _PARTS[section].items() if known == path), None)
