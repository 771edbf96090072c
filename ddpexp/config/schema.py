"""The experiment as frozen, typed values: one class for each section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ddpexp.config.instantiate import Node, Trust
from ddpexp.config.param_groups import FreezeUntil, LayerDecay, ParamGroup, Patterns
from ddpexp.launch import Timeout
from ddpexp.launch.launchers.base import Launcher
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.options import Options
from ddpexp.task import Schedule

MOST_LOADERS = 1024  # processes for each worker


Auto = Literal["auto"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


# What every data section understands.
DATA_KEYS = (
    "prepare", "validation_fraction", "num_workers", "on_device",
    "stratify", "group_by", "fold", "folds", "weights", "samples_per_epoch", "lengths", "batch_tokens",
    "transform", "eval_transform", "transform_of", "collate",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What is trained: the name stands in the default run directory."""

    name: str


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on linear layers."""

    match: str | tuple[str, ...]  # globs on names of layers
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    train: str | tuple[str, ...] = ()  # globs on names of parameters that are trained as a whole

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs on names of layers."""
        return (self.match,) if isinstance(self.match, str) else self.match

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the globs on names of parameters that are trained as a whole."""
        return (self.train,) if isinstance(self.train, str) else self.train

    @property
    def scale(self) -> float:
        """Return what the product of the two matrices is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Trainer:
    """How it is trained; every field is explained in conf/trainer/default.yaml."""

    nodes: Auto | int | str
    gpus: Auto | int
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "gloo", "nccl", "mpi"]
    threads: Auto | int
    seed: int
    epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: Auto | int
    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool | CompileMode
    channels_last: bool
    clip_grad_norm: float | None
    ema_decay: float | None
    nonfinite: Literal["stop", "skip"]
    log_every: int
    eval_every: Literal["epoch"] | int
    checkpoint_every: Literal["epoch"] | int
    checkpoint_every_seconds: float | None
    keep_last: int | None
    keep_best: str | None
    on_save_error: Literal["stop", "continue"]
    reduction: Literal["fast", "exact"]
    deterministic: bool
    grace_seconds: float
    timeout: Timeout
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    master_weights: bool = True
    compile_blocks: str | None = None
    activation_checkpointing: tuple[str, ...] | None = None
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    cudnn_benchmark: bool = False
    max_seconds: float | None = None
    swa_start: int | None = None
    swa_every: Literal["epoch"] | int = "epoch"
    average_batch_norm: int | None = None
    limit_train_samples: int | None = None
    limit_eval_batches: int | None = None
    clip_grad_value: float | None = None
    eval_at_start: bool = False
    keep_best_k: int = 1
    keep_every: int | None = None
    compare_replicas: int | None = None
    param_groups: tuple[ParamGroup, ...] | None = None
    layer_decay: LayerDecay | None = None
    freeze: Patterns | None = None
    freeze_until: FreezeUntil | tuple[FreezeUntil, ...] | None = None
    lora: LoRA | None = None
    numa_binding: bool = True

    @property
    def computes_in(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the numbers in which a forward pass computes what can be computed in fewer bits."""
        return self.precision if self.param_dtype == "fp32" else self.param_dtype

    @property
    def averages(self) -> bool:
        """Return whether an average of the weights is evaluated in their place."""
        return self.ema_decay is not None or self.swa_start is not None


@dataclass(frozen=True)
class Run:
    """Where the run lies and what it starts from."""

    dir: str | None
    resume: Literal["auto", "never", "require"]
    init_from: str | None
    trust: tuple[str, ...]
    code: str | None
    allow_changes: tuple[Literal["code", "data"], ...] = ()
    init_checkpoint: Literal["best", "last"] | int = "last"
    init_weights: Literal["raw", "ema"] = "raw"
    init_rename: Mapping[str, str] | None = None
    init_skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predict:
    """How `ddpexp predict` uses the weights."""

    batch_size: Auto | int = "auto"


@dataclass(frozen=True)
class Data:
    """The data: who prepares it, who loads it, and what every kind of data understands."""

    target: str
    prepare: str | None
    validation_fraction: float
    num_workers: int
    on_device: Auto | bool
    options: Mapping[str, Any]
    stratify: bool | None = None
    group_by: str | None = None
    fold: int | None = None
    folds: int | None = None
    weights: str | Node | None = None
    samples_per_epoch: int | None = None
    lengths: str | None = None
    batch_tokens: int | None = None
    transform: tuple[Node, ...] = ()
    eval_transform: tuple[Node, ...] = ()
    transform_of: Literal["input", "sample"] = "input"
    collate: Node | None = None
    sources: Mapping[str, Data] = field(default_factory=dict)  # of a mixture, by name


@dataclass(frozen=True)
class Experiment:
    """One experiment, as asked: parsed, checked, frozen."""

    recipe: Recipe
    task: Node
    model: Node
    data: Data
    optimizer: Node
    scheduler: Schedule | Node  # a user's own is a node, which only workers build
    strategy: Options
    launcher: Launcher
    logger: Mapping[str, Node]  # what records the run beside metrics.jsonl, by the key below `logger`
    callbacks: Mapping[str, Node]  # in the order of their calls, by the key below `callbacks`
    trainer: Trainer
    run: Run
    predict: Predict = Predict()

    @property
    def trust(self) -> Trust:
        """Return whose code this experiment may name."""
        return Trust(self.run.trust, Path(self.run.code) if self.run.code else None)


TYPED_SECTIONS: Mapping[str, Any] = {
    "trainer": Trainer,
    "strategy": DDPOptions,  # of the other kinds, `ddpexp.config.parse` finds the class
    "run": Run,
    "predict": Predict,
    "recipe": Recipe,
}
"""The sections whose keys are fields with types, checked by `parse`."""
