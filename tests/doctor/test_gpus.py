"""What nvidia-smi says, judged. The files have the form of its answers and were written for the tests, not recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.doctor import gpus
from ddpexp.doctor.report import Finding
from ddpexp.doctor.setting import Setting

ANSWERS = Path(__file__).parent / "answers"
HERE = Setting("outputs", device="cuda", workers=2, world_size=2)


def facts(name: str | None = "h100.xml", **others: Any) -> dict[str, Any]:
    none: dict[str, Any] = {"driver": None, "gpus": [], "visible": ["0", "1"], "failed": None, "environment": {}}
    return {**none, **(gpus.parse_query((ANSWERS / name).read_text()) if name else {}), **others}


def texts(findings: list[Finding], level: str) -> list[str]:
    return [finding.text for finding in findings if finding.level == level]


def test_a_gpu_that_is_well_has_one_line() -> None:
    findings = gpus.judge_gpus(facts(visible=["0"]), HERE)
    assert [(found.level, found.text) for found in findings] == [
        ("good", "1 x NVIDIA H100 80GB HBM3 (80 GiB), driver 550.54.15 (1 of 2 visible)")
    ]
    assert findings[0].measured == "at most 31 C"


def test_each_trouble_of_a_gpu_has_a_line() -> None:
    findings = gpus.judge_gpus(facts(visible=["GPU-2222"]), HERE)
    assert texts(findings, "bad") == ["GPU 1: its NVLink fabric is not ready (In Progress)"]
    assert texts(findings, "doubtful") == [
        "GPU 1: faulty memory is replaced with its next reset",
        "GPU 1: 2 uncorrectable memory errors since the driver was loaded",
        "GPU 1: the hardware slows it down because it is too hot (88 C)",
        "GPU 1: PCIe with 8 of 16 lanes",
        "GPU 1: in use by python3 (process 4711): 59.8 of 80 GiB, 97 % busy",
    ]
    assert all(found.advice for found in findings if found.level != "good")


def test_mig_instances_are_counted() -> None:
    findings = gpus.judge_gpus(facts("mig.xml", visible=["MIG-1", "MIG-2"]), HERE)
    assert [found.text for found in findings] == [
        "1 x NVIDIA A100-SXM4-40GB (40 GiB), 2 MIG instances, driver 535.161.08"
    ]


def test_mig_without_an_instance_is_bad() -> None:
    mig = facts("mig.xml")
    mig["gpus"][0]["mig_memory_mib"] = []
    assert texts(gpus.judge_gpus(mig, HERE), "bad") == ["GPU 0: MIG is enabled without an instance"]


def test_a_machine_without_gpus_is_no_trouble() -> None:
    [finding] = gpus.judge_gpus(facts(None, visible=[]), replace(HERE, device="cpu"))
    assert (finding.level, finding.text) == ("good", "no GPU here: a run uses CPU workers")


def test_gpus_without_nvidia_smi_are_doubtful() -> None:
    [finding] = gpus.judge_gpus(facts(None), HERE)
    assert finding.level == "doubtful"
    assert "NVIDIA_DRIVER_CAPABILITIES" in finding.advice


def test_a_driver_that_does_not_answer_is_bad() -> None:
    failed = "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch"
    [finding] = gpus.judge_gpus(facts(None, failed=failed), HERE)
    assert (finding.level, finding.text) == ("bad", failed)


def test_gpus_of_two_kinds_are_doubtful() -> None:
    mixed = facts()
    mixed["gpus"][1]["name"] = "NVIDIA A100"
    assert "1 x NVIDIA H100 80GB HBM3 (80 GiB), 1 x NVIDIA A100 (80 GiB)" in gpus.judge_gpus(mixed, HERE)[0].text


@pytest.mark.parametrize(
    ("driver", "driver_cuda", "torch_cuda", "level"),
    [
        ("550.54.15", "12.4", "12.4", "good"),
        ("550.54.15", "12.4", "12.8", "good"),  # CUDA's minor versions are compatible
        ("550.54.15", "12.4", "13.0", "bad"),
        ("550.54.15", "13.0", "13.0", "good"),  # with cuda-compat
        ("580.82.07", "13.0", "12.8", "good"),
        ("470.82.01", "11.4", "12.1", "bad"),
        ("580.82.07", "13.0", "14.0", "bad"),  # a version that is not known yet
    ],
)
def test_the_driver_is_compared_with_the_build_of_torch(
    driver: str, driver_cuda: str, torch_cuda: str, level: str
) -> None:
    [finding] = gpus.judge_driver({"driver": driver, "driver_cuda": driver_cuda}, torch_cuda)
    assert finding.level == level
    assert ("the driver is too old" in finding.text) == (level == "bad")


def test_a_build_for_the_cpu_has_no_driver_to_compare() -> None:
    assert gpus.judge_driver({"driver": "550.54.15", "driver_cuda": "12.4"}, None) == []
