"""Cores, memory, limits, file systems, clock, network and scheduler, judged by facts alone."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.doctor import host, resources, software, storage
from ddpexp.doctor.setting import Setting
from ddpexp.system import oom
from tests.conftest import ROOT

HERE = Setting("/data/outputs/mnist")
GIB = 1 << 30


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


CORES = {"usable": 8, "affinity": 8, "quota": None, "machine": 8, "load": 0.4, "omp_num_threads": None}


def test_workers_that_share_cores_are_doubtful() -> None:
    assert levels(resources.judge_cores(CORES, replace(HERE, workers=2, threads=4))) == ["good"]
    [finding] = resources.judge_cores({**CORES, "usable": 4, "quota": 4}, replace(HERE, workers=8))
    assert (finding.level, finding.text) == (
        "doubtful",
        "4 of 8 cores usable (a control group's quota) for 8 workers x 1 thread",
    )
    assert levels(resources.judge_cores({**CORES, "load": 20.0}, HERE)) == ["doubtful"]


def test_cores_that_each_rank_has_for_itself_count_together() -> None:
    bound = {**CORES, "usable": 1, "affinity": 1, "machine": 2}
    facts = resources.with_cores_of(bound, [[0], [1]])  # as mpirun binds ranks
    assert levels(resources.judge_cores(facts, replace(HERE, workers=2))) == ["good"]
    assert resources.with_cores_of(CORES, [list(range(8))] * 2) == CORES
    assert resources.with_cores_of({"hung": 15.0}, [[0]]) == {"hung": 15.0}


MEMORY = {"total": 64 * GIB, "available": 50 * GIB, "group": None, "limit": None, "used": None}


@pytest.mark.parametrize(
    ("facts", "workers", "level"),
    [
        (MEMORY, 8, "good"),
        ({**MEMORY, "available": 6 * GIB}, 8, "doubtful"),
        ({**MEMORY, "available": GIB}, 8, "bad"),
        ({**MEMORY, "group": "/sys/fs/cgroup", "limit": 4 * GIB, "used": GIB}, 2, "good"),
        ({**MEMORY, "group": "/sys/fs/cgroup", "limit": 2 * GIB, "used": GIB}, 2, "doubtful"),
        ({**MEMORY, "group": "/sys/fs/cgroup", "limit": GIB, "used": GIB}, 1, "bad"),
    ],
)
def test_memory_counts_by_worker_and_control_group(facts: dict[str, Any], workers: int, level: str) -> None:
    assert levels(resources.judge_memory(facts, replace(HERE, workers=workers))) == [level]


def test_the_tightest_control_group_counts_without_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    for folder, limit, used, cache in (("job", 8 * GIB, 7 * GIB, 6 * GIB), ("job/step", 4 * GIB, 3 * GIB, GIB)):
        group = tmp_path / "sys/fs/cgroup" / folder
        group.mkdir(parents=True)
        (group / "memory.events").write_text("oom_kill 0\n")
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert oom.tightest_limit(tmp_path) == (str(tmp_path / "sys/fs/cgroup/job/step"), 4 * GIB, 2 * GIB)
    assert oom.tightest_limit(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("free", "setting", "level"),
    [
        (8 * GIB, HERE, "good"),
        (64 << 20, HERE, "doubtful"),
        (64 << 20, replace(HERE, num_workers=2), "doubtful"),
        (64 << 20, replace(HERE, num_workers=8), "bad"),
        (64 << 20, replace(HERE, device="cuda", workers=8), "bad"),
        (64 << 20, replace(HERE, device="cuda", workers=1), "doubtful"),
    ],
)
def test_shared_memory_is_for_loaders_and_nccl(free: int, setting: Setting, level: str) -> None:
    facts = {"size": free, "free": free, "writable": True, "container": "docker"}
    [finding] = resources.judge_shared_memory(facts, setting)
    assert finding.level == level
    assert ("--shm-size" in finding.advice) == (level != "good")
    [outside] = resources.judge_shared_memory({**facts, "container": ""}, setting)
    assert ("mount -o remount" in outside.advice) == (level != "good")


def test_shared_memory_that_is_missing_is_bad_where_it_is_used() -> None:
    missing = {"size": None, "free": None, "writable": False, "reason": "No such file or directory", "container": ""}
    assert levels(resources.judge_shared_memory(missing, HERE)) == ["doubtful"]
    assert levels(resources.judge_shared_memory(missing, replace(HERE, num_workers=2))) == ["bad"]


LIMITS = {"nofile": 1 << 20, "memlock": None, "address_space": None, "file_size": None, "cpu_seconds": None,
          "processes": [["kernel.pid_max", 32768, 500], ["/sys/fs/cgroup/pids.max", 4096, 100]]}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"nofile": 1024}, {"open_files": "doubtful"}),
        ({"nofile": 40}, {"open_files": "bad"}),
        ({"processes": [["pids.max", 512, 100]]}, {"processes": "doubtful"}),
        ({"processes": [["pids.max", 128, 100]]}, {"processes": "bad"}),
        ({"file_size": 1 << 20}, {"file_size": "doubtful"}),
        ({"address_space": 1 << 35}, {"address_space": "doubtful"}),
        ({"cpu_seconds": 3600}, {"cpu_time": "doubtful"}),
    ],
)
def test_limits_are_compared_with_what_a_run_takes(changed: dict[str, Any], expected: dict[str, str]) -> None:
    findings = resources.judge_limits({**LIMITS, **changed}, replace(HERE, workers=5, world_size=5))
    assert {found.check: found.level for found in findings if found.level != "good"} == expected


def test_cuda_needs_the_address_space() -> None:
    findings = resources.judge_limits({**LIMITS, "address_space": 1 << 35}, replace(HERE, device="cuda"))
    assert [found.check for found in findings if found.level == "bad"] == ["address_space"]


FILES = {"folder": "/data/outputs/mnist", "exists": True, "kind": "ext4", "mount": "/data", "source": "/dev/sda1",
         "options": "rw", "free": 1 << 40, "free_files": 1 << 20, "refused": None, "fsync_seconds": 0.02,
         "renames": True, "locks": "yes"}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, "good", "on ext4"),
        ({"kind": "nfs4", "source": "server:/data"}, "good", "on nfs4 (server:/data)"),
        ({"refused": "Read-only file system"}, "bad", "cannot be written: Read-only file system"),
        ({"renames": False}, "bad", "does not rename"),
        ({"free": 1 << 20}, "bad", "is full"),
        ({"free_files": 5}, "bad", "is full: and 5 files (inodes) left"),
        ({"free": 1 << 30}, "doubtful", "has little room"),
        ({"free_files": 500}, "doubtful", "can hold 500 more files"),
        ({"locks": "none"}, "doubtful", "has no locks"),
        ({"locks": "no"}, "doubtful", "grants the same lock twice"),
        ({"fsync_seconds": 3.5}, "doubtful", "is slow to write"),
        ({"kind": "tmpfs"}, "doubtful", "lost when the machine stops"),
        ({"kind": "overlay"}, "doubtful", "lost with the container"),
        ({"free_files": None}, "good", "on ext4"),
    ],
)
def test_file_systems(changed: dict[str, Any], level: str, text: str) -> None:
    [finding] = storage.judge_files({**FILES, **changed}, HERE)
    assert finding.level == level
    assert text in finding.text
    assert (finding.advice == "") == (level == "good")


MOUNTS = """22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /data rw,relatime shared:5 - nfs4 server:/export/data rw,vers=4.2,local_lock=none
31 30 0:41 / /data/my\\040runs rw - lustre 10.0.0.1@o2ib:/scratch rw,flock
32 22 0:42 / /tmp rw,nosuid,noexec - tmpfs tmpfs rw,size=1024k
33 22 0:43 / /tmp rw,nosuid - tmpfs hidden rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me", ("/", "ext4", "/dev/vda", "rw,relatime,rw")),
        ("/data/outputs", ("/data", "nfs4", "server:/export/data", "rw,relatime,rw,vers=4.2,local_lock=none")),
        ("/data/my runs/a", ("/data/my runs", "lustre", "10.0.0.1@o2ib:/scratch", "rw,rw,flock")),
        ("/database", ("/", "ext4", "/dev/vda", "rw,relatime,rw")),
        ("/tmp", ("/tmp", "tmpfs", "hidden", "rw,nosuid,rw")),  # the later mount hides the earlier one
    ],
)
def test_the_file_system_of_a_path(path: str, expected: tuple[str, ...]) -> None:
    assert storage.mount_of(path, MOUNTS) == expected


