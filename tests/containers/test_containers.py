"""The image, built by the Dockerfile's own commands, and what runs in containers of it: slow, and for root alone.

`DDPEXP_TEST_IMAGE=FOLDER` keeps the image there and uses it again; remove the folder after a change.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.containers.image import Container, Image, build, debian, pip_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SMALL = ("recipe=mnist", "data.source=embedded", "data.embedded_train=2560", "data.embedded_test=256")
DDPEXP = ("python", "-m", "ddpexp")
SETTINGS = (*SMALL, "trainer.threads=1", "trainer.epochs=30", "trainer.log_every=10", "trainer.eval_every=600")
TRAIN = (*DDPEXP, *SETTINGS, "trainer.gpus=2")
RUN_SECONDS = 300.0  # several people share the machines that this runs on
STOP_SECONDS = 30.0


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    try:
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "--net", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("containers need namespaces, which only root may make")
    kept = os.environ.get("DDPEXP_TEST_IMAGE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("image")
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed, which makes the base image")
    if "PIP_FIND_LINKS" not in pip_settings():
        pytest.skip("PIP_FIND_LINKS names no folder with a build of torch for CPUs")
    arguments = {"PYTHON": "3.11", "TORCH": "cpu", "TORCH_INDEX": "file:///nowhere"}  # Python of Debian 12
    return build(debian(folder), folder / "layers", arguments)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No container outlives its test."""
    yield
    while Container.started:
        Container.started.pop().kill()


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return volume(tmp_path / "outputs", 1000)


def volume(folder: Path, user: int) -> Path:
    """Make a folder of the host that belongs to a user of the container."""
    folder.mkdir()
    os.chown(folder, user, user)
    return folder


def result(run: Path) -> tuple[str, int, str]:
    """Return how a run ended, its last step and the hash of its weights."""
    values = json.loads((run / "result.json").read_text())
    return values["status"], values["step"], values["weights_sha256"]


