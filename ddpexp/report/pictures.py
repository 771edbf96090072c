"""The pictures of evaluations, from TensorBoard's event files of any run."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpexp.report.thinned import spaced
from ddpexp.system.files import JSON_BYTES, open_regular

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST = 4096  # pixels of a side: a few bytes can stand for a picture that fills the memory of a browser
_FILES = 50  # of a run: each start writes one
_OF_A_NAME = 12  # steps that are shown


@dataclass(frozen=True)
class Picture:
    """A picture that was logged."""

    name: str
    step: int
    png: bytes

    @property
    def address(self) -> str:
        """Return it as an address that contains it."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def read_pictures(folder: Path) -> dict[str, list[Picture]]:
    """Return the pictures of a run's event files by name, of each at most a dozen of its steps, the last among them."""
    found: dict[str, dict[int, Picture]] = {}
    try:
        names = sorted(name for name in os.listdir(folder) if ".tfevents." in name)[-_FILES:]
    except OSError:
        names = []
    for name in names:
        for picture in _pictures(folder / name):
            found.setdefault(picture.name, {})[picture.step] = picture
    return {name: spaced([of_name[step] for step in sorted(of_name)], _OF_A_NAME) for name, of_name in found.items()}


def within(runs: Sequence[dict[str, list[Picture]]], num_bytes: int) -> list[dict[str, list[Picture]]]:
    """Return what fits into so many bytes: the newest picture of each name first, then the oldest ones."""
    order = sorted(
        (0 if index == len(pictures) - 1 else index + 1, number, name, index)
        for number, run in enumerate(runs)
        for name, pictures in run.items()
        for index in range(len(pictures))
    )
    chosen: set[tuple[int, str, int]] = set()
    for _, number, name, index in order:
        size = len(runs[number][name][index].png)
        if size <= num_bytes:
            num_bytes -= size
            chosen.add((number, name, index))
    return [
        {name: kept for name, pictures in run.items()
         if (kept := [picture for index, picture in enumerate(pictures) if (number, name, index) in chosen])}
        for number, run in enumerate(runs)
    ]  # fmt: skip


def _pictures(path: Path) -> Iterator[Picture]:
    with suppress(OSError, ImportError), open_regular(path) as file:
        content = file.read(JSON_BYTES)
        if _PNG not in content:
            return
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event  # without numpy, which TensorBoard's reader of files needs

        for record in _records(content):
            if _PNG not in record:
                continue
            with suppress(DecodeError, ValueError):
                event = Event.FromString(record)
                for value in event.summary.value:
                    png = value.image.encoded_image_string
                    if _is_drawable(png) and event.step >= 0:
                        yield Picture(value.tag, event.step, png)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file: each behind its length and a checksum, and with a checksum behind it."""
    begin = 0
    while begin + 12 <= len(content):
        (size,) = struct.unpack_from("<Q", content, begin)
        yield content[begin + 12 : begin + 12 + size]
        begin += size + 16


def _is_drawable(png: bytes) -> bool:
    if not png.startswith(_PNG) or len(png) < 24:
        return False
    sides: tuple[int, int] = struct.unpack_from(">II", png, 16)
    return all(0 < side <= _LARGEST for side in sides)
