"""Check the keys of the data section that choose samples."""

from __future__ import annotations

from ddpexp.config.schema import Data
from ddpexp.errors import RefusedError

_FILES = (".npy", ".txt", ".csv")


def check_sampling(data: Data) -> None:
    """Check which samples are held out, drawn and transformed, as far as the keys show it.

    Raises:
        RefusedError: a value that means nothing, or two that contradict each other.
    """
    if data.folds is None and data.fold is not None:
        raise RefusedError(f"data.fold={data.fold} is one of how many? Type data.folds, too, for example data.folds=5.")
    if data.folds is not None:
        _check_folds(data, data.folds)
    divides = data.folds is not None or data.validation_fraction > 0
    for name in ("stratify", "group_by"):
        value = getattr(data, name)
        if value and not divides:
            raise RefusedError(
                f"data.{name}={str(value).lower() if value is True else value} is about the held-out samples, and none "
                "are held out: type data.validation_fraction=0.1, or data.fold=0 data.folds=5."
            )
    if isinstance(data.weights, str) and data.weights != "balanced" and not data.weights.endswith(_FILES):
        raise RefusedError(
            f"data.weights={data.weights}: use balanced, a file (.npy, .txt or .csv) with a weight for each training "
            "sample, or a function, {_target_: mine.weights}."
        )
    if data.on_device and (data.transform or data.eval_transform or data.collate):
        raise RefusedError(
            "data.on_device=true: data.transform, data.eval_transform and data.collate run on the host, sample by "
            "sample. Use data.on_device=false."
        )
    if data.on_device and data.prepare == "image_folder":
        raise RefusedError(
            "data.on_device=true keeps samples in the memory of the device, and images of many sizes stay on the host. "
            "Use data.on_device=false; data.augment_on=device computes their changes there."
        )
    if data.samples_per_epoch is not None and data.samples_per_epoch < 1:
        raise RefusedError(f"data.samples_per_epoch={data.samples_per_epoch} is too small: use 1 or more.")


def check_epoch(data: Data, global_batch_size: int) -> None:
    """Check that an epoch has a global batch.

    Raises:
        RefusedError: it has not.
    """
    if data.samples_per_epoch is not None and data.samples_per_epoch < global_batch_size:
        raise RefusedError(
            f"data.samples_per_epoch={data.samples_per_epoch} is fewer than trainer.global_batch_size="
            f"{global_batch_size}, the samples of a step. Use data.samples_per_epoch={global_batch_size} or more."
        )


def _check_folds(data: Data, folds: int) -> None:
    if folds < 2:
        raise RefusedError(f"data.folds={folds} is too small: use 2 or more, or null for none.")
    if data.fold is None:
        raise RefusedError(
            f"data.folds={folds}: which fold is held out? Type data.fold=0, or sweep over all of them: "
            f"-m 'data.fold=range({folds})'."
        )
    if not 0 <= data.fold < folds:
        raise RefusedError(f"data.fold={data.fold} is none of data.folds={folds}: use 0 to {folds - 1}.")
    if data.validation_fraction > 0:
        raise RefusedError(
            f"data.validation_fraction={data.validation_fraction} data.folds={folds}: both hold out samples. Use "
            "data.validation_fraction=0."
        )
