"""torch's elastic agent in a process of its own, without torchrun's last words: the ranks have said why they failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from ddpexp.errors import EXIT_FAILED
from ddpexp.launch.launchers.elastic_board import FEW_CAME, JOB_ENDED, LIST_LOST, Phase, StoreMailbox, not_for_ranks
from ddpexp.system.process import children, die_with_parent

_TRIES = 5  # to meet, while machines are lost in the middle of it; each may take a minute


class Agent(LocalElasticAgent):
    """Ends the ranks so that they know why, and has every round of machines meet at an address of its own.

    These methods are torch's points of extension.
    """

    def _invoke_run(self, *words: Any) -> RunResult:
        try:
            result: RunResult = super()._invoke_run(*words)
            return result
        except RendezvousError:
            StoreMailbox.here().note(Phase.MEETS)  # the ranks, which are ended now, have not been stopped by a user
            raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        for _ in range(_TRIES - 1):
            with suppress(DistError):  # one of the machines was lost since all had come
                return self._meet(worker_group)
        return self._meet(worker_group)

    def _meet(self, worker_group: WorkerGroup) -> None:
        # torch makes the ranks' store, and says where it is, in a machine's first round alone: one that joins later
        # waits for the address in vain (DistStoreError after a minute), or the machines have several. Without this
        # every round has its own.
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    def _start_workers(self, *words: Any) -> dict[int, Any]:
        StoreMailbox.here().note(Phase.RUNS)
        started: dict[int, Any] = super()._start_workers(*words)
        return started

    def _monitor_workers(self, *words: Any) -> RunResult:
        StoreMailbox.here().note(Phase.LOOKS)  # this ends the others where one has failed
        result: RunResult = super()._monitor_workers(*words)
        if result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED):
            StoreMailbox.here().note(Phase.RUNS)
        return result

    def _stop_workers(self, *_: Any) -> None:
        StoreMailbox.here().note(Phase.MEETS)
        # SIGUSR2 reaches the ranks of all machines, whose agents may know nothing yet.
        self._shutdown(signal.SIGUSR2, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))

    def run(self, *words: Any) -> RunResult:
        """Run to the end; a spare machine, which was not needed until then, has seen the job end."""
        result: RunResult | None = super().run(*words)
        if result is None:
            raise RendezvousClosedError
        return result


def main() -> None:
    """Run the agent with torchrun's words, behind the parent's process id. Ends this process."""
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    not_for_ranks()
    logging.disable()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP"  # to end; the others are for the ranks
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, _pass_on)
    signal.signal(
        signal.SIGUSR2, lambda *_: None
    )  # sent to every process of a host it is the command's, which ends this one
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
        code = 0
    except ChildFailedError:
        code = EXIT_FAILED
    except SignalException as error:
        code = 128 + int(error.sigval)
    except RendezvousClosedError:
        code = JOB_ENDED
    except RendezvousTimeoutError:
        code = FEW_CAME
    except (RendezvousError, DistError):
        code = LIST_LOST
    os._exit(code)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
