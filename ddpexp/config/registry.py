"""ddpexp's own parts: the key by which a configuration names each of them, and where its code is.

Keys are the names of the options in `conf`. Nothing else depends on where a module is or what it is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """One of ddpexp's own classes or functions."""

    path: str  # module.name
    also: str = ""  # the names of its counterparts in other frameworks, with blanks between them
    forks: bool = False  # of a launcher: the command forks its workers, which must be known before it is imported
    forks_in: str = ""  # the variable without which it does not


_ENTRIES: Mapping[str, Mapping[str, Entry]] = {
    "launcher": {
        "spawn": Entry(
            "ddpexp.launch.launchers.local.Spawn",
            "local ddp ddp_spawn mp process single none accelerate deepspeed fabric lightning",
            forks=True,
        ),
        "inline": Entry("ddpexp.launch.launchers.inline.Inline"),
        "torchrun-env": Entry("ddpexp.launch.launchers.torchrun_env.TorchrunEnv", "env", forks=True),
        "mpi": Entry("ddpexp.launch.launchers.mpi.Mpi", "mpirun mpiexec horovod", forks=True),
        "slurm": Entry(
            "ddpexp.launch.launchers.slurm.Slurm",
            "srun sbatch salloc submitit submitit_slurm",
            forks=True,
            forks_in="SLURM_STEP_ID",
        ),
        "elastic": Entry("ddpexp.launch.launchers.elastic.Elastic"),
    },
    "scheduler": {
        "constant": Entry("ddpexp.train.schedule.Constant", "none false no off"),
        "constant_with_warmup": Entry("ddpexp.train.schedule.Constant", "warmup warmup_constant warmuplr"),
        "cosine": Entry(
            "ddpexp.train.schedule.Cosine", "cosineannealing cosineannealinglr cosine_annealing cosine_with_restarts"
        ),
        "exponential": Entry("ddpexp.train.schedule.Exponential", "exp exponentiallr"),
        "linear": Entry("ddpexp.train.schedule.Linear", "linearlr"),
        "multi_step": Entry("ddpexp.train.schedule.MultiStep", "step steplr multisteplr"),
        "onecycle": Entry("ddpexp.train.schedule.OneCycle", "one_cycle onecyclelr"),
        "plateau": Entry("ddpexp.train.plateau.Plateau", "reducelronplateau reduce_lr_on_plateau reduce_on_plateau"),
        "polynomial": Entry("ddpexp.train.schedule.Polynomial", "poly polynomiallr"),
        "torch": Entry("ddpexp.train.torch_schedule.TorchSchedule"),
        "wsd": Entry("ddpexp.train.schedule.WSD", "warmup_stable_decay trapezoidal"),
    },
    "optimizer": {
        "lbfgs": Entry("ddpexp.train.lbfgs.LBFGS", "l_bfgs"),
        "muon": Entry("ddpexp.train.combined_optimizer.muon"),
        "sparse_adam": Entry("ddpexp.train.combined_optimizer.sparse_adam"),
    },
    "logger": {
        "tensorboard": Entry("ddpexp.loggers.tensorboard.TensorBoard", "tb"),
        "csv": Entry("ddpexp.loggers.csv_files.CsvFiles", "CSVLogger"),
        "wandb": Entry("ddpexp.loggers.remote.wandb.WandB", "weights_and_biases WandbLogger"),
        "mlflow": Entry("ddpexp.loggers.remote.mlflow.MLflow"),
    },
    "callbacks": {
        "early_stopping": Entry(
            "ddpexp.train.callbacks.early_stopping.EarlyStopping", "earlystopping early_stop EarlyStopping"
        ),
        "find_nonfinite": Entry("ddpexp.train.callbacks.find_nonfinite.FindNonFinite", "detect_anomaly anomaly"),
        "histograms": Entry("ddpexp.train.callbacks.histograms.Histograms"),
        "lr_monitor": Entry("ddpexp.train.callbacks.lr_monitor.LRMonitor", "learning_rate_monitor LearningRateMonitor"),
    },
    "strategy": {
        "ddp": Entry(
            "ddpexp.strategy.ddp_options.DDPOptions",
            "dp dataparallel data_parallel distributeddataparallel no_shard",
        ),
        "fsdp": Entry(
            "ddpexp.strategy.fsdp.options.FSDPOptions",
            "fsdp2 fsdp1 fully_sharded fully_shard zero3 zero_3 deepspeed_stage_3 sharded full_shard",
        ),
        "local_sgd": Entry("ddpexp.strategy.local.options.LocalOptions", "localsgd local post_local_sgd postlocalsgd"),
        "diloco": Entry("ddpexp.strategy.local.options.DiLoCoOptions"),
        "pipeline": Entry("ddpexp.strategy.pipeline.options.PipelineOptions"),
    },
    "data": {
        "arrays": Entry("ddpexp.data.arrays.dataset.load"),
        "hf": Entry("ddpexp.data.arrays.dataset.load"),
        "mixture": Entry("ddpexp.data.mixture.dataset.mix"),
        "mnist": Entry("ddpexp.data.images.dataset.load"),
        "cifar10": Entry("ddpexp.data.images.dataset.load"),
        "images": Entry("ddpexp.data.images.dataset.load"),
        "image_folder": Entry("ddpexp.data.image_folder.dataset.load"),
        "tar_shards": Entry("ddpexp.data.tar_shards.dataset.load"),
        "text": Entry("ddpexp.data.text.dataset.load"),
    },
    "data.prepare": {
        "arrays": Entry("ddpexp.data.arrays.prepare.prepare"),
        "hf": Entry("ddpexp.data.hf.prepare.prepare"),
        "mnist": Entry("ddpexp.data.mnist.prepare.prepare"),
        "cifar10": Entry("ddpexp.data.cifar10.prepare.prepare"),
        "images": Entry("ddpexp.data.images.files.prepare"),
        "image_folder": Entry("ddpexp.data.image_folder.prepare.prepare"),
        "tar_shards": Entry("ddpexp.data.tar_shards.prepare.prepare"),
        "text": Entry("ddpexp.data.text.prepare.prepare"),
    },
    # Of kinds that check the keys of every kind of data.
    "data.check": {
        "image_folder": Entry("ddpexp.data.image_folder.prepare.check"),
        "text": Entry("ddpexp.data.text.prepare.check"),
    },
    # Of kinds that read other data by the schema, or the facts, of the data that was trained on.
    "data.predict": {
        "arrays": Entry("ddpexp.data.arrays.to_predict.prepare"),
        "image_folder": Entry("ddpexp.data.image_folder.to_predict.prepare"),
    },
    # What makes samples of raw inputs, as an evaluation would; see `ddpexp/data/inputs.py`.
    "data.read": {
        "arrays": Entry("ddpexp.data.arrays.read.read"),
        "hf": Entry("ddpexp.data.hf.read.read"),
        "mnist": Entry("ddpexp.data.images.read.read"),
        "cifar10": Entry("ddpexp.data.images.read.read"),
        "images": Entry("ddpexp.data.images.read.read"),
        "image_folder": Entry("ddpexp.data.image_folder.read.read"),
        "tar_shards": Entry("ddpexp.data.tar_shards.read.read"),
        "text": Entry("ddpexp.data.text.read.read"),
    },
}

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
    return tuple(_ENTRIES.get(section_of(where), ()))


