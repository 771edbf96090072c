"""The file system on which run directories are made, that of temporary files, and the paths of the data."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from ddpexp.doctor.gather import Facts
from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.doctor.setting import Setting
from ddpexp.errors import RefusedError
from ddpexp.run.prepare import check_paths
from ddpexp.settings.data import Data
from ddpexp.system.text import size_text

_TEST_BYTES = 4 << 20
_SLOW_SECONDS = 1.0  # of writing 4 MB through to the disk
_LITTLE_BYTES, _NO_BYTES = 5 << 30, 100 << 20  # free: a few checkpoints of a small model; not even one
_FEW_FILES, _NO_FILES = 10_000, 100
_LITTLE_TEMPORARY = 1 << 30
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "orangefs", "wekafs", "9p",
          "fuse.glusterfs", "fuse.juicefs", "virtiofs")  # fmt: skip
_LOST = {"tmpfs": "in memory: lost when the machine stops", "ramfs": "in memory: lost when the machine stops",
         "overlay": "a container's own layer: lost with the container"}  # fmt: skip
_ESCAPED = re.compile(r"\\([0-7]{3})")


def mount_of(path: str, mountinfo: str) -> tuple[str, str, str, str]:
    """Return mount point, kind, source and options of the file system that holds an absolute path.

    `mountinfo` is the text of /proc/self/mountinfo. Source: proc(5).
    """
    best = ("/", "unknown", "unknown", "")
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):  # a later mount hides an earlier one
            best = (point, rest[0], rest[1], ",".join([fields[5], *rest[2:3]]))
    return best


def nearest_folder(folder: str) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(place for place in (Path(folder), *Path(folder).parents) if place.is_dir())


def gather_files(folder: str) -> Facts:
    """Write, lock, rename and remove a file beside where a run directory would be made."""
    existing = nearest_folder(folder)
    point, kind, source, options = mount_of(os.path.realpath(existing), _mounts())
    status = os.statvfs(existing)
    facts: dict[str, object] = {
        "folder": folder,
        "exists": str(existing) == folder,
        "kind": kind,
        "mount": point,
        "source": source,
        "options": options,
        "free": status.f_bavail * status.f_frsize,
        "free_files": status.f_favail if status.f_files else None,
    }
    try:
        return {**facts, "refused": None, **_try_out(existing)}
    except OSError as error:
        return {**facts, "refused": error.strerror or str(error)}


def _try_out(folder: Path) -> dict[str, object]:
    scratch = Path(tempfile.mkdtemp(prefix=".ddpexp-doctor-", dir=folder))
    try:
        first, second = scratch / "first", scratch / "second"
        with first.open("wb") as file:
            began = time.monotonic()
            file.write(os.urandom(_TEST_BYTES))
            file.flush()
            os.fsync(file.fileno())
            seconds = time.monotonic() - began
        first.rename(second)
        renamed = second.is_file() and not first.exists()
        return {"fsync_seconds": round(seconds, 4), "renames": renamed, "locks": _locks(second)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _locks(path: Path) -> str:
    """Return whether a lock keeps a second one out: yes, no (it does not), or none (the file system has no locks)."""
    with path.open("rb+") as first, path.open("rb+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return "none"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return "yes" if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else "none"
        return "no"


def judge_files(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the file system of run directories."""
    folder, elsewhere = facts["folder"], "choose another place with run.dir=... ."
    text = f"{folder} on {facts['kind']}" + (f" ({facts['source']})" if facts["kind"] in SHARED else "")
    measured = f"{size_text(facts['free'])} free"
    if facts["refused"] is not None:
        return [bad("file_system", f"{text} cannot be written: {facts['refused']}", elsewhere, **facts)]
    measured += f", 4 MB on disk in {facts['fsync_seconds'] * 1000:.0f} ms"
    if not facts["renames"]:
        return [bad("file_system", f"{text} does not rename files", elsewhere, measured, **facts)]
    if facts["free"] < _NO_BYTES or (facts["free_files"] is not None and facts["free_files"] < _NO_FILES):
        files = "" if facts["free_files"] is None else f" and {facts['free_files']:,} files (inodes)"
        return [bad("file_system", f"{text} is full{files and ':'}{files} left", f"make room, or {elsewhere}", measured,
                    **facts)]  # fmt: skip
    findings = []
    if facts["locks"] != "yes":
        how = "has no locks" if facts["locks"] == "none" else "grants the same lock twice"
        advice = f"mount it with locks (NFS: without nolock), or {elsewhere} Two starts of a run may collide"
        findings.append(doubtful("file_system", f"{text} {how}", advice, measured, **facts))
    if facts["kind"] in _LOST:
        advice = "put outputs on a volume (docker run -v), or " + elsewhere
        findings.append(doubtful("file_system", f"{text}, {_LOST[facts['kind']]}", advice, measured, **facts))
    if facts["free"] < _LITTLE_BYTES:
        findings.append(doubtful("file_system", f"{text} has little room", f"make room, or {elsewhere}", measured,
                                 **facts))  # fmt: skip
    if facts["free_files"] is not None and facts["free_files"] < _FEW_FILES:
        few = f"{text} can hold {facts['free_files']:,} more files (inodes)"
        findings.append(doubtful("file_system", few, "remove files, or " + elsewhere, measured, **facts))
    if facts["fsync_seconds"] > _SLOW_SECONDS:
        advice = f"save less often (trainer.checkpoint_every), or {elsewhere} Each checkpoint waits for the disk"
        findings.append(doubtful("file_system", f"{text} is slow to write", advice, measured, **facts))
    return findings or [good("file_system", text, measured, **facts)]


def gather_temporary() -> Facts:
    """Return the folder of temporary files and its room."""
    try:
        folder = tempfile.gettempdir()
    except OSError:
        return {"folder": os.environ.get("TMPDIR", "/tmp"), "writable": False, "free": 0, "options": ""}
    status = os.statvfs(folder)
    options = mount_of(os.path.realpath(folder), _mounts())[3]
    return {"folder": folder, "writable": True, "free": status.f_bavail * status.f_frsize, "options": options}


def judge_temporary(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the folder of temporary files."""
    folder, measured = facts["folder"], f"{size_text(facts['free'])} free"
    if not facts["writable"]:
        return [bad("tmp", f"no folder for temporary files can be written ({folder})", "export TMPDIR=... to one that "
                    "can", **facts)]  # fmt: skip
    if facts["free"] < _LITTLE_TEMPORARY:
        advice = "make room, or export TMPDIR=...: the compiler of trainer.compile and some libraries write there"
        return [doubtful("tmp", f"{folder} has little room", advice, measured, **facts)]
    if "noexec" in facts["options"].split(","):
        advice = "export TMPDIR=... and TORCHINDUCTOR_CACHE_DIR=...: code that trainer.compile builds cannot be loaded"
        report = bad if setting.compiles else doubtful
        return [report("tmp", f"{folder} is mounted noexec", advice, measured, **facts)]
    return [good("tmp", folder, measured, **facts)]


def gather_data(data: Data | None) -> Facts:
    """Return which file or folder of data that is named does not exist."""
    try:
        if data is not None:
            check_paths(data)
    except RefusedError as error:
        return {"refused": error.as_dict()}
    return {}


def judge_data(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the paths of the data: a run would be refused; all else is found out by reading them."""
    if "refused" not in facts:
        return []
    said = facts["refused"]
    text = f"{said['key']}={said['value']} {said['reason']}"
    return [bad("data", text, "name what a run is to read, or put it there", **said)]


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
