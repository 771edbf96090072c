"""TensorBoard: the same scalars, the configuration as text, images, and the hyperparameters with their results."""

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

from ddpexp.loggers.append_file import AppendFile


class TensorBoard:
    """Write TensorBoard's event files; the x axis is the optimizer step.

    Every record is written immediately and atomically, so that a checkpoint can store which part of the file it covers.
    """

    def __init__(self, folder: Path, from_step: int = 0) -> None:
        """Open a new file in the folder; an open viewer discards what it has read of steps after `from_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        number = 0
        while (path := folder / f"events.out.tfevents.{int(now)}.{platform.node()}.{os.getpid()}.{number}").exists():
            number += 1
        self._file = AppendFile(path)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if from_step:
            self._write(Event(wall_time=now, step=from_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write one event with a point for each name."""
        self._add(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]), step)

    def text(self, name: str, text: str) -> None:
        """Write a text for the Text tab."""
        self._add(summary.text(name, text), 0)  # type: ignore[no-untyped-call]

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Write an image for the Images tab. Shapes: (height, width, 3) uint8."""
        self._add(summary.image(name, pixels.numpy(), dataformats="HWC"), step)  # type: ignore[no-untyped-call]

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

    def done(self) -> None:
        """Write that the session succeeded."""
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        self._add_session(SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))

    def flush(self) -> dict[Path, int]:
        """Return the file and its size. Units: bytes."""
        self._file.flush()
        return {self._file.path: self._file.num_bytes}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add_session(self, tag: str, data: Any) -> None:
        self._add(
            Summary(value=[Summary.Value(tag=tag, metadata=create_summary_metadata(data), tensor=NULL_TENSOR)]), 0
        )

    def _add(self, value: Any, step: int) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=value))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
