"""What the machine does not give: memory, files, processes, room on the disk. The sentence names the limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddpexp.system.hardware import usable_cores
from ddpexp.system.oom import Memory
from tests.conftest import finish
from tests.faults.harness import Ended, trained
from tests.points import ITEMS, Recipe, wait_for
from tests.refusals import command_refused

EVERY = ("trainer.gpus=2", "trainer.log_every=1", "trainer.epochs=4")
CODE = """\
class Hogs(Paced):
    # Takes memory without end in rank 1, once the file is there.
    def __init__(self, when):
        self.when = when

    def step(self, model, batch):
        if RANK == 1 and os.path.exists(self.when):
            hoard = []
            while True:
                hoard.append(bytearray(b"x") * (1 << 24))
        return super().step(model, batch)


class Opens(Paced):
    # Opens files without end in rank 1.
    def step(self, model, batch):
        kept = [open("/dev/null") for _ in range(100_000 if RANK == 1 else 0)]
        return super().step(model, batch)


class Talks(Paced):
    # Prints two megabytes in rank 1.
    def step(self, model, batch):
        for _ in range(20_000 if RANK == 1 and time.sleep(0.1) is None else 0):
            print("x" * 99)
        return super().step(model, batch)


class Grows(torch.optim.SGD):
    # Keeps more than its class shows.
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["more"] = torch.zeros(1 << 19)