@pytest.fixture(scope="module")
def undisturbed(image: Image, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, str]:
    """The result of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outputs = volume(folder / "outputs", 1000)
    command = (*TRAIN, "run.dir=outputs/run")
    code, text = Container(image, command, folder / "container", volumes={"/experiments/outputs": outputs}).wait(
        RUN_SECONDS
    )
    assert code == 0, text
    assert "2 CPU workers (gloo, gradients through shared memory)" in text
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in outputs.rglob("*")}
    assert owners == {(1000, 1000)}
    return result(outputs / "run")


def test_the_image_holds_the_package_and_runs_it_without_privileges(image: Image, tmp_path: Path) -> None:
    shown = Container(image, image.command, tmp_path / "help").wait(60)
    assert shown[0] == 0
    assert "python -m ddpexp recipe=mnist trainer.gpus=2" in shown[1]
    folders = "ls /src /opt /data /experiments"
    script = f"id -u; cat /proc/1/comm; grep CapEff /proc/self/status; {folders}; df -B1 /dev/shm | tail -1"
    _, text = Container(image, ["sh", "-c", f"{script}; touch /opt/ddpexp/new"], tmp_path / "look").wait(60)
    assert text.startswith("1000\ntini\nCapEff:\t0000000000000000\n")
    assert "cannot access '/src'" in text
    assert "build" not in text  # what builds packages stays behind
    assert "/opt:\nddpexp\n" in text
    assert " 67108864 " in text
    assert "Permission denied" in text


@pytest.mark.parametrize("init", [True, False], ids=["init", "pid1"])
def test_a_stopped_container_saves_and_another_one_resumes_to_the_same_weights(
    image: Image, undisturbed: tuple[str, int, str], outputs: Path, tmp_path: Path, init: bool
) -> None:
    command = (*TRAIN, "run.dir=outputs/run")
    first = Container(
        image, command, tmp_path / "first", volumes={"/experiments/outputs": outputs}, name="first", init=init
    )
    first.wait_for(r"^step +\d+/600")
    begin = time.monotonic()
    first.send(signal.SIGTERM)
    code, text = first.wait(STOP_SECONDS)
    assert code == 128 + signal.SIGTERM, text
    assert "ddpexp: interrupted by SIGTERM; saved at step" in text
    assert time.monotonic() - begin < STOP_SECONDS
    second = Container(
        image, (*DDPEXP, "resume", "/runs/run"), tmp_path / "second", volumes={"/runs": outputs}, name="second",
        init=init,
    )  # fmt: skip
    code, text = second.wait(RUN_SECONDS)
    assert code == 0, text
    assert "resumed after step" in text
    assert result(outputs / "run") == undisturbed


@pytest.mark.parametrize("init", [True, False], ids=["init", "pid1"])
def test_a_container_that_is_killed_leaves_nothing_and_is_resumed(
    image: Image, undisturbed: tuple[str, int, str], outputs: Path, tmp_path: Path, init: bool
) -> None:
    command = (*TRAIN, "trainer.checkpoint_every=20", "run.dir=outputs/run")
    first = Container(image, command, tmp_path / "first", volumes={"/experiments/outputs": outputs}, init=init)
    first.wait_for(r"^step +[4-9]\d/600")
    pids = first.pids()
    assert len(pids) >= 4  # the command, its fork server and two ranks
    os.kill(pids[-1], signal.SIGSTOP)  # a process that hears nothing ends with the others
    first.send(signal.SIGKILL)
    assert first.wait(STOP_SECONDS)[0] == 1  # unshare's own, after SIGKILL
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    code, text = Container(
        image, command, tmp_path / "second", volumes={"/experiments/outputs": outputs}, name="second", init=init
    ).wait(RUN_SECONDS)
    assert code == 0, text
    assert "resumed after step" in text
    assert result(outputs / "run") == undisturbed


def test_a_stop_before_the_first_line_of_the_command_ends_the_container(image: Image, tmp_path: Path) -> None:
    """Python has no handler yet: process 1 would ignore the signal."""
    container = Container(image, TRAIN, tmp_path / "container")
    deadline = time.monotonic() + 60
    while [name_of(pid) for pid in container.pids()] != ["tini", "python"]:
        assert time.monotonic() < deadline
    container.send(signal.SIGTERM)
    assert container.wait(STOP_SECONDS)[0] == 128 + signal.SIGTERM


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_any_user_id_runs_on_a_read_only_file_system(
    image: Image, undisturbed: tuple[str, int, str], tmp_path: Path
) -> None:
    outputs = volume(tmp_path / "outputs", 12345)
    code, text = Container(
        image, (*TRAIN, "run.dir=outputs/run"), tmp_path / "container", volumes={"/experiments/outputs": outputs},
        user="12345:12345", read_only=True, environ={"XDG_CACHE_HOME": "/experiments/outputs/.cache"},
    ).wait(RUN_SECONDS)  # fmt: skip
    assert code == 0, text
    assert result(outputs / "run") == undisturbed
    assert {path.stat().st_uid for path in outputs.rglob("*")} == {12345}


def test_what_needs_a_temporary_folder_says_so_on_a_read_only_file_system(
    image: Image, outputs: Path, tmp_path: Path
) -> None:
    code, text = Container(
        image, (*DDPEXP, "plan", *SMALL), tmp_path / "container", volumes={"/experiments/outputs": outputs},
        read_only=True, environ={"XDG_CACHE_HOME": "/experiments/outputs/.cache"},
    ).wait(120)  # fmt: skip
    assert code == 1
    assert "set TMPDIR to a folder that can be written, or start the container with --tmpfs /tmp" in text


def test_a_second_container_with_the_same_host_name_does_not_take_a_run_that_is_in_use(
    image: Image, outputs: Path, tmp_path: Path
) -> None:
    command = (*TRAIN, "trainer.epochs=3000", "run.dir=outputs/run")
    first = Container(image, command, tmp_path / "first", volumes={"/experiments/outputs": outputs}, name="host")
    first.wait_for(r"^step ")
    code, text = Container(
        image, command, tmp_path / "second", volumes={"/experiments/outputs": outputs}, name="host"
    ).wait(60)
    assert code == 2
    assert "run.dir=outputs/run is still in use after 10 s" in text
    assert "cannot be checked from this host" in text
    first.kill()


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them, and no names."""
    names = [f"ddpexp-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.7.{number + 2}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "elastic"])
def test_two_containers_are_two_machines(
    image: Image, undisturbed: tuple[str, int, str], network: Sequence[str], outputs: Path, tmp_path: Path,
    launcher: str,
) -> None:  # fmt: skip
    host, port = "10.99.7.2", 29500  # free: the networks are new
    words = [*SETTINGS, "run.dir=outputs/run"]
    containers = []
    for number, name in enumerate(network):
        spawn = ["trainer.nodes=2", f"launcher.node_rank={number}", f"launcher.master_addr={host}"]
        spawn += [f"launcher.master_port={port}", "trainer.gpus=1"]
        torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", f"--master-addr={host}"]
        torchrun += [f"--master-port={port}", "-m", "ddpexp", "launcher=torchrun-env"]
        elastic = ["launcher=elastic", "trainer.nodes=2:2", f"launcher.rdzv_endpoint={host}:{port}", "trainer.gpus=1"]
        commands = {"spawn": [*DDPEXP, *spawn], "torchrun": torchrun, "elastic": [*DDPEXP, *elastic]}
        containers.append(
            Container(
                image, [*commands[launcher], *words], tmp_path / name, volumes={"/experiments/outputs": outputs},
                network=name, name=f"node{number}", address=f"10.99.7.{number + 2}",
            )
        )  # fmt: skip
    ends = [container.wait(RUN_SECONDS) for container in containers]
    assert [code for code, _ in ends] == [0, 0], ends
    assert result(outputs / "run") == undisturbed
