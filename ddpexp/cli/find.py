"""The command `ddpexp find`: values of keys that short real runs find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ddpexp.cli.start import check_runs_once, compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.find.micro_batch import largest
from ddpexp.find.search import Search
from ddpexp.find.show import Found, nothing_fits, show
from ddpexp.launch import Layout
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.run.worker_request import worker_request
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted

_WHAT = ("batch_size",)


def find(call: Call) -> int:
    """Find what the first word names for the run that the overrides describe, and return the exit code.

    Raises:
        RefusedError: a run would be refused. DdpexpError: there is nothing to find. WorkerError: a trial failed.
    """
    what, *overrides = call.operands
    if what not in _WHAT:
        raise RefusedError(
            "is nothing that can be found", place=f"find {what}", suggestion=f"Type ddpexp find {_WHAT[0]} ... ."
        )
    check_runs_once("find the same")
    experiment, composed = compose_experiment(overrides)
    server = call.server or Server()
    outcome.stop_on_signals()
    try:
        return _find_batch_size(experiment, composed.text, server, call.as_json)
    finally:
        server.close()


def _find_batch_size(experiment: Experiment, text: str, server: Server, as_json: bool) -> int:
    layout = _layout(experiment)
    search = Search(experiment, text, layout, server, lambda line: print_message(f"ddpexp: {line}"))
    tried = search.run()
    if largest(tried) is None:
        raise nothing_fits(tried)
    found = Found(tried, search.observed[-1].changes, _notes(experiment, layout))
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(found)
    return EXIT_DONE


def _layout(experiment: Experiment) -> Layout:
    """Return the workers of the run.

    Raises:
        RefusedError: this machine cannot run them, or their micro-batches are not counted in samples.
    """
    if experiment.data.batch_tokens is not None:
        raise RefusedError(
            "makes micro-batches of as many tokens as fit, and trainer.micro_batch_size is for evaluations alone",
            key="data.batch_tokens",
            value=experiment.data.batch_tokens,
            suggestion="Use data.batch_tokens=null, or try other values of it.",
        )
    request = worker_request(experiment)
    local = resolve(request.gpus, request.device, request.backend, request.threads)
    nodes = request.node_range[1]
    layout = replace(local, nodes=nodes, world_size=nodes * local.world_size)
    plan_batches(
        experiment.trainer.global_batch_size, "auto", experiment.strategy.data_rank(0, layout.world_size).size
    )  # refuses a batch that does not split over the workers
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
