"""Many jobs as one job array of Slurm.

The script, what is cut and refused, and real arrays on a cluster of two hosts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpexp.errors import FinishedError, RefusedError
from ddpexp.launch import Failed, Job, Lifecycle, Outcome, WorkerRequest
from ddpexp.launch.launchers.base import Submitter
from ddpexp.launch.launchers.slurm import Slurm
from ddpexp.launch.launchers.slurm_array import Kind, by_kind, cut, follow, submit
from ddpexp.system.job_schedulers.slurm import SLURM, array_size
from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, calling, finish
from tests.launch.launchers.test_slurm import begun, requeue_now, slurm_output, state_of, steps
from tests.points import Recipe, wait_for
from tests.refusals import command_refused, refused


def state_names(job_ids: Iterable[str]) -> dict[str, str]:
    return {job_id: state.name for job_id, state in SLURM.states(job_ids).items()}


CODE = """\
from pathlib import Path


class Gated(Sides):
    # Fifty milliseconds a step until it may run faster, with a mark for every rank that has begun to train.
    def __init__(self, folder):
        self.folder = folder

    def step(self, model, batch):
        open(f"{self.folder}/train{RANK}", "w").close()
        if not Path(self.folder, "go").exists():
            time.sleep(0.05)
        return super().step(model, batch)
"""

DRIVER = """\
import json, sys
from pathlib import Path

from ddpexp.run.outcome import stop_on_signals
from ddpexp.config.parse import parse
from ddpexp.config.compose import compose
from ddpexp.errors import ENDS
from ddpexp.run.training import Training

sweep, jobs, ids = Path(sys.argv[1]), [], []
for number, words in enumerate(json.loads(sys.argv[2])):
    place = str(sweep / f"{number:04d}").replace("'", "\\\\'")
    composed = compose([*words, f"run.dir='{place}'"])
    experiment = parse(composed.values)
    training = Training(experiment, composed.text, composed.overrides, ["ddpexp", *words])
    jobs.append((experiment.launcher, training.job))

def submitted(number, job_id):
    ids.append(job_id)
    print("id", number, job_id, flush=True)

def ended(place, state, code):
    print("end", ids[place], state, code, flush=True)

stop_on_signals()
try:
    jobs[0][0].submit(jobs, sweep, submitted)
    if jobs[0][0].wait:
        jobs[0][0].follow(ids, ended)
