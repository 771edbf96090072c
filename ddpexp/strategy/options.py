"""How the replicas of a model work together; the options are free of torch, so that a wrong one is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Options:
    """How the replicas work together; every field is explained in conf/strategy/ddp.yaml."""

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
