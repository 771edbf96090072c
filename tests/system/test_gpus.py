"""Which devices the workers get, from recorded answers of the driver and the variables of several clusters."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import math
import re
from pathlib import Path

import pytest

from ddpexp.system import amd, hardware, nvml
from ddpexp.system.gpu_state import GpuState, open_gpu, reason_of
from ddpexp.system.gpus import shared_gpu, visible, why_hidden, worker_variables
from ddpexp.system.nvml import Driver, Gpu, MigInstance, obstacle

# `nvidia-smi -L`, recorded; NVML gives the same UUIDs in the same order.
FOUR = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5ebe9f43-ac33-420d-0002-000000000000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5ebe9f43-ac33-420d-0002-000000000001)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
GPU 3: NVIDIA A100-SXM4-40GB (UUID: GPU-c08d91cb-e324-655c-71ba-7570956445bc)
"""
PARTITIONED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-c08d91cb-e324-655c-71ba-7570956445bc)
  MIG 1c.3g.40gb  Device  0: (UUID: MIG-c788539f-c1ea-5a36-8b4d-9b07d024b1bb)
  MIG 1c.3g.40gb  Device  1: (UUID: MIG-405bbda1-6b05-535f-9702-f95e8cd170ce)
  MIG 1g.10gb     Device  2: (UUID: MIG-b4b2228d-6933-5839-bc0e-41ab9edb61c6)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-5ebe9f43-ac33-420d-0002-000000000000)
  MIG 7g.80gb     Device  0: (UUID: MIG-c71dc464-b9f9-5611-9d29-d601a47cffd6)
"""
MIXED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5ebe9f43-ac33-420d-0002-000000000000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
  MIG 3g.20gb     Device  0: (UUID: MIG-b4b2228d-6933-5839-bc0e-41ab9edb61c6)
  MIG 3g.20gb     Device  1: (UUID: MIG-c71dc464-b9f9-5611-9d29-d601a47cffd6)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-c08d91cb-e324-655c-71ba-7570956445bc)
"""
FIRST = "GPU-5ebe9f43-ac33-420d-0002-000000000000"
OLD_NAMES = """\
GPU 0: A100-SXM4-40GB (UUID: GPU-5ebe9f43-ac33-420d-0002-000000000000)
  MIG 3g.20gb Device 0: (UUID: MIG-GPU-5ebe9f43-ac33-420d-0002-000000000000/1/0)
  MIG 3g.20gb Device 1: (UUID: MIG-GPU-5ebe9f43-ac33-420d-0002-000000000000/2/0)
"""


