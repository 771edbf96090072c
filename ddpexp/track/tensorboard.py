"""TensorBoard: the same scalars, the configuration as text, images, and the hyperparameters with their outcome."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams, scalar


class TensorBoard:
    """Write TensorBoard's files; the x axis is the optimizer step."""

    def __init__(self, folder: Path) -> None:
        """Open a file in the folder."""
        self._writer = SummaryWriter(str(folder), flush_secs=10)
        self._file: Any = self._writer.file_writer

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write one point for each name, all in one event."""
        summaries = [scalar(name, value, new_style=True) for name, value in values.items()]  # type: ignore[no-untyped-call]
        self._file.add_summary(Summary(value=[one for summary in summaries for one in summary.value]), step)

    def text(self, name: str, text: str) -> None:
        """Write a text for the Text tab."""
        self._writer.add_text(name, text)

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Write a picture for the Images tab. Shapes: (height, width, 3) uint8."""
        self._writer.add_image(name, pixels.numpy(), step, dataformats="HWC")

    def hyperparameters(self, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write for the HParams tab, into this run's own file (the writer's own method would make a run beside it)."""
        known = {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()}
        for summary in hparams(known, dict.fromkeys(metrics, 0.0)):  # type: ignore[no-untyped-call]
            self._file.add_summary(summary)

    def flush(self) -> None:
        """Bring everything to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
