"""Judge what the workers of the job found: torch on their devices, peer access and the all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.system.text import size_text

_EXPECTED_SHARE = 0.25  # of the links: with less, another way is taken or something else uses them
_BROKEN_SHARE = 0.05
_SLOW_CPU = 0.05  # gigabytes a second between CPU workers of one host
_SKEW_SECONDS = 1.0


def supports(capability: Sequence[int], architectures: Sequence[str]) -> bool:
    """Return whether a build of torch has code for a GPU.

    Code for sm_80 runs on 8.0 and 8.6, that of compute_80 is compiled for any later one. Source: CUDA's programming
    guide, binary and PTX compatibility.
    """
    major, minor = capability
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = "".join(filter(str.isdigit, digits))
        if not number:
            continue
        of_code = int(number[:-1]), int(number[-1])
        exact = digits[-1] == "a"  # code for this GPU alone
        if kind == "compute" and of_code <= (major, minor):
            return True
        if kind == "sm" and of_code[0] == major and (of_code[1] == minor if exact else of_code[1] <= minor):
            return True
    return False


def judge_devices(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Judge torch and the devices of one host's ranks."""
    findings = []
    for rank in ranks:
        device = rank.get("device")
        if device and not supports(device["capability"], rank["architectures"]):
            number = ".".join(map(str, device["capability"]))
            text = f"torch {rank['torch']} has no code for {device['name']} (compute capability {number})"
            advice = "install a newer torch, or a build for this GPU: its kernels cannot run"
            findings.append(bad("torch_gpu", text, advice, architectures=rank["architectures"]))
    first = ranks[0]
    if first.get("device") and not findings:
        nccl = f", NCCL {first['nccl']}" if first.get("nccl") else ""
        kinds = [rank["device"]["name"] for rank in ranks if rank.get("device")]
        counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        findings.append(good("torch_gpu", f"torch {first['torch']} for {counted}{nccl}", devices=kinds))
    return list({finding.text: finding for finding in findings}.values())


def judge_peers(peers: Sequence[Sequence[bool]], links: tuple[str, float] | None) -> list[Finding]:
    """Judge which GPUs of a host reach each other's memory."""
    without = [(a, b) for a, row in enumerate(peers) for b, can in enumerate(row) if a < b and not can]
    if len(peers) < 2:
        return []
    if not without:
        return [good("peer_access", f"all {len(peers)} GPUs reach each other's memory")]
    shown = ", ".join(f"{a}-{b}" for a, b in without[:4]) + (", ..." if len(without) > 4 else "")
    text = f"no peer access between GPUs {shown}: their data goes through the host's memory"
    if links is not None and links[0].startswith("NVLink"):
        advice = "they have NVLink: look at the IOMMU and ACS settings, or the settings of the virtual machine"
        return [doubtful("peer_access", text, advice, without=without)]
    return [good("peer_access", text, without=without)]


def judge_all_reduce(result: Mapping[str, Any], expected: tuple[str, float] | None, where: str) -> Finding:
    """Judge a measured all-reduce against the links. `expected`: their name and gigabytes a second."""
    speed, size = result["bus_gigabytes_a_second"], result["ranks"]
    text = f"{size} ranks {where} over {result['backend']}"
    measured = (
        f"{size_text(result['num_bytes'])} at {speed:.3g} GB/s per rank and direction, "
        f"a small one in {result['latency_us']:,.0f} us"
    )
    facts = {**result, "expected_gigabytes_a_second": expected[1] if expected else None}
    if not result["correct"]:
        advice = "do not train on this: test the memory and the links (dcgmi diag -r 3)"
        return bad("all_reduce", f"{text} gives a wrong sum", advice, measured, **facts)
    if expected is not None:
        share = speed / expected[1]
        measured += f", {share:.0%} of {expected[0]}'s {expected[1]:g} GB/s"
        if share < _EXPECTED_SHARE:
            report = bad if share < _BROKEN_SHARE else doubtful
            advice = (
                "NCCL_DEBUG=INFO prints the way it takes: look for other programs on the links, NCCL_ variables, ACS"
            )
            if result["backend"] == "gloo":
                advice = "look for other programs on the network, and at the interface that the line network names"
            return report("all_reduce", f"{text} is slow", advice, measured, **facts)
    elif result["backend"] == "gloo" and speed < _SLOW_CPU:
        advice = "other programs use the cores or the memory: see the load average"
        return doubtful("all_reduce", f"{text} is slow", advice, measured, **facts)
    return good("all_reduce", text, measured, **facts)


def judge_skew(times: Mapping[str, float]) -> list[Finding]:
    """Compare the wall clocks of several hosts, read right after a barrier. Units: seconds."""
    if len(times) < 2:
        return []
    first, last = min(times, key=lambda host: times[host]), max(times, key=lambda host: times[host])
    skew = times[last] - times[first]
    text = f"the clocks of {len(times)} hosts agree"
    if skew > _SKEW_SECONDS:
        advice = (
            "run chrony or ntpd on all hosts: logs and records of the hosts disagree, and shared files look new or old"
        )
        text = f"the clock of {last} is ahead of the clock of {first}"
        return [doubtful("clock_skew", text, advice, f"by {skew:.2f} s", seconds=round(skew, 3))]
    return [good("clock_skew", text, f"within {skew * 1000:.0f} ms", seconds=round(skew, 3))]
