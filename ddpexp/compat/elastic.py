"""torch's elastic agent, with the methods that a subclass overrides under public names.

Private: `LocalElasticAgent._invoke_run`, `_rendezvous`, `_start_workers`, `_monitor_workers`, `_stop_workers` and
`_shutdown`, `DynamicRendezvousHandler._bootstrap_store_info`, and `torch.distributed.launcher.api.LocalElasticAgent`;
torch 2.10 to 2.13.
Why: torch's manual lists most of these methods for subclasses, and torchrun takes no agent of another class.
When it goes: launcher=elastic does not start, or behaves as torchrun does. Look for the new names in torch's manual,
under "Elastic Agent", and in `torch.distributed.launcher.api.launch_agent`.
"""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api


class ExtensibleAgent(LocalElasticAgent):
    """An agent whose methods do what torch's do, unless a subclass overrides them."""

    def run_to_the_end(self, *words: Any) -> RunResult:
        """Run all rounds of workers."""
        result: RunResult = super()._invoke_run(*words)
        return result

    def meet(self, worker_group: WorkerGroup) -> None:
        """Meet the agents of the other machines, and begin a round."""
        super()._rendezvous(worker_group)

    def start_workers(self, *words: Any) -> dict[int, Any]:
        """Start the workers of a round."""
        started: dict[int, Any] = super()._start_workers(*words)
        return started

    def monitor_workers(self, *words: Any) -> RunResult:
        """Look at the workers, and end the others if one has failed."""
        result: RunResult = super()._monitor_workers(*words)
        return result

    def stop_workers(self, *words: Any) -> None:
        """End a round that is to be followed by another one."""
        super()._stop_workers(*words)

    def end_workers(self, number: signal.Signals, timeout_seconds: int) -> None:
        """Send the workers a signal, and kill them after the timeout."""
        self._shutdown(number, timeout_seconds)

    def _invoke_run(self, *words: Any) -> RunResult:
        return self.run_to_the_end(*words)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(worker_group)

    def _start_workers(self, *words: Any) -> dict[int, Any]:
        return self.start_workers(*words)

    def _monitor_workers(self, *words: Any) -> RunResult:
        return self.monitor_workers(*words)

    def _stop_workers(self, *words: Any) -> None:
        self.stop_workers(*words)


def forget_store(worker_group: WorkerGroup) -> None:
    """Have the next round of an agent make a store of its own for its ranks, and publish its address."""
    handler = worker_group.spec.rdzv_handler
    if isinstance(handler, DynamicRendezvousHandler):
        handler._bootstrap_store_info = None


def install(agent: type[LocalElasticAgent]) -> None:
    """Have torchrun in this process use another class of agents."""
    api.LocalElasticAgent = agent  # type: ignore[attr-defined]
