"""Running Hydra's sweepers (its own, Optuna's): the launcher to which they pass their jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import open_dict

from ddpexp.compat.hydra import FailedJob, sweeper_context
from ddpexp.config.interpolations import bounded_interpolations
from ddpexp.config.keys import override_key
from ddpexp.config.sweeps import Swept
from ddpexp.config.tree import refuse_hydra_errors
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.job_result import Ended

FAILURE_RATE = "hydra.sweeper.max_failure_rate"
"""The key of sweepers that end when more of the jobs that they ask for at a time fail."""
_MOST = 10_000  # jobs of a grid: each is composed and checked before the first starts


RunBatch = Callable[[Sequence[Sequence[str]]], Sequence[Ended]]


class _Launcher:
    """In place of Hydra's launcher: runs a batch of jobs with the sweep's own function."""

    def __init__(self, run_batch: RunBatch, counts_failures: bool, folder: SweepDir) -> None:
        self._run_batch = run_batch
        self._counts_failures = counts_failures
        self._folder = folder
        self.began = self.has_run = False  # a batch

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs of a batch and return their objectives."""
        self.began = True
        self._folder.mask_records()
        ended = self._run_batch(job_overrides)
        self.has_run = True
        return [self._returned(overrides, result) for overrides, result in zip(job_overrides, ended, strict=True)]

    def _returned(self, overrides: Sequence[str], ended: Ended) -> JobReturn:
        if ended.status == "failed" and self._counts_failures:
            failure = JobFailed("its line says why")  # which the sweep has printed
            return FailedJob(overrides=overrides, status=JobStatus.FAILED, _return_value=failure)
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=ended.objective)


def run_sweeper(swept: Swept, folder: SweepDir, run_batch: RunBatch, continues: bool) -> str:
    """Run the jobs of the chosen sweeper; each batch is the overrides of several jobs.

    `continues`: whatever fails, unless hydra.sweeper.max_failure_rate is typed. Returns a sentence on why the sweeper
    has ended early, or nothing.

    Raises:
        RefusedError: the sweeper takes its settings not as they were typed. And what `run_batch` raises.
    """
    cfg = swept.composed.cfg
    loader = swept.composed.loader
    plugins = Plugins.instance()
    with open_dict(cfg):
        cfg.hydra.sweep.dir = str(folder.path)
        typed = any(override_key(override) == FAILURE_RATE for override in swept.overrides)
        if continues and not typed and cfg.hydra.sweeper.get("max_failure_rate") == 0:  # what Optuna's plugin has
            cfg.hydra.sweeper.max_failure_rate = 1.0
    launcher = _Launcher(run_batch, not is_grid(swept), folder)  # a grid continues whatever fails, batch by batch
    # Sweepers look up a launcher by name in a namespace package of Hydra; they get this one.
    plugins.instantiate_launcher = lambda **_: launcher  # type: ignore[method-assign,assignment]
    # Hydra's own sweeper composes each job only to see whether that can be done, which `run_batch` does with all of
    # them.
    loader.load_sweep_config = lambda master_config, sweep_overrides: master_config  # type: ignore[method-assign]
    with refuse_hydra_errors():
        try:
            context = sweeper_context(loader)
            with bounded_interpolations():  # not in what follows, which lasts as long as the sweep
                sweeper = plugins.instantiate_sweeper(config=cfg, hydra_context=context, task_function=run_batch)
            sweeper.sweep(arguments=list(swept.overrides))
        except OSError as error:
            if launcher.began:
                raise
            raise folder.not_writable(error) from None
        except JobFailed:
            if not continues:
                return ""
            rate = cfg.hydra.sweeper.get("max_failure_rate")
            return f"The sweeper has ended, since more failed than {FAILURE_RATE}={rate:g} allows."
        except (AssertionError, ValueError) as error:
            if (
                launcher.has_run
            ):  # Optuna, whose best trial of none that went well this is: the sweep itself says what failed
                return ""
            if launcher.began:
                raise
            raise RefusedError(_refusal(swept, error)) from None
        finally:
            with suppress(OSError):
                folder.mask_records()
    return ""


def _refusal(swept: Swept, error: Exception) -> str:
    """Raise an error for what a sweeper does not support, which it only asserts."""
    typed = " ".join(
        override
        for override in swept.overrides
        if override.startswith("hydra.sweeper.") or override_key(override) in swept.keys
    )
    why = " ".join(str(error).split()).rstrip(".")
    return f"{swept.sweeper_choice} does not take one of: {typed}{f' ({why})' if why else ''}."


def check_grid_size(swept: Swept) -> None:
    """Check the size of a grid before Hydra lists its jobs, which a typo in a range can make larger than memory.

    Raises:
        RefusedError: more than any machine trains.
    """
    if not is_grid(swept):
        return  # others draw from a range
    count = 1
    with refuse_hydra_errors(), bounded_interpolations():
        params = swept.sweeper.get("params") or {}
        overrides = [*(f"{key}={value}" for key, value in params.items()), *swept.overrides]
        for override in OverridesParser.create(swept.composed.loader).parse_overrides(overrides):
            if override.is_sweep_override() and override.is_discrete_sweep():
                value = override.value()
                values = iter(value.range()) if isinstance(value, RangeSweep) else override.sweep_iterator()
                count *= sum(1 for _ in islice(values, _MOST + 1))
            if count > _MOST:
                raise RefusedError(
                    f"{override.input_line} makes this a sweep of more than {_MOST:,} jobs",
                    suggestion="Use fewer values.",
                )


def is_grid(swept: Swept) -> bool:
    """Return whether the jobs are Hydra's own grid, which needs no objective."""
    return str(swept.sweeper.get("_target_", "")).endswith(".BasicSweeper")


class JobFailed(DdpexpError):
    """A job failed; raised for sweepers that count failures."""
