"""From the configuration to how many workers run on which devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpexp.errors import RefusedError
from ddpexp.launch.rendezvous.layout import Auto, check_threads, resolve
from ddpexp.system import hardware, nvml
from ddpexp.system.gpus import worker_variables
from ddpexp.system.hardware import count_gpus, threads_per_worker, usable_cores, visible_devices
from ddpexp.system.nvml import Driver, Gpu, MigInstance
from tests.conftest import PATIENCE
from tests.refusals import is_about, refused


def on_machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int = 8) -> None:
    """Pretend to be a machine: a fake, for the real ones have only what they have."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "driver", lambda: Driver(tuple(Gpu(f"GPU-{number}") for number in range(gpus))))
    monkeypatch.setattr(hardware, "_torch_build", lambda: "cuda")
    monkeypatch.setattr(hardware, "usable_cores", lambda: cores)


@pytest.mark.parametrize(
    ("gpus", "device", "present", "workers", "kind", "backend"),
    [
        ("auto", "auto", 0, 1, "cpu", "gloo"),
        (8, "auto", 0, 8, "cpu", "gloo"),
        ("auto", "auto", 4, 4, "cuda", "nccl"),
        (2, "auto", 4, 2, "cuda", "nccl"),
        (2, "cuda", 2, 2, "cuda", "nccl"),
        ("auto", "cpu", 4, 1, "cpu", "gloo"),
        (6, "cpu", 4, 6, "cpu", "gloo"),
    ],
)
def test_workers_are_gpus_where_there_are_some_and_cpu_workers_otherwise(
    monkeypatch: pytest.MonkeyPatch, gpus: Auto | int, device: str, present: int, workers: int, kind: str, backend: str
) -> None:
    on_machine(monkeypatch, present)
    found = resolve(gpus, device, "auto", "auto")
    assert (found.nodes, found.world_size, found.device, found.backend) == (1, workers, kind, backend)


def test_a_configured_backend_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 2)
    assert resolve("auto", "auto", "gloo", "auto").backend == "gloo"


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    ("gpus", "device", "backend", "threads", "present", "sentence"),
    [
        (8, "auto", "auto", "auto", 2, "trainer.gpus=8"),
        (2, "cuda", "auto", "auto", 1, "trainer.gpus=2"),
        ("auto", "cuda", "auto", "auto", 0, "trainer.device=cuda"),
        (2, "cpu", "nccl", "auto", 4, "trainer.backend=nccl"),
    ],
)  # fmt: skip
def test_what_the_machine_does_not_have_is_refused_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Auto | int,
    device: str,
    backend: str,
    threads: Auto | int,
    present: int,
    sentence: str,
) -> None:
    on_machine(monkeypatch, present)
    with pytest.raises(RefusedError) as caught:
        resolve(gpus, device, backend, threads)
    assert is_about(caught.value, sentence)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 8, 1), (1, 1, 1)]
)
def test_the_cores_are_divided_among_the_workers(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, threads: int
) -> None:
    on_machine(monkeypatch, 0, cores)
    assert threads_per_worker(workers) == threads
    assert resolve(workers, "cpu", "auto", "auto").threads == threads
    assert resolve(workers, "cpu", "auto", 5).threads == 5


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, 4), ("0", 1), ("0,1", 2), ("3, 1", 2), ("", 0), ("-1", 0), ("0,1,-1,2", 2), ("0,7,1", 1), ("0,,1", 1),
        ("0,1,0", 0), ("GPU-1,GPU-3", 2), ("GPU-5ebe9f43,GPU-1", 0), ("none", 0), ("NoDevFiles", 0),
    ],
)  # fmt: skip
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, shown: int) -> None:
    on_machine(monkeypatch, 4)
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == shown


def test_each_mig_instance_is_a_worker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 0)
    instances = tuple(MigInstance(f"MIG-a{number}", number, 0) for number in range(3))
    monkeypatch.setattr(nvml, "driver", lambda: Driver((Gpu("GPU-0", mig=instances),)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a0,MIG-a2")
    assert [worker_variables(visible_devices(), number) for number in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-a0", "DDPEXP_GPU": "0"},
        {"CUDA_VISIBLE_DEVICES": "MIG-a2", "DDPEXP_GPU": "0"},
    ]
    layout = resolve("auto", "auto", "auto", "auto")
    assert (layout.world_size, layout.device, layout.backend) == (2, "cuda", "gloo")
    with pytest.raises(RefusedError) as caught:
        resolve("auto", "auto", "nccl", "auto")
    assert is_about(caught.value, "trainer.backend=nccl")
    assert resolve(1, "auto", "nccl", "auto").backend == "nccl"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [resolve("auto", "auto", backend, "auto").backend for backend in ("auto", "nccl")] == ["nccl", "nccl"]


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    ("built", "visible", "why"),
    [
        ("cuda", "", "(4 here, but CUDA_VISIBLE_DEVICES= hides all)"),
        ("cuda", "-1", "(4 here, but CUDA_VISIBLE_DEVICES=-1 hides all)"),
        ("cuda", "7", "(4 here, but CUDA_VISIBLE_DEVICES=7 names 7, which is none of them)"),
        ("cuda", "0,0", "(4 here, but CUDA_VISIBLE_DEVICES=0,0 names 0 twice, and CUDA shows none then)"),
        ("cpu", "0", "(4 here, but the installed torch is a CPU-only build)"),
    ],
)
def test_gpus_that_cannot_be_used_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, built: str, visible: str, why: str
) -> None:
    on_machine(monkeypatch, 4)
    monkeypatch.setattr(hardware, "_torch_build", lambda: built)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with refused(f"trainer.device=cuda: {why}"):
        resolve("auto", "cuda", "auto", "auto")


def test_too_few_gpus_are_refused_with_what_hides_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,9,2")
    with pytest.raises(RefusedError) as caught:
        resolve(4, "auto", "auto", "auto")
    assert is_about(caught.value, "trainer.gpus=4")


def test_a_machine_without_gpus_shows_none_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 0)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


def test_cores_are_those_of_the_affinity_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cgroup_quota", lambda: None)
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(hardware, "_cgroup_quota", lambda: 1)
    assert usable_cores() == 1


def test_counting_loads_neither_torch_nor_cuda() -> None:
    program = (
        "import sys; from ddpexp.system.hardware import count_gpus; count_gpus();"
        "maps = open('/proc/self/maps').read(); assert 'libcuda.so' not in maps and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")
def test_the_count_is_torchs_count() -> None:
    program = "import torch; print(torch.cuda.device_count())"
    for visible in (None, "0", "", "-1"):
        environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=PATIENCE
        )
        assert count_gpus(environ) == int(done.stdout)


def test_more_threads_than_a_worker_can_start_are_refused() -> None:
    with refused("trainer.threads=100000"):
        check_threads(100_000)
    check_threads(1024)  # another machine may have as many cores, and the same number of threads gives the same bits
