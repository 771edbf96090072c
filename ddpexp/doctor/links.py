"""The links between GPUs and between hosts, and what an all-reduce over them should reach."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpexp.doctor.gather import Facts
from ddpexp.doctor.report import Finding, doubtful, good
from ddpexp.doctor.setting import Setting

# Gigabytes a second and lane, in one direction. Source: the PCIe specifications, encoding included.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_NVLINK = 25.0  # gigabytes a second and link, in one direction, where nvidia-smi does not say: that of most GPUs
_ACROSS_SOCKETS = 0.5  # of PCIe's bandwidth: the connection between CPUs is shared
_MOST_SEARCHED = 10  # GPUs whose rings are searched; with more, all are taken to be connected alike
_LITTLE_LOCKED = 1 << 30
# Variables that turn a way of NCCL off, and the values that do.
_TURNED_OFF = {
    "NCCL_P2P_DISABLE": "peer access between GPUs",
    "NCCL_SHM_DISABLE": "shared memory between GPUs",
    "NCCL_IB_DISABLE": "InfiniBand",
    "NCCL_NVLS_ENABLE": "NVLink SHARP",
}


def parse_topology(text: str) -> list[list[str]]:
    """Return how each pair of GPUs is connected, from `nvidia-smi topo -m`: X, NV4, PIX, SYS and so on."""
    rows: dict[int, list[str]] = {}
    columns = 0
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        words = [word.strip() for word in line.split("\t")]
        if not columns:
            columns = sum(re.fullmatch(r"GPU\d+", word) is not None for word in words)
        elif (match := re.fullmatch(r"GPU(\d+)", words[0])) is not None:
            rows[int(match[1])] = [word for word in words[1:] if word][:columns]
    return [rows[number] for number in sorted(rows)] if all(len(row) == columns for row in rows.values()) else []


def parse_nvlink(text: str) -> float | None:
    """Return the speed of an NVLink from `nvidia-smi nvlink -s`; None without one. Units: gigabytes a second."""
    speeds = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", text)]
    return max(speeds, default=None)


def link_speed(kind: str, nvlink: float | None, pcie: float) -> float:
    """Return what a connection carries in one direction. Units: gigabytes a second."""
    if (match := re.fullmatch(r"NV(\d+)", kind)) is not None:
        return int(match[1]) * (nvlink or _NVLINK)
    return pcie * (_ACROSS_SOCKETS if kind in ("SYS", "NODE") else 1.0)


def pcie_speed(gpus: Sequence[Mapping[str, Any]]) -> float:
    """Return what the slowest of some GPUs' PCIe carries in one direction. Units: gigabytes a second."""
    speeds = [_PCIE_LANE.get(gpu["pcie_gen"] or 0, 0.0) * (gpu["pcie_width"] or 16) for gpu in gpus]
    return min((speed for speed in speeds if speed), default=_PCIE_LANE[3] * 16)


def ring(speeds: Sequence[Sequence[float]]) -> float:
    """Return the speed of the best ring through all GPUs: that of its slowest link. Units: those of `speeds`."""
    size = len(speeds)
    pairs = sorted({speeds[a][b] for a in range(size) for b in range(size) if a != b}, reverse=True)
    if size > _MOST_SEARCHED:
        return pairs[-1]
    return next(speed for speed in pairs if _has_ring(speeds, speed))


def _has_ring(speeds: Sequence[Sequence[float]], least: float) -> bool:
    size = len(speeds)

    def reaches(path: list[int]) -> bool:
        if len(path) == size:
            return speeds[path[-1]][path[0]] >= least
        return any(
            reaches([*path, other])
            for other in range(size)
            if other not in path and speeds[path[-1]][other] >= least
        )  # fmt: skip

    return reaches([0])


