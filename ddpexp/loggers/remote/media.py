"""media.jsonl: texts, images and histograms, one JSON object per line, which remote loggers are fed from."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpexp.loggers.append_file import AppendFile, truncate_file
from ddpexp.loggers.base import Logger
from ddpexp.loggers.remote.base import Medium
from ddpexp.system.files import json_line

if TYPE_CHECKING:
    from torch import Tensor

NAME = "media.jsonl"
CONFIG = "config"  # the name of the text that holds the configuration
_BINS = 64  # of a histogram


class MediaFile(Logger):
    """Append texts, images and histograms; scalars are in metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        """The file is created with its first record."""
        self._path = run_dir / NAME
        self._file: AppendFile | None = None

    def text(self, name: str, text: str) -> None:
        """Write a text; remote loggers get the configuration in another way."""
        if name != CONFIG:
            self._write(0, "text", name, text=text)

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Write an image as PNG. Shapes: (height, width, 3) uint8."""
        from PIL import Image

        data = io.BytesIO()
        Image.fromarray(pixels.cpu().numpy()).save(data, "PNG")
        self._write(step, "image", name, png=base64.b64encode(data.getvalue()).decode())

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Write the distribution of the finite values. Shapes: any."""
        flat = values.detach().float().cpu().flatten()
        finite = flat[flat.isfinite()]
        if not len(finite):
            return
        counts, edges = finite.histogram(_BINS)
        self._write(step, "histogram", name, counts=list(map(int, counts.tolist())), edges=edges.tolist())

    def position(self) -> dict[str, int]:
        """Return the length of the file. Units: bytes."""
        if self._file is None:
            return {NAME: self._path.stat().st_size} if self._path.is_file() else {}
        self._file.flush()
        return {NAME: self._file.num_bytes}

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        """Cut the file back to its length at the checkpoint, and to whole lines."""
        truncate_file(self._path, position, NAME, lines=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, kind: str, name: str, **content: Any) -> None:
        if self._file is None:
            self._file = AppendFile(self._path)
        record = {"step": step, "time": time.time(), "kind": kind, "name": name, **content}
        self._file.write(json_line(record))


def medium_of(record: Mapping[str, Any]) -> Medium:
    """Return what a line of the file records. Raises KeyError, TypeError and ValueError for a line that is invalid."""
    return Medium(
        record["kind"], str(record["name"]), str(record.get("text", "")), base64.b64decode(record.get("png", "")),
        tuple(record.get("counts", ())), tuple(record.get("edges", ())),
    )  # fmt: skip
