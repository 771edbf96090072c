"""Detect containers, and what in them differs from a host: names of users, PID namespaces, shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal

Runtime = Literal["", "docker", "kubernetes", "apptainer"]

# The first namespaces of a machine have fixed numbers. Source: the kernel's include/linux/proc_ns.h
HOST_PID_NAMESPACE = "4026531836"
_HOST_IPC_NAMESPACE = "4026531839"

_ENLARGE = {
    "": "as root, mount -o remount,size=1g /dev/shm",
    "docker": "docker run --shm-size=1g",
    "kubernetes": "mount an emptyDir volume with medium: Memory at /dev/shm in the pod",
    "apptainer": "apptainer run --bind /dev/shm",  # with --contain it has a small one of its own
}
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # Source: Python's getpass.getuser


def runtime(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, pids: str | None = None) -> Runtime:
    """Return the kind of container that this process runs in; empty outside. Podman and containerd count as docker.

    A virtual machine whose disk is made from an image has the files of a container, and the PID namespace of a host:
    `pids` is its number, here the one of this process.
    """
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ:
        return "apptainer"
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    if "KUBERNETES_SERVICE_HOST" in environ or "kubepods" in groups:
        return "kubernetes"
    marked = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    marked = marked and (pid_namespace() if pids is None else pids) != HOST_PID_NAMESPACE
    if marked or re.search(r"/(docker|libpod|lxc|cri-containerd)\b", groups):
        return "docker"
    return ""


def shared_memory_place(kind: Runtime) -> str:
    """Return whose /dev/shm it is, for messages."""
    return "container" if kind not in ("", "apptainer") else "host"


def enlarge_shared_memory(kind: Runtime) -> str:
    """Return what enlarges /dev/shm there."""
    return _ENLARGE[kind]


def pid_namespace() -> str:
    """Return the number of this process's PID namespace: process IDs of another one mean other processes."""
    return _namespace("pid")


def sees_owners_of_shared_memory(pids: str | None = None, ipc: str | None = None) -> bool:
    """Return whether process IDs in the names of files in /dev/shm can be looked up here.

    A container with `--ipc=host` has the host's /dev/shm, but process IDs of its own.
    """
    pids = pid_namespace() if pids is None else pids
    ipc = _namespace("ipc") if ipc is None else ipc
    return pids in ("", HOST_PID_NAMESPACE) or ipc != _HOST_IPC_NAMESPACE


def name_user(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give a user ID without an entry in /etc/passwd a name, such as that of `docker run --user 12345`.

    Libraries raise an error without one; torch's compiler puts it into the path of its cache.
    """
    if any(environ.get(name) for name in _NAMES):
        return
    import pwd  # late: a directory service may take a while to answer

    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["LOGNAME"] = f"uid{os.getuid()}"


def _namespace(kind: str) -> str:
    try:
        found = re.search(r"\d+", os.readlink(f"/proc/self/ns/{kind}"))
    except OSError:
        return ""
    return found[0] if found is not None else ""
