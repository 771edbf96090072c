"""Converting a file of torch.save to safetensors, in a process of its own; free of torch."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

from ddpexp.errors import RefusedError, subject
from ddpexp.system.programs import python
from ddpexp.system.text import sanitize


def convert(source: Path, target: Path, description: str, averaged: bool) -> str | None:
    """Write the tensors of a file of torch.save to a safetensors file; return which part of the file they were.

    Raises:
        RefusedError: it holds something else than tensors, is damaged, or takes more than it should.
    """
    check_archive(source, description)
    reading, writing = os.pipe()
    arguments = os.getpid(), writing, str(source.resolve()), str(target), averaged
    process = subprocess.Popen(
        python("ddpexp.checkpoint.pickled:convert_and_answer", *arguments), pass_fds=[writing],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    errors = (process.communicate()[1] or b"").decode(errors="replace").strip()
    if process.returncode or not text:
        reason = sanitize(errors.rpartition("\n")[2], 200) or f"its reader ended with {process.returncode}"
        raise RefusedError(f"cannot be read ({reason})", **subject(description, source.name))
    answer = json.loads(text)
    if "refused" in answer:
        refused = answer["refused"]
        suggestion = refused["suggestion"]
        raise RefusedError(refused["reason"], suggestion=suggestion, **subject(description, source.name))
    part: str | None = answer["part"]
    return part


def to_safetensors(source: str, target: str) -> None:
    """Convert a file in a command of its own, which errors that name such a file tell the user to type.

    Raises:
        SystemExit: it cannot be converted, or the other file exists.
    """
    if os.path.lexists(target):
        raise SystemExit(f"ddpexp: {target} exists already.")
    try:
        part = convert(Path(source), Path(target).absolute(), source, averaged=False)
    except (RefusedError, OSError) as error:
        raise SystemExit(f"ddpexp: {error}") from None
    print(f"{target} has the tensors of {source}" + (f", its part {part}." if part else "."))


def check_archive(path: Path, description: str) -> None:
    """Check that a zip archive is one as torch.save writes it, with nothing compressed: it cannot grow when read.

    Raises:
        RefusedError: it is not.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise RefusedError(f"is damaged ({error})", **subject(description, path.name)) from None
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size for entry in entries):
        reason = "is a compressed archive, which torch.save does not write"
        raise RefusedError(reason, **subject(description, path.name))
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise RefusedError("declares more bytes than it has", **subject(description, path.name))
