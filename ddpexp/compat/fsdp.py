"""FSDP's interfaces for collectives other than the backend's. Importing this raises RefusedError without them.

Private: `torch.distributed.fsdp._fully_shard._fsdp_api`; torch 2.10 to 2.13.
Why: `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` are public, the classes that they take are not.
When it goes: look where torch has moved them to: the annotations of these two methods name them.
"""

from __future__ import annotations

import torch

from ddpexp.errors import RefusedError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:
    raise RefusedError(
        "sums the gradients of CPU workers, and with trainer.reduction=exact all gradients, in an order of its own, "
        f"and torch {torch.__version__} does not let it: torch.distributed.fsdp has no interface ReduceScatter where "
        "torch 2.10 to 2.13 have it",
        key="strategy",
        value="fsdp",
        suggestion="Install one of these, or use strategy=ddp strategy.shard_optimizer=true.",
    ) from None

__all__ = ["AllGather", "ReduceScatter"]