except ENDS as error:
    if not error.quiet:
        print(f"ddpexp: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
"""What a sweep does with its jobs: the words of each are given, and its run directory is numbered."""


class Sweep:
    """A sweep of the recipe `points` in a directory of its own."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder

    def start(self, *jobs: Sequence[str], common: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
        first = [
            "--config-dir",
            str(self.recipe.folder / "conf"),
            "recipe=points",
            "launcher=slurm",
            "trainer.threads=1",
        ]
        overrides = json.dumps([[*first, *common, *own] for own in jobs])
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.folder), overrides],
            cwd=self.recipe.ddpexp.folder, env={**self.recipe.ddpexp.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __call__(self, *jobs: Sequence[str], common: Sequence[str] = (), **variables: str) -> Done:
        return finish(self.start(*jobs, common=common, **variables), self.folder)

    def result(self, number: int) -> dict[str, Any]:
        """Return the result of a job, but for the command that it came from."""
        found: dict[str, Any] = json.loads((self.folder / f"{number:04d}/result.json").read_text())
        return {key: value for key, value in found.items() if key != "command"}


def said(done: Done, what: str) -> dict[str, str]:
    """Return what the driver has said of each job: its id, or how it ended by its id."""
    lines = [line.split(" ", 2) for line in done.out.splitlines()]
    return {line[1]: line[2] for line in lines if line[0] == what}


# The text.


def job(**asked: Any) -> Job:
    return calling("module:function", [], asked=WorkerRequest(**asked))


def script(launcher: Slurm, *runs: str) -> str:
    return launcher.kind(job(), 2, Path("/sweep")).script(runs, Path("/sweep/array.sbatch"))


def test_the_script_of_an_array_starts_a_member_in_each_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    launcher = Slurm(partition="gpu", setup=("module load cuda",), python="python3", sbatch_args=("--exclusive",))
    assert script(launcher, "/sweep/0000", "/sweep/0001_lr=0.1 $x") == (
        "#!/bin/bash\n"
        "# Written by ddpexp: 2 jobs, a task each. To submit them again: sbatch /sweep/array.sbatch\n"
        "#SBATCH --job-name=ddpexp\n"
        "#SBATCH --output=/sweep/logs/slurm-%A.log\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --chdir=/tmp\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --signal=USR2@85\n"
        "#SBATCH --requeue\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --array=0-1\n"
        "\n"
        "ddpexp_runs=(\n"
        "  /sweep/0000\n"
        "  '/sweep/0001_lr=0.1 $x'\n"
        ")\n"
        "ddpexp_run=${ddpexp_runs[SLURM_ARRAY_TASK_ID]:?has no such task}\n"
        'exec >>"$ddpexp_run/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log" 2>&1\n'
        "module load cuda\n"
        "exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 python3 -m ddpexp member "
        "\"$ddpexp_run\"\n"
    )  # fmt: skip


def test_the_number_of_jobs_at_once_is_passed_to_slurm_and_to_nobody_else() -> None:
    assert "#SBATCH --array=0-0%3\n" in script(Slurm(array_parallelism=3), "/sweep/0000")
    assert "%3" not in Slurm(array_parallelism=3).script(job(), 1, Path("/run"))


def test_the_tasks_are_ours_whatever_sbatch_args_say() -> None:
    lines = script(Slurm(sbatch_args=("--array=0-99",)), "/sweep/0000").splitlines()
    assert [line for line in lines if "--array" in line] == ["#SBATCH --array=0-99", "#SBATCH --array=0-0"]


@pytest.mark.fault(71, "S9")
@pytest.mark.parametrize(
    "name", ["two  words", 'it\'s "a"', "$(touch pwned)`touch pwned`;touch pwned", "b\\s %A_%a", "a\nb", "ünï☃"]
)
def test_bash_hands_a_hostile_run_directory_to_srun_unchanged(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    run.mkdir()
    program = tmp_path / "srun"
    program.write_text('#!/bin/sh\nfor word; do :; done\nprintf "[%s]" "$word"\n')
    program.chmod(0o755)
    text = script(Slurm(), "/elsewhere", str(run))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (run / "slurm-7_1.log").read_text() == f"[{run}]"
    assert not list(tmp_path.rglob("pwned"))
    done = subprocess.run(
        ["bash", "-c", text], env={**environ, "SLURM_ARRAY_TASK_ID": "2"}, capture_output=True, text=True, timeout=20
    )
    assert done.returncode != 0
    assert "has no such task" in done.stderr


def test_jobs_with_the_same_sbatch_options_share_arrays_of_a_size_that_slurm_accepts() -> None:
    one, other = Kind((), (), "srun", None), Kind(("#SBATCH --time=5",), (), "srun", None)
    jobs = [job() for _ in range(5)]
    found = cut(by_kind([one, other, one, one, one], jobs), 3)
    assert [(kind, [number for number, _ in part]) for kind, part in found] == [
        (one, [0, 2, 3]),
        (one, [4]),
        (other, [1]),
    ]
    assert [job for _, job in found[0][1]] == [jobs[0], jobs[2], jobs[3]]
    # Run directories are no difference, the overrides for the job's size or time are.
    launchers = [Slurm(), Slurm(), Slurm(time=5)]
    assert len({launcher.kind(job(), 1, Path("/sweep")) for launcher in launchers}) == 2
    assert len({Slurm().kind(job(), nodes, Path("/sweep")) for nodes in (1, 2)}) == 2


def test_slurm_is_a_launcher_that_submits() -> None:
    assert isinstance(Slurm(), Submitter)
    assert Slurm().submits


@pytest.mark.parametrize(
    ("environ", "name", "exact"),
    [
        ({}, None, None),
        ({"SLURM_JOB_ID": "7"}, "7", "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2", "7"),
        ({"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "5_3", "5_3"),
    ],
)
def test_a_task_of_an_array_is_called_by_its_place_in_it(
    environ: dict[str, str], name: str | None, exact: str | None
) -> None:
    assert (SLURM.job_id(environ), SLURM.unique_job_id(environ)) == (name, exact)


def test_ids_are_numbers_of_jobs_and_of_tasks() -> None:
    assert all(map(SLURM.is_job_id, ("7", "12_0", "12_345")))
    assert not any(map(SLURM.is_job_id, ("", "_", "7_", "_7", "7_[1-3]", "-1", "7 8", "--me", "7_1_2", "٧", None, 7)))


def test_without_slurm_nothing_is_known_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert state_names(["7", "7_1", "none"]) == {"7": "UNKNOWN", "7_1": "UNKNOWN", "none": "UNKNOWN"}
    assert (SLURM.is_over("7_1"), array_size()) == (None, 1001)


# Programs that answer as Slurm does, for a cluster with other limits, and a signal at a moment that nobody could hit.


class Directory(Lifecycle):
    """A job that makes a directory and does nothing."""

    needs = "the same"

    def __init__(self, run: Path) -> None:
        self.job = Job(self, portable=self)
        self.run, self.prepared, self.ended = run, 0, ""

    def foresee(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        return {}

    def prepare(self) -> None:
        self.prepared += 1

    def create(self) -> Path:
        try:
            self.run.mkdir()
        except FileExistsError:
            raise (FinishedError if (self.run / "done").exists() else RefusedError)(
                f"{self.run.name} is there."
            ) from None
        self.submitted()
        return self.run

    def submitted(self, **facts: Any) -> None:
        (self.run / "result.json").write_text(json.dumps({"status": "submitted", **facts}))

    def withdraw(self, others: Sequence[Path]) -> None:
        pytest.fail("a job of an array keeps its folder")

    def end(self, outcome: Outcome | None) -> str:
        self.ended = outcome.failure.message if isinstance(outcome, Failed) else "interrupted"
        return ""


def programs(folder: Path, **texts: str) -> str:
    """Return a PATH on which there are these programs of a shell."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


COUNTS = 'cd "${0%/*}"; echo >>count; n=$(wc -l <count)'  # how often this one was started


def test_what_is_too_large_for_an_array_is_split_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = "echo 'MaxArraySize            = 5'; echo 'SchedulerParameters     = bf_interval=1,max_array_tasks=3'"
    refuses = 'if [ $n = 3 ]; then echo "sbatch: error: No more." >&2; exit 1; fi'
    monkeypatch.setenv(
        "PATH",
        programs(tmp_path / "bin", scontrol=config, sbatch=f'{COUNTS}; {refuses}; echo "$n$SBATCH_ARRAY_INX;cluster"'),
    )
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-99")
    assert array_size() == 3
    jobs = [Directory(tmp_path / f"{number}") for number in range(8)]
    jobs_of = by_kind([Slurm(array_parallelism=2).kind(job(), 1, tmp_path)] * 8, [each.job for each in jobs])
    ids: dict[int, str] = {}
    with refused("sbatch"):
        submit(jobs_of, tmp_path, ids.__setitem__)
    assert list(ids.values()) == ["1_0", "1_1", "1_2", "2_0", "2_1", "2_2"]
    assert [json.loads((job.run / "result.json").read_text()).get("job_id") for job in jobs] == [
        *ids.values(),
        None,
        None,
    ]
    assert [bool(job.ended) for job in jobs] == [False] * 6 + [True] * 2
    assert sum(job.prepared for job in jobs) == 1
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == (
        "ddpexp: 8 jobs go into 3 arrays, for an array holds 3 here; launcher.array_parallelism counts for each"
    )
    assert out.splitlines()[1].startswith("submitted array 1 of 3 jobs  sweep directory ")
    assert err == "ddpexp: 6 of 8 jobs are submitted and keep running; cancel them with scancel 1 2\n"


def test_what_is_finished_is_left_out_and_what_is_refused_keeps_all_from_being_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch=f"{COUNTS}; echo $n"))
    (tmp_path / "1/done").mkdir(parents=True)
    kinds = [Slurm().kind(job(), 1, tmp_path)] * 3
    ids: dict[int, str] = {}
    submit(by_kind(kinds, [Directory(tmp_path / f"{number}").job for number in range(3)]), tmp_path, ids.__setitem__)
    assert ids == {0: "1_0", 2: "1_1"}
    again = [Directory(tmp_path / name) for name in ("3", "0", "4")]
    with refused("0 is there."):
        submit(by_kind(kinds, [each.job for each in again]), tmp_path, ids.__setitem__)
    assert (len(ids), (tmp_path / "4").exists(), again[0].ended) == (2, False, "interrupted")
    assert not (tmp_path / "array-1.sbatch").exists()