class Big(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.rest = nn.Parameter(torch.zeros(1 << 20))  # 4 MiB

    def forward(self, rows):
        return super().forward(rows) + 0 * self.rest[0]
"""


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a run meets is tested: fork servers are forks, but in a control group of their own."""
    return warm_environ


@pytest.fixture
def recipe(recipe: Recipe) -> Recipe:
    with (recipe.folder / "points.py").open("a") as file:
        file.write(f"\n\n{CODE}")
    return recipe


def start(recipe: Recipe, shell: str, *overrides: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the command from a shell that sets limits first."""
    arguments, run = recipe.words(*overrides)
    script = f'{shell} && exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, sys.executable, "-m", "ddpexp", *arguments],
        cwd=recipe.ddpexp.folder, env=recipe.ddpexp.environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return process, run


def limited(recipe: Recipe, shell: str, *overrides: str) -> Ended:
    return Ended(finish(*start(recipe, shell, *overrides)))


def group_of(controller: str) -> Path:
    """Return a new control group (version 1) below this process's own."""
    top = Path("/sys/fs/cgroup") / controller
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((path for _, names, path in lines if controller in names.split(",")), None)
    if path is None:
        pytest.skip(f"this machine has no control group for {controller} of version 1")
    base = top / path.strip("/")
    folder = (base if base.is_dir() else top) / f"ddpexp-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    return folder


def remove(group: Path) -> None:
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A control group of 600 MiB."""
    group = group_of("memory")
    try:
        (group / "memory.limit_in_bytes").write_text(str(600 << 20))
        if "oom_kill " not in (group / "memory.oom_control").read_text():
            pytest.skip("this kernel does not count what it kills in a control group")
        yield group
    finally:
        remove(group)


@pytest.mark.variants(1)
@pytest.mark.fault(20)
@pytest.mark.parametrize("victim", ["rank", "server"])
def test_out_of_memory_is_reported_with_the_limit(recipe: Recipe, memory: Path, tmp_path: Path, victim: str) -> None:
    overrides = (
        "task._target_=points.Hogs",
        f"+task.when={tmp_path}/now",
        "trainer.epochs=50000",
        "trainer.log_every=1",
    )
    process, run = start(recipe, f"echo $$ > {memory}/cgroup.procs", *overrides, "trainer.gpus=2")
    wait_for(lambda: process.poll() is not None or trained(run, 3))
    if victim == "server":
        [server] = [pid for pid in children(process.pid) if children(pid)]
        Path(f"/proc/{server}/oom_score_adj").write_text("1000")
    (tmp_path / "now").touch()
    ended = Ended(finish(process, run))
    error = ended.failed(
        rank=1 if victim == "rank" else 0, says="killed.*: out of memory: the control group ", step=False
    )
    assert (
        f"out of memory: the control group {memory} may use 600 MiB. Use a smaller trainer.micro_batch_size"
        in error["message"]
    )
    assert error["signal"] == signal.SIGKILL
    assert error["kind"] == ("SIGKILL" if victim == "rank" else "ServerLost")


def children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.fault(20)
def test_a_kill_that_the_kernel_did_not_count_is_not_called_out_of_memory(recipe: Recipe) -> None:
    process, run = recipe.start(*EVERY, environ={"DDPEXP_FAULT": "forward:kill:1:5"})
    ended = Ended(finish(process, run))
    error = ended.failed(rank=1, says="killed by SIGKILL")
    assert error["message"] == "killed by SIGKILL"
    assert "memory" not in ended.done.err


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, None),
        # Killed in it, but nothing that was full.
        ({"sys/fs/cgroup/memory/a/b/memory.oom_control": "oom_kill 1"}, None),
        (
            {"sys/fs/cgroup/memory/a/b/memory.oom_control": "oom_kill 1", "sys/fs/cgroup/memory/a/memory.failcnt": "3"},
            "the control group {root}/sys/fs/cgroup/memory/a may use 2 GiB.",
        ),
        (
            {"sys/fs/cgroup/c/memory.events": "oom 1\noom_kill 1",
                "sys/fs/cgroup/c/memory.events.local": "oom 1\noom_kill 1"},
            "the control group {root}/sys/fs/cgroup/c may use 512.5 MiB.",
        ),
        ({"proc/vmstat": "nr 1\noom_kill 8"}, "the kernel has killed a process on this machine for lack of memory."),
    ],
    ids=["nothing", "no group was full", "version 1, the parent's limit", "version 2", "machine"],
)  # fmt: skip
def test_what_the_kernel_counts_is_read_from_both_versions_of_control_groups(
    tmp_path: Path, files: dict[str, str], says: str | None
) -> None:
    """Files of our own stand for the kernel's: this machine has one version."""
    before = {
        "proc/self/cgroup": "5:memory:/a/b\n0::/c",
        "proc/vmstat": "nr 1\noom_kill 7",
        "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill 0",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2 << 30),
        "sys/fs/cgroup/memory/a/memory.failcnt": "2",
        "sys/fs/cgroup/memory/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/a/b/memory.failcnt": "0",
        "sys/fs/cgroup/c/memory.events": "oom 0\noom_kill 0",
        "sys/fs/cgroup/c/memory.events.local": "oom 0\noom_kill 0",
        "sys/fs/cgroup/c/memory.max": str((512 << 20) + (512 << 10)),
    }
    write(tmp_path, before)
    memory = Memory(tmp_path)
    write(tmp_path, files)
    verdict = memory.verdict()
    assert (verdict is None) == (says is None)
    if says:
        assert f"out of memory: {says.format(root=tmp_path)} Use a smaller" in str(verdict)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.fault(23)
def test_sixty_four_files_are_enough_for_two_workers(recipe: Recipe) -> None:
    ended = limited(recipe, "ulimit -n 64", *EVERY, "logger=tensorboard")
    assert (ended.done.code, ended.done.err) == (0, "")


@pytest.mark.fault(23)
def test_the_soft_limit_of_files_is_raised_silently(recipe: Recipe) -> None:
    ended = limited(recipe, "ulimit -Sn 32", *EVERY)
    assert (ended.done.code, ended.done.err) == (0, "")


@pytest.mark.fault(23)
def test_too_few_files_for_the_workers_are_refused_before_work(recipe: Recipe) -> None:
    ended = limited(recipe, "ulimit -n 64", "trainer.gpus=8")
    command_refused(ended.done, "8 workers: ulimit -n 68")
    assert not ended.done.run.exists()


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    ("overrides", "files"),
    [(("task._target_=points.Opens",), 44), (ITEMS, 44), (ITEMS, 48), (ITEMS, 50)],
    ids=["task", "loader", "worker", "rank"],
)
def test_a_rank_that_runs_out_of_files_names_the_limit(recipe: Recipe, overrides: tuple[str, ...], files: int) -> None:
    ended = limited(recipe, f"ulimit -n {files}", *EVERY, *overrides)
    assert ended.done.code == 1, ended.done
    assert f"this shell allows {files} open files (ulimit -n): raise that limit" in ended.done.err.splitlines()[-1]
    assert f"this shell allows {files} open files" in ended.error["message"]
    assert "Traceback" not in ended.done.out + ended.done.err
    log = (ended.done.run / f"ranks/{ended.error['rank']}.log").read_text()
    assert ("Traceback" in log) == (overrides != ITEMS)  # of the recipe's code


