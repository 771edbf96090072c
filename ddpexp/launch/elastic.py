"""launcher=elastic: torch's elastic agent starts the workers of this machine, and starts them again when some are lost."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from ddpexp.errors import ENDS, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, RefusedError, StoppedError, first_end
from ddpexp.launch import Job, child
from ddpexp.launch.fork_server import Server
from ddpexp.launch.layout import resolve
from ddpexp.launch.torchrun_env import TorchrunEnv

_CODES = "DDPEXP_EXIT_CODES"  # the path where each rank of this machine leaves its exit code
_END_SECONDS = 2.0  # for the command to end the agent
_CODE_BYTES = 4
_PORT = "29400"  # torch's, where the endpoint names none
_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class Elastic:
    """Type the same command on every machine; a range of machines, such as trainer.nodes=1:4, may come and go."""

    typed_again: ClassVar = ("rdzv_endpoint", "rdzv_conf")  # torch unpickles what it finds there

    max_restarts: int = 3
    rdzv_backend: Literal["c10d", "etcd-v2"] = "c10d"
    rdzv_endpoint: str | None = None
    rdzv_id: str = "ddpexp"
    rdzv_conf: str | None = None

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the agent with this machine's workers and return the exit code of the job.

        Raises:
            RefusedError: a number of machines that the batch does not split over, or a rendezvous that is not there.
            StoppedError: a signal to this process ended the run.
        """
        low, high = self._range(job.asked.nodes)
        here = resolve(job.asked.gpus, job.asked.device, job.asked.backend, job.asked.threads)
        for nodes in range(low, high + 1):
            try:
                job.check(replace(here, nodes=nodes, world_size=nodes * here.world_size))
            except RefusedError as error:
                raise RefusedError(f"with {nodes} of trainer.nodes={job.asked.nodes}: {error}") from None
        rendezvous = self._rendezvous(high)
        keeper = _Keeper(self.rdzv_endpoint) if self.rdzv_endpoint is not None and self.rdzv_backend == "c10d" else None
        if server is not None:
            server.close()  # each worker's command has its own
        job.leads = False  # one of the commands that the agent starts does
        with _memory(json.dumps(job.described()).encode()) as described, _memory(bytes(here.world_size * _CODE_BYTES)) as codes:
            words = [
                sys.executable, "-m", "ddpexp.launch.elastic_agent", str(os.getpid()), f"--nnodes={low}:{high}",
                f"--nproc-per-node={here.world_size}", f"--max-restarts={self.max_restarts}", *rendezvous,
                f"--log-dir={os.devnull}", "-m", "ddpexp", "member", str(described),
            ]  # fmt: skip
            # Each worker sets its own number of threads.
            environ = {"OMP_NUM_THREADS": "1", **os.environ, _CODES: str(codes)}
            code = child.run(
                words, environ, job.asked.grace_seconds, (signal.SIGUSR1, signal.SIGQUIT),
                ended=lambda: any(map(_ends_all, _codes(codes))),
                lost=lambda: bool(_codes(codes)) and keeper is not None and keeper.is_lost(),  # it was there when the ranks began
            )  # fmt: skip
            if keeper is not None and keeper.lost:
                text = (
                    f"launcher.rdzv_endpoint={self.rdzv_endpoint} does not answer any more, where the list of the machines is kept"
                )
                print(f"ddpexp: {text}: without it the ranks cannot be started again here", file=sys.stderr, flush=True)
            return code if code == EXIT_DONE else next(iter(_codes(codes)), EXIT_FAILED)

    def member(self, job: Job, server: Server | None = None) -> int:
        """Be one rank that the agent has started; like `TorchrunEnv.launch`."""
        job.asked = replace(job.asked, nodes="auto", gpus="auto")
        _leave_code(EXIT_DONE)  # an attempt before this one may have left another
        code = EXIT_FAILED
        try:
            code = TorchrunEnv().launch(job, server)
            return code
        except ENDS as error:
            code = first_end(error).exit_code
            raise
        finally:
            if code > 128 and any(not _ends_all(one) for one in _codes(Path(os.environ[_CODES]))):
                code = EXIT_FAILED  # one that has failed has left: the agent ends the others, to start them all again
            _leave_code(code)
            if _ends_all(code):
                _wait_for_the_end()

    def _range(self, nodes: int | str) -> tuple[int, int]:
        low, _, high = ("1" if nodes == "auto" else str(nodes)).partition(":")
        first, last = int(low), int(high or low)
        if first < 1 or last < first:
            raise RefusedError(f"trainer.nodes={nodes} is no range: the least number of machines comes first, such as 1:4.")
        return first, last

    def _rendezvous(self, most: int) -> list[str]:
        if self.max_restarts < 0:
            raise RefusedError(f"launcher.max_restarts={self.max_restarts}: use 0 or more.")
        if self.rdzv_backend == "etcd-v2" and importlib.util.find_spec("etcd") is None:
            raise RefusedError("launcher.rdzv_backend=etcd-v2 needs the package python-etcd: pip install 'ddpexp[etcd]'.")
        if self.rdzv_endpoint is None:
            if most > 1 or self.rdzv_backend != "c10d":
                raise RefusedError(
                    "launcher.rdzv_endpoint is missing: name the place where the machines meet, HOST:PORT, the same on all of them."
                )
            return ["--standalone"]
        words = [f"--rdzv-backend={self.rdzv_backend}", f"--rdzv-endpoint={self.rdzv_endpoint}", f"--rdzv-id={self.rdzv_id}"]
        return [*words, *([f"--rdzv-conf={self.rdzv_conf}"] if self.rdzv_conf else [])]