@pytest.fixture
def offline(ddpexp: Ddpexp) -> Sweep:
    return Sweep(Recipe(ddpexp), ddpexp.folder / "sweep")


@pytest.mark.slow
def test_a_signal_while_sbatch_runs_loses_no_job(offline: Sweep, tmp_path: Path) -> None:
    stops = 'if [ $n = 2 ]; then kill -TERM $PPID; sleep 0.2; fi; echo "$n"'
    path = programs(tmp_path / "bin", sbatch=f"{COUNTS}; {stops}", srun="", scontrol="exit 1")
    done = offline(["launcher.time=10"], ["launcher.time=20"], ["launcher.time=20"], ["launcher.time=30"], PATH=path)
    assert done.code == 128 + signal.SIGTERM
    assert said(done, "id") == {"0": "1_0", "1": "2_0", "2": "2_1"}
    assert [offline.result(number) for number in range(3)] == [
        {"status": "submitted", "job_id": job_id} for job_id in ("1_0", "2_0", "2_1")
    ]
    assert not (offline.folder / "0003").exists()
    assert (
        done.err.splitlines()[0] == "ddpexp: 3 of 4 jobs are submitted and keep running; cancel them with scancel 1 2"
    )
    # Those that wait are not started twice, and what is new is submitted.
    path = programs(tmp_path / "queue", scontrol="echo '   JobState=PENDING Reason=None'", sbatch="echo 9", srun="")
    again = offline(["launcher.time=10"], PATH=path)
    assert (again.code, said(again, "id")) == (2, {})
    assert "was submitted as job 1_0, which is in the queue. Wait for it, or scancel 1_0 first." in again.err


