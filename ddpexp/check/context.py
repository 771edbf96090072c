"""What a worker of a short run knows before anything of it is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.config.parse import load
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.run.directory import RunDir
from ddpexp.train.build import RunContext
from ddpexp.train.join import join_world
from ddpexp.train.process import open_log


def short_context(request: Mapping[str, Any], control: Control) -> RunContext:
    """Join the other ranks of the short run that a request describes. Ranks: all; returns when all have joined."""
    experiment, layout = load(request["config"]), Layout(**request["layout"])
    control.status.set_phase("join")
    world = join_world(experiment, layout, control)
    return RunContext(
        run=RunDir(Path(request["run"])),
        config="",
        experiment=experiment,
        layout=layout,
        prepared=request["data"],
        init_from=request["init_from"],
        world=world,
        control=control,
        log=open_log(world, control, None),
    )
