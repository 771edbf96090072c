"""Which samples a run trains on and which it holds out, by the keys of the sections `data` and `trainer`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.config.build import did_you_mean
from ddpexp.config.instantiate import instantiate
from ddpexp.config.schema import Experiment
from ddpexp.data.base import IndexData, Subset
from ddpexp.data.columns import column_of, labels_of, places_in
from ddpexp.data.datasets import Splits, belongs_on_device, choose_samples, device_bytes, kind_of, on_device, select
from ddpexp.data.lengths import ByLength
from ddpexp.data.named_files import is_value_file
from ddpexp.data.order import TrainingOrder
from ddpexp.data.partition import OrderSlice, fold_parts, fraction_parts
from ddpexp.data.streams import Stream
from ddpexp.data.token_batches import by_tokens
from ddpexp.data.weights import (
    Passes,
    Weighted,
    checked_amounts,
    checked_groups,
    checked_weights,
    class_balanced,
    read_values,
)
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError, subject
from ddpexp.settings.data import Data
from ddpexp.settings.metrics import TEST_SET
from ddpexp.settings.node import Node
from ddpexp.system.text import counted
from ddpexp.train.transform_samples import transformed, without_own_arguments


def arrange(splits: Splits, experiment: Experiment, world: World) -> Splits:
    """Hold out samples, choose and order those to train on, and move the data sets to the device if configured.

    Raises:
        RefusedError: the data does not allow it.
    """
    experiment = without_own_arguments(experiment)
    data = experiment.data
    limit = experiment.trainer.limit_train_samples
    whole = splits.train
    if data.validation_fraction or data.folds is not None:
        _check_no_order(splits, f"data.folds={data.folds}" if data.folds else _fraction(data))
        splits = _hold_out(splits, data)
    if data.test_set is not None:
        splits = replace(splits, evals=_with_test(splits.evals, data.test_set))
    if limit is not None:
        _check_no_order(splits, f"trainer.limit_train_samples={limit}")
        splits = replace(splits, train=choose_samples(splits.train, limit))
    if data.weights is not None or (data.samples_per_epoch is not None and not data.sources):  # a mixture has its own
        splits = replace(splits, order=_order(splits.train, whole, experiment))
    if data.lengths is not None:
        splits = replace(splits, order=_by_length(splits, whole, data.lengths, experiment))
    splits = transformed(splits, experiment)
    if data.on_device == "auto" and belongs_on_device(splits, world.device):
        if world.is_rank_zero:
            size = device_bytes(splits) / 1e6
            logging.getLogger("ddpexp").info(f"data.on_device=auto: {size:,.0f} MB of samples in the GPU's memory")
        return on_device(splits, world.device)
    return on_device(splits, world.device) if data.on_device is True else splits


def check_held_out(experiment: Experiment, splits: Splits, undivided: Splits) -> None:
    """Check that what is held out leaves a global batch to train.

    Raises:
        RefusedError: it does not, and without it there is one.
    """
    if isinstance(splits.train, Stream):
        return
    size = experiment.trainer.global_batch_size
    left, before = (train.samples_per_epoch for train in (splits.train, undivided.train))
    fraction = experiment.data.validation_fraction
    if fraction and left < size <= before:
        raise RefusedError(
            f"leaves {counted(left, 'training sample')} of {before:,}, fewer than trainer.global_batch_size={size}",
            key="data.validation_fraction",
            value=fraction,
            suggestion=f"Use at most data.validation_fraction={_share(before, size):g}.",
        )


def _share(total: int, kept: int) -> float:
    """Return the largest fraction of four digits that can be held out of `total` samples and leave `kept`."""
    return math.floor((total - kept) / total * 1e4) / 1e4


def _fraction(data: Data) -> str:
    return f"data.validation_fraction={data.validation_fraction}"


def _check_no_order(splits: Splits, key: str) -> None:
    """Check that the data brings no order of all samples, where the key takes a part of them."""
    if splits.order is not None:
        raise RefusedError(
            f"An order of all {len(splits.train):,} samples comes with the data (Splits.order), and contains samples "
            "that would be left out",
            key=key,
            suggestion="Leave the key out, or give the set itself an order and a method select(indices) "
            "(ddpexp.data.base.IndexData).",
        )


def _hold_out(splits: Splits, data: Data) -> Splits:
    """Move some of the training samples into a set named `validation`."""
    train = splits.train
    key = f"data.folds={data.folds}" if data.folds else _fraction(data)
    if len(train) < (data.folds or 2):
        most = f"Use at most data.folds={len(train)}." if data.folds and len(train) > 1 else ""
        reason = (
            f"is too many for {counted(len(train), 'training sample')}" if data.folds else "leaves nothing to train on"
        )
        raise RefusedError(reason, suggestion=most, **subject(key))
    if "validation" in splits.evals:
        off = "null" if data.folds else "0"
        reason = f"holds samples out, and {data.target} has a `validation` set of its own"
        raise RefusedError(reason, suggestion=f"Use {off}.", **subject(key))
    kept, held = _parts(train, data)
    return replace(splits, train=select(train, *kept, key), evals={**splits.evals, "validation": Subset(train, *held)})


def _with_test(evals: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return evaluation sets of which the one called `name` is the set `test`."""
    if name not in evals:
        suggestion = did_you_mean(name, list(evals), "data.test_set=") if evals else "Use data.test_set=null."
        raise RefusedError(
            "is not an evaluation set of the data", key="data.test_set", value=name, suggestion=suggestion
        )
    if TEST_SET in evals and name != TEST_SET:
        raise RefusedError(
            f"would be the set `{TEST_SET}`, and the data has one of its own",
            key="data.test_set",
            value=name,
            suggestion="Use data.test_set=null.",
        )
    return {TEST_SET if one == name else one: data for one, data in evals.items()}