def recorded(text: str, allowed: str | None = None) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi -L`; of these only the digits in `allowed` are in the device control group."""
    found: list[Gpu] = []
    for line in text.splitlines():
        [uuid] = re.findall(r"UUID: (.*)\)", line)
        if line.startswith("GPU"):
            denied = allowed is not None and str(len(found)) not in allowed
            found.append(Gpu(uuid, obstacle(0, "", errno.EPERM) if denied else ""))
        else:
            gpu = found.pop()
            instances = gpu.mig or ()
            old = re.search(r"/(\d+)/(\d+)$", uuid)
            numbers = (int(old[1]), int(old[2])) if old else (len(instances) + 1, 0)
            found.append(Gpu(gpu.uuid, gpu.obstacle, (*instances, MigInstance(uuid, *numbers))))
    return found


def names(gpus: list[Gpu], variable: str | None) -> list[str]:
    """Return the first eight characters of the devices' UUIDs, behind their kind."""
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    return [device.uuid for device in visible(gpus, environ).devices]


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, "0123"), ("", ""), ("-1", ""), ("0,2,-1,1", "02"), ("2,1", "21"), ("4", ""), ("0,4,1", "0"),
        ("0,0", ""), ("0,1,0", ""), ("1gpu2,2ampere", "12"), ("+1", "1"), ("all", ""), ("NoDevFiles", ""),
        ("GPU-8932", "2"), ("GPU-8932,GPU-c0", "23"), ("GPU-8932, GPU-c0", "23"), ("GPU-8932f937-d72c-4106", "2"),
        ("GPU-5ebe", ""), ("GPU-8932,GPU-5ebe,GPU-c0", "2"),  # ambiguous
        ("GPU-8932,GPU-8932f9", ""),  # the same twice
        ("GPU-ffff", ""), ("GPU-8932,GPU-ffff,GPU-c0", "2"), ("gpu-8932", ""), ("8932f937", ""),
        ("GPU-8932,0", "2"), ("0,GPU-8932", "0"), ("MIG-8932", ""),
    ],
)  # fmt: skip
def test_the_variable_is_read_as_cuda_reads_it(variable: str | None, numbers: str) -> None:
    gpus = recorded(FOUR)
    assert names(gpus, variable) == [gpus[int(number)].uuid for number in numbers]


@pytest.mark.parametrize(
    ("text", "variable", "uuids"),
    [
        (PARTITIONED, None, "MIG-c788 MIG-405b MIG-b4b2 MIG-c71d"),
        (PARTITIONED, "MIG-405b,MIG-c71d", "MIG-405b MIG-c71d"),
        (PARTITIONED, "MIG-c7", ""),
        (PARTITIONED, "MIG-c788,MIG-c7885", ""),
        (PARTITIONED, "1", "MIG-c71d"),
        (PARTITIONED, "GPU-c08d", "MIG-c788 MIG-405b MIG-b4b2"),
        (PARTITIONED, "MIG-GPU-c08d91cb-e324-655c-71ba-7570956445bc/2/0,MIG-GPU-c08d91cb/1/0", "MIG-405b MIG-c788"),
        (OLD_NAMES, None, f"MIG-{FIRST}/1/0 MIG-{FIRST}/2/0"),
        (OLD_NAMES, f"MIG-{FIRST}/2/0", f"MIG-{FIRST}/2/0"),
        (OLD_NAMES, f"MIG-{FIRST}/3/0", ""),
        (MIXED, None, "GPU-5ebe GPU-c08d"),
        (MIXED, "MIG-b4b2", "MIG-b4b2"),
        (MIXED, "0,1", "GPU-5ebe MIG-b4b2 MIG-c71d"),
    ],
)  # fmt: skip
def test_an_instance_counts_as_a_device_and_its_gpu_stands_for_all_of_its_instances(
    text: str, variable: str | None, uuids: str
) -> None:
    found, expected = names(recorded(text), variable), uuids.split()
    assert len(found) == len(expected)
    assert all(uuid.startswith(beginning) for uuid, beginning in zip(found, expected, strict=True))


def test_a_worker_on_an_instance_sees_it_alone_as_device_0() -> None:
    devices = visible(recorded(PARTITIONED), {}).devices
    assert [worker_variables(devices, number) for number in (0, 3)] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-c788539f-c1ea-5a36-8b4d-9b07d024b1bb", "DDPEXP_GPU": "0"},
        {"CUDA_VISIBLE_DEVICES": "MIG-c71dc464-b9f9-5611-9d29-d601a47cffd6", "DDPEXP_GPU": "0"},
    ]
    assert worker_variables(visible(recorded(FOUR), {}).devices, 3) == {"DDPEXP_GPU": "3"}


def test_a_worker_on_a_whole_gpu_beside_instances_sees_it_alone() -> None:
    # Without a variable CUDA would show it one instance, and no whole GPU.
    assert worker_variables(visible(recorded(MIXED), {}).devices, 1) == {
        "CUDA_VISIBLE_DEVICES": "GPU-c08d91cb-e324-655c-71ba-7570956445bc",
        "DDPEXP_GPU": "0",
    }
    named = visible(recorded(MIXED), {"CUDA_VISIBLE_DEVICES": "0,2"}).devices
    assert [worker_variables(named, number) for number in range(2)] == [{"DDPEXP_GPU": "0"}, {"DDPEXP_GPU": "1"}]


def test_two_instances_of_one_gpu_share_it() -> None:
    devices = visible(recorded(PARTITIONED), {}).devices
    assert shared_gpu(devices) == "GPU-c08d91cb-e324-655c-71ba-7570956445bc"
    assert shared_gpu(devices[2:]) is None
    assert shared_gpu(visible(recorded(FOUR), {}).devices) is None


@pytest.mark.parametrize(
    ("allowed", "environ", "numbers"),
    [
        # ConstrainDevices=yes: the variable counts the GPUs of the control group from 0.
        ("2", {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "2", "SLURM_LOCALID": "2"}, "2"),
        ("13", {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "1,3", "GPU_DEVICE_ORDINAL": "0,1"}, "13"),
        # Sites that unset the variable and leave it to the control group.
        ("13", {"SLURM_JOB_GPUS": "1,3"}, "13"),
        ("3", {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1"}, "3"),
        # ConstrainDevices=no: the variable has the numbers of the node, and nothing is denied.
        ("0123", {"CUDA_VISIBLE_DEVICES": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_LOCALID": "2"}, "2"),
        ("0123", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4", "SLURM_LOCALID": "2"}, "0123"),
        # --gpu-bind=single:1 with a control group of the step that has all of the job's.
        ("0123", {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPU_BIND": "single:1", "SLURM_LOCALID": "1"}, "1"),
        # A job without GPUs on a node that has some.
        ("", {"SLURM_JOB_ID": "7"}, ""),
        ("0123", {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_ID": "7"}, ""),
        # The numbers of the node in a control group that has fewer, as from a stale `export`: the same as in CUDA.
        ("3", {"CUDA_VISIBLE_DEVICES": "3"}, ""),
        # UUIDs are the same inside and outside.
        ("23", {"CUDA_VISIBLE_DEVICES": "GPU-c08d"}, "3"),
        ("23", {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43-ac33-420d-0002-000000000001"}, ""),
    ],
)
def test_only_gpus_of_the_control_group_count(allowed: str, environ: dict[str, str], numbers: str) -> None:
    gpus = recorded(FOUR, allowed)
    assert [device.uuid for device in visible(gpus, environ).devices] == [gpus[int(number)].uuid for number in numbers]


@pytest.mark.parametrize(
    ("status", "node_error", "reason"),
    [
        (0, None, ""),
        (0, errno.ENOENT, ""),  # WSL has no nodes
        (0, errno.EPERM, "not in this process's device control group"),
        (4, None, "not in this process's device control group"),
        (0, errno.EACCES, "Permission denied"),
        (0, errno.EIO, "Input/output error"),
        (15, None, "GPU is lost"),
    ],
)
def test_a_gpu_counts_if_its_handle_and_its_node_open(status: int, node_error: int | None, reason: str) -> None:
    assert obstacle(status, "GPU is lost" if status else "Success", node_error) == reason


@pytest.mark.parametrize(
    ("gpus", "variable", "reason"),
    [
        ([], "0", ""),
        (recorded(FOUR), None, ""),
        (recorded(FOUR), "3,2,1,0", ""),
        (recorded(FOUR), "0,1", " (4 here, but CUDA_VISIBLE_DEVICES=0,1 hides the others)"),
        (recorded(FOUR, "2"), "0", " (4 here, but 3 cannot be opened: not in this process's device control group)"),
        (recorded(MIXED), None,
         " (3 here, but beside whole GPUs, MIG instances are used only where CUDA_VISIBLE_DEVICES names them)"),
        ([Gpu("GPU-0", mig=())], None,
         " (1 here, but in MIG mode, without an instance for this process: `nvidia-smi mig -lci` lists the instances)"),
        (recorded(PARTITIONED), "MIG-c788,MIG-0", " (2 here, but CUDA_VISIBLE_DEVICES=MIG-c788,MIG-0 names MIG-0, "
         "which is none of them, and all after it are ignored)"),
    ],
)  # fmt: skip
def test_what_hides_a_gpu_is_named(gpus: list[Gpu], variable: str | None, reason: str) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert why_hidden(Driver(tuple(gpus)), "13.0", environ) == reason


def test_a_driver_that_does_not_answer_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(library, "nvmlDeviceGetCount_v2", lambda _: 18)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    nvml.driver.cache_clear()
    try:
        assert why_hidden(nvml.driver(), "13.0", {}) == " (the driver's library reports: status 18)"
    finally:
        nvml.driver.cache_clear()


@pytest.mark.parametrize(
    ("driver", "built", "old"), [("12.8", "13.0", True), ("13.0", "13.2", False), ("", "13.0", False)]
)
def test_a_driver_of_an_older_cuda_runs_no_worker(
    driver: str, built: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Driver((Gpu("GPU-0"),), cuda=driver)
    monkeypatch.setattr(hardware, "_torch_version_file", lambda: f"cuda: Optional[str] = '{built}'\n")
    monkeypatch.setattr(nvml, "driver", lambda: answer)
    assert hardware.count_gpus({}) == (0 if old else 1)
    assert hardware.why_no_gpu({}) == (
        "none used (1 here, but the driver supports CUDA up to 12.8, and the installed torch is built for 13.0: update "
        "the driver, or install a torch for that CUDA)"
        if old
        else "none found; the installed torch can use NVIDIA's"
    )


def test_a_variable_that_hides_all_gpus_is_what_a_run_on_cpus_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_torch_version_file", lambda: "cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(nvml, "driver", lambda: Driver(tuple(recorded(FOUR))))
    assert hardware.why_no_gpu({"CUDA_VISIBLE_DEVICES": ""}) == (
        "none used (4 here, but CUDA_VISIBLE_DEVICES= hides all)"
    )


def test_a_gpu_without_its_library_is_seen_in_the_files_of_the_kernel(tmp_path: Path) -> None:
    bus = tmp_path / "sys/bus/pci/devices"
    for name, vendor, kind in (("0000:00:02.0", "8086", "030000"), ("0000:01:00.1", "10de", "040300")):
        (bus / name).mkdir(parents=True)
        (bus / name / "vendor").write_text(f"0x{vendor}\n")
        (bus / name / "class").write_text(f"0x{kind}\n")
    assert nvml.trace_of_gpus(tmp_path) == ""  # another maker's, and the sound device of a GPU
    (bus / "0000:02:00.0").mkdir()
    (bus / "0000:02:00.0/vendor").write_text("0x10de\n")
    (bus / "0000:02:00.0/class").write_text("0x030200\n")
    assert nvml.trace_of_gpus(tmp_path) == "/sys/bus/pci/devices/0000:02:00.0"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert nvml.trace_of_gpus(tmp_path) == "/dev/nvidia0"


@pytest.mark.parametrize(
    ("build", "trace", "expected"),
    [
        ("'13.0'", "", "none found; the installed torch can use NVIDIA's"),
        ("'13.0'", "/dev/nvidia0", "none used (/dev/nvidia0 shows one, but libnvidia-ml.so.1 is not found: install "
         "NVIDIA's driver, or start the container with its GPUs (docker run --gpus all))"),
        ("None", "", ""),
    ],
)  # fmt: skip
def test_a_run_on_cpus_says_why_where_torch_can_use_gpus(
    build: str, trace: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(hardware, "_torch_version_file", lambda: f"cuda: Optional[str] = {build}\n")
    monkeypatch.setattr(nvml, "trace_of_gpus", lambda _: trace)
    nvml.driver.cache_clear()
    try:
        assert hardware.count_gpus({}) == 0
        assert hardware.why_no_gpu({}) == expected
    finally:
        nvml.driver.cache_clear()


def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(name: str) -> None:
        asked.append(name)
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(hardware, "_torch_build", lambda: "cuda")
    nvml.driver.cache_clear()
    try:
        assert (hardware.count_gpus({}), hardware.visible_gpus({}), hardware.why_hidden({})) == (0, [], "")
        assert asked == ["libnvidia-ml.so.1"]
    finally:
        nvml.driver.cache_clear()


def test_a_hidden_gpu_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_torch_build", lambda: "cuda")
    monkeypatch.setattr(nvml, "driver", lambda: pytest.fail("the driver was asked"))
    for variable in ("", "-1"):
        assert hardware.count_gpus({"CUDA_VISIBLE_DEVICES": variable}) == 0


def test_a_library_gives_its_gpus_instances_and_what_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"/dev/nvidia0": None, "/dev/nvidia1": errno.EPERM, "/dev/nvidia3": None}
    monkeypatch.setattr(nvml, "_open_error", lambda path: nodes[path])
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    nvml.driver.cache_clear()
    try:
        assert nvml.driver() == Driver(
            (
                Gpu("GPU-0", name="H100"),
                Gpu("GPU-1", "not in this process's device control group"),
                Gpu("GPU 2", "not in this process's device control group"),
                Gpu("GPU-3", mig=(MigInstance("MIG-3-0", 10, 0), MigInstance("MIG-3-2", 12, 0))),
            ),
            version="580.95",
        )
    finally:
        nvml.driver.cache_clear()


def test_the_state_of_a_gpu_and_what_holds_its_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    gpu = open_gpu("GPU-1")
    assert gpu is not None
    assert gpu.read() == GpuState(0.87, 1095.0, 1980.0, 0x44)
    assert (reason_of(0x44), reason_of(0x4), reason_of(0x1), reason_of(0)) == ("thermal", "power limit", "", "")
    assert open_gpu("MIG-1") is None
    old = open_gpu("GPU-2")  # of which the driver tells nothing
    assert old is not None
    assert all(map(math.isnan, (old.read().utilization, old.read().clock, old.read().most_clock)))
    monkeypatch.undo()
    assert open_gpu("GPU-1") is None  # no driver here


class Library:
    """NVML's functions with four GPUs: a fake, for there is none here. Handles are numbers; instances are above 100."""

    def __init__(self) -> None:
        self.nvmlErrorString = lambda status: f"status {status}".encode()

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: object) -> int:
        return self._set(count, 4)

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        return 4 if index == 2 else self._set(handle, index + 1)

    def nvmlDeviceGetMinorNumber(self, handle: object, minor: object) -> int:
        return self._set(minor, handle.value - 1)  # type: ignore[attr-defined]

    def nvmlDeviceGetUUID(self, handle: object, text: object, size: int) -> int:
        number = handle.value - 1  # type: ignore[attr-defined]
        name = f"GPU-{number}" if number < 100 else f"MIG-3-{number - 100}"
        text.value = name.encode()  # type: ignore[attr-defined]
        return 0 if size == 96 else 7

    def nvmlDeviceGetName(self, handle: object, text: object, size: int) -> int:
        text.value = b"H100"  # type: ignore[attr-defined]
        return 0 if handle.value == 1 else 3  # type: ignore[attr-defined]

    def nvmlSystemGetDriverVersion(self, text: object, size: int) -> int:
        text.value = b"580.95"  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetMigMode(self, handle: object, current: object, pending: object) -> int:
        return self._set(current, 1) if handle.value == 4 else 3  # type: ignore[attr-defined]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object, count: object) -> int:
        return self._set(count, 7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int, instance: object) -> int:
        return self._set(instance, 101 + index) if index in (0, 2) else 6

    def nvmlDeviceGetGpuInstanceId(self, handle: object, number: object) -> int:
        return self._set(number, handle.value - 101 + 10)  # type: ignore[attr-defined]

    def nvmlDeviceGetComputeInstanceId(self, handle: object, number: object) -> int:
        return self._set(number, 0)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        return self._set(handle, int(uuid.removeprefix(b"GPU-"))) if uuid.startswith(b"GPU-") else 6

    def nvmlDeviceGetUtilizationRates(self, handle: object, rates: object) -> int:
        rates._obj[0] = 87  # type: ignore[attr-defined]
        return 0 if handle.value == 1 else 3  # type: ignore[attr-defined]

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int, clock: object) -> int:
        return self._set(clock, 1095) if (handle.value, kind) == (1, 1) else 3  # type: ignore[attr-defined]

    def nvmlDeviceGetMaxClockInfo(self, handle: object, kind: int, clock: object) -> int:
        return self._set(clock, 1980) if (handle.value, kind) == (1, 1) else 3  # type: ignore[attr-defined]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object, reasons: object) -> int:
        return self._set(reasons, 0x44)

    @staticmethod
    def _set(reference: object, value: int) -> int:
        reference._obj.value = value  # type: ignore[attr-defined]
        return 0


# ----------------------------------------------------------------------------------------------------------------- ROCm


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, "0123"),
        ({"HIP_VISIBLE_DEVICES": "2,1"}, "21"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "23"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, "3"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000002"}, "2"),
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
        ({"HIP_VISIBLE_DEVICES": "0,9,1"}, "0"),
    ],
)
def test_rocms_variables_choose_among_amds_gpus(environ: dict[str, str], numbers: str) -> None:
    gpus = [amd.AmdGpu(f"GPU-{number:016x}") for number in range(4)]
    assert [device.uuid for device in amd.visible(gpus, environ)] == [gpus[int(number)].uuid for number in numbers]


def test_amds_gpus_are_read_from_the_kernels_topology(tmp_path: Path) -> None:
    for number, text in enumerate(
        (
            "cpu_cores_count 64\nsimd_count 0\nunique_id 0\ndrm_render_minor 0\n",
            "cpu_cores_count 0\nsimd_count 304\nunique_id 10\ndrm_render_minor 128\n",
            "cpu_cores_count 0\nsimd_count 304\nunique_id 11\ndrm_render_minor 129\n",  # its node is not here
        )
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(text)
    (tmp_path / "renderD128").touch()
    assert amd.gpus(tmp_path, tmp_path) == [amd.AmdGpu("GPU-000000000000000a")]
    assert amd.gpus(tmp_path / "none", tmp_path) == []


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda = '11.8'\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n", "hip"),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, build: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(text)
    spec = type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert hardware._torch_build() == build
    variable = "HIP_VISIBLE_DEVICES" if build == "hip" else "CUDA_VISIBLE_DEVICES"
    assert hardware.restricted_to(["1", "3"]) == {variable: "1,3"}
