"""Directories of sweeps as they are left, made by the test: hundreds of jobs, odd ones, broken ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ddpexp.run.lock import Owner
from ddpexp.sweep.folder import EventLog, SweepDir, job_name

POINTS = ((10, 0.9), (20, 0.7), (30, 0.5))
"""A curve."""


class Made:
    """Makes one sweep."""

    def __init__(self, path: Path, objective: str | None = "eval/loss", mode: str = "min") -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._count = 0
        self.add("sweep", words=["-m", "optimizer.lr=0.1,0.2"], slots=2, kind="cpu", objective=objective, mode=mode)

    def add(self, event: str, **facts: Any) -> None:
        record = EventLog(SweepDir(self.path))
        record.add(event, **facts)
        record.close()

    def job(
        self, *overrides: str, status: str | None = "done", points: Sequence[tuple[int, float]] = POINTS,
        name: str = "eval/loss",
        events: Sequence[str] = ("started", "ended"), seconds: float = 12.5, **result: Any,
    ) -> Path:  # fmt: skip
        """Make one job: its events, and with a status its run directory too; None leaves the run without a result."""
        number = self._count
        self._count += 1
        path = self.path / job_name(number, overrides)
        self.add("planned", job=number, name=path.name, overrides=list(overrides))
        if "started" in events:
            self.add("started", job=number, attempt=1, slots=[0], gpus=[])
            run(path, ["recipe=points", *overrides], status, points, name, seconds=seconds, **result)
        if "ended" in events:
            self.add("ended", job=number, status=status, exit_code=0, seconds=seconds,
                objective=points[-1][1] if points else None,
                     message=None)  # fmt: skip
        return path


def run(
    path: Path, overrides: Sequence[str] = (), status: str | None = "done", points: Sequence[tuple[int, float]] = POINTS,
    name: str = "eval/loss", **result: Any,
) -> Path:  # fmt: skip
    """Make a run directory as a run leaves it."""
    path.mkdir(parents=True)
    (path / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    config: dict[str, Any] = {"optimizer": {"lr": 0.5, "nesterov": True}, "trainer": {"seed": 0}, "run": {}}
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, field = key.partition(".")
        if field:
            config.setdefault(section, {})[field] = yaml.safe_load(value)
        else:
            config[section] = {"_target_": f"points.{value}"}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "manifest.json").write_text(json.dumps({"started": "2026-11-21T12:00:00+0000"}))
    lines = [{"step": step, "epoch": 1.0, "time": 0.0, name: value} for step, value in points]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if status is not None:
        last: Mapping[str, Any] = {name: points[-1][1]} if points else {}
        told = {"status": status, "step": points[-1][0] if points else 0, "metrics": last, **result}
        (path / "result.json").write_text(json.dumps(told))
    return path


def hold(path: Path, **changed: Any) -> None:
    """Write this test's process into a directory's lock, as the command that has it, or another one."""
    (path / "lock").write_text(json.dumps(replace(Owner.here(), **changed).as_record()))


def hold_dead(path: Path) -> None:
    """Write a process that is gone into a directory's lock."""
    hold(path, pid=os.getpid(), started="1")
