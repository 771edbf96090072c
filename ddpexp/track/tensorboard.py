"""TensorBoard: the same scalars, the configuration as text, images, and the hyperparameters with their outcome."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import summary

from ddpexp.track.appending import Appending


class TensorBoard:
    """Write TensorBoard's files; the x axis is the optimizer step.

    Every record reaches the file at once and whole, so that a checkpoint can say how far the file belongs to it.
    """

    def __init__(self, folder: Path, from_step: int = 0) -> None:
        """Open a new file in the folder; a viewer that is open forgets what it has read of steps after `from_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        number = 0
        while (path := folder / f"events.out.tfevents.{int(now)}.{platform.node()}.{os.getpid()}.{number}").exists():
            number += 1
        self._file = Appending(path)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if from_step:
            self._write(Event(wall_time=now, step=from_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write one point for each name, all in one event."""
        made = [summary.scalar(name, value, new_style=True) for name, value in values.items()]  # type: ignore[no-untyped-call]
        self._add(Summary(value=[value for one in made for value in one.value]), step)

    def text(self, name: str, text: str) -> None:
        """Write a text for the Text tab."""
        self._add(summary.text(name, text), 0)  # type: ignore[no-untyped-call]

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Write a picture for the Images tab. Shapes: (height, width, 3) uint8."""
        self._add(summary.image(name, pixels.numpy(), dataformats="HWC"), step)  # type: ignore[no-untyped-call]

    def hyperparameters(self, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write for the HParams tab, into this run's own file (the writer's own method would make a run beside it)."""
        known = {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()}
        for one in summary.hparams(known, dict.fromkeys(metrics, 0.0)):  # type: ignore[no-untyped-call]
            self._add(one, 0)

    def flush(self) -> dict[Path, int]:
        """Tell how long the file is."""
        self._file.flush()
        return {self._file.path: self._file.num_bytes}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, what: Any, step: int) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=what))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
