"""How a worker is set up: the memory of activations stays from step to step, and new memory is not filled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ddpexp.train.join import _pci_address, choose_algorithms
from tests.fitting import TRAINER

# Blocks of 4 MiB, 160 MiB in all, taken and given back as a step does, with nothing behind them in the heap.
STEPS = """
import resource
import torch
from ddpexp.train.join import _keep_freed_memory

_keep_freed_memory()
for step in range(6):
    if step == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(1 << 20) for _ in range(40)]
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", STEPS], env=environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_pages_are_not_returned_between_steps_unless_the_environment_says_so() -> None:
    # Now and then a fragmented heap takes 3 to 5 of 200 blocks anew. Where pages are returned, every run takes them all.
    assert any(faults() < 2000 for _ in range(3))
    assert faults(MALLOC_MMAP_THRESHOLD_="1048576") > 100_000  # five steps of 40,960 pages each


def test_a_gpu_has_the_address_that_the_kernel_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
    assert _pci_address(torch.device("cuda", 0)) == "0000:3b:00.0"


def test_deterministic_algorithms_do_not_fill_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        choose_algorithms(replace(TRAINER, deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.empty(1 << 10).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_convolutions_use_tf32_unless_they_are_to_be_exact() -> None:
    assert torch.backends.cudnn.allow_tf32
    try:
        choose_algorithms(TRAINER)
        assert torch.backends.cudnn.allow_tf32
        choose_algorithms(replace(TRAINER, conv_precision="fp32"))
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = True
