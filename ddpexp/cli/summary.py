"""The command `ddpexp summary`: the modules of a model, with their shapes, parameters and FLOPs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddpexp.cli.start import compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.config.facts import refers
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.plan.gather import ask, error_of
from ddpexp.plan.model_tree import Summary
from ddpexp.run.prepare import prepare, with_facts
from ddpexp.settings.key import Key


@dataclass(frozen=True)
class SummaryArguments:
    """What was typed."""

    run: Sequence[str] = ()  # its arguments, as for a training
    json: bool = False
    depth: Annotated[int, Key(at_least=1, use="a whole number above 0")] = 3


def summary(call: Call) -> int:
    """Print the summary of the model that the overrides describe, and return the exit code.

    Raises:
        RefusedError: what a run would refuse. DdpexpError: the model's code failed.
    """
    arguments = call.typed(SummaryArguments(call.operands))
    found = _summary_of(arguments.run)
    if arguments.json:
        print(json.dumps(found.down_to(arguments.depth).as_dict(), indent=2))
    else:
        from ddpexp.plan.show_summary import show

        show(found, arguments.depth)
    return EXIT_DONE


def _summary_of(overrides: Sequence[str]) -> Summary:
    experiment, composed = compose_experiment(overrides)
    prepared, without_data = None, None
    try:
        prepared = prepare(experiment.data, experiment.trust)
    except RefusedError as error:
        if refers(composed.text):  # the model may need the number of classes
            raise
        without_data = str(error)
    text = with_facts(composed.text, experiment.data, prepared)
    found = ask("ddpexp.plan.summarize:answer", {"config": text, "data": prepared, "without_data": without_data})
    failure = error_of(found)
    if failure is not None:
        raise failure
    return Summary.from_dict(found)
