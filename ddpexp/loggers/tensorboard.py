"""TensorBoard: the same scalars, the configuration as text, images, histograms, and the hyperparameters."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams.metadata import (
    NULL_TENSOR,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    create_summary_metadata,
)
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import summary

from ddpexp.loggers.append_file import AppendFile, length_in, truncate_file
from ddpexp.loggers.base import Logger


class TensorBoard(Logger):
    """Write TensorBoard's event files to `tb` in the run directory; the x axis is the optimizer step.

    Each start of a run writes a file of its own. Every record is written immediately and atomically, so that a
    checkpoint can store which part of the file it covers.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open a new file."""
        self._folder = run_dir / "tb"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._earlier: dict[str, int] = {}  # the files of earlier starts, and their lengths in bytes
        stem = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}"
        number = 0
        while (path := self._folder / f"{stem}.{number}").exists():
            number += 1
        self._file = AppendFile(path)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write one event with a point for each name."""
        self._add(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]), step)

    def text(self, name: str, text: str) -> None:
        """Write a text for the Text tab."""
        self._add(summary.text(name, text), 0)  # type: ignore[no-untyped-call]

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Write an image for the Images tab. Shapes: (height, width, 3) uint8."""
        self._add(summary.image(name, pixels.numpy(), dataformats="HWC"), step)  # type: ignore[no-untyped-call]

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Write a histogram for the Histograms tab. Shapes: any."""
        content = summary.histogram(name, values.detach().float().cpu().numpy(), bins="auto")  # type: ignore[no-untyped-call]
        self._add(content, step)

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Write the hyperparameters for the HParams tab.

        Only the start of a session, without the description of an experiment that torch's own function writes into
        every run: the plugin uses the first description it finds for all runs, and hides the columns of the others.
        """
        session = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in values.items():
            if isinstance(value, bool):
                session.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                session.hparams[name].number_value = value
            else:
                session.hparams[name].string_value = value
        self._add_session(SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=session))

    def best(self, step: int, metric: str, value: float) -> None:
        """Write the value and the step as metrics for the HParams tab."""
        values = {f"best/{metric}": value, "best/step": step}
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=number) for tag, number in values.items()]), step)

    def done(self) -> None:
        """Write that the session succeeded."""
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        self._add_session(SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))

    def position(self) -> dict[str, int]:
        """Return the lengths of the files, those of earlier starts too. Units: bytes."""
        self._file.flush()
        return {**self._earlier, self._name(self._file.path): self._file.num_bytes}

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        """Remove the records of earlier starts after `step`; a viewer discards those that it has read."""
        for path in self._folder.glob("events.*"):
            name = self._name(path)
            if path == self._file.path:
                continue
            if name not in (position or {}):
                path.unlink()
            elif path.is_file():
                truncate_file(path, position, name)
                self._earlier[name] = min(length_in(position, name), path.stat().st_size)
        if step:
            self._write(Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _name(self, path: Path) -> str:
        return f"{self._folder.name}/{path.name}"

    def _add_session(self, tag: str, data: Any) -> None:
        self._add(
            Summary(value=[Summary.Value(tag=tag, metadata=create_summary_metadata(data), tensor=NULL_TENSOR)]), 0
        )

    def _add(self, value: Any, step: int) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=value))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
