"""Which part of its devices' peak a training uses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpexp.system.peak_flops import peak_flops
from ddpexp.train.utilization import utilization_of
from tests.conftest import PATIENCE, Ddpexp
from tests.fitting import asked
from tests.points import Recipe

BATCHES: Any = None  # of one length
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "numbers", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H200", "tf32", 494),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10G", "bf16", 70),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("AMD Instinct MI250X", "tf32", None),
        ("GeForce GT 1030", "fp32", None),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name(name: str, numbers: Any, tflops: float | None) -> None:
    assert peak_flops(name, numbers) == (None if tflops is None else tflops * 1e12)


def test_the_tasks_own_number_is_taken() -> None:
    task = SimpleNamespace(flops_per_sample=4e9)
    utilization = utilization_of(asked(peak_tflops=2.0).trainer, CPU, 4, task, BATCHES, {})
    assert utilization is not None
    assert utilization.column(samples_per_second=500.0) == {"train/mfu": 0.25}
    assert utilization_of(asked().trainer, CPU, 4, task, BATCHES, {}) is None  # no peak of a CPU is known


def test_a_task_that_steps_by_itself_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    task = SimpleNamespace(train_step=lambda update, batches: None)
    assert utilization_of(asked(peak_tflops=2.0).trainer, CPU, 1, task, BATCHES, {}) is None
    assert "no train/mfu: the task's train_step decides" in caplog.text


def test_the_model_is_counted_in_a_process_of_its_own(ddpexp: Ddpexp, caplog: pytest.LogCaptureFixture) -> None:
    done = Recipe(ddpexp)("trainer.peak_tflops=1e-6", "trainer.max_steps=1")
    assert done.code == 0, done.err
    config = (done.run / "config.yaml").read_text()
    with caplog.at_level(logging.INFO, "ddpexp"):
        request = {"config": config, "data": None, "without_data": None}
        utilization = utilization_of(asked(peak_tflops=1e-6).trainer, CPU, 2, object(), BATCHES, request)
        assert utilization is not None
        # Forward 2 x (4 x 8 + 8 x 2); backward as much for the weights, and 2 x 8 x 2 for the input of the second layer.
        assert utilization.flops.result(PATIENCE) == 96 + 96 + 32
    assert utilization.column(1000.0) == {"train/mfu": pytest.approx(1000 * 224 / 2e6)}
    assert caplog.messages == ["FLOPs   224 a sample, and at most 1 M a second of a device: train/mfu"]


def test_what_cannot_be_counted_gives_no_column(ddpexp: Ddpexp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddpexp"):
        utilization = utilization_of(
            asked(peak_tflops=1.0).trainer, CPU, 2, object(), BATCHES, {"config": "no: config"}
        )
        assert utilization is not None
        assert utilization.flops.result(PATIENCE) is None
    assert utilization.column(1000.0) == {}
    assert "FLOPs could not be counted" in caplog.text