def test_a_real_folder_is_tried_out_and_left_as_it_was(tmp_path: Path) -> None:
    facts = storage.gather_files(str(tmp_path / "outputs/mnist"))
    assert (facts["refused"], facts["renames"], facts["locks"], facts["exists"]) == (None, True, "yes", False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert levels(storage.judge_files(storage.gather_files(str(tmp_path)), HERE)) == ["bad"]


@pytest.mark.parametrize(
    ("facts", "compiles", "level"),
    [
        ({"folder": "/tmp", "writable": True, "free": 1 << 40, "options": "rw"}, False, "good"),
        ({"folder": "/tmp", "writable": True, "free": 1 << 20, "options": "rw"}, False, "doubtful"),
        ({"folder": "/tmp", "writable": True, "free": 1 << 40, "options": "rw,noexec"}, False, "doubtful"),
        ({"folder": "/tmp", "writable": True, "free": 1 << 40, "options": "rw,noexec"}, True, "bad"),
        ({"folder": "/tmp", "writable": False, "free": 0, "options": ""}, False, "bad"),
    ],
)
def test_temporary_files(facts: dict[str, Any], compiles: bool, level: str) -> None:
    assert levels(storage.judge_temporary(facts, replace(HERE, compiles=compiles))) == [level]


CLOCK = {"time": 1_800_000_000.0, "moved_seconds": 0.0002, "synchronized": True}


@pytest.mark.parametrize(
    ("changed", "nodes", "level"),
    [
        ({}, 2, "good"),
        ({"synchronized": None}, 2, "good"),
        ({"synchronized": False}, 1, "good"),
        ({"synchronized": False}, 2, "doubtful"),
        ({"moved_seconds": -0.8}, 1, "doubtful"),
        ({"time": 1000.0}, 1, "bad"),
    ],
)
def test_clocks(changed: dict[str, Any], nodes: int, level: str) -> None:
    assert levels(host.judge_clock({**CLOCK, **changed}, replace(HERE, nodes=nodes))) == [level]


NETWORK: dict[str, Any] = {
           "hostname": "gpu01", "resolves_to": ["10.0.0.1"], "resolve_error": None, "resolve_seconds": 0.001,
           "address": "10.0.0.1", "interface": "eth0", "speed_mbit": 25000, "interfaces": ["eth0", "lo"],
           "named": {}}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "nodes", "expected"),
    [
        ({}, 2, ["good", "good"]),
        ({"address": "127.0.0.1", "interface": "lo"}, 1, ["good", "good"]),
        ({"address": "127.0.0.1", "interface": "lo"}, 2, ["bad", "good"]),
        ({"interface": "docker0"}, 2, ["doubtful", "good"]),
        ({"named": {"NCCL_SOCKET_IFNAME": "eth"}}, 2, ["good", "good"]),  # a prefix
        ({"named": {"NCCL_SOCKET_IFNAME": "^docker"}}, 2, ["good", "good"]),
        ({"named": {"GLOO_SOCKET_IFNAME": "ib0"}}, 2, ["bad", "good"]),
        ({"resolve_error": "Name or service not known", "resolves_to": []}, 1, ["good", "doubtful"]),
        ({"resolve_seconds": 5.0}, 1, ["good", "doubtful"]),
    ],
)
def test_networks(changed: dict[str, Any], nodes: int, expected: list[str]) -> None:
    assert levels(host.judge_network({**NETWORK, **changed}, replace(HERE, nodes=nodes))) == expected


