"""Run directories for reports: with times and pictures, and with texts that a page could take for code."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from ddpexp.train.step_times import RECORDED_PHASES
from tests.sweep.made import Made

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028$title`\"'&amp;"
"""Ends a script, opens another one and a comment, and asks for a file."""


def png(value: int = 0) -> bytes:
    """Return a picture of 8 by 8 pixels of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_events(folder: Path, pictures: Iterable[tuple[str, int, bytes]]) -> Path:
    """Write an event file as TensorBoard's writer does, with other checksums, which nobody reads."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    folder.mkdir(exist_ok=True)
    records = [Event(file_version="brain.Event:2")]
    for name, step, content in pictures:
        image = Summary.Image(height=8, width=8, encoded_image_string=content)
        records.append(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)])))
    path = folder / "events.out.tfevents.1.host.1.0"
    raw = [record.SerializeToString() for record in records]
    path.write_bytes(b"".join(struct.pack("<QI", len(one), 0) + one + struct.pack("<I", 0) for one in raw))
    return path


def record(
    step: int, metrics: Mapping[str, float] | None = None, evaluation: float = 0.0, slow_rank: int = -1
) -> dict[str, Any]:
    """Return a record of training: the phases take 1, 2, 3 ... milliseconds."""
    times = {f"times/{phase}": (number + 1) / 1000 for number, phase in enumerate(RECORDED_PHASES)}
    times |= {"times/evaluation": evaluation, "times/checkpoint": 0.0, "times/slow_rank": float(slow_rank)}
    return {"step": step, "epoch": step / 100, "time": 1.0, **(metrics or {}), **times, "times/slow_factor": 1.5}


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return path


def write_manifest(job: Path) -> None:
    """Write the little that a report needs to compare a run."""
    (job / "manifest.json").write_text(json.dumps({"format": 1, "started": "2026-11-21T12:00:00.0+0000"}))


def sweep(path: Path) -> Path:
    """Make a sweep of six jobs over a rate and seeds."""
    made = Made(path)
    for rate in ("0.1", "0.2", "0.4"):
        for seed in ("0", "1"):
            value = float(rate) + int(seed) / 100
            job = made.job(f"optimizer.lr={rate}", f"trainer.seed={seed}", points=[(10, 0.9), (20, value)])
            trained = [record(step, {"train/loss": 1 / step}) for step in range(1, 21)]
            evaluated = [{"step": step, "epoch": step / 100, "eval/loss": y} for step, y in ((10, 0.9), (20, value))]
            write_manifest(job)
            write_records(job / "metrics.jsonl", [*trained, *evaluated])
            write_events(job / "tb", [("samples", 10, png(1)), ("samples", 20, png(2))])
    return path


def hostile(path: Path) -> Path:
    """Make a sweep of a stranger, who has written a text that is code into every place."""
    made = Made(path, objective="eval/loss")
    for number in range(3):
        job = made.job(f"model.name={number}", points=[(10, 0.5 + number)], message=HOSTILE)
        (job / "overrides.yaml").write_text(json.dumps([f"model.name={number}{HOSTILE}", f"+{HOSTILE}=1"]))
        lines = [{"step": step, f"eval/{HOSTILE}": 1.0 / step, "eval/loss": number} for step in (1, 2, 3)]
        write_records(job / "metrics.jsonl", lines)
        (job / "config.yaml").write_text(
            json.dumps({"run": {}, "model": {"name": f"{number}{HOSTILE}", HOSTILE: number}})
        )
        manifest = {
            "format": 1,
            "started": "2026-11-21T12:00:00.0+0000",
            "command": [HOSTILE],
            "hosts": [f"{HOSTILE}{number}"],
            "git": {"commit": f"{number}{HOSTILE}"},
            "packages": {HOSTILE: f"{HOSTILE}{number}"},
            "python": HOSTILE,
            "data": {HOSTILE: HOSTILE},
        }
        (job / "manifest.json").write_text(json.dumps(manifest))
        failed = {"status": "failed", "step": 3, "metrics": {f"eval/{HOSTILE}": 1.0}, "verdict": {"phase": HOSTILE}}
        (job / "result.json").write_text(json.dumps(failed))
        (job / "error.json").write_text(json.dumps({"rank": 0, "kind": HOSTILE, "message": HOSTILE}))
        write_events(job / "tb", [(HOSTILE, 3, png(3))])
    return path
