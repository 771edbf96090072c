"""Subprocess that runs torch's elastic agent, without torchrun's error summary: the ranks report their own errors."""

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
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.run import parse_args, run

from ddpexp.compat.elastic import ExtensibleAgent, forget_store, install
from ddpexp.errors import EXIT_FAILED
from ddpexp.launch.launchers.agent_status import FEW_CAME, JOB_ENDED, LIST_LOST, AgentStatus, Phase, not_for_ranks
from ddpexp.system.process import children, die_with_parent

_ATTEMPTS = 5  # to complete a rendezvous while machines are lost in the middle of it; each may take a minute


class Agent(ExtensibleAgent):
    """Stops ranks with SIGUSR2 so that they save, and gives every round of machines its own store address."""

    def run_to_the_end(self, *words: Any) -> RunResult:
        """Run all rounds of workers."""
        try:
            return super().run_to_the_end(*words)
        except RendezvousError:
            AgentStatus.here().note(Phase.MEETS)  # so the ranks, which end now, know that no user stopped them
            raise

    def meet(self, worker_group: WorkerGroup) -> None:
        """Meet the agents of the other machines, and begin a round."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(DistError):  # a machine was lost after all had joined
                return self._meet_once(worker_group)
        return self._meet_once(worker_group)

    def _meet_once(self, worker_group: WorkerGroup) -> None:
        # torch creates the ranks' store, and publishes its address, only in a machine's first round: a machine that
        # joins later waits for the address in vain (DistStoreError after a minute), or machines use different stores.
        # Without the cached address every round creates its own store.
        forget_store(worker_group)
        super().meet(worker_group)

    def start_workers(self, *words: Any) -> dict[int, Any]:
        """Start the workers of a round."""
        AgentStatus.here().note(Phase.RUNS)
        return super().start_workers(*words)

    def monitor_workers(self, *words: Any) -> RunResult:
        """Look at the workers, and end the others if one has failed."""
        AgentStatus.here().note(Phase.LOOKS)  # the call below ends the other ranks when one has failed
        result = super().monitor_workers(*words)
        if result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED):
            AgentStatus.here().note(Phase.RUNS)
        return result

    def stop_workers(self, *_: Any) -> None:
        """End a round that is to be followed by another one: the ranks save."""
        AgentStatus.here().note(Phase.MEETS)
        # SIGUSR2 stops the ranks of all machines, even if their agents do not know yet.
        self.end_workers(signal.SIGUSR2, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))

    def run(self, *words: Any) -> RunResult:
        """Run to the end; on a spare machine, which has no result, raise RendezvousClosedError."""
        result: RunResult | None = super().run(*words)
        if result is None:
            raise RendezvousClosedError
        return result


def main() -> None:
    """Subprocess entry point: the arguments are the parent's process id, then torchrun's. Exits the process."""
    parent, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    not_for_ranks()
    logging.disable()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = (
        "SIGTERM,SIGINT,SIGHUP"  # end the agent; other signals are for the ranks
    )
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, _forward)
    # A SIGUSR2 sent to every process of a host is handled by the command, which ends this process.
    signal.signal(signal.SIGUSR2, lambda *_: None)
    install(Agent)
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
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


def _forward(number: int, _frame: FrameType | None) -> None:
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