JOB = """JobId=42 JobName=train
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue={requeue} Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=23:50:00 TimeLimit={limit} TimeMin=N/A
   SubmitTime=2025-03-04T10:00:00 EligibleTime=2025-03-04T10:00:00
   Partition=gpu AllocNode:Sid=login:123
   NumNodes=2 NumCPUs=32 NumTasks=2 CPUs/Task=16
"""


@pytest.mark.parametrize(
    ("limit", "requeue", "level", "measured"),
    [
        ("2-00:00:00", 1, "good", "24:10:00 left"),
        ("UNLIMITED", 1, "good", "no time limit"),
        ("23:55:00", 1, "doubtful", "0:05:00 left"),
        ("2-00:00:00", 0, "doubtful", "24:10:00 left"),
    ],
)
def test_a_job_of_slurm(limit: str, requeue: int, level: str, measured: str) -> None:
    job = host.parse_job(JOB.format(limit=limit, requeue=requeue))
    facts = {"installed": True, "job_id": "42", "in_step": True, "job": job, "restarts": None}
    [finding] = host.judge_scheduler(facts, replace(HERE, launcher="slurm"))
    assert (finding.level, finding.measured) == (level, measured)
    assert finding.text.startswith("Slurm job 42 in partition gpu")


def test_no_job_of_slurm() -> None:
    outside = {"installed": False, "job_id": None, "in_step": False, "job": None, "restarts": None}
    assert levels(host.judge_scheduler(outside, HERE)) == ["good"]
    assert levels(host.judge_scheduler(outside, replace(HERE, launcher="slurm"))) == ["bad"]
    assert levels(host.judge_scheduler({**outside, "job_id": "42"}, HERE)) == ["doubtful"]