def key_of(where: str, target: object) -> str | None:
    """Return the key of one of our own parts; None for all else."""
    return target if isinstance(target, str) and target in _ENTRIES.get(section_of(where), ()) else None


def path_of(where: str, key: str) -> str:
    """Return the full name, `module.name`, of one of our own parts."""
    return _ENTRIES[section_of(where)][key].path


def forks_workers(launcher: str, environ: Mapping[str, str]) -> bool:
    """Return whether the command itself forks the workers of a launcher of ours, given by its key."""
    entry = _ENTRIES["launcher"].get(launcher)
    return entry is not None and entry.forks and (not entry.forks_in or entry.forks_in in environ)


def is_mixture(target: object) -> bool:
    """Return whether a section of data is made of others."""
    return key_of("data", target) == "mixture"


def is_remote_logger(where: str, target: object) -> bool:
    """Return whether a logger of ours sends to another machine; its class is free of torch."""
    return key_of(where, target) in ("wandb", "mlflow")


def key_of_class(section: str, kind: type) -> str | None:
    """Return the key of one of our own classes."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    return next((key for key, entry in _ENTRIES[section].items() if entry.path == path), None)


def synonyms_of(section: str) -> Mapping[str, str]:
    """Return the names of other frameworks' counterparts of our parts, by the key of each part."""
    return {key: entry.also for key, entry in _ENTRIES.get(section, {}).items()}