def test_a_dry_run_prints_the_scripts_and_writes_nothing(offline: Sweep) -> None:
    done = offline(["launcher.time=10"], ["launcher.time=20"], common=["launcher.dry_run=true"], PATH="")
    assert done.code == 0
    assert done.err.count("ddpexp: asks for 1 node with") == 1
    assert done.out.count("#!/bin/bash\n") == 2
    assert re.search(rf"ddpexp_runs=\(\n  '?{offline.folder}/0001\S*\n\)\n", done.out)
    assert not offline.folder.exists()


def test_without_slurm_a_sweep_is_refused_before_anything_is_written(offline: Sweep) -> None:
    done = offline([], PATH="")
    command_refused(done, "launcher=slurm: sbatch")
    assert not offline.folder.exists()


# Real arrays.

HOSTILE = 'it\'s "a" $(touch pwned);`touch pwned` 100% %A %a b\\s ünï☃'


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Jobs whose fork servers are forks."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    conf = os.environ.get("SLURM_CONF")
    if not conf:
        pytest.skip("SLURM_CONF is not set: there is no Slurm cluster to run on")
    login = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    return Recipe(Ddpexp(tmp_path_factory.mktemp("array"), {**login, "SLURM_CONF": conf}), CODE)


@pytest.fixture
def sweep(recipe: Recipe, tmp_path: Path) -> Sweep:
    return Sweep(recipe, tmp_path / "sweep")


