"""Build the Dockerfile and run containers of it without Docker: overlays, namespaces and a chroot, as root.

The base image is a Debian that debootstrap makes, with Debian's own Python in place of the one of python:3.12-slim.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ddpexp.system.process import children
from tests.conftest import ROOT
from tests.containers.dockerfile import Stage, argument, context, expand, stages

_PACKAGES = "ca-certificates,python3,python3-venv"
_BUILD_SECONDS = 1200
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def debian(folder: Path) -> Path:
    """Make the base image: Debian 12, and `python` as the images of Python have it."""
    root = folder / "base"
    if root.exists():
        return root
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    return root


@dataclass
class Image:
    """The layers of an image, the lowest first, and what a container starts with."""

    layers: list[Path]
    environ: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        """Return where an absolute path lies that a layer holds."""
        return next(found for layer in self.layers[::-1] if (found := layer / inside.lstrip("/")).exists())


def build(base: Path, folder: Path, arguments: Mapping[str, str]) -> Image:
    """Build the last stage of the Dockerfile; stages whose folders exist are not built again."""
    found, outer = stages((ROOT / "Dockerfile").read_text(), arguments)
    images: dict[str, Image] = {}
    for number, stage in enumerate(found):
        image = _build_stage(stage, Image([base, folder / str(number)]), images, {**outer, **arguments})
        images[stage.name or str(number)] = image
    return image


def _build_stage(stage: Stage, image: Image, others: Mapping[str, Image], arguments: Mapping[str, str]) -> Image:
    upper = image.layers[-1]
    is_kept = upper.exists()
    upper.mkdir(parents=True, exist_ok=True)
    values: dict[str, str] = {}
    for one in stage.instructions:
        if one.name == "ARG":
            values |= argument(one, arguments)
        elif one.name == "ENV":
            image.environ |= one.pairs()
        elif one.name == "WORKDIR":
            image.folder = one.rest
            (upper / one.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif one.name == "USER":
            image.user = one.rest
        elif one.name in ("COPY", "RUN") and is_kept:
            pass
        elif one.name == "COPY":
            _copy(one.rest, image, others)
        elif one.name == "RUN":
            _run(one.rest, image, {name: expand(value, values) for name, value in values.items()})
        elif one.name == "ENTRYPOINT":
            image.entrypoint = one.exec_form() or []
        elif one.name == "CMD":
            image.command = one.exec_form() or []
        else:
            assert one.name == "STOPSIGNAL", one
    return image


def _copy(words: str, image: Image, others: Mapping[str, Image]) -> None:
    """Copy files of the build context, or of another stage."""
    *sources, target = words.split()
    folder = image.layers[-1] / os.path.join(image.folder, target).lstrip("/")
    if sources[0].startswith("--from="):
        made = others[sources[0].removeprefix("--from=")].path(sources[1])
        subprocess.run(["cp", "-aT", str(made), str(folder)], check=True)
        return
    for name in sources:
        for path in context():
            if path.parts[0] == name and len(path.parts) > 1:
                inside = path.relative_to(name)
            elif len(path.parts) == 1 and path.match(name):
                inside = path
            else:
                continue
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / inside)


def _run(script: str, image: Image, arguments: Mapping[str, str]) -> None:
    """Run a command of the build as root, with this machine's network and settings of pip."""
    settings = pip_settings()
    bound = {path: path for path in settings_paths(settings)} | {Path("/etc/resolv.conf"): Path("/etc/resolv.conf")}
    container = Container(
        image, ["/bin/sh", "-c", script], work=image.layers[-1].with_name("run"), init=False, network="host",
        user="0:0", upper=image.layers[-1], volumes={str(inside): path for inside, path in bound.items()},
        environ={**settings, **arguments}, confined=False,
    )  # fmt: skip
    code, text = container.wait(_BUILD_SECONDS)
    assert code == 0, text[-5000:]


def pip_settings() -> dict[str, str]:
    """Return the settings of pip on this machine as environment variables."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE)
    found = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout.decode(), re.MULTILINE))
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found.items()}


def settings_paths(settings: Mapping[str, str]) -> set[Path]:
    """Return the files and folders that settings of pip name; an index may have its files in a folder beside it."""
    words = [word for value in settings.values() for word in value.split()]
    named = {Path(word) for word in words if word.startswith("/")}
    named |= {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:///")}
    return {path for path in named if path.exists()}


_SETUP = """
set -e
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$UPPER,workdir=$WORK" "$TOP"
mount -t proc proc "$TOP/proc"
mount -t sysfs -o ro sysfs "$TOP/sys" 2>/dev/null || mount --rbind /sys "$TOP/sys"
mount -t tmpfs -o mode=755 tmpfs "$TOP/dev"
for name in null zero full random urandom tty; do : >"$TOP/dev/$name"; mount --bind "/dev/$name" "$TOP/dev/$name"; done
ln -s /proc/self/fd "$TOP/dev/fd"
ln -s /proc/self/fd/0 "$TOP/dev/stdin"
ln -s /proc/self/fd/1 "$TOP/dev/stdout"
ln -s /proc/self/fd/2 "$TOP/dev/stderr"
mkdir "$TOP/dev/shm"
mount -t tmpfs -o "size=$SHM,mode=1777,nosuid,nodev,noexec" shm "$TOP/dev/shm"
: >"$TOP/.dockerenv"
"""
_CONFINE = """
hostname "$NAME"
echo "127.0.0.1 localhost" >"$TOP/etc/hosts"
echo "$ADDRESS $NAME" >>"$TOP/etc/hosts"
mount --bind "$TOP/proc/sys" "$TOP/proc/sys"
mount -o remount,bind,ro "$TOP/proc/sys"
for name in kcore keys timer_list sysrq-trigger; do
  if [ -e "$TOP/proc/$name" ]; then mount --bind /dev/null "$TOP/proc/$name"; fi