@dataclass
class _Keeper:
    """The port where one of the machines keeps the list of them. An agent that has lost it waits for minutes or for ever."""

    endpoint: str
    lost: bool = False
    _failures: int = 0
    _next: float = 0.0

    def is_lost(self) -> bool:
        """Look once a second whether somebody listens there; what does not answer twice is lost."""
        if time.monotonic() < self._next:
            return self.lost
        host, _, port = self.endpoint.rpartition(":") if ":" in self.endpoint else (self.endpoint, "", _PORT)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
            self._failures = 0
        except (OSError, ValueError):
            self._failures += 1
        self._next = time.monotonic() + _ANSWER_SECONDS
        self.lost = self._failures > 1
        return self.lost


@contextmanager
def _memory(data: bytes) -> Iterator[Path]:
    """Hold data in memory under a path that this user's other processes of the host can open; it goes with this process."""
    descriptor = os.memfd_create("ddpexp")
    try:
        os.write(descriptor, data)
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _leave_code(code: int) -> None:
    """Leave this rank's exit code where the command that has started the agent looks for it."""
    with suppress(OSError), open(os.environ[_CODES], "r+b", buffering=0) as codes:  # that command may be gone
        os.pwrite(codes.fileno(), code.to_bytes(_CODE_BYTES, "little"), int(os.environ["LOCAL_RANK"]) * _CODE_BYTES)


def _ends_all(code: int) -> bool:
    """Tell whether the ranks are not to be started again: nothing would be different, or somebody has stopped them."""
    return code == EXIT_REFUSED or code > 128


def _wait_for_the_end() -> None:
    """Let the command end the agent while all is quiet: one that sees a rank leave starts it again, and may miss a signal then."""
    with suppress(StoppedError):
        time.sleep(_END_SECONDS)


def _codes(place: Path) -> list[int]:
    """Return the exit codes of the ranks that did not end well, by rank."""
    found = place.read_bytes()
    codes = [int.from_bytes(found[i : i + _CODE_BYTES], "little") for i in range(0, len(found), _CODE_BYTES)]
    return [code for code in codes if code != EXIT_DONE]