@pytest.mark.slurm
@pytest.mark.fault(71, "S9")
def test_jobs_of_an_array_end_with_the_weights_of_jobs_alone(recipe: Recipe, tmp_path: Path) -> None:
    sweep = Sweep(recipe, tmp_path / HOSTILE)
    seeds = [[f"trainer.seed={seed}"] for seed in range(4)]
    # Each has a host of its own.
    overrides = ("trainer.gpus=1", "launcher.wait=true", "launcher.sbatch_args=[--exclusive]")
    done = sweep(*seeds, common=overrides)
    assert (done.code, done.err) == (0, "")
    ids = list(said(done, "id").values())
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_{task}" for task in range(4)]
    assert said(done, "end") == dict.fromkeys(ids, "COMPLETED 0")
    shown = os.path.relpath(sweep.folder, recipe.ddpexp.folder)
    assert f"submitted array {array} of 4 jobs  sweep directory {shown}\n" in done.out
    # One of them has another seed of Python's hashes than the jobs.
    own = [OWN_SERVER, None, None, None]
    alone = [
        recipe.start("trainer.gpus=1", "trainer.threads=1", *seed, environ=environ)
        for seed, environ in zip(seeds, own, strict=True)
    ]
    for number, (process, run) in enumerate(alone):
        expected = finish(process, run).result()["weights_sha256"]
        assert (sweep.result(number)["status"], sweep.result(number)["weights_sha256"]) == ("done", expected)
        assert "done    eval/loss" in (sweep.folder / f"{number:04d}/slurm-{ids[number]}.log").read_text()
    runs = [sweep.folder / f"{number:04d}" for number in range(4)]
    assert {host for run in runs for host in json.loads((run / "manifest.json").read_text())["hosts"]} == {
        "node0",
        "node1",
    }
    assert (sweep.folder / "logs/slurm.log").read_text() == ""  # Slurm's patterns do not work beside a backslash
    assert not [*tmp_path.rglob("pwned"), *recipe.ddpexp.folder.rglob("pwned")]
    assert state_names(ids) == dict.fromkeys(ids, "COMPLETED")


@pytest.mark.slow
@pytest.mark.slurm
def test_jobs_of_one_node_and_of_two_go_into_two_arrays_and_end_the_same(sweep: Sweep) -> None:
    done = sweep(
        ["trainer.nodes=2", "trainer.gpus=1"], ["trainer.nodes=1", "trainer.gpus=2"], common=["launcher.wait=true"]
    )
    assert (done.code, done.err) == (0, "")
    ids = said(done, "id")
    assert [task.partition("_")[2] for task in ids.values()] == ["0", "0"]
    assert done.out.startswith("ddpexp: 2 jobs go into 2 arrays, for their options for sbatch differ\n")
    assert sorted(path.name for path in sweep.folder.glob("*.sbatch")) == ["array-1.sbatch", "array.sbatch"]
    assert json.loads((sweep.folder / "0000/manifest.json").read_text())["hosts"] == ["node0", "node1"]
    assert sweep.result(0)["weights_sha256"] == sweep.result(1)["weights_sha256"] is not None


@pytest.mark.slow
@pytest.mark.slurm
def test_no_more_jobs_run_at_once_than_configured_and_what_never_began_is_reported(sweep: Sweep) -> None:
    setup = "launcher.setup=['date +%s.%N','sleep 0.3','date +%s.%N','exit 3']"
    done = sweep([], [], [], [], [], common=[setup, "launcher.array_parallelism=2", "launcher.wait=true"])
    assert (done.code, done.err) == (0, "")
    ids = list(said(done, "id").values())
    assert said(done, "end") == dict.fromkeys(ids, "FAILED 3")
    changes: list[tuple[float, int]] = []
    for number, job_id in enumerate(ids):
        begin, end = (sweep.folder / f"{number:04d}/slurm-{job_id}.log").read_text().split()
        changes += [(float(begin), 1), (float(end), -1)]
        assert sweep.result(number) == {"status": "submitted", "job_id": job_id}
    running, most = 0, 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    assert most == 2


