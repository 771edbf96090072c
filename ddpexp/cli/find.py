"""The command `ddpexp find`: values of keys that short real runs find."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ddpexp.cli.start import check_runs_once, compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.find import learning_rate
from ddpexp.find.learning_rate import RangeTest, suggested
from ddpexp.find.micro_batch import largest
from ddpexp.find.search import Search
from ddpexp.find.show import Found, nothing_fits, show
from ddpexp.launch import Layout
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.run.worker_request import worker_request
from ddpexp.settings.key import Key
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted

_Rate = Annotated[float, Key(above=0, below=math.inf, use="a number above 0")]


@dataclass(frozen=True)
class FindArguments:
    """What was typed."""

    what: str
    run: Sequence[str] = ()  # its arguments, as for a training
    json: bool = False
    steps: Annotated[int, Key(at_least=20, use="a whole number from 20")] = 100
    low: _Rate = 1e-6
    high: _Rate = 10.0
    output: Annotated[str | None, Key(pattern=r".*\.png", use="the name of a PNG file")] = None


def find(call: Call) -> int:
    """Find what the first word names for the run that the overrides describe, and return the exit code.

    Raises:
        RefusedError: a run would be refused. DdpexpError: there is nothing to find. WorkerError: a trial failed.
    """
    arguments = arguments_of(call)
    check_runs_once("find the same")
    experiment, composed = compose_experiment(arguments.run)
    server = call.server or Server()
    outcome.stop_on_signals()
    finders = {"batch_size": _find_batch_size, "lr": _find_lr}
    try:
        return finders[arguments.what](experiment, composed.text, server, arguments)
    finally:
        server.close()


def arguments_of(call: Call) -> FindArguments:
    """Return what was typed.

    Raises:
        RefusedError: nothing that can be found, or an option that means nothing.
    """
    what, *overrides = call.operands
    if what not in ("batch_size", "lr"):
        raise RefusedError(
            "is nothing that can be found",
            place=f"find {what}",
            suggestion="Type ddpexp find batch_size ... or ddpexp find lr ... .",
        )
    arguments = call.typed(FindArguments(what, overrides))
    other = next((name for name in ("--steps", "--low", "--high", "--output") if name in call.options), None)
    if what != "lr" and other is not None:
        raise RefusedError("is an option of find lr", place=f"find {what} {other}")
    if arguments.low >= arguments.high:
        raise RefusedError(
            f"is not below --high {arguments.high:g}",
            place=f"find lr --low {arguments.low:g}",
            suggestion="Rates grow from the lower to the higher one.",
        )
    return arguments


def _find_batch_size(experiment: Experiment, text: str, server: Server, arguments: FindArguments) -> int:
    if experiment.data.batch_tokens is not None:
        raise RefusedError(
            "makes micro-batches of as many tokens as fit, and trainer.micro_batch_size is for evaluations alone",
            key="data.batch_tokens",
            value=experiment.data.batch_tokens,
            suggestion="Use data.batch_tokens=null, or try other values of it.",
        )
    layout = _layout(experiment)
    search = Search(experiment, text, layout, server, _report)
    tried = search.run()
    if largest(tried) is None:
        raise nothing_fits(tried)
    found = Found(tried, search.observed[-1].changes, _notes(experiment, layout))
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(found)
    return EXIT_DONE


def _find_lr(experiment: Experiment, text: str, server: Server, arguments: FindArguments) -> int:
    layout = _layout(experiment)
    if arguments.output is not None and not (folder := Path(arguments.output).absolute().parent).is_dir():
        raise RefusedError(f"There is no directory {folder}", place=f"find lr --output {arguments.output}")
    test = RangeTest(experiment, text, layout, arguments.low, arguments.high, arguments.steps)
    curve = test.run(server, _report)
    rate = suggested(curve)
    if arguments.output is not None:
        try:
            learning_rate.draw(curve, rate, Path(arguments.output))
        except OSError as error:
            reason = f"cannot be written: {reason_with_limit(error)}"
            raise RefusedError(reason, place=f"find lr --output {arguments.output}") from None
        _report(f"{arguments.output} shows the losses")
    if arguments.json:
        print(json.dumps(learning_rate.as_dict(curve, rate), indent=2))
    else:
        notes = [f"note: {note}" for note in _notes(experiment, layout)]
        print("\n".join([*learning_rate.lines(curve, rate), *notes]))
    return EXIT_DONE


def _report(line: str) -> None:
    print_message(f"ddpexp: {line}")


def _layout(experiment: Experiment) -> Layout:
    """Return the workers of the run.

    Raises:
        RefusedError: this machine cannot run those of a machine, or the batch does not split over them.
    """
    request = worker_request(experiment)
    local = resolve(request.gpus, request.device, request.backend, request.threads)
    nodes = request.node_range[1]
    layout = replace(local, nodes=nodes, world_size=nodes * local.world_size)
    data_size = experiment.strategy.data_rank(0, layout.world_size).size
    plan_batches(experiment.trainer.global_batch_size, "auto", data_size)
    return layout


def _notes(experiment: Experiment, layout: Layout) -> Sequence[str]:
    """Return in what the trials differ from a run."""
    notes = []
    if (name := launcher_name(type(experiment.launcher))) != launcher_name(Spawn):
        notes.append(f"launcher={name} is not used: the workers were those of this machine")
    if layout.nodes > 1:
        local = counted(layout.world_size // layout.nodes, "worker")
        notes.append(f"measured with the {local} of one of {layout.nodes} machines: no network was in the way")
    return notes
