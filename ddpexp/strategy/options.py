"""The options of the strategies, free of torch, so that the command can check them before it starts workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Options:
    """Options of data parallelism; conf/strategy/ddp.yaml explains every field."""

    kind: Literal["ddp"]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: int | float
    broadcast_buffers: bool
    reduce_through: Literal["auto", "shared_memory", "backend"]
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"]
    powersgd_rank: int
    sync_batchnorm: bool