done
"""


class Container:
    """A container as `docker run` makes it: namespaces of its own, capabilities dropped, PID 1 is its first program."""

    started: ClassVar[list[Container]] = []

    def __init__(
        self,
        image: Image,
        command: Sequence[str],
        work: Path,
        *,
        volumes: Mapping[str, Path] | None = None,
        environ: Mapping[str, str] | None = None,
        user: str | None = None,
        name: str = "c0ffee",
        network: str = "none",
        address: str = "127.0.1.1",
        shm: str = "64m",
        init: bool = True,
        read_only: bool = False,
        upper: Path | None = None,
        confined: bool = True,
    ) -> None:
        """Start it. `network` is none, host, or the name of a network namespace; `volumes` are by their path inside."""
        top, upper, self._work = work / "top", upper or work / "upper", work
        for path in (top, upper, work / "overlay"):
            path.mkdir(parents=True, exist_ok=True)
        mounts = ""
        for inside, outside in (volumes or {}).items():
            target = shlex.quote(str(top / inside.lstrip("/")))
            make = f"mkdir -p {target}" if outside.is_dir() else f"mkdir -p $(dirname {target}); : >>{target}"
            mounts += f"{make}\nmount --bind {shlex.quote(str(outside.resolve()))} {target}\n"
        if read_only:
            mounts += 'mount -o remount,ro "$TOP"\n'
        uid, gid = (user or image.user).split(":")
        drop = f"setpriv --reuid {uid} --regid {gid} --clear-groups"
        drop += " --no-new-privs --bounding-set -all --inh-caps -all" if confined else ""
        inner = {"PATH": _PATH, **image.environ, **(environ or {})}
        assignments = shlex.join(f"{key}={value}" for key, value in inner.items())
        program = shlex.join([*(image.entrypoint if init else []), *command])
        run = f'exec chroot "$TOP" {drop} env -i -C {image.folder} {assignments} {program}\n'
        (work / "start.sh").write_text(_SETUP + (_CONFINE if confined else "") + mounts + run)
        namespaces = ["--mount", "--pid", "--fork", "--kill-child=SIGKILL"]
        namespaces += ["--ipc", "--uts"] if confined else []
        loopback = []
        if network == "none":
            namespaces.append("--net")
            loopback = ["sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"]
        entered = ["ip", "netns", "exec", network] if network not in ("none", "host") else []
        settings = {
            "TOP": str(top), "UPPER": str(upper), "WORK": str(work / "overlay"), "SHM": shm, "NAME": name,
            "ADDRESS": address, "LOWER": ":".join(str(one) for one in image.layers[::-1] if one != upper),
        }  # fmt: skip
        with (work / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*entered, "unshare", *namespaces, *loopback, "sh", str(work / "start.sh")],
                env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(self)

    def output(self) -> str:
        """Return what it has printed so far."""
        return (self._work / "output").read_text(errors="replace")

    def pids(self) -> list[int]:
        """Return the process IDs of its processes on this machine, of PID 1 first."""
        found = children(self._process.pid)
        for pid in found:
            found += children(pid)
        return found

    def wait_for(self, pattern: str, path: Path | None = None, seconds: float = 60) -> None:
        """Wait until its output, or a file, matches."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                if re.search(pattern, path.read_text() if path is not None else self.output(), re.MULTILINE):
                    return
            assert self._process.poll() is None, f"ended with {self._process.returncode}: {self.output()[-5000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {seconds} s: {self.output()[-5000:]}"
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send a signal to PID 1, as `docker stop` does."""
        os.kill(children(self._process.pid)[0], number)

    def wait(self, seconds: float) -> tuple[int, str]:
        """Wait for its end; return the exit code of PID 1 and everything printed."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {seconds} s: {self.output()[-5000:]}") from None
        return code, self.output()

    def kill(self) -> None:
        """End it and everything in it."""
        with suppress(ProcessLookupError, IndexError):
            self.send(signal.SIGKILL)
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
