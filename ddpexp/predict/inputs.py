"""Raw inputs, such as a picture, as the samples that an evaluation of the run would make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.config.instantiate import instantiate
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Experiment
from ddpexp.data.adapters import MapStyle
from ddpexp.data.base import SampleNames
from ddpexp.data.inputs import INPUT, Inputs, as_path, listed
from ddpexp.errors import RefusedError
from ddpexp.settings.data import Data
from ddpexp.settings.node import Node
from ddpexp.task import HasReadInput
from ddpexp.train.transform_samples import to_evaluate, without_own_arguments

INPUT_SET = "input"  # the name of the set that raw inputs are
_EXAMPLE = """    def read_input(self, value):
        return load(value), -1  # as a sample of the evaluation set: here an input, and no label"""


def read_inputs(
    experiment: Experiment, task: Any, trained_on: Mapping[str, Any], given: Any, split: str | None
) -> Inputs:
    """Return raw inputs as samples; `trained_on` describes the data of the run, and `split` a source of a mixture.

    `given` is a path, or what a call of `Run.predict` gets.

    Raises:
        RefusedError: the data of the run does not say how inputs are read, or the inputs are none of its kind.
    """
    experiment = without_own_arguments(experiment)
    if isinstance(task, HasReadInput):
        inputs = _by_task(task, given)
    else:
        data, known = _source(experiment.data, trained_on, split)
        if key_of("data.read", data.prepare) is None or not known:
            raise _unreadable(experiment, data, known)
        node = Node(str(data.prepare), data.options)
        inputs = instantiate(node, experiment.trust, "data.read", given, known)
    samples = to_evaluate(inputs.samples, INPUT_SET, experiment)
    return Inputs(samples, inputs.names, inputs.is_one)


def _source(data: Data, trained_on: Mapping[str, Any], split: str | None) -> tuple[Data, Mapping[str, Any]]:
    """Return the section by which inputs are read, and the description of its data."""
    if not data.sources:
        if split is not None:
            reason = f"{split} is a set of the data, and {INPUT} is of none"
            raise RefusedError(reason, place="split", suggestion="Leave the split out.")
        return data, trained_on
    if split is None or split not in data.sources:
        names = ", ".join(data.sources)
        raise RefusedError(
            "The data is a mixture, and each of its sources is read in a way of its own",
            suggestion=f"Name the source as the split, one of {names}: --split {next(iter(data.sources))}.",
        )
    known = (trained_on.get("sources") or {}).get(split)
    return data.sources[split], known if isinstance(known, Mapping) else {}


def _unreadable(experiment: Experiment, data: Data, known: Mapping[str, Any]) -> RefusedError:
    """Return the error for data of the user's own, and for weights without a run."""
    if key_of("data.read", data.prepare) is not None:
        return RefusedError(
            "needs the directory of the run, whose record says how inputs are read",
            place=INPUT,
            suggestion="Name the run in place of the file of weights.",
        )
    return RefusedError(
        f"The data (data._target_={data.target}) does not say how an input becomes a sample",
        suggestion=f"Give the task ({experiment.task.target}) a method that does, for example:\n{_EXAMPLE}",
    )


def _by_task(task: HasReadInput, given: Any) -> Inputs:
    """Return the samples that a task of the user's makes of inputs; a folder stands for the files in it."""
    values, is_one = listed(given)
    chosen: list[Any] = []
    names: list[str] = []
    for value in values:
        path = as_path(value) if isinstance(value, Path) else None
        if path is None:
            chosen.append(value)
            continue
        is_one = is_one and not path.is_dir()
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        chosen += map(str, files)
        names += [str(file.relative_to(path)) if path.is_dir() else str(value) for file in files]
    if not chosen:
        raise RefusedError("holds no files", place=str(given))
    samples = MapStyle([task.read_input(value) for value in chosen])
    return Inputs(samples, SampleNames("file", names) if len(names) == len(chosen) else None, is_one)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
