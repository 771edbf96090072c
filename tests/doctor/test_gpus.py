"""What nvidia-smi says, judged. The files have the form of its answers and were written for the tests, not recorded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.doctor import gpus
from ddpexp.doctor.report import Finding
from ddpexp.doctor.setting import Setting

FIRST, SECOND = "GPU-11111111-aaaa-bbbb-cccc-000000000000", "GPU-22222222-aaaa-bbbb-cccc-000000000000"
ANSWERS = Path(__file__).parent / "answers"
HERE = Setting("outputs", device="cuda", workers=2, world_size=2)


def facts(name: str | None = "h100.xml", **others: Any) -> dict[str, Any]:
    none: dict[str, Any] = {
        "driver": None,
        "gpus": [],
        "visible": [FIRST, SECOND],
        "failed": None,
        "loaded": True,
        "environment": {},
    }
    return {**none, **(gpus.parse_query((ANSWERS / name).read_text()) if name else {}), **others}


def texts(findings: list[Finding], level: str) -> list[str]:
    return [finding.text for finding in findings if finding.level == level]


def test_a_gpu_that_is_well_has_one_line() -> None:
    findings = gpus.judge_gpus(facts(visible=[FIRST]), HERE)
    assert [(found.level, found.text) for found in findings] == [
        ("good", "1 x NVIDIA H100 80GB HBM3 (80 GiB), driver 550.54.15 (1 of 2 visible)")
    ]
    assert findings[0].measured == "at most 31 C"


def test_each_trouble_of_a_gpu_has_a_line() -> None:
    findings = gpus.judge_gpus(facts(visible=[SECOND]), HERE)
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
    findings = gpus.judge_gpus(facts("mig.xml", visible=["GPU-33333333-aaaa-bbbb-cccc-000000000000"] * 2), HERE)
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


def test_a_login_node_with_nvidia_smi_alone_is_no_trouble() -> None:
    login = facts(None, failed="nvidia-smi fails: no driver", loaded=False, visible=[])
    assert [found.level for found in gpus.judge_gpus(login, HERE)] == ["good"]
    assert [found.level for found in gpus.judge_gpus({**login, "loaded": True}, HERE)] == ["bad"]


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


def test_a_driver_that_loads_anew_for_each_start_is_doubtful() -> None:
    slow = facts(visible=[FIRST], answer_seconds=6.2)
    assert texts(gpus.judge_gpus(slow, HERE), "doubtful") == []
    slow["gpus"][0]["persistence"] = False
    [text] = texts(gpus.judge_gpus(slow, HERE), "doubtful")
    assert text == "each start waits for the driver to load: persistence mode is off"


PROGRAM = """#!/bin/sh
case "$1" in
    -q) cat {query} ;;
    topo) cat {topology} ;;
    *) echo "no NVLink" >&2; exit 1 ;;
esac
"""


def test_nvidia_smi_is_asked_three_times_at_once(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(PROGRAM.format(query=ANSWERS / "h100.xml", topology=ANSWERS / "topo_nvlink.txt"))
    program.chmod(0o755)
    gathered = gpus.gather_gpus({"PATH": f"{tmp_path}:{os.defpath}", "NCCL_DEBUG": "WARN", "HOME": "/root"})
    assert [gpu["uuid"] for gpu in gathered["gpus"]] == [FIRST, SECOND]
    assert (gathered["failed"], gathered["nvlink"], gathered["environment"]) == (None, "", {"NCCL_DEBUG": "WARN"})
    assert "NV18" in gathered["topology"]
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    failed = gpus.gather_gpus({"PATH": f"{tmp_path}:{os.defpath}"})["failed"]
    assert failed == "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch"