@pytest.mark.fault(23)
def test_a_checkpoint_that_is_larger_than_a_file_may_be_is_refused_before_the_first_step(recipe: Recipe) -> None:
    ended = limited(recipe, "ulimit -f 1024", *EVERY, "model._target_=points.Big", "strategy.reduce_through=backend")
    command_refused(ended.done, "a file of a checkpoint: 1,024 KiB a file (ulimit -f)", out=None)
    assert not ended.done.run.exists()


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    ("overrides", "rank"),
    [
        pytest.param(
            ("optimizer._target_=points.Grows", "optimizer.lr=0.05"), 0, marks=pytest.mark.slow, id="checkpoint"
        ),
        pytest.param(("task._target_=points.Talks",), 1, id="log"),
    ],
)
def test_a_file_that_grows_too_large_names_the_limit(recipe: Recipe, overrides: tuple[str, ...], rank: int) -> None:
    ended = limited(recipe, "ulimit -f 1024", *EVERY, *overrides)
    error = ended.failed(rank=rank, says="File too large", step=False)
    assert "this shell allows 1,024 KiB a file (ulimit -f): raise that limit" in error["message"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of twenty megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("every", ["0", pytest.param("epoch", marks=pytest.mark.slow)])
def test_a_disk_that_holds_no_checkpoint_is_refused_before_the_first_step(
    recipe: Recipe, disk: Path, every: str
) -> None:
    (disk / "full").write_bytes(bytes(14 << 20))
    overrides = ("model._target_=points.Big", f"trainer.checkpoint_every={every}")
    done = recipe(*EVERY, *overrides, run=disk / "run")
    command_refused(done, "a checkpoint takes 8.39 MB: run.dir", out=None)
    assert re.search(r"/disk/run has 6\.\d\d MB free", done.err), done.err
    assert not (disk / "run/metrics.jsonl").exists() or not (disk / "run/metrics.jsonl").read_text()
    (disk / "full").unlink()
    assert (
        recipe(*EVERY, *overrides, "trainer.keep_last=1", run=disk / "run").code == 0
    )  # the same command, when there is room


@pytest.fixture
def few_files(tmp_path: Path) -> Iterator[Path]:
    """A disk of twenty megabytes that can hold so many files: a run's own, and a checkpoint or two."""
    place = tmp_path / "few"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m,nr_inodes=40", "none", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.fault(23)
def test_a_disk_that_can_hold_no_more_files_says_so_at_each_moment(recipe: Recipe, few_files: Path) -> None:
    for number in range(20):
        (few_files / str(number)).touch()
    before = recipe(*EVERY, run=few_files / "run")  # its own files fit, a checkpoint's do not
    command_refused(before, "a checkpoint takes 10 files: of its 40 (inodes", out=None)
    assert not (few_files / "run").exists()
    for number in range(12):
        (few_files / str(number)).unlink()
    full = recipe(*EVERY, "trainer.keep_last=null", run=few_files / "run")  # more checkpoints than it can hold
    assert full.code == 1, full
    assert "No space left on device (no inodes are left: the file system of " in full.err
    assert " holds all 40 files that it can, though " in full.err
    for number in range(20, 60):
        with suppress(OSError):
            (few_files / str(number)).touch()
    at_once = recipe(*EVERY, run=few_files / "other")
    command_refused(at_once, "run.dir: No space left on device (no inodes are left")


def test_a_full_disk_is_refused_with_one_sentence(recipe: Recipe, disk: Path) -> None:
    with (disk / "full").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    done = recipe(run=disk / "run")
    command_refused(done, "run.dir=disk/run: No space left on device (0 bytes of 21 MB", out=None)


def test_a_place_that_cannot_be_written_is_refused_at_once(recipe: Recipe, disk: Path) -> None:
    assert recipe("trainer.max_steps=4", run=disk / "run").code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for run, overrides in ((disk / "run", ("trainer.max_steps=8",)), (disk / "other", ())):
        done = recipe(*overrides, run=run)
        command_refused(done, "run.dir: Read-only file system")
        assert done.err.count("\n") == 1


@pytest.mark.fault(65)
def test_more_workers_than_cores_are_reported_in_the_headline(recipe: Recipe) -> None:
    cores = usable_cores()
    done = recipe(f"trainer.gpus={cores + 1}", f"trainer.global_batch_size={8 * (cores + 1)}", "trainer.max_steps=2")
    assert done.code == 0, done
    [world] = [line for line in done.out.splitlines() if line.startswith("world ")]
    assert world.endswith(f"1 thread each; {cores + 1} share {cores} core{'s' if cores > 1 else ''}")


@pytest.mark.slow
def test_a_disk_that_will_not_hold_all_that_are_kept_is_warned_of_once(recipe: Recipe, disk: Path) -> None:
    overrides = ("model._target_=points.Big", "trainer.epochs=1")
    done = recipe("trainer.gpus=2", *overrides, run=disk / "run")
    assert done.code == 0, done
    assert (
        done.out.count("and 3 checkpoints of 8.39 MB exist at the same time (trainer.keep_last=2): saving will fail")
        == 1
    )
    assert "saving will fail" not in recipe("trainer.gpus=2", *overrides).out


@pytest.fixture
def processes() -> Iterator[Path]:
    """A control group for few processes: the limit of ulimit -u does not bind root."""
    group = group_of("pids")
    try:
        yield group
    finally:
        remove(group)


@pytest.mark.variants(1)
@pytest.mark.fault(23)
@pytest.mark.parametrize(
    ("allowed", "workers", "says"),
    [(2, 2, "the process of rank 0 could not be started: Resource temporarily unavailable"), (12, 8, "")],
    ids=["process", "thread"],
)
def test_a_process_too_many_ends_the_run_with_the_limit(
    recipe: Recipe, processes: Path, allowed: int, workers: int, says: str
) -> None:
    (processes / "pids.max").write_text(str(allowed))
    ended = limited(recipe, f"echo $$ > {processes}/cgroup.procs", *EVERY, f"trainer.gpus={workers}")
    assert ended.done.code == 1, ended.done
    last = ended.done.err.splitlines()[-1]
    assert f"{processes}/pids.max allows {allowed} processes and threads and " in last
    assert " are there: raise that limit, or use fewer workers" in last
    assert says in last
    assert ended.error["message"] in last


@pytest.mark.variants(1)
@pytest.mark.fault(23)
@pytest.mark.parametrize("allowed", [50_000, 100_000, 400_000])
def test_too_little_address_space_is_named(recipe: Recipe, allowed: int) -> None:
    ended = limited(recipe, f"ulimit -v {allowed}", *EVERY)
    assert ended.done.code in (1, 2), ended.done
    sentence = f"this shell allows {allowed:,} KiB of address space (ulimit -v): raise that limit"
    assert sentence in ended.done.err.replace("This shell", "this shell")  # where torch for CUDA cannot be mapped
    assert "Traceback" not in ended.done.err
    assert allowed == 400_000 or not ended.done.run.exists()
