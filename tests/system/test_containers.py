"""What is recorded of containers of each kind, and what follows from it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddpexp.data import loader_limits
from ddpexp.launch.launchers.elastic import Elastic
from ddpexp.launch.supervise import activity
from ddpexp.launch.workers import cleanup
from ddpexp.system import containers, hardware, network, process
from ddpexp.system.containers import HOST_PID_NAMESPACE, name_user, runtime, sees_owners_of_shared_memory
from ddpexp.system.oom import memory_left

HOST = "0::/user.slice/user-1000.slice/session-3.scope\n"
DOCKER_1 = "9:memory:/docker/5f1e9a\n4:cpu,cpuacct:/docker/5f1e9a\n0::/system.slice/containerd.service\n"
DOCKER_ON_CLUSTER = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1a.slice/cri-containerd-77.scope\n"
PODMAN = "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-3e.scope/container\n"
OWN = "0::/\n"  # a control group namespace of its own, as Docker and Podman make it by default


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({"proc/self/cgroup": HOST}, {}, ""),
        ({}, {}, ""),
        ({"proc/self/cgroup": OWN}, {}, ""),
        ({"proc/self/cgroup": OWN, ".dockerenv": ""}, {}, "docker"),
        ({"proc/self/cgroup": OWN, "run/.containerenv": 'engine="podman-4.3"\n'}, {}, "docker"),
        ({"proc/self/cgroup": DOCKER_1}, {}, "docker"),
        ({"proc/self/cgroup": PODMAN}, {}, "docker"),
        ({"proc/self/cgroup": DOCKER_ON_CLUSTER}, {}, "kubernetes"),
        ({"proc/self/cgroup": OWN}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"proc/self/cgroup": HOST}, {"APPTAINER_CONTAINER": "/images/ddpexp.sif"}, "apptainer"),
        ({"proc/self/cgroup": HOST}, {"SINGULARITY_CONTAINER": "/images/ddpexp.sif"}, "apptainer"),
    ],
)
def test_a_container_is_recognised_by_what_its_runtime_leaves(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str
) -> None:
    assert runtime(write(tmp_path, files), environ, "4026532201") == kind


def test_a_virtual_machine_made_from_an_image_is_no_container(tmp_path: Path) -> None:
    assert runtime(write(tmp_path, {"proc/self/cgroup": OWN, ".dockerenv": ""}), {}, HOST_PID_NAMESPACE) == ""
    assert runtime(write(tmp_path, {"proc/self/cgroup": DOCKER_1}), {}, HOST_PID_NAMESPACE) == "docker"  # --pid=host


@pytest.mark.parametrize(
    ("kind", "place", "remedy"),
    [
        ("", "host", "as root, mount -o remount,size=1g /dev/shm"),
        ("docker", "container", "docker run --shm-size=1g"),
        ("kubernetes", "container", "mount an emptyDir volume with medium: Memory at /dev/shm in the pod"),
        ("apptainer", "host", "apptainer run --bind /dev/shm"),
    ],
)
def test_little_shared_memory_names_the_remedy_of_the_place(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: str, remedy: str
) -> None:
    monkeypatch.setattr(loader_limits, "runtime", lambda: kind)
    monkeypatch.setattr(loader_limits, "shared_memory", lambda: (1 << 20, 1 << 19))
    assert loader_limits.shared_memory_warning(2) == (
        f"/dev/shm of this {place} has 1.0 MB, little for the batches of data.num_workers=2 DataLoader workers a rank: "
        f"enlarge it ({remedy}), or use data.num_workers=0"
    )
    assert f"/dev/shm of this {place} has 1.0 MB, 0.5 MB of it free. Enlarge it ({remedy})" in str(
        loader_limits.no_room()
    )
    assert loader_limits.shared_memory_warning(0) is None


@pytest.mark.parametrize(
    ("pids", "ipc", "seen"),
    [
        (HOST_PID_NAMESPACE, "4026531839", True),
        ("4026532201", "4026532199", True),  # docker run
        ("4026532201", "4026531839", False),  # docker run --ipc=host
        ("", "", True),
    ],
)
def test_process_ids_in_the_hosts_shared_memory_mean_nothing_in_a_container(pids: str, ipc: str, seen: bool) -> None:
    assert sees_owners_of_shared_memory(pids, ipc) is seen


def test_what_other_containers_have_in_shared_memory_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = tmp_path / "torch_4194305_123_0"  # beyond the largest process ID
    left.write_bytes(b"0")
    monkeypatch.setattr(cleanup, "_FOLDER", tmp_path)
    monkeypatch.setattr(cleanup, "sees_owners_of_shared_memory", lambda: False)
    cleanup.clear(0, tmp_path)
    assert left.exists()
    monkeypatch.setattr(cleanup, "sees_owners_of_shared_memory", lambda: True)
    cleanup.clear(0, tmp_path)
    assert not left.exists()


def test_a_user_id_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    name_user(environ)
    assert environ == {}  # this user has an entry
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 12345)
    name_user(environ)
    assert environ == {"LOGNAME": f"uid{2**31 - 12345}"}
    named = {"USER": "ada"}
    name_user(named)
    assert named == {"USER": "ada"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": OWN, "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": OWN, "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": OWN, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": OWN, "sys/fs/cgroup/cpu.max": "what\n"}, None),
        # Without a control group namespace the limit is below the top, or above the group of the process.
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
            },
            4,
        ),
        # The path is the host's, and only the container's own group is visible.
        (
            {
                "proc/self/cgroup": DOCKER_1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": DOCKER_1,
                "sys/fs/cgroup/cpu/docker/5f1e9a/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/docker/5f1e9a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": DOCKER_1}, None),
        ({}, None),
    ],
)
def test_the_quota_of_cores_is_found_in_both_kinds_of_control_groups(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    assert hardware._cgroup_quota(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"proc/self/cgroup": OWN, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "1000\n",
                "sys/fs/cgroup/a/b/memory.current": "900\n",
                "sys/fs/cgroup/a/b/memory.stat": "anon 600\ninactive_file 300\n",
                "sys/fs/cgroup/a/memory.max": "9000\n",
                "sys/fs/cgroup/a/memory.current": "8900\n",
            },
            100,
        ),
        (
            {
                "proc/self/cgroup": DOCKER_1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            400,
        ),
        (
            {
                "proc/self/cgroup": DOCKER_1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_the_memory_that_control_groups_leave_is_what_the_nearest_limit_allows(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    assert memory_left(write(tmp_path, files)) == left


@pytest.mark.parametrize(
    ("endpoint", "argument"),
    [
        ("127.0.0.1:29500", ["--local-addr=127.0.0.1"]),  # by its address: others may be unable to resolve its name
        ("127.0.0.1", ["--local-addr=127.0.0.1"]),
        ("127.0.0.1:port", []),
        ("[::1]:29500", []),
    ],
)
def test_an_elastic_machine_gives_the_others_its_address_on_the_way_to_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, argument: list[str]
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    arguments = Elastic(rdzv_endpoint=endpoint)._rendezvous(2, 300.0)
    assert [word for word in arguments if word.startswith("--local-addr")] == argument


def test_the_interface_that_is_chosen_for_gloo_gives_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert network.address_towards("192.0.2.1", 29500) == "127.0.0.1"


def test_a_process_that_ends_while_it_is_looked_at_has_neither_threads_nor_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its folder vanishes between two system calls: `Path.glob` raises then."""
    pid = os.getpid()
    assert pid in {int(thread.name) for thread in process.threads(pid)}
    assert pid in activity.cpu_delays(pid, "train") or not Path("/proc/self/schedstat").exists()

    def vanished(path: object = ".") -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(os, "scandir", vanished)
    monkeypatch.setattr(os, "listdir", vanished)
    assert process.children(pid) == []
    assert activity.cpu_delays(pid, "train") == {}


def test_namespaces_are_read_where_they_are_visible() -> None:
    assert containers.pid_namespace() == str(os.stat("/proc/self/ns/pid").st_ino)