@pytest.mark.slow
@pytest.mark.slurm
def test_a_task_that_is_requeued_resumes_and_no_other_start_disturbs_it(sweep: Sweep, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    process = sweep.start(
        *(["task._target_=points.Gated", f"+task.folder={tmp_path}/{number}"] for number in range(2)),
        common=["trainer.gpus=2", "trainer.epochs=40", "trainer.log_every=1", "launcher.wait=true"],
    )  # fmt: skip
    wait_for(lambda: all(begun(tmp_path / str(number), 2) for number in range(2)))
    # The command has nothing to do but to wait.
    process.send_signal(signal.SIGINT)
    done = finish(process, sweep.folder)
    array = said(done, "id")["0"].partition("_")[0]
    assert done.code == 128 + signal.SIGINT
    assert done.err == f"ddpexp: 2 jobs keep running; cancel them with scancel {array}\n"
    assert state_names([f"{array}_0", f"{array}_1", array, "99999999", "7_x"]) == {
        f"{array}_0": "RUNNING", f"{array}_1": "RUNNING", array: "RUNNING", "99999999": "FORGOTTEN", "7_x": "UNKNOWN",
    }  # fmt: skip
    assert (SLURM.is_over(f"{array}_1"), SLURM.is_over(f"{array}_2")) == (False, True)
    again = slurm_output("sbatch", "--parsable", str(sweep.folder / "array.sbatch")).strip()
    assert [state_of(f"{again}_{number}") for number in range(2)] == [("FAILED", "2:0")] * 2
    # By what Slurm does when it takes a job's nodes, and by what it sends before the end of its time.
    slurm_output("scontrol", "requeue", f"{array}_0")
    slurm_output("scancel", "--signal=USR2", f"{array}_1")
    requeue_now(f"{array}_0", f"{array}_1")
    for number in range(2):
        (tmp_path / f"{number}/go").touch()
    for number in range(2):
        job_id, run = f"{array}_{number}", sweep.folder / f"{number:04d}"
        assert state_of(job_id) == ("COMPLETED", "0:0")
        text = (run / f"slurm-{job_id}.log").read_text()
        assert text.count(f"ddpexp: restart 1 of Slurm job {job_id}\n") == 1
        assert (f"ddpexp: requeueing job {job_id}\n" in text) == (number == 1)
        assert (sweep.result(number)["status"], steps(run)) == ("done", list(range(1, 161)))
        refused = (run / f"slurm-{again}_{number}.log").read_text()
        assert (
            f"ddpexp: job {job_id} still runs in {run}. Wait for its end, or end it with scancel {job_id}.\n" in refused
        )


@pytest.mark.slurm
@pytest.mark.fault(70)
def test_what_sbatch_refuses_is_2_and_what_it_took_before_waits_and_is_not_submitted_twice(sweep: Sweep) -> None:
    overrides = [["launcher.partition=main"], ["launcher.partition=main"], ["launcher.partition=nosuch"]]
    done = sweep(*overrides, common=["launcher.sbatch_args=[--hold]"])
    assert done.code == 2
    ids = list(said(done, "id").values())
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_0", f"{array}_1"]
    told, refused = done.err.splitlines()
    assert told == f"ddpexp: 2 of 3 jobs are submitted and keep running; cancel them with scancel {array}"
    assert re.fullmatch(r"ddpexp: sbatch rejected the job: .*invalid partition specified: nosuch.* script\.", refused)
    assert [sweep.result(number) for number in range(2)] == [
        {"status": "submitted", "job_id": job_id} for job_id in ids
    ]
    assert not (sweep.folder / "0002").exists()
    assert state_names(ids) == dict.fromkeys(ids, "PENDING")
    assert SLURM.is_over(ids[1]) is False
    again = sweep(*overrides[:2])
    assert (again.code, said(again, "id")) == (2, {})
    assert (
        f"was submitted as job {array}_0, which is in the queue. Wait for it, or scancel {array}_0 first." in again.err
    )
    slurm_output("scancel", f"{array}_0")
    assert state_names(ids) == {
        ids[0]: "FORGOTTEN",
        ids[1]: "PENDING",
    }  # Slurm keeps no record of a task that it never made a job of
    slurm_output("scancel", array)
    ends: list[tuple[int, str, int]] = []
    follow([*ids, "99999999"], lambda *end: ends.append(end))
    assert ends == [(0, "FORGOTTEN", 0), (1, "CANCELLED", 1), (2, "FORGOTTEN", 0)]
    assert [SLURM.is_over(job_id) for job_id in ids] == [True, True]
