"""Check the keys of the data section that choose samples."""

from __future__ import annotations

from typing import Literal

from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import BatchPlan, plan_batches
from ddpexp.errors import RefusedError
from ddpexp.settings.data import Data

_FILES = (".npy", ".txt", ".csv")


def check_sampling(data: Data) -> None:
    """Check which samples are held out, drawn and transformed, as far as the keys show it.

    Raises:
        RefusedError: a value that means nothing, or two that contradict each other.
    """
    if data.folds is None and data.fold is not None:
        raise RefusedError(
            "is one of an unknown number of folds",
            key="data.fold",
            value=data.fold,
            suggestion="Type data.folds, too, for example data.folds=5.",
        )
    if data.folds is not None:
        _check_folds(data, data.folds)
    divides = data.folds is not None or data.validation_fraction > 0
    for name in ("stratify", "group_by"):
        value = getattr(data, name)
        if value and not divides:
            raise RefusedError(
                "is about the held-out samples, and none are held out",
                key=f"data.{name}",
                value=value,
                suggestion="Type data.validation_fraction=0.1, or data.fold=0 data.folds=5.",
            )
    if isinstance(data.weights, str) and data.weights != "balanced" and not data.weights.endswith(_FILES):
        raise RefusedError(
            key="data.weights",
            value=data.weights,
            suggestion="Use balanced, a file (.npy, .txt or .csv) with a weight for each training sample, or "
            "a function, {_target_: mine.weights}.",
        )
    if data.on_device is True and (data.transform or data.eval_transform or data.collate):
        raise RefusedError(
            "is incompatible with data.transform, data.eval_transform and data.collate, which run on the host",
            key="data.on_device",
            value=True,
            suggestion="Use data.on_device=false.",
        )
    if data.batch_tokens is not None:
        _check_batch_tokens(data, data.batch_tokens)


def check_micro_batch(experiment: Experiment) -> None:
    """Check that a micro-batch that is to be found is one of samples.

    Raises:
        RefusedError: it is made by tokens.
    """
    if experiment.trainer.micro_batch_size == "fit" and experiment.data.batch_tokens is not None:
        raise RefusedError(
            f"finds a number of samples, and data.batch_tokens={experiment.data.batch_tokens} makes micro-batches of "
            "as many tokens as fit",
            key="trainer.micro_batch_size",
            value="fit",
            suggestion="Use trainer.micro_batch_size=auto, and a data.batch_tokens whose batches fit.",
        )


def training_plan(experiment: Experiment, data_size: int) -> BatchPlan:
    """Split the global batch over `data_size` workers; with `data.batch_tokens` it consists of single micro-batches.

    Raises:
        RefusedError: as `plan_batches`.
    """
    return plan_batches(experiment.trainer.global_batch_size, training_micro_batch_size(experiment), data_size)


def training_micro_batch_size(experiment: Experiment) -> int | Literal["auto", "fit"]:
    """Return what the global batch is split into: samples, or 1 where it counts micro-batches made by tokens."""
    return experiment.trainer.micro_batch_size if experiment.data.batch_tokens is None else 1


def eval_batch_size(experiment: Experiment, data_size: int) -> int:
    """Return the number of samples of an evaluation batch: those of a micro-batch, unless it is made by tokens."""
    trainer = experiment.trainer
    if experiment.data.batch_tokens is not None and not isinstance(trainer.micro_batch_size, str):
        return trainer.micro_batch_size
    return plan_batches(trainer.global_batch_size, trainer.micro_batch_size, data_size).micro_batch_size


def check_epoch(data: Data, global_batch_size: int) -> None:
    """Check that an epoch has a global batch.

    Raises:
        RefusedError: it has not.
    """
    if data.samples_per_epoch is not None and data.samples_per_epoch < global_batch_size:
        raise RefusedError(
            f"is fewer than trainer.global_batch_size={global_batch_size}, the samples of a step",
            key="data.samples_per_epoch",
            value=data.samples_per_epoch,
            suggestion=f"Use data.samples_per_epoch={global_batch_size} or more.",
        )


def _check_folds(data: Data, folds: int) -> None:
    if data.fold is None:
        raise RefusedError(
            "does not say which fold is held out",
            key="data.folds",
            value=folds,
            suggestion=f"Type data.fold=0, or sweep over all of them: -m 'data.fold=range({folds})'.",
        )
    if not 0 <= data.fold < folds:
        raise RefusedError(
            f"is not one of data.folds={folds}", key="data.fold", value=data.fold, suggestion=f"Use 0 to {folds - 1}."
        )
    if data.validation_fraction > 0:
        raise RefusedError(
            f"is incompatible with data.folds={folds}: both hold out samples",
            key="data.validation_fraction",
            value=data.validation_fraction,
            suggestion="Use data.validation_fraction=0.",
        )


def _check_batch_tokens(data: Data, batch_tokens: int) -> None:
    key = f"data.batch_tokens={batch_tokens}"
    if data.lengths is None:
        raise RefusedError(
            "needs the length of each sample",
            key=key,
            suggestion="Set data.lengths as well, to a column of the data or a file.",
        )
    for name, value in {"weights": data.weights, "samples_per_epoch": data.samples_per_epoch}.items():
        if value is not None:
            raise RefusedError(
                f"divides all samples into batches, and data.{name} chooses others in each epoch",
                key=key,
                suggestion=f"Use data.{name}=null, or data.batch_tokens=null for batches of equally many samples.",
            )
