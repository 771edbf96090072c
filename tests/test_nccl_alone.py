"""NCCL on one GPU: one rank makes a group of its own, and does over it what ranks of several GPUs do.

A run with one worker makes no group, so nothing else on one GPU calls NCCL. The same code over gloo on the CPU keeps
this program sound where there is no GPU. One process does everything, since each would take seconds to begin.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from ddpexp.distributed import flight_recorder
from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.ddp import _FixedLateDDP
from ddpexp.strategy.exact.exchange import OverBackend, Plan
from ddpexp.strategy.late_reduction import LateDDP
from ddpexp.system.hardware import count_gpus
from ddpexp.train.weights_hash import _gathered
from tests.conftest import PATIENCE, ROOT

STEPS = 3
GONE_SECONDS = 10.0


def pretended(device: torch.device) -> World:
    """Return a world of two ranks, whose group has this one: nothing is left out as it is where a rank is alone."""
    return World(0, 0, 0, 2, 2, device)


def collectives(device: torch.device) -> None:
    world = pretended(device)
    for dtype in (torch.uint8, torch.int64, torch.float64, torch.bool):
        values = torch.tensor([0, 1, 1], device=device).to(dtype)
        assert torch.equal(world.sum(values.clone()), values), dtype
        assert torch.equal(world.broadcast(values.clone()), values), dtype
    world.barrier()


def records_of_collectives(device: torch.device) -> None:
    pretended(device).sum(torch.ones(7, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    record = flight_recorder.read()
    if device.type == "cuda":  # gloo records in newer versions of torch alone
        assert record is not None
        assert any(call.elements == 7 for group in record.groups for call in group.calls.values()), record


def wrapped_by_ddp(device: torch.device) -> None:
    for kind, overlaps in ((_FixedLateDDP, True), (LateDDP, True), (LateDDP, False)):
        bare = network(device)
        ddp = kind(copy.deepcopy(bare), device_ids=[device.index] if device.type == "cuda" else None)
        for step in range(STEPS):
            ddp.begin(True, overlaps)
            if overlaps:
                trained(ddp, step, device)
            else:
                with ddp.no_sync():
                    trained(ddp, step, device)
            ddp.finish()
            trained(bare, step, device)
            updated(ddp)
            updated(bare)
        assert same(ddp.module, bare), kind


def sharded(device: torch.device, offload: bool = False) -> None:
    bare = network(device)
    mesh = init_device_mesh(device.type, (1,))
    whole = copy.deepcopy(bare)
    fully_shard(whole, mesh=mesh, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    assert {parameter.device.type for parameter in whole.parameters()} == {"cpu" if offload else device.type}
    for step in range(STEPS):
        for module in (whole, bare):
            trained(module, step, device)
            updated(module)
    for mine, theirs in zip(whole.parameters(), bare.parameters(), strict=True):
        held = mine.to_local()  # type: ignore[attr-defined]
        assert torch.allclose(held, theirs.to(held.device))


def sharded_on_the_host(device: torch.device) -> None:
    if device.type == "cuda":  # where the device is the host, there is nothing to move
        sharded(device, offload=True)


def gathered_from_the_host(device: torch.device) -> None:
    rows = torch.arange(12.0).view(4, 3)
    [whole] = _gathered(Shard(rows, (4, 3), 0), pretended(device))
    assert torch.equal(whole.cpu(), rows)


def exact_sum(device: torch.device) -> None:
    block = torch.arange(5.0, device=device)
    expected = block.clone()
    OverBackend(Plan.of(4, 1), World(0, 0, 0, 1, 1, device)).sum([block])
    assert torch.equal(block, expected)
    received = torch.empty_like(block)
    dist.all_to_all_single(as_bytes(received), as_bytes(block))
    assert torch.equal(received, block)


def another_group(device: torch.device) -> None:
    group = dist.new_group([0])
    values = torch.ones(3, device=device)
    dist.all_reduce(values, group=group)
    assert torch.equal(values.cpu(), torch.ones(3))


CHECKS: Mapping[str, Callable[[torch.device], None]] = {
    check.__name__: check
    for check in (
        collectives, records_of_collectives, wrapped_by_ddp, sharded, sharded_on_the_host, gathered_from_the_host,
        exact_sum, another_group,
    )
}  # fmt: skip


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)


def trained(module: nn.Module, step: int, device: torch.device) -> None:
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).to(device)
    module(rows).square().mean().backward()


@torch.no_grad()
def updated(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None


def same(module: nn.Module, other: nn.Module) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = list(zip(module.parameters(), other.parameters(), strict=True))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def main(kind: str, folder: str) -> None:
    """Make the group, then print a line for each check: its name, and its traceback if it failed."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    flight_recorder.enable(os.environ)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device if kind == "cuda" else None)
    for name, check in CHECKS.items():
        try:
            check(device)
            problem = ""
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)
    if kind == "cuda":
        sleep: Callable[[int], None] = torch.cuda._sleep
        sleep(100_000_000_000)  # cycles: a kernel that runs for a minute
    print(json.dumps(["long kernel", ""]), flush=True)
    time.sleep(PATIENCE)
    os._exit(1)


def killed(process: subprocess.Popen[str]) -> float:
    """Kill a process, and return after how long it was gone. Units: seconds."""
    began = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    return time.monotonic() - began


KINDS = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")]),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, str]]:
    """Return a function that runs the program on a kind of device, once, and returns the problem of each check."""
    found: dict[str, dict[str, str]] = {}

    def of(kind: str) -> Mapping[str, str]:
        if kind not in found:
            found[kind] = problems(kind, tmp_path_factory.mktemp(kind))
        return found[kind]

    return of


def problems(kind: str, folder: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.test_nccl_alone", kind, str(folder)]
    errors = folder / "errors"
    found = {}
    with (
        errors.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            name, found[name] = json.loads(line)
            if name == "long kernel":
                found["gone"] = str(killed(process))
    found["errors"] = errors.read_text()[-2000:]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS)
def test_one_rank_alone(outcomes: Callable[[str], Mapping[str, str]], kind: str, check: str) -> None:
    found = outcomes(kind)
    assert found.get(check, f"not reached: {found['errors']}") == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_is_killed_in_a_kernel_is_gone(outcomes: Callable[[str], Mapping[str, str]], kind: str) -> None:
    assert float(outcomes(kind)["gone"]) < GONE_SECONDS


if __name__ == "__main__":
    main(*sys.argv[1:])
