"""Check the sections of an experiment, each by itself and together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpexp.config.check_optimizer import arguments_of, check_has_average, check_optimizer
from ddpexp.config.check_trainer import check_trainer
from ddpexp.config.declared import default_of
from ddpexp.config.param_groups import check_layers_and_late_starts, check_param_groups
from ddpexp.config.sampling import (
    check_epoch,
    check_micro_batch,
    check_sampling,
    training_micro_batch_size,
    training_plan,
)
from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import check_range
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import Checked
from ddpexp.settings.run import RunSettings


def check_layout(experiment: Experiment, layout: Layout) -> None:
    """Check what depends on the number of workers and their device.

    Raises:
        RefusedError: a batch that does not split, an option that the device does not have.
    """
    trainer = experiment.trainer
    data_size = experiment.strategy.data_rank(0, layout.world_size).size
    batch = training_plan(experiment, data_size)
    if trainer.reduction == "exact" and layout.device == "cuda" and not trainer.deterministic:
        raise RefusedError(
            "on GPUs needs deterministic kernels: else a GPU's own sums differ each time",
            key="trainer.reduction",
            value="exact",
            suggestion="Use trainer.deterministic=true.",
        )
    if trainer.compile == "reduce-overhead" and layout.device == "cpu":
        raise RefusedError(
            "records CUDA graphs, and the workers have no GPU",
            key="trainer.compile",
            value="reduce-overhead",
            suggestion="Use trainer.compile=true.",
        )
    if trainer.memory_snapshot is not None and layout.device == "cpu":
        raise RefusedError(
            "shows the memory of GPUs, and the workers have none",
            key="trainer.memory_snapshot",
            value=trainer.memory_snapshot,
            suggestion="Leave it out.",
        )
    experiment.strategy.check_layout(experiment, layout, batch.gradient_accumulation_steps)


def check_layouts(experiment: Experiment, layouts: Sequence[Layout]) -> None:
    """Check each layout of the range trainer.nodes, or a single one; the batch first, over all of them.

    Raises:
        RefusedError: as `check_layout`; of a range, with a batch that splits over all of it.
    """
    trainer = experiment.trainer
    if len(layouts) > 1:
        data_sizes = {
            layout.nodes: experiment.strategy.data_rank(0, layout.world_size).size
            for layout in sorted(layouts, key=lambda layout: layout.nodes)
        }
        check_range(trainer.global_batch_size, training_micro_batch_size(experiment), data_sizes, str(trainer.nodes))
    for layout in layouts:
        try:
            check_layout(experiment, layout)
        except RefusedError as error:
            if len(layouts) > 1:
                with_nodes = f"(with {layout.nodes} of trainer.nodes={trainer.nodes})"
                error.suggestion = f"{error.suggestion} {with_nodes}".lstrip()
            raise


def check(experiment: Experiment) -> None:
    """Check each section by itself, then what they must be together.

    Raises:
        RefusedError: a value that means nothing, or two that contradict each other; the sentence names the keys.
    """
    check_trainer(experiment.trainer)
    check_optimizer(experiment.optimizer)
    check_param_groups(experiment.trainer.param_groups or (), arguments_of(experiment.optimizer.target))
    check_layers_and_late_starts(experiment.trainer)
    _check_run(experiment.run)
    check_sampling(experiment.data)
    check_micro_batch(experiment)
    check_epoch(experiment.data, experiment.trainer.global_batch_size)
    check_has_average(experiment)
    for part in (experiment.strategy, experiment.launcher, experiment.scheduler):
        if isinstance(part, Checked):
            part.check(experiment)


def _check_run(run: RunSettings) -> None:
    if run.dir == "":
        raise RefusedError(
            "is empty", key="run.dir", value="", suggestion="Give it a folder, or null for one under outputs."
        )
    if re.search(r"[\x00-\x1f\x7f]", run.dir or ""):
        raise RefusedError(
            f"has a line break or another control character, which no line can show: {run.dir!r}", key="run.dir"
        )
    _check_init(run)


def _check_init(run: RunSettings) -> None:
    """Check the keys beside run.init_from."""
    if run.init_from is not None:
        return
    for name in ("init_checkpoint", "init_weights", "init_rename", "init_skip"):
        value = getattr(run, name)
        if value and value != default_of(f"run.{name}"):
            shown = value
            if isinstance(value, tuple):
                shown = f"[{','.join(value)}]"
            elif name == "init_rename":
                shown = "..."
            raise RefusedError(
                "is for the weights of run.init_from, and there are none",
                key=f"run.{name}",
                value=shown,
                suggestion="Add run.init_from=WEIGHTS.",
            )


ALERT_URL = "alert_url"  # the key of the section `logger` that is no logger


def check_alert_url(url: object) -> None:
    """Check the address of the webhook, which is never printed.

    Raises:
        RefusedError: it is none.
    """
    if url is not None and not (isinstance(url, str) and re.fullmatch(r"https?://[^\s/]+\S*", url)):
        raise RefusedError(
            "is not an address that begins with https:// or http://",
            key=f"logger.{ALERT_URL}",
            suggestion=f"Name the variable that holds it: logger.{ALERT_URL}='${{oc.env:SLACK_WEBHOOK}}'.",
        )
