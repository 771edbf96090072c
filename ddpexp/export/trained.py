"""Trained weights in a model of this process, or in files for other programs. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ddpexp.checkpoint.format import open_checkpoint
from ddpexp.checkpoint.loading import load_weights
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.export.weights import export_adapters, export_weights
from ddpexp.strategy.replica import modules_of
from ddpexp.train.build import build_model
from ddpexp.train.offline import without_downloads


def saved_model(experiment: Experiment, folder: Path, averaged: bool) -> Any:
    """Return the model with the weights of a checkpoint, on the CPU, in evaluation mode."""
    experiment.trust.make_importable()
    with unchanged_random_state(), without_downloads(experiment):
        model = build_model(experiment, trains=False)
    load_into(model, folder, averaged)
    for module in modules_of(model).values():
        module.eval()
    return model


def load_into(model: Any, folder: Path, averaged: bool) -> None:
    """Load the weights of a checkpoint into a module, or into a mapping of names to modules.

    Raises:
        RefusedError: it is neither.
    """
    if not isinstance(model, nn.Module) and not (
        isinstance(model, Mapping) and all(isinstance(module, nn.Module) for module in model.values())
    ):
        raise RefusedError("is neither a torch.nn.Module nor a mapping of names to modules", place=type(model).__name__)
    load_weights(modules_of(model), folder, str(folder), averaged)


def export(source: Path, folder: Path, averaged: bool, adapters: bool, max_file_bytes: int) -> list[Path]:
    """Write the weights of a checkpoint, or their adapters alone, into a folder, or one for each of several models."""
    checkpoint = open_checkpoint(source)
    names = [name for name in checkpoint.weights if name.endswith(".ema.safetensors") is averaged]
    if (problem := checkpoint.problem(files=names)) is not None:
        raise RefusedError(f"is damaged: {problem}", place=source)
    written = []
    for name in names:
        target = folder if len(names) == 1 else folder / name.partition(".")[0]
        if adapters:
            written += export_adapters(source / name, target)
        else:
            written += export_weights(source / name, target, max_file_bytes)
    return written


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Leave the global generators as they are: of torch, of NumPy and of Python."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
