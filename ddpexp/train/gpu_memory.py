"""Answer an error for lack of GPU memory with who holds it and what to change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ddpexp.data.batch_plan import BatchPlan
from ddpexp.launch.workers.page import Phase
from ddpexp.system.text import binary_size_text, counted

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_SETTING = re.compile(r"PYTORCH_(?:CUDA_)?ALLOC_CONF")
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Errors of CUDA and its libraries, which allocate without torch.
_OF_LIBRARIES = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Usage:
    """What the message of a `torch.OutOfMemoryError` says. Units: bytes; None: it does not say so."""

    gpu: str | None
    wanted: int | None
    total: int | None
    free: int | None
    ours: int | None  # held by this process, also outside of torch
    allocated: int | None  # in tensors
    unallocated: int | None  # reserved by torch, and not in use
    others: Mapping[str, int]  # held by other processes, by process id; empty where this one cannot be distinguished
    setting: str  # the variable with the allocator's settings, as this torch calls it


@dataclass(frozen=True)
class Situation:
    """What a rank did when the memory ran out."""

    plan: BatchPlan
    precision: str
    phase: Phase
    on_device: bool  # the data are in the GPU's memory


def parse_usage(message: str) -> Usage:
    """Return the numbers of torch's message. Source: c10/cuda/CUDACachingAllocator.cpp, torch 2.10 to 2.15."""
    ours = _size(message, rf"this process has {_SIZE} memory in use")
    gpu = re.search(r"GPU (\d+) has a total capacity", message)
    setting = _SETTING.search(message)
    return Usage(
        gpu=gpu[1] if gpu else None,
        wanted=_size(message, rf"Tried to allocate {_SIZE}"),
        total=_size(message, rf"total capacity of {_SIZE}"),
        free=_size(message, rf"of which {_SIZE} is free"),
        ours=ours,
        allocated=_size(message, rf"Of the allocated memory {_SIZE} is allocated"),
        unallocated=_size(message, rf"and {_SIZE} is reserved by PyTorch but unallocated"),
        # In a container process ids may be the host's, and one of the others may be this process.
        others={} if ours is None else {match[1]: _bytes(match[2], match[3]) for match in _OTHER.finditer(message)},
        setting=setting[0] if setting else "PYTORCH_CUDA_ALLOC_CONF",
    )


def _size(message: str, pattern: str) -> int | None:
    match = re.search(pattern, message)
    return _bytes(match[1], match[2]) if match else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def explain(message: str, stats: Mapping[str, int], now: Situation, environ: Mapping[str, str]) -> str:
    """Return who holds the memory of the GPU, and what to change.

    `stats` are those of `torch.cuda.memory_stats`, for what the message does not say.
    """
    usage = parse_usage(message)
    return f"{_describe(usage, stats)} {_advice(usage, now, environ)}"


def _describe(usage: Usage, stats: Mapping[str, int]) -> str:
    allocated = stats.get("allocated_bytes.all.current") if usage.allocated is None else usage.allocated
    reserved = stats.get("reserved_bytes.all.current")
    unallocated = usage.unallocated
    if unallocated is None and allocated is not None and reserved is not None:
        unallocated = max(0, reserved - allocated)
    gpu = f"GPU {usage.gpu}" if usage.gpu is not None else "the GPU"
    parts = []
    held = usage.ours if usage.ours is not None else reserved
    if held is not None:
        detail = [f"{binary_size_text(allocated)} in tensors"] if allocated is not None else []
        detail += (
            [f"{binary_size_text(unallocated)} reserved by torch and not in use"] if unallocated is not None else []
        )
        details = f" ({', '.join(detail)})" if detail else ""
        parts.append(f"this process holds {binary_size_text(held)}{details}")
    if usage.others:
        processes = ", ".join(usage.others)
        parts.append(f"other processes hold {binary_size_text(sum(usage.others.values()))} (process {processes})")
    if usage.free is not None:
        parts.append(f"{binary_size_text(usage.free)} are free")
    size = f" of {binary_size_text(usage.total)}" if usage.total is not None else ""
    wanted = f" for {binary_size_text(usage.wanted)} more" if usage.wanted is not None else ""
    return f"{gpu}{size} has no memory{wanted}: {', '.join(parts)}." if parts else f"{gpu} has no memory{wanted}."


def _advice(usage: Usage, now: Situation, environ: Mapping[str, str]) -> str:
    cures = []
    wanted = usage.wanted or 0
    if sum(usage.others.values()) > wanted:
        cures.append("end the other processes, or choose another GPU with CUDA_VISIBLE_DEVICES")
    settings = ",".join(environ[name] for name in _SETTINGS if name in environ)
    if wanted and (usage.unallocated or 0) >= wanted and "expandable_segments:True" not in settings:
        value = ",".join(filter(None, [settings, "expandable_segments:True"]))
        cures.append(f"set {usage.setting}={value}, since what torch has reserved would do in one piece")
    if now.phase != "build":
        cures += smaller_batch(now)
    if now.on_device:
        cures.append("keep the data in the memory of the host (data.on_device=false)")
    if now.precision == "fp32":
        cures.append("use trainer.precision=bf16")
    if now.phase not in ("build", "evaluate"):
        cures.append("recompute activations in the model (torch.utils.checkpoint)")
    if not cures:
        return "Use a smaller model, or a GPU with more memory."
    return f"What helps: {'; '.join(cures)}."


def smaller_batch(now: Situation) -> list[str]:
    """Return the advice to use a smaller micro-batch, if there is one."""
    plan = now.plan
    smaller = next((size for size in range(plan.micro_batch_size // 2, 0, -1) if plan.micro_batch_size % size == 0), 0)
    if not smaller:
        return []
    if now.phase == "evaluate":
        return [
            f"evaluate in batches of {smaller} with trainer.micro_batch_size={smaller} (it is {plan.micro_batch_size})"
        ]
    steps = plan.gradient_accumulation_steps * plan.micro_batch_size // smaller
    return [
        f"use trainer.micro_batch_size={smaller} (it is {plan.micro_batch_size}): trainer.global_batch_size="
        f"{plan.global_batch_size} stays, with {counted(steps, 'accumulation step')}"
    ]


@contextmanager
def explained(situation: Callable[[], Situation]) -> Iterator[None]:
    """Put the explanation in the place of the message, where the body runs out of GPU memory.

    Its class, traceback and causes stay.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in message for text in _OF_LIBRARIES):
            raise
        stats = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
        error.args = (explain(message, stats, situation(), os.environ),)
        raise
