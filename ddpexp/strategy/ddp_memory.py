"""Estimates for data parallelism: DDP's buckets, and what carries the gradients. Pure, and free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.memory import Bucket, Facts, Parameter, Part, Traffic
from ddpexp.system.limits import human

if TYPE_CHECKING:
    from ddpexp.strategy.ddp_options import DDPOptions

_MIB = 1 << 20
_GATHERED = 128 << 10  # ddpexp.strategy.comm.reduce.GATHERED_BYTES, which a test holds this to


def buckets(parameters: Iterable[Parameter], options: DDPOptions, rebuilt: bool = True) -> list[Bucket]:
    """Cut the trained parameters into DDP's buckets, those first whose gradients are ready first.

    A bucket closes as soon as it holds `strategy.bucket_cap_mb` or more, so a large parameter may overflow it; each
    kind of number has its own. `rebuilt` is DDP's layout from the second step on, in the order in which gradients
    become ready, for which the reverse of the models' order stands in; without it the buckets are cut in the models'
    order.
    Source: torch, csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size and Reducer::rebuild_buckets.
    """
    cap = int(options.bucket_cap_mb * _MIB)
    models: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.trained:
            models.setdefault(parameter.model, []).append(parameter)
    all_buckets = []
    for name, members in models.items():
        cut = _cut(name, members[::-1] if rebuilt else members, cap)
        all_buckets += cut if rebuilt else cut[::-1]
    return all_buckets


def _cut(model: str, members: Sequence[Parameter], cap: int) -> list[Bucket]:
    full: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    for parameter in members:
        dtype = parameter.dtype
        last = filling.get(dtype, Bucket(model, dtype, 0, 0))
        filling[dtype] = Bucket(model, dtype, last.num_bytes + parameter.num_bytes, last.num_parameters + 1)
        if filling[dtype].num_bytes >= cap:
            full.append(filling.pop(dtype))
    return [*full, *filling.values()]


def fixes_buckets(options: DDPOptions, world_size: int, device: str) -> bool:
    """Return whether DDP must have the same buckets in every step: the backend orders a sum by their layout.

    On CPUs gradients are summed in the order of the ranks, whatever the layout, unless a hook compresses them; a sum of
    two is the same in either order. DDP itself keeps its first buckets where it searches for unused parameters.
    """
    orders = options.comm_hook != "none" or device != "cpu"
    return world_size > 2 and orders and not options.find_unused_parameters


def transport(
    trainer: Trainer, options: DDPOptions, layout: Layout
) -> Literal["none", "shared_memory", "in_rank_order", "backend"]:
    """Return what carries the gradients: see `ddpexp.strategy.comm.reduce`, and `exchange` for the exact reduction."""
    if layout.world_size == 1:
        return "none"
    if layout.device == "cuda" or (options.comm_hook != "none" and trainer.reduction == "fast"):
        return "backend"
    if layout.nodes == 1 and options.reduce_through != "backend":
        return "shared_memory"
    return "backend" if layout.world_size == 2 and trainer.reduction == "fast" else "in_rank_order"


def exchange_bytes(sizes: Iterable[int], world_size: int) -> int:
    """Return what a rank holds while gradients are summed in the order of the ranks through the backend.

    A small bucket is gathered from all ranks; of a large one this rank sends all chunks and receives its own from all.
    """
    return sum(
        world_size * size if (world_size - 2) * size < _GATHERED else 2 * -(-size // world_size) * world_size
        for size in sizes
    )


def replica_parts(
    options: DDPOptions, common: list[Part], facts: Facts, trainer: Trainer, layout: Layout
) -> list[Part]:
    """Return what a rank holds of the model, its gradients and its optimizers."""
    by_ddp = layout.world_size > 1 and trainer.reduction == "fast"
    parameters, gradients, optimizer = common
    trained = gradients.num_bytes
    if by_ddp and options.gradient_as_bucket_view:
        gradients = Part("gradients", trained, "views of the buckets")
    parts = [parameters, gradients]
    if by_ddp and not options.gradient_as_bucket_view:
        parts.append(Part("buckets", trained, "beside the gradients: strategy.gradient_as_bucket_view=false"))
    if options.shard_optimizer and layout.world_size > 1 and optimizer.num_bytes is not None:
        share = -(-optimizer.num_bytes // layout.world_size)
        optimizer = Part(
            optimizer.name, share, f"a share of {human(optimizer.num_bytes)}: strategy.shard_optimizer=true"
        )
    parts.append(optimizer)
    if trainer.reduction == "exact":
        parts.append(Part("sums of micro-batches", facts.sums_bytes, "trainer.reduction=exact"))
    way, local = transport(trainer, options, layout), layout.world_size // layout.nodes
    if way == "shared_memory":
        note = f"{human(facts.shared_bytes)} for {local} workers"
        parts.append(Part("shared memory", facts.shared_bytes // local, note))
    elif way == "in_rank_order":
        sizes = [bucket.num_bytes for bucket in _buckets(options, facts, trainer, layout)] or [facts.sums_bytes]
        note = "what the ranks send one another, in the order of the sum"
        parts.append(Part("exchange", exchange_bytes(sizes, layout.world_size), note))
    elif way == "backend" and options.comm_hook == "powersgd":
        note = "the error that it feeds back, and its factors beside that"
        parts.append(Part("PowerSGD's memory", trained, note))
    return parts


def gradient_traffic(options: DDPOptions, facts: Facts, trainer: Trainer, layout: Layout) -> Traffic:
    """Return what the ranks send one another in a step; compressed gradients as they travel."""
    way = transport(trainer, options, layout)
    if way == "none":
        return Traffic(way)
    cut = _buckets(options, facts, trainer, layout)
    sizes = [bucket.num_bytes for bucket in cut]
    if not cut:
        sizes = [sum(parameter.num_bytes for parameter in facts.parameters if parameter.trained)]
    if options.comm_hook in ("fp16", "bf16"):
        sizes = [size // 2 for size in sizes]
    unknown = "what PowerSGD's products cost is not known" if options.comm_hook == "powersgd" else ""
    return Traffic(way, sizes, cut, options.bucket_cap_mb, unknown)


def _buckets(options: DDPOptions, facts: Facts, trainer: Trainer, layout: Layout) -> list[Bucket]:
    """Return DDP's buckets; there are none alone, nor in the exact reduction."""
    if layout.world_size == 1 or trainer.reduction == "exact":
        return []
    searches = options.find_unused_parameters and not options.static_graph  # then DDP keeps its initial buckets
    return buckets(facts.parameters, options, not searches)
