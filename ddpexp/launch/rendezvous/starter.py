"""Detect that the launcher which started this command died before the command could record its parent.

A process whose parent ends is adopted by another one: init, a subreaper, or in a container any program. Such a parent
cannot be distinguished from the original, so the evidence is what launchers pass to their processes, in a state that is
impossible while they live. Without such evidence the command keeps running: a healthy run is never ended on a guess.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from ddpexp.system.process import ancestors

_ANSWER_SECONDS = 5.0  # no answer within this time is no evidence
_STEP_DAEMON = "slurmstepd"


def was_lost(starter: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, mpirun, or srun's slurmstepd on this host is known to be gone.

    Called before any worker starts.
    """
    if starter == "torchrun":
        return _agent_is_lost(environ)
    if starter == "mpirun":
        return _mpirun_is_lost(environ) or _proxy_is_lost(environ)
    return starter == "srun" and _step_daemon_is_lost(environ)


def control_port(pid: int) -> str | None:
    """Return the address of mpirun from the command line of MPICH's proxy; the same for all proxies of a job."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return command[command.index("--control-port") + 1]
    except (OSError, ValueError, IndexError):
        return None


def _agent_is_lost(environ: Mapping[str, str]) -> bool:
    """Return whether nothing listens at the port of the store, which an agent opens before any rank is started."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return _is_refused(environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))


def _mpirun_is_lost(environ: Mapping[str, str]) -> bool:
    """Return whether nothing listens at the port where Open MPI's mpirun, or its local daemon, serves its ranks."""
    texts = [text for name, text in environ.items() if name.startswith("PMIX_SERVER_URI")]
    endpoints = {match for text in texts for match in re.findall(r"tcp4://([\d.]+):(\d+)", text)}
    return bool(endpoints) and all(_is_refused(host, port) for host, port in endpoints)


def _proxy_is_lost(environ: Mapping[str, str]) -> bool:
    """Return whether the connection to MPICH's proxy is closed, and no proxy is an ancestor of this process.

    The second condition is for a script between the two that has run another MPI program before, which closed the
    connection properly.
    """
    try:
        number = int(environ["PMI_FD"])
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False  # a script between the two closed it
    except (KeyError, ValueError, OSError):
        return False
    poll = select.poll()
    poll.register(number, 0)
    closed = any(event & select.POLLHUP for _, event in poll.poll(0))
    return closed and not any(map(control_port, ancestors(os.getpid())))


def _step_daemon_is_lost(environ: Mapping[str, str]) -> bool:
    """Return whether the srun task that contains this process has another parent than slurmstepd."""
    lineage = [os.getpid(), *ancestors(os.getpid())]
    task = environ.get("SLURM_TASK_PID", "")
    parent = next((parent for pid, parent in itertools.pairwise(lineage) if str(pid) == task), None)
    if parent is None:
        return False  # it is in another container, or has ended
    try:
        return Path(f"/proc/{parent}/comm").read_text().rstrip("\n") != _STEP_DAEMON
    except OSError:
        return False


def _is_refused(host: str, port: str) -> bool:
    """Return whether all addresses of a host refuse connections to a port; no answer is not a refusal."""
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return bool(addresses) and all(_refuses(family, address) for family, _, _, _, address in addresses)


def _refuses(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWER_SECONDS)
        try:
            client.connect(address)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
