"""Run the probes of this host beside each other, each within a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpexp.system.limits import reason_with_limit

Facts = Mapping[str, Any]  # plain values, as JSON has them
Probe = Callable[[], Facts]


@dataclass
class Gathering:
    """Probes that run, each in a thread of its own.

    A probe that hangs (a file server that is gone, a driver that does not answer) delays no other one: its thread is
    left behind and ends with the process.
    """

    _started: float = field(default_factory=time.monotonic)
    _facts: dict[str, Facts] = field(default_factory=dict)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)

    @classmethod
    def start(cls, probes: Mapping[str, Probe]) -> Gathering:
        """Start the probes."""
        gathering = cls()
        for name, probe in probes.items():
            thread = threading.Thread(target=gathering._run, args=(name, probe), daemon=True, name=f"probe-{name}")
            gathering._threads[name] = thread
            try:
                thread.start()
            except RuntimeError as error:  # thread limit reached
                gathering._facts[name] = {"error": reason_with_limit(error)}
        return gathering

    def facts(self, seconds: float) -> dict[str, Facts]:
        """Return what each probe found, `seconds` after the start at the latest.

        Of a probe that failed it is `error`, of one that has not ended `hung`, with the seconds it was given.
        """
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join(max(0.0, self._started + seconds - time.monotonic()))
        gathered = dict(self._facts)  # a probe may end now
        waited = round(time.monotonic() - self._started, 1)
        return {name: gathered.get(name, {"hung": waited}) for name in self._threads}

    def _run(self, name: str, probe: Probe) -> None:
        try:
            facts = probe()
        except Exception as error:  # whatever a driver or a file system comes up with is a finding
            facts = {"error": reason_with_limit(error)}
        self._facts[name] = facts
