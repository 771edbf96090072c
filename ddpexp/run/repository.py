"""The git repository of a run's code: its commit, and a patch with the uncommitted code.

The repository is not trusted, and its settings may name programs: none of them is executed.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpexp.system.programs import located
from ddpexp.system.secrets import masked
from ddpexp.system.text import one_line

DIFF_BYTES = 1 << 20
"""Maximum size of a patch."""

_SECONDS = 4.0  # for all calls of git together
# Bytes read beyond the end of a truncated patch: longer than any secret, which must be complete to be masked.
_MARGIN_BYTES = 1 << 16
_PATHS = 1000  # files compared
_FILTERS = r"^filter\..*\.(clean|process|required)$"
_SETTINGS = (
    "core.fsmonitor=false", f"core.hooksPath={os.devnull}",  # programs that git runs while it compares files
    "core.sshCommand=false", "protocol.allow=never",  # programs that fetch missing objects
    "core.bigFileThreshold=256k",  # larger files are data, and are not compared line by line
)  # fmt: skip
_DIFF = (
    "diff-index", "-p", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--no-relative", "--full-index",
    "--submodule=short", "--ignore-submodules=dirty", f"-O{os.devnull}", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """The code of one start."""

    git: Mapping[str, Any] | None  # the commit, and whether files differ from it; None if unknown
    diff: bytes  # a patch on top of the commit; empty if there are no changes
    is_cut: bool = False


def snapshot(folder: Path | None, files: Sequence[str]) -> Snapshot:
    """Return the state of the repository that contains `folder` (None: the current folder), with `files` of the recipe.

    The patch contains all changes of tracked files, and untracked ones of `files` as new files. Secrets of the
    environment are masked. What takes too long, or would run a program of the repository, is left out.
    """
    git = _Git(folder, time.monotonic() + _SECONDS)
    try:
        state = _state(git)
    except (OSError, ValueError, subprocess.SubprocessError):
        state = None
    parts, is_whole = _new_files(git, state, folder, files)
    if state is not None and state.commit is not None and state.compared:
        try:
            arguments = [*state.options, *_DIFF, state.commit, "--", *state.compared[:_PATHS]]
            text, is_all = git.at_top.first_bytes(*arguments)
            is_whole = is_whole and is_all
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            text = f"# {len(state.compared)} changed files could not be compared: {type(error).__name__}\n"
        parts.append(text)
        if len(state.compared) > _PATHS:
            parts.append(f"# {len(state.compared) - _PATHS} more changed files are left out\n")
    if state is not None and state.translated:
        parts.append(
            f"# not compared, for a program of the repository translates it: {one_line(', '.join(state.translated))}\n"
        )
    diff, is_cut = _cut(masked("".join(parts)), is_whole)
    return Snapshot(None if state is None else {"commit": state.commit, "dirty": state.dirty}, diff, is_cut)


@dataclass(frozen=True)
class _State:
    """The state of the work tree."""

    commit: str | None  # None: there is none yet
    dirty: bool | None
    compared: Sequence[str]  # the changed files
    translated: Sequence[str]  # those that need a filter, such as that of git-lfs
    options: Sequence[str]  # options that disable the filters


@dataclass(frozen=True)
class _Git:
    """Calls git, with a deadline for all calls together."""

    folder: Path | None
    deadline: float

    def output(self, *arguments: str) -> list[str]:
        """Return the null-separated fields of git's output; git cannot run other programs.

        Raises OSError, subprocess.SubprocessError.
        """
        command, environ = _command(*arguments)
        left = max(0.0, self.deadline - time.monotonic())
        done = subprocess.run(
            command, env=environ, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=left,
            text=True,
            errors="surrogateescape",
        )  # fmt: skip
        if done.returncode > ("config" in arguments):  # 1: there is no such setting
            raise subprocess.CalledProcessError(done.returncode, command)
        return [part for part in done.stdout.split("\0") if part]

    @cached_property
    def at_top(self) -> _Git:
        """Return a copy that runs git in the top folder of the repository, to which its paths are relative.

        Raises like `output`.
        """
        [top] = self.output("rev-parse", "--show-toplevel")
        return replace(self, folder=Path(top.rstrip("\n")))

    def first_bytes(self, *arguments: str) -> tuple[str, bool]:
        """Return the beginning of git's output, and whether it is complete. Raises like `output`."""
        command, environ = _command(*arguments)
        output_bytes = b""
        with subprocess.Popen(
            command,
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            try:
                while len(output_bytes) <= DIFF_BYTES + _MARGIN_BYTES:
                    ready, _, _ = select.select([process.stdout], [], [], max(0.0, self.deadline - time.monotonic()))
                    if not ready:
                        raise subprocess.TimeoutExpired(command, _SECONDS)
                    read = os.read(process.stdout.fileno(), 1 << 16)
                    if not read:
                        if process.wait(max(0.0, self.deadline - time.monotonic())):
                            raise subprocess.CalledProcessError(process.returncode, command)
                        return output_bytes.decode(errors="surrogateescape"), True
                    output_bytes += read
            finally:
                process.kill()
        return output_bytes.decode(errors="surrogateescape"), False


def _command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    environ = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
    return [located("git"), "--no-pager", "--literal-pathspecs", *settings, *arguments], environ


def _state(git: _Git) -> _State | None:
    """Return the commit and the changed files; None if a filter has a name that no option can disable.

    Raises: OSError, ValueError, subprocess.SubprocessError.
    """
    filters = {
        key.rpartition(".")[0] for key in git.output("config", "--null", "--name-only", "--get-regexp", _FILTERS)
    }
    if any("=" in name for name in filters):
        return None
    none = [f"{name}.{what}" for name in sorted(filters) for what in ("clean=", "process=", "required=false")]
    options = [part for setting in none for part in ("-c", setting)]
    flags = ("-z", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty", "--no-renames")
    status = git.output(*options, "status", *flags)
    changed = [line for line in status if not line.startswith("#")]
    commit = next((line.split()[-1] for line in status if line.startswith("# branch.oid")), None)
    # 1 XY sub mH mI mW hH hI path, and u XY sub m1 m2 m3 mW h1 h2 h3 path for unmerged files. See git-status(1).
    paths = [line.split(" ", 10 if line.startswith("u ") else 8)[-1] for line in changed]
    attributes = (
        git.at_top.output("check-attr", "-z", "filter", "--", *paths)[2::3] if filters and paths else [""] * len(paths)
    )
    translated = [path for path, name in zip(paths, attributes, strict=True) if f"filter.{name}" in filters]
    # 1 .M: an ordinary file, unchanged in the index, with other contents.
    unknown = changed and len(translated) == len(paths) and all(line.startswith("1 .M ") for line in changed)
    commit = commit if commit != "(initial)" else None
    compared = [path for path in paths if path not in translated]
    return _State(commit, None if unknown else bool(changed), compared, translated, options)


def _new_files(git: _Git, state: _State | None, folder: Path | None, files: Sequence[str]) -> tuple[list[str], bool]:
    """Return patches for those of `files` that are not tracked, and whether these are complete."""
    top, tracked = os.path.realpath(folder or os.curdir), set[str]()
    if state is not None and state.commit is not None and files:
        try:
            top = str(git.at_top.folder)
            inside = [path for path in map(os.path.realpath, files) if path.startswith(f"{top}{os.sep}")]
            tracked = (
                {os.path.join(top, name) for name in git.output("ls-files", "-z", "--full-name", "--", *inside)}
                if inside
                else set()
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
    parts: list[str] = []
    room = DIFF_BYTES + _MARGIN_BYTES
    for path in map(os.path.realpath, files):
        if path in tracked:
            continue
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="") as opened:
                text = opened.read(room)
        except OSError:
            continue
        parts.append(_new_file(one_line(os.path.relpath(path, top)), text))
        room -= len(text)
        if room <= 0:
            return parts, False
    return parts, True


def _new_file(name: str, text: str) -> str:
    """Return the patch that creates a file."""
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return head
    lines = text.split("\n")
    is_ended = lines[-1] == ""
    lines = lines[:-1] if is_ended else lines
    body = "".join(f"+{line}\n" for line in lines)
    end = "" if is_ended else "\\ No newline at end of file\n"
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}{end}"


def _cut(text: str, is_whole: bool) -> tuple[bytes, bool]:
    """Truncate a patch that is too long after a complete line, with a note."""
    raw = text.encode(errors="surrogateescape")
    if is_whole and len(raw) <= DIFF_BYTES:
        return raw, False
    end = raw.rfind(b"\n", 0, min(DIFF_BYTES, len(raw) if is_whole else max(0, len(raw) - _MARGIN_BYTES))) + 1
    return raw[:end] + f"# cut here: there are more than {DIFF_BYTES:,} bytes\n".encode(), True
