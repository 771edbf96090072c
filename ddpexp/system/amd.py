"""Find AMD's GPUs for a ROCm build of torch, from the kernel's description of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpexp.system.gpus import VISIBLE as CUDA_VISIBLE
from ddpexp.system.gpus import Device

VISIBLE = "HIP_VISIBLE_DEVICES"
_FIRST = "ROCR_VISIBLE_DEVICES"
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class AmdGpu:
    """A GPU that this process may open."""

    uuid: str


def gpus(nodes: Path = _NODES, devices: Path = Path("/dev/dri")) -> list[AmdGpu]:
    """Return the GPUs whose device node opens.

    Source: the kernel's kfd_topology.c. Nodes with SIMDs are GPUs; `properties` of one that a control group denies
    cannot be read.
    """
    found = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            properties = dict(re.findall(r"^(\w+) (\d+)$", (node / "properties").read_text(), re.MULTILINE))
        except OSError:
            continue
        render = devices / f"renderD{properties.get('drm_render_minor')}"
        if properties.get("simd_count", "0") != "0" and os.access(render, os.R_OK | os.W_OK):
            found.append(AmdGpu(f"GPU-{int(properties.get('unique_id', 0)):016x}"))
    return found


def visible(present: Sequence[AmdGpu], environ: Mapping[str, str]) -> list[Device]:
    """Return the GPUs that ROCR_VISIBLE_DEVICES leaves, and of these HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES.

    Source: ROCm's documentation, GPU isolation techniques.
    """
    left = _chosen(list(present), environ.get(_FIRST))
    numbered = [(gpu, str(number)) for number, gpu in enumerate(left)]
    kept = _chosen(left, environ.get(VISIBLE, environ.get(CUDA_VISIBLE)))
    return [Device(gpu.uuid, gpu.uuid, entry) for gpu in kept for other, entry in numbered if other is gpu]


def _chosen(present: list[AmdGpu], variable: str | None) -> list[AmdGpu]:
    if variable is None:
        return present
    chosen: list[AmdGpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        named = [gpu for number, gpu in enumerate(present) if entry in (str(number), gpu.uuid)]
        if len(named) != 1:
            break
        chosen += named
    return chosen
