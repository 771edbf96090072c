"""Whether what has started this command was gone before the command's first line.

When its parent was another process already.

A process whose parent ends is given to another one: init, a subreaper, or in a container any program. Nothing tells
such a parent from a true one, so what counts is what starters leave to the processes that they start, and what cannot
be so while they live. Where nothing of the kind is found the command runs on: a healthy run is never ended on a guess.
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

_ANSWER_SECONDS = 5.0  # longer means nothing
_KEEPER = "slurmstepd"


def was_lost(starter: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether torchrun, mpirun or srun's keeper on this host is known to be gone.

    Asked before any worker starts.
    """
    if starter == "torchrun":
        return _agent_is_lost(environ)
    if starter == "mpirun":
        return _mpirun_is_lost(environ) or _proxy_is_lost(environ)
    return starter == "srun" and _keeper_is_lost(environ)


def control_port(pid: int) -> str | None:
    """Read from MPICH's proxy, which starts its ranks, the address of its mpirun, which all proxies of a job share."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[words.index("--control-port") + 1]
    except (OSError, ValueError, IndexError):
        return None


def _agent_is_lost(environ: Mapping[str, str]) -> bool:
    """Tell whether nobody has the port of the store.

    That the first machine's agent opens before any agent starts a rank.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return _refused(environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))


def _mpirun_is_lost(environ: Mapping[str, str]) -> bool:
    """Tell whether nobody has the port where Open MPI's mpirun, or its daemon on this host, serves the ranks.

    That it starts.
    """
    texts = [text for name, text in environ.items() if name.startswith("PMIX_SERVER_URI")]
    found = {match for text in texts for match in re.findall(r"tcp4://([\d.]+):(\d+)", text)}
    return bool(found) and all(_refused(host, port) for host, port in found)


def _proxy_is_lost(environ: Mapping[str, str]) -> bool:
    """Tell whether the other end of a rank's connection to MPICH's proxy is closed, and no proxy is above this process.

    A script between the two may have run a program before that has used MPI and closed the connection properly.
    """
    try:
        number = int(environ["PMI_FD"])
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False  # a script between the two has closed it
    except (KeyError, ValueError, OSError):
        return False
    poll = select.poll()
    poll.register(number, 0)
    closed = any(event & select.POLLHUP for _, event in poll.poll(0))
    return closed and not any(map(control_port, ancestors(os.getpid())))


def _keeper_is_lost(environ: Mapping[str, str]) -> bool:
    """Tell whether the task of srun that this process is, or is below.

    Is the child of another program than Slurm's keeper.
    """
    line = [os.getpid(), *ancestors(os.getpid())]
    task = environ.get("SLURM_TASK_PID", "")
    above = next((over for pid, over in itertools.pairwise(line) if str(pid) == task), None)
    if above is None:
        return False  # it is in another container, or has ended
    try:
        return Path(f"/proc/{above}/comm").read_text().rstrip("\n") != _KEEPER
    except OSError:
        return False


def _refused(host: str, port: str) -> bool:
    """Tell whether a host refuses connections to a port at all of its addresses; no answer means nothing."""
    try:
        places = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return bool(places) and all(_refuses(family, address) for family, _, _, _, address in places)


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
