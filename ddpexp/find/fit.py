"""The search of `trainer.micro_batch_size=fit`, in a process of its own beside the command that starts a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpexp.config.fitted import FIT, KEY
from ddpexp.config.parse import load
from ddpexp.errors import RefusedError, StoppedError, WorkerError
from ddpexp.find.micro_batch import largest
from ddpexp.find.search import Search, failure_text
from ddpexp.find.show import nothing_fits
from ddpexp.launch import Layout
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.system.terminal import print_message

_MARGIN = 0.9  # of a CPU worker's memory: a run takes a little more than a trial, and nothing survives its lack there


def answer(request: Mapping[str, Any]) -> int:
    """Return the largest micro-batch that fits; `request` has a configuration as YAML and a layout.

    Raises:
        RefusedError: none fits, or the experiment cannot be trained for another reason.
    """
    experiment, layout = load(request["config"]), Layout(**request["layout"])
    outcome.stop_on_signals()
    server = Server()
    try:
        search = Search(experiment, request["config"], layout, server, _report, measures_speed=False, margin=_MARGIN)
        tried = search.run()
    except WorkerError as error:
        raise RefusedError(
            f"was tried, and a short run failed: {failure_text(error)}",
            key=KEY,
            value=FIT,
            suggestion=f"Type a number, such as {KEY}=1, to see the whole error.",
        ) from None
    except StoppedError as error:
        raise SystemExit(error.exit_code) from None  # the command that has started this process says so
    finally:
        server.close()
    found = largest(tried)
    if found is None:
        raise nothing_fits(tried)
    return found.micro_batch_size


def _report(line: str) -> None:
    print_message(f"ddpexp: {line}")
