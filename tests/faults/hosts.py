"""The hosts of the cluster that SLURM_CONF belongs to.

Cut off, healed, killed and started again, as its own tool does it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import PATIENCE, Done, finish
from tests.launch.starters import host
from tests.points import Recipe, wait_for


class Hosts:
    """What happens to hosts; `restore` makes all as it was."""

    def __init__(self) -> None:
        """Look how many there are."""
        self.conf = Path(os.environ["SLURM_CONF"])
        self._count = int((self.conf.parent / "n").read_text())

    def cut(self, number: int) -> None:
        """Take a host off the network: packets vanish, nothing is closed."""
        _run("ip", "link", "set", f"ddpv{number}", "nomaster")
        _run("ip", "link", "set", f"ddpv{number}", "down")

    def heal(self, number: int) -> None:
        """Put it back."""
        _run("ip", "link", "set", f"ddpv{number}", "master", "ddpbr", "up")

    def vanish(self, number: int) -> None:
        """Cut the power: no process is left, and nobody on the network hears of their end."""
        self.cut(number)
        for pid in _run("ip", "netns", "pids", f"ddp-node{number}").split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def restore(self) -> None:
        """Heal and start what is not there, and wait until Slurm has all hosts free."""
        for number in range(self._count):
            self.heal(number)
            if "slurmd" not in {_name(pid) for pid in _run("ip", "netns", "pids", f"ddp-node{number}").split()}:
                _run(*host(number), "slurmd", "-f", str(self.conf), "-N", f"node{number}")
        wait_for(lambda: set(_run("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"})

    def listening(self, number: int, without: frozenset[int] = frozenset()) -> list[tuple[str, int]]:
        """Return the addresses and ports that processes of a host listen on over IPv4, but for some ports."""
        lines = _run(*host(number), "cat", "/proc/net/tcp").splitlines()[1:]
        found = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
        places = [(socket.inet_ntoa(bytes.fromhex(one)[::-1]), int(port, 16)) for one, port in found]
        return [place for place in places if place[1] not in without]


NOTHING: Sequence[dict[str, str]] = ({}, {})


class Both:
    """One command on each of two hosts, with words and variables of its own."""

    def __init__(
        self,
        recipe: Recipe,
        overrides: Sequence[str],
        *,
        own: Sequence[dict[str, str]] = NOTHING,
        run: Path | None = None,
    ) -> None:
        """Start them; `words` in which N stands for the host's number."""
        arguments, self.run = recipe.words("trainer.threads=1", *overrides, run=run)
        environ = {**recipe.ddpexp.environ, "SLURM_CONF": os.environ["SLURM_CONF"]}
        self.processes = [
            subprocess.Popen(
                [*host(number), sys.executable, "-m", "ddpexp", *(word.replace("=N", f"={number}") for word in arguments)],
                cwd=recipe.folder, env={**environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            for number, variables in enumerate(own)
        ]  # fmt: skip

    def finish(self, timeout: float = PATIENCE) -> list[Done]:
        """Wait for both."""
        return [finish(process, self.run, timeout) for process in self.processes]


def _run(*overrides: str) -> str:
    return subprocess.run(overrides, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