SOFTWARE = {"python": "3.11.7", "versions": {"torch": "2.13.0+cpu", "hydra-core": "1.3.8", "omegaconf": "2.3.1"},
            "supported": software.SUPPORTED, "ddpexp": "0.1.0", "git": {"commit": "0123456789abcdef", "dirty": True},
            "torch_cuda": None, "gpus": 0, "why_no_gpu": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({}, "good"),
        ({"versions": {"torch": "2.9.1"}}, "bad"),
        ({"versions": {"torch": "3.0.0a0+git"}}, "good"),
        ({"versions": {"hydra-core": "1.5.0"}}, "doubtful"),
        ({"versions": {"hydra-core": None}}, "bad"),
    ],
)
def test_versions(changed: dict[str, Any], level: str) -> None:
    findings = software.judge_software({**SOFTWARE, **changed}, HERE)
    assert findings[0].level == level
    assert levels(findings[-2:]) == ["good", "good"]


def test_a_build_for_the_cpu_beside_gpus_is_bad() -> None:
    why = " (8 here, but the installed torch is a CPU-only build)"
    finding = software.judge_software({**SOFTWARE, "why_no_gpu": why}, HERE)[1]
    assert (finding.check, finding.level) == ("torch_build", "bad")
    assert "install a build of torch for CUDA" in finding.advice


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, bounds in software.SUPPORTED.items():
        shown = f'requires-python = "{bounds}"' if name == "python" else f'"{name}{bounds}"'
        assert shown in text
    assert not re.search(r'"torch[^">]*<', text)


def test_a_missing_nvidia_smi_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpexp.doctor import gpus

    def run(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 8.0)

    monkeypatch.setattr(gpus, "find", lambda *_: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", run)
    assert gpus.gather_gpus({})["failed"] == "nvidia-smi fails: no answer in 8 s"
