"""launcher=elastic: torch's elastic agent starts the workers of this machine, and starts them again when some are lost."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, DdpexpError, RefusedError, first_end
from ddpexp.launch import Job, child
from ddpexp.launch.fork_server import Server
from ddpexp.launch.layout import resolve
from ddpexp.launch.torchrun_env import TorchrunEnv

_CODES = "DDPEXP_EXIT_CODES"  # the folder where each rank of this machine leaves its exit code


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
        if server is not None:
            server.close()  # each worker's command has its own
        job.leads = False  # one of the commands that the agent starts does
        with tempfile.TemporaryDirectory(prefix="ddpexp-") as private:
            described = Path(private) / "job.json"
            described.write_text(json.dumps(job.described()))
            words = [
                sys.executable, "-m", "ddpexp.launch.elastic_agent", str(os.getpid()), f"--nnodes={low}:{high}",
                f"--nproc-per-node={here.world_size}", f"--max-restarts={self.max_restarts}", *rendezvous,
                "-m", "ddpexp", "member", str(described),
            ]  # fmt: skip
            # Each worker sets its own number of threads; what torch writes beside goes with the folder.
            environ = {"OMP_NUM_THREADS": "1", **os.environ, _CODES: private, "TMPDIR": private}
            code = child.run(
                words, environ, job.asked.grace_seconds, (signal.SIGUSR1, signal.SIGQUIT),
                ended=lambda: any(code == EXIT_REFUSED or code > 128 for code in _codes(private)),  # else it would start again
            )  # fmt: skip
            return code if code == EXIT_DONE else next(iter(_codes(private)), EXIT_FAILED)

    def member(self, job: Job, server: Server | None = None) -> int:
        """Be one rank that the agent has started; like `TorchrunEnv.launch`."""
        job.asked = replace(job.asked, nodes="auto", gpus="auto")
        place = Path(os.environ[_CODES]) / f"{int(os.environ['RANK']):06}.code"
        place.unlink(missing_ok=True)
        code = EXIT_FAILED
        try:
            code = TorchrunEnv().launch(job, server)
            return code
        except DdpexpError as error:
            code = first_end(error).exit_code
            raise
        finally:
            if code != EXIT_DONE and place.parent.is_dir():
                place.write_text(str(code))

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


def _codes(folder: str) -> list[int]:
    """Return the exit codes of the ranks that did not end well, by rank."""
    return [int(text) for path in sorted(Path(folder).glob("*.code")) if (text := path.read_text())]
