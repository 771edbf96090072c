"""Loading the data sets of a run, mixtures and streams among them, and building the training batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ddpexp.checkpoint.codec import encode
from ddpexp.config.data_functions import Description, check_takes_description, check_takes_keys
from ddpexp.config.instantiate import Trust, instantiate, locate
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Experiment
from ddpexp.data.adapters import MapStyle
from ddpexp.data.base import IndexData
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Splits
from ddpexp.data.mixture.dataset import mix
from ddpexp.data.streams import Batches, Stream, StreamBatches, first_samples
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.settings.data import Data
from ddpexp.settings.node import Node
from ddpexp.settings.trainer import Trainer
from ddpexp.train.recipe_checks import check_splits
from ddpexp.train.transform_samples import own_arguments


def load_sets(experiment: Experiment, prepared: Mapping[str, Any] | None) -> Splits:
    """Build the data sets of a configuration; `prepared` is what `ddpexp.run.prepare` returned.

    Raises:
        RefusedError: they are not what the loop needs.
    """
    data = experiment.data
    if not data.sources:
        return streams_checked(_load(data, prepared, experiment.trust, "data"), experiment)
    of_sources = (prepared or {}).get("sources") or {}
    parts = {
        name: _load(source, of_sources.get(name), experiment.trust, f"data.sources.{name}")
        for name, source in data.sources.items()
    }
    weights, samples_per_epoch = data.options.get("source_weights"), data.samples_per_epoch
    return streams_checked(mix(parts, weights, samples_per_epoch, experiment.trainer.global_batch_size), experiment)


def _load(data: Data, prepared: Mapping[str, Any] | None, trust: Trust, where: str) -> Splits:
    """Call the data function of a section."""
    function, is_own = locate(data.target, trust, where), key_of(where, data.target) is None
    if data.prepare is None:
        options = {**data.options, **own_arguments(data, trust)}
        if is_own and not any(name.startswith("_") for name in options):
            check_takes_keys(function, options, f"{where}._target_", data.target)
        returned = instantiate(Node(data.target, options), trust, where)
    elif is_own:
        check_takes_description(function, data.options, data.prepare, data.target)
        returned = function(Description(prepared or {}))
    else:
        returned = instantiate(Node(data.target), trust, where, prepared)
    return check_splits(returned, data.target)


def streams_checked(splits: Splits, experiment: Experiment) -> Splits:
    """Return the sets with evaluation sets that are streams read into memory; a set that is no stream is left alone.

    Raises:
        RefusedError: the configuration needs what a stream does not have.
    """
    if isinstance(splits.train, Stream):
        _check_keys(experiment)
    return replace(splits, evals={name: _evaluation_set(name, part) for name, part in splits.evals.items()})


def _evaluation_set(name: str, part: IndexData | Stream) -> IndexData:
    if not isinstance(part, Stream):
        return part
    if part.num_samples is None:
        raise RefusedError(
            f"the evaluation set `{name}` is a stream without a length",
            suggestion="Give it the number of samples to evaluate, Stream(open, num_samples=1000).",
        )
    samples = first_samples(part, part.num_samples)
    if not samples:
        raise RefusedError(f"the evaluation set `{name}` is a stream without samples.")
    return MapStyle(samples)


def _check_keys(experiment: Experiment) -> None:
    trainer, data = experiment.trainer, experiment.data
    wrong: Mapping[str, tuple[object, object, str]] = {
        "trainer.epochs": (trainer.epochs, None, "null, and trainer.max_steps"),
        "trainer.limit_train_samples": (trainer.limit_train_samples, None, "null"),
        "trainer.average_batch_norm": (trainer.average_batch_norm, None, "null"),
        "data.validation_fraction": (data.validation_fraction, 0.0, "0, and return an evaluation set"),
        "data.folds": (data.folds, None, "null, and return an evaluation set"),
        "data.weights": (data.weights, None, "null"),
        "data.samples_per_epoch": (data.samples_per_epoch, None, "null"),
        "data.lengths": (data.lengths, None, "null"),
        "data.on_device": (data.on_device is True, False, "false"),
        "data.num_workers": (data.num_workers, 0, "0: its rank reads it, or processes that it starts itself"),
    }
    for key, (value, needed, remedy) in wrong.items():
        if value != needed:
            raise RefusedError(
                "`train` is a stream, without a length and indices", key=key, value=value, suggestion=f"Use {remedy}."
            )
    if trainer.max_steps is None:
        raise RefusedError(
            "`train` is a stream without a length",
            key="trainer.max_steps",
            value=None,
            suggestion="Give the number of steps.",
        )


def build_batches(experiment: Experiment, splits: Splits, plan: BatchPlan, rank: int, device: torch.device) -> Batches:
    """Return the training batches of a rank."""
    trainer = experiment.trainer
    data = experiment.data
    train = splits.train
    if isinstance(train, Stream):
        return StreamBatches(
            train,
            plan,
            rank,
            trainer.seed,
            device,
            steps_per_epoch=trainer.max_steps or 0,
            check=_check_state,
            num_workers=data.num_workers,
        )
    return TrainBatches(
        train,
        plan,
        rank,
        trainer.seed,
        device,
        num_workers=data.num_workers,
        timeout_seconds=trainer.timeout.data_seconds,
        on_device=splits.on_device,
        order=splits.order,
    )


def _check_state(state: Any) -> None:
    """Raise RefusedError if a checkpoint cannot hold the positions of a stream."""
    try:
        encode(state, {}, "the position of the stream `train`: ")
    except DdpexpError as error:
        raise RefusedError(str(error)) from None


def warn_of_streams(batches: StreamBatches, trainer: Trainer, log: logging.Logger) -> None:
    """Log what a run on a stream cannot do, before its first step."""
    if warning := batches.warning():
        log.warning(warning)
    elif trainer.checkpoint_every == "epoch" and trainer.checkpoint_every_seconds is None:
        log.warning(
            "`train` is a stream, whose only epoch is the whole run: trainer.checkpoint_every=epoch saves at the end "
            "alone. Give a number of steps."
        )