def expected(facts: Facts, gpus: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
    """Return by which links the GPUs of a run are connected, and what a ring carries; None where it is not known.

    Units: gigabytes a second.
    """
    table = parse_topology(facts["topology"])
    chosen = [gpu["index"] for gpu in gpus]
    if len(chosen) < 2 or not table or max(chosen) >= len(table) or any(gpu.get("mig") for gpu in gpus):
        return None
    nvlink, pcie = parse_nvlink(facts["nvlink"]), pcie_speed(gpus)
    speeds = [[link_speed(table[a][b], nvlink, pcie) for b in chosen] for a in chosen]
    speed = ring(speeds)
    kinds = {table[a][b] for a in chosen for b in chosen if a != b}
    slowest = min((kind for kind in kinds if link_speed(kind, nvlink, pcie) >= speed),
                  key=lambda kind: link_speed(kind, nvlink, pcie))  # fmt: skip
    return ("NVLink" if slowest.startswith("NV") else "PCIe") + f" ({slowest})", round(speed, 1)


def parse_nccl_log(text: str) -> dict[str, Any]:
    """Return from NCCL's own log (NCCL_DEBUG=INFO) by which ways the channels go, and the network it chose."""
    ways: dict[str, int] = {}
    for way in re.findall(r" via (P2P|SHM|NET/IB|NET/Socket|NET|COLLNET|NVLS)", text):
        ways[way] = ways.get(way, 0) + 1
    network = re.search(r"Using network (\S+)", text)
    return {
        "ways": ways,
        "network": network[1] if network else None,
        "nvls": "NVLS multicast support is available" in text,
    }


def judge_links(facts: Facts, gpus: Sequence[Mapping[str, Any]], setting: Setting) -> list[Finding]:
    """Judge the links between the GPUs of a run, and the variables that keep NCCL from using them."""
    findings = []
    for name, what in _TURNED_OFF.items():
        value = facts["environment"].get(name)
        if value is not None and (value == "0") == name.endswith("_ENABLE") and value != "":
            text = f"{name}={value} turns {what} off"
            findings.append(doubtful("links", text, f"unset {name}, unless this machine needs it", variable=name))
    links = expected(facts, gpus)
    if links is not None and setting.workers > 1:
        text = f"the GPUs are connected by {links[0]}, {links[1]:g} GB/s in each direction"
        findings.append(good("links", text, gigabytes_a_second=links[1], kind=links[0]))
    return findings


def judge_nccl(log: Mapping[str, Any], links: tuple[str, float] | None, infiniband: Facts) -> list[Finding]:
    """Compare the ways that NCCL takes with the links that there are."""
    findings, ways = [], log["ways"]
    shown = ", ".join(f"{count} channels by {way}" for way, count in ways.items())
    if links is not None and links[0].startswith("NVLink") and ways.get("SHM"):
        text = f"NCCL goes through the host's memory although the GPUs have NVLink ({shown})"
        advice = "unset NCCL_P2P_DISABLE; in a virtual machine or with an IOMMU, turn ACS off; use --ipc=host"
        findings.append(doubtful("nccl", text, advice, **log))
    if _active(infiniband) and (ways.get("NET/Socket") or log["network"] == "Socket"):
        text = "NCCL uses sockets although InfiniBand is here"
        advice = "unset NCCL_IB_DISABLE and NCCL_NET; in a container pass /dev/infiniband and ulimit -l unlimited"
        findings.append(doubtful("nccl", text, advice, **log))
    if not findings and shown:
        network = f", network {log['network']}" if log["network"] else ""
        findings.append(good("nccl", f"NCCL connects the ranks{network}", shown, **log))
    return findings


def gather_infiniband(root: Path = Path("/sys/class/infiniband")) -> Facts:
    """Return the ports of InfiniBand and RoCE adapters."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        state, rate, layer = (_text(port / name) for name in ("state", "rate", "link_layer"))
        match = re.match(r"([\d.]+) Gb/sec", rate)
        ports.append(
            {
                "name": f"{port.parent.parent.name}:{port.name}",
                "active": "ACTIVE" in state,
                "gbit": float(match[1]) if match else None,
                "layer": layer,
            }
        )
    return {"ports": ports}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _active(infiniband: Facts) -> list[Mapping[str, Any]]:
    return [port for port in infiniband.get("ports", ()) if port["active"]]


def host_speed(infiniband: Facts, speed_mbit: int | None) -> float | None:
    """Return what the network of a host carries in one direction; None: not known. Units: gigabytes a second."""
    gbit = sum(port["gbit"] or 0.0 for port in _active(infiniband)) or (speed_mbit or 0) / 1000
    return gbit / 8 or None


def judge_infiniband(facts: Facts, memlock: int | None, setting: Setting) -> list[Finding]:
    """Judge the ports and the memory that may be locked for them: nothing without an adapter."""
    ports, active = facts["ports"], _active(facts)
    if not ports:
        return []
    shown = f"{len(active)} of {len(ports)} InfiniBand or RoCE ports active"
    if active:
        shown += f", {sum(port['gbit'] or 0 for port in active):g} Gbit/s together"
    if not active and setting.nodes > 1:
        advice = "see ibstat; NCCL would use sockets"
        return [doubtful("infiniband", shown, advice, **facts)]
    if active and memlock is not None and memlock < _LITTLE_LOCKED:
        text = f"{shown}, and this shell allows {memlock // 1024:,} KiB of locked memory"
        advice = "ulimit -l unlimited (docker run --ulimit memlock=-1, in Slurm PropagateResourceLimitsExcept=MEMLOCK)"
        return [doubtful("infiniband", text, advice, memlock=memlock, **facts)]
    return [good("infiniband", shown, memlock=memlock, **facts)]