def _parts(train: IndexData, data: Data) -> tuple[OrderSlice, OrderSlice]:
    """Return the samples to train on, and those that are held out."""
    stratify = data.folds is not None if data.stratify is None else data.stratify
    labels = labels_of(train) if stratify else None
    if data.stratify and labels is None:
        raise _no_labels(train, "data.stratify", True, "data.stratify=false")
    groups = _groups(train, data.group_by) if data.group_by is not None else None
    if data.folds is None or data.fold is None:
        return fraction_parts(len(train), data.validation_fraction, labels, groups)
    return fold_parts(len(train), data.fold, data.folds, labels, groups)


def _groups(train: IndexData, name: str) -> NDArray[Any]:
    groups = read_values(name, "data.group_by") if is_value_file(name) else column_of(train, name)
    if groups is None:
        raise RefusedError(
            f"is neither a column of the training set ({kind_of(train)}) nor a file (.npy, .txt or .csv) with a "
            "value for each training sample",
            key="data.group_by",
            value=name,
        )
    return checked_groups(groups, len(train), name)


def _order(train: IndexData, whole: IndexData, experiment: Experiment) -> TrainingOrder:
    """Return the order of drawing from the samples to train on, which are part of the `whole` training set."""
    data = experiment.data
    if train.brings_order:
        name = "weights" if data.weights is not None else "samples_per_epoch"
        raise RefusedError(
            f"`train` is a {kind_of(train)} with a training order of its own",
            key=f"data.{name}",
            suggestion=f"Use data.{name}=null.",
        )
    length = data.samples_per_epoch or len(train)
    if data.weights is None:
        return Passes(length, len(train))
    indices = places_in(train, whole)
    if data.weights == "balanced":
        labels = labels_of(whole)
        if labels is None:
            raise _no_labels(whole, "data.weights", "balanced", "a file of weights or a function")
        classes = labels[indices]
        return Weighted.of(class_balanced(classes), length, classes)
    weights = _weights(data.weights, whole, experiment)[indices]
    if not weights.any():
        raise RefusedError(
            "All samples with a weight above 0 are held out or left out, so there is nothing to draw",
            key="data.weights",
        )
    return Weighted.of(weights, length)


def _by_length(splits: Splits, whole: IndexData, name: str, experiment: Experiment) -> TrainingOrder:
    """Return the order of training with samples of similar length in the same batch."""
    train, key = splits.train, f"data.lengths={name}"
    if train.brings_order and train is not whole:
        raise RefusedError(
            f"`train` is a part of a {kind_of(train)} with a training order of its own, whose lengths are not known",
            key=key,
            suggestion="Hold out no samples, or use data.lengths=null.",
        )
    values = read_values(name, "data.lengths") if is_value_file(name) else column_of(whole, name)
    if values is None:
        raise RefusedError(
            f"is neither a column of the training set ({kind_of(whole)}) nor a file (.npy, .txt or .csv) with the "
            "length of each training sample",
            key=key,
        )
    lengths = checked_amounts(values, len(whole), "length", key)[places_in(train, whole)]
    most_tokens = experiment.data.batch_tokens
    if most_tokens is None:
        return ByLength(splits.order or train, lengths, experiment.trainer.global_batch_size)
    by_sample = train.is_loaded or experiment.data.transform or experiment.data.collate is not None
    if not by_sample or splits.order is not None or train.brings_order:
        raise RefusedError(
            f"builds batches from single samples, but `train` is a {kind_of(train)}, which has batches or an order of "
            "its own",
            key="data.batch_tokens",
            value=most_tokens,
            suggestion="Use data.batch_tokens=null.",
        )
    return by_tokens(lengths, most_tokens)


def _weights(weights: str | Node, whole: IndexData, experiment: Experiment) -> NDArray[np.float64]:
    if isinstance(weights, Node):
        found = instantiate(weights, experiment.trust, "data.weights", whole.returned)
        return checked_weights(found, len(whole), f"data.weights._target_={weights.target}")
    key = f"data.weights={weights}"
    return checked_weights(read_values(weights, "data.weights"), len(whole), key)


def _no_labels(data: IndexData, key: str, value: Any, instead: str) -> RefusedError:
    return RefusedError(
        f"needs the labels of the training set, a {kind_of(data)}, which are not known",
        key=key,
        value=value,
        suggestion=f"Give the set an attribute `labels` with a label for each sample, or use {instead}.",
    )
