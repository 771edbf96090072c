"""Finds the micro-batch of `trainer.micro_batch_size=fit` before the workers of a run start."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ddpexp.config.fitted import FIT, KEY, recorded, with_size
from ddpexp.config.schema import Experiment
from ddpexp.config.validate import check_layout
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.run import directory
from ddpexp.run.directory import RunDir
from ddpexp.system import files, separate_process
from ddpexp.system.terminal import print_message


def fit(experiment: Experiment, text: str, layout: Layout, before: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the micro-batch by its key, where it is `fit`: that of an earlier start, else the largest that fits.

    It is found anew where other workers resume the run, over which that of the earlier start does not split.

    `text` is the configuration as YAML, `before` the manifest of the earlier start.

    Raises:
        RefusedError: none is found.
    """
    if experiment.trainer.micro_batch_size != FIT:
        return {}
    size = recorded(before)
    if size is not None:
        try:
            check_layout(with_size(experiment, size), layout)
            return {KEY: size}
        except RefusedError as error:
            print_message(f"ddpexp: {KEY}={FIT} was {size} so far, which these workers cannot have: {error}")
    print_message(f"ddpexp: {KEY}={FIT}: finding the largest micro-batch that fits, by short runs")
    size = _search(text, layout)
    check_layout(with_size(experiment, size), layout)
    return {KEY: size}


def fit_on_this_host(run: RunDir, start: str, layout: Layout) -> dict[str, Any]:
    """Return the largest micro-batch that fits on a host that is not the first, whose memory may be less.

    The first command of a host finds it, and the others read what it has found for the same `start`.
    """
    host = directory.host()
    path = run.ranks / f"fit-{host}.json"
    known = run.read_if_present(path) or {}
    if known.get("start") != start or not isinstance(known.get("size"), int):
        print_message(f"ddpexp: {KEY}={FIT}: finding the largest micro-batch that fits on {host}, too")
        known = {"start": start, "size": _search(run.config.read_text(), layout)}
        files.write_json(path, known)
    return {"host": host, "size": known["size"]}


def _search(text: str, layout: Layout) -> int:
    request = {"config": text, "layout": asdict(layout)}
    try:
        size: int = separate_process.call("ddpexp.find.fit:answer", request, stdout=sys.stderr.fileno())
    except separate_process.NoAnswerError as error:
        raise RefusedError(
            f"could not be found: the process that tried sizes ended with exit code {error.status}",
            key=KEY,
            value=FIT,
            suggestion="Type a number.",
        ) from None
    return size
