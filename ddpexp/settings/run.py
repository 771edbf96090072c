"""The sections `recipe`, `run`, `predict` and `sweep`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key
from ddpexp.settings.metrics import check_not_test
from ddpexp.settings.trainer import Auto


@dataclass(frozen=True)
class Recipe:
    """What is trained: the name stands in the default run directory."""

    name: Annotated[str, Key(pattern=r"[^/]+", use="a plain name, for it names the folder of the runs")]


@dataclass(frozen=True)
class RunSettings:
    """Where the run lies and what it starts from; conf/config.yaml has the default of every key and explains it."""

    dir: Annotated[
        str | None,
        Key(also="output_dir out_dir save_dir log_dir logging_dir default_root_dir run_name exp_name experiment_name"),
    ]
    resume: Annotated[
        Literal["auto", "never", "require"],
        Key(
            synonyms={
                "auto": "true yes latest last newest",
                "require": "must always force",
                "never": "false no none off",
            }
        ),
    ]
    init_from: str | None
    trust: tuple[str, ...]
    code: str | None
    allow_changes: tuple[Literal["code", "data"], ...]
    init_checkpoint: Annotated[
        int | str,
        Key(at_least=0, pattern=r"auto|best|last|step-\d+", use="best, last or a step, such as 1200 or step-1200"),
    ]
    init_weights: Literal["raw", "ema"]
    init_rename: Mapping[str, str] | None
    init_skip: tuple[str, ...]
    rerun_of: str | None
    rerun_exact: bool
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Predict:
    """How `ddpexp predict` uses the weights."""

    batch_size: Annotated[Auto | int, Key(at_least=1)]


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep runs its jobs; conf/config.yaml has the default of every key and explains it."""

    slots: Annotated[Auto | int, Key(at_least=1, also="n_jobs num_parallel max_concurrent")]
    objective: Annotated[str | None, Key(also="optimized_metric metric")]
    mode: Annotated[
        Literal["min", "max"],
        Key(also="direction goal", synonyms={"max": "maximize maximise", "min": "minimize minimise"}),
    ]
    picture: bool
    on_failure: Literal["continue", "stop"]
    early_stop: Literal["median", "halving"] | None
    early_stop_after: Annotated[int, Key(at_least=1)]
    early_stop_factor: Annotated[int, Key(at_least=2)]
    retries: Annotated[int, Key(at_least=0)]

    def __post_init__(self) -> None:
        """Refuse an objective that is none, and early stopping without one."""
        if self.objective is None:
            if self.early_stop is None:
                return
            raise RefusedError(
                "compares jobs by their objective, but sweep.objective is not set",
                key="sweep.early_stop",
                value=self.early_stop,
                suggestion="Name one with sweep.objective=eval/loss.",
            )
        with_mode = re.fullmatch(r"(min|max):(.+)", self.objective)
        if with_mode is not None:
            raise RefusedError(
                "is not the name of a metric",
                key="sweep.objective",
                value=self.objective,
                suggestion=f"Type sweep.mode={with_mode[1]} sweep.objective={with_mode[2]}.",
            )
        check_not_test("sweep.objective", self.objective, self.objective)
