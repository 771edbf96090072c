"""Going on with a run directory: the same command again, and `ddpexp resume`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpexp.config.compare import Change
from ddpexp.launch import Layout
from ddpexp.run import history
from ddpexp.run.differences import Value, over_steps
from ddpexp.run.directory import RunDir
from ddpexp.run.manifest import accepted
from ddpexp.run.resume import PreviousRun, Start, _finished, _has_other_callbacks, _is_longer, inspect, resolve_layout
from ddpexp.run.resume_arguments import merge_overrides
from tests.cli.test_evaluate import listing
from tests.conftest import PATIENCE, ROOT, SMALL, Ddpexp, Done, finish, starts_of
from tests.points import Recipe, wait_for
from tests.refusals import command_refused

SLOW = """\
class Slow(Sides):
    def step(self, model, batch):
        time.sleep(0.05)
        return super().step(model, batch)
"""
LONG = ("task._target_=points.Slow", "trainer.epochs=200", "trainer.log_every=1")
SHORTER = ("task._target_=points.Sides", "trainer.epochs=25")
"""What makes the rest of a long run quick."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddpexp")


@pytest.fixture(scope="session")
def environ(warm_single_environ: dict[str, str]) -> dict[str, str]:
    """How a run is resumed is tested, not how fork servers start."""
    return warm_single_environ


@pytest.fixture
def recipe(ddpexp: Ddpexp) -> Recipe:
    return Recipe(ddpexp, SLOW)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Done:
    """One run of two workers, which tests copy."""
    done = Ddpexp(tmp_path_factory.mktemp("finished"), environ)(*SMALL, "trainer.gpus=2")
    assert done.code == 0, done.err
    return done


@pytest.fixture
def run(finished: Done, tmp_path: Path) -> Path:
    """A copy of the finished run, as `run` in the current folder of the command."""
    return shutil.copytree(finished.run, tmp_path / "run")


@pytest.fixture
def stopped(run: Path) -> Path:
    """The same run as it is when it was interrupted before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    change(run / "result.json", status="interrupted", step=0, epoch=0, metrics={}, weights_sha256=None)
    return run


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def again(ddpexp: Ddpexp, *overrides: str, environ: dict[str, str] | None = None) -> Done:
    """Type the command of the run again."""
    return ddpexp(*SMALL, "trainer.gpus=2", "run.dir=run", *overrides, environ=environ)


def resumed(ddpexp: Ddpexp, *overrides: str, environ: dict[str, str] | None = None) -> Done:
    return ddpexp("resume", *overrides, environ=environ)


def torchrun(ddpexp: Ddpexp, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *overrides], cwd=ddpexp.folder, env=ddpexp.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def interrupted(recipe: Recipe, *overrides: str, number: int = signal.SIGTERM) -> tuple[Done, Path]:
    """Return how a long run ended that got a signal in its middle."""
    process, run = recipe.start(*LONG, *overrides)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    process.send_signal(number)
    return finish(process, run), run


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [(2, 1, ["1 worker instead of 2"]), (1, 4, ["4 workers instead of 1"]), (2, 2, [])],
)
def test_another_number_of_workers_is_noted(before: int, now: int, note: list[str]) -> None:
    previous = PreviousRun({"world": {"world_size": before, "threads": 1, "device": "cpu"}})
    layout = Layout(1, now, "cpu", "gloo", 1)
    assert resolve_layout(previous, layout, "auto") == (layout, note)


# A finished run.

FINISHED = "is finished at step 10 (eval/accuracy 67.00%): nothing to do.\n"


def test_a_finished_run_says_so_and_stays_as_it_is(ddpexp: Ddpexp, run: Path) -> None:
    before = listing(run)
    for done, name in (
        (again(ddpexp), "run.dir=run"),
        (resumed(ddpexp, "run"), "run"),
        (resumed(ddpexp, f"{run}/"), "run"),
    ):
        assert (done.code, done.out, done.err) == (0, f"ddpexp: {name} {FINISHED}", "")
    # Neither what is free nor where it is started matters to it, and no workers are there to refuse anything.
    done = again(ddpexp, "run.resume=never", "trainer.log_every=7")
    assert (done.code, done.err) == (0, "")
    assert listing(run) == before


@pytest.mark.slow
def test_every_rank_of_a_finished_run_ends_well(ddpexp: Ddpexp, run: Path) -> None:
    before = listing(run)
    done = finish(torchrun(ddpexp, *SMALL, "run.dir=run", "launcher=torchrun-env"), run)
    assert (done.code, done.out) == (0, f"ddpexp: run.dir=run {FINISHED}"), done.err
    assert "ddpexp" not in done.err
    elastic = resumed(ddpexp, "run", "launcher=elastic")
    assert (elastic.code, elastic.out, elastic.err) == (0, f"ddpexp: run {FINISHED}", "")
    assert listing(run) == before


def test_a_finished_run_cannot_become_another_one(ddpexp: Ddpexp, run: Path) -> None:
    before = listing(run)
    command_refused(resumed(ddpexp, "run", "optimizer.lr=0.5"), "run: optimizer.lr 0.1 -> 0.5")
    command_refused(again(ddpexp, "trainer.seed=1"), "run.dir=run: trainer.seed=1")
    assert resumed(ddpexp, "run", "trainer.max_steps=5").code == 0
    assert resumed(ddpexp, "run", "trainer.max_steps=20").code == 0  # the epochs end it at the same step
    assert listing(run) == before


def test_a_finished_run_resumes_when_it_is_extended(ddpexp: Ddpexp, run: Path) -> None:
    done = resumed(ddpexp, "run", "trainer.epochs=4", "trainer.max_steps=12")
    assert done.code == 0, done.err
    remark = "the learning rate's schedule follows the new length from here on"
    assert f"changed: trainer.epochs 2 -> 4 ({remark}), trainer.max_steps 10 -> 12 ({remark})\n" in done.out
    assert json.loads((run / "result.json").read_text())["step"] == 12
    assert "- trainer.max_steps=12\n" in (run / "overrides.yaml").read_text()
    assert "- trainer.max_steps=10\n" in (run / "overrides-1.yaml").read_text()
    assert yaml.safe_load((run / "config-1.yaml").read_text())["trainer"]["epochs"] == 2
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["epochs"] == 4
    manifest = RunDir(run).read(run / "manifest.json")
    assert [start.after for start in history.starts_of(RunDir(run), manifest)] == [0, 10]
    assert over_steps(history.periods_of(RunDir(run), manifest)) == {
        "trainer.epochs": (Value(0, 2), Value(10, 4)),
        "trainer.max_steps": (Value(0, 10), Value(10, 12)),
    }
    assert resumed(ddpexp, "run").out == f"ddpexp: run {FINISHED}".replace("step 10", "step 12").replace(
        "67.00", percent(run)
    )


def percent(run: Path) -> str:
    return f"{100 * json.loads((run / 'result.json').read_text())['metrics']['eval/accuracy']:.2f}"


@pytest.mark.parametrize(
    ("trainer", "longer"),
    [
        ({"max_seconds": None}, True),
        ({"max_seconds": 60}, True),
        ({"max_seconds": 30.5}, False),
        ({"max_seconds": 60, "max_steps": 10}, False),  # its steps are done as well
    ],
)
def test_a_run_out_of_time_is_finished_until_it_gets_more(trainer: dict[str, Any], longer: bool) -> None:
    result = {"step": 10, "epoch": 1.0, "elapsed_seconds": 31.0, "stopped": "trainer.max_seconds=30 reached"}
    changes = [Change("trainer.max_seconds", 30, trainer["max_seconds"], "typed")]
    assert _is_longer(changes, trainer, result) == longer
    assert _finished("run", result, changes) == (
        "run is finished at step 10, where it ended early: trainer.max_seconds=30 reached; there is nothing to do."
    )


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        (["trainer.epochs=3"], "3 more epochs are trainer.epochs=6."),
        (["trainer.epochs=9", "trainer.epochs=2"], "2 more epochs are trainer.epochs=5."),
        (["trainer.max_steps=10"], "10 more steps are trainer.max_steps=25."),
        (["trainer.epochs=null", "trainer.seed=3"], ""),
        ([], ""),
    ],
)
def test_a_length_that_a_finished_run_has_is_said_to_count_from_its_beginning(typed: list[str], advice: str) -> None:
    said = _finished("run", {"step": 15, "epoch": 3.0}, [], typed)
    assert said.startswith("run is finished at step 15: nothing to do.")
    assert said.endswith(advice or "nothing to do.")
    assert [Change("trainer.epochs", 3, new, "typed").is_length for new in (5, None)] == [True, False]


def test_a_run_that_a_callback_has_ended_says_how_it_continues() -> None:
    result = {"step": 10, "stopped": "callbacks.early_stopping: eval/loss has not improved"}
    assert _finished("run", result, []) == (
        "run is finished at step 10, where it ended early: callbacks.early_stopping: eval/loss has not improved. To "
        "continue, change callbacks.early_stopping, or leave it out with callbacks=none."
    )
    patience = Change("callbacks.early_stopping.patience", 3, 6, "typed")
    assert _has_other_callbacks([patience], result)
    assert not _has_other_callbacks([patience], {"step": 10, "stopped": None})
    assert not _has_other_callbacks([Change("trainer.log_every", 3, 6, "free")], result)


# An unfinished one.


def test_the_same_command_resumes_and_lists_nothing(ddpexp: Ddpexp, stopped: Path) -> None:
    (stopped / ".result.json.0123abcd").touch()
    (stopped / ".mine.json.0123abcd").touch()
    (stopped / "error.json").write_text("{}")
    config = (stopped / "config.yaml").stat()
    done = again(ddpexp)
    assert (done.code, done.err) == (0, "ddpexp: resuming run\n")
    assert "recipe  mnist\n" in done.out  # not always its start: gloo of torch 2.10 prints a line before
    names = set(os.listdir(stopped))
    assert not {"config-1.yaml", "overrides-1.yaml", ".result.json.0123abcd", "error.json"} & names
    assert {"error-1.json", ".mine.json.0123abcd"} <= names
    assert (stopped / "config.yaml").stat().st_ino == config.st_ino
    first, second = starts_of(stopped)
    assert {key for key in first if first[key] != second[key]} <= {"started", "command"}
    assert set(second) == {
        "format",
        "changes", "code_diff", "command", "git", "hosts", "inputs", "owners", "packages", "platform", "python",
        "restart",
        "started", "world",
    }  # fmt: skip


def test_a_manifest_of_one_start_alone_becomes_the_first_of_several(ddpexp: Ddpexp, stopped: Path) -> None:
    manifest = json.loads((stopped / "manifest.json").read_text())
    del manifest["earlier"]
    (stopped / "manifest.json").write_text(json.dumps(manifest))
    assert resumed(ddpexp, "run", environ={"SLURM_RESTART_COUNT": "3"}).code == 0
    first, second = starts_of(stopped)
    assert (first["started"], first["restart"], second["restart"]) == (manifest["started"], None, 3)


def test_what_is_free_to_change_is_listed_in_the_log(ddpexp: Ddpexp, stopped: Path) -> None:
    done = resumed(ddpexp, "run", "trainer.log_every=2", "trainer.gpus=1", "optimizer.lr=0.02", "scheduler=cosine")
    assert done.code == 0, done.err
    log = (stopped / "run.log").read_text()
    for line in (
        "1 worker instead of 2",
        "changed: optimizer.lr 0.1 -> 0.02, scheduler._target_ onecycle -> cosine, ",
        "also other than before: trainer.gpus 2 -> 1, trainer.log_every 5 -> 2",
    ):
        assert line in done.out
        assert line in log
    assert {"config-1.yaml", "overrides-1.yaml"} <= set(os.listdir(stopped))
    # What was accepted is what the run is from here on.
    change(stopped / "result.json", status="interrupted")
    after = resumed(ddpexp, "run")
    assert after.code == 0
    assert "changed" not in after.out
    assert not (stopped / "config-2.yaml").exists()


def test_what_has_changed_without_an_override_is_refused(ddpexp: Ddpexp, stopped: Path) -> None:
    # As a default that was another one when the run was started.
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("weight_decay: 0.0005", "weight_decay: 0.01"))
    change(stopped / "manifest.json", config=accepted(config.read_text()))
    before = listing(stopped)
    command_refused(again(ddpexp), "run.dir=run: optimizer.weight_decay=0.01")
    command_refused(again(ddpexp, "data.embedded_train=700"), "run.dir=run: data.embedded_train=700")
    assert listing(stopped) == before
    assert again(ddpexp, "optimizer.weight_decay=0.01").code == 0


def test_other_data_is_refused_with_both_names(ddpexp: Ddpexp, stopped: Path) -> None:
    manifest = json.loads((stopped / "manifest.json").read_text())
    for data, name in (({"sha256": "0" * 64}, "embedded-digits (000000000000)"), ({"name": "mnist"}, "mnist (")):
        change(stopped / "manifest.json", data={**manifest["data"], **data})
        before = listing(stopped)
        done = again(ddpexp)
        command_refused(done, f"run.dir=run: {name}")
        assert f"embedded-digits ({manifest['data']['sha256'][:12]})" in done.err
        after = listing(stopped)
        assert after.pop("lock") == before.pop("lock") == b""  # had, and let go of
        assert after == before


def test_threads_stay_as_they_were(ddpexp: Ddpexp, stopped: Path) -> None:
    manifest = json.loads((stopped / "manifest.json").read_text())
    found = manifest["world"]["threads"]
    change(stopped / "manifest.json", world={**manifest["world"], "threads": found + 1})
    done = again(ddpexp)
    assert done.code == 0
    assert (
        f"threads: {found + 1} each as before, because another number changes the last bits of the result; " in done.out
    )
    assert f"this start would have chosen {found} (trainer.threads={found})\n" in done.out
    assert f", {found + 1} threads each" in done.out
    change(stopped / "result.json", status="interrupted")
    arguments = again(ddpexp, f"trainer.threads={found}")
    assert "as before" not in arguments.out
    assert json.loads((stopped / "manifest.json").read_text())["world"]["threads"] == found


def test_an_optimizer_stays_fused_as_the_first_start_has_chosen(ddpexp: Ddpexp, stopped: Path) -> None:
    """The first start had CPU workers; the manifest is changed to one of a start with GPUs."""
    assert json.loads((stopped / "manifest.json").read_text())["resolved"] == {"optimizer.fused": False}
    change(stopped / "manifest.json", resolved={"optimizer.fused": True})
    done = again(ddpexp)
    assert done.code == 0
    assert "\noptimizer.fused=auto: parameters are updated in one kernel" in done.out
    assert json.loads((stopped / "manifest.json").read_text())["resolved"] == {"optimizer.fused": True}


def test_never_refuses_and_require_wants_a_checkpoint(ddpexp: Ddpexp, stopped: Path) -> None:
    before = listing(stopped)
    command_refused(again(ddpexp, "run.resume=never"), "run.dir=run: run.resume=never")
    command_refused(again(ddpexp, "run.resume=require"), "run.dir=run: no complete checkpoint")
    command_refused(resumed(ddpexp, "run", "run.resume=never"), "run.resume=never: forbids")
    assert listing(stopped) == before
    command_refused(ddpexp(*SMALL, "run.dir=new", "run.resume=require"), "run.resume=require: no run")
    command_refused(ddpexp(*SMALL, "--", "run.resume=require"), "run.resume=require: run.dir is not set")
    assert not (ddpexp.folder / "new").exists()
    # `never` was in the first command; the other one was given to resume.
    (stopped / "config.yaml").write_text((stopped / "config.yaml").read_text().replace("resume: auto", "resume: never"))
    assert resumed(ddpexp, "run").code == 0


@pytest.mark.variants(2)
@pytest.mark.parametrize("left", [(), ("ranks/",), ("lock",), ("ranks/", "lock"), ("ranks/", "lock", "config.yaml")])
def test_a_start_that_was_killed_early_leaves_a_directory_that_can_be_used(
    ddpexp: Ddpexp, finished: Done, left: tuple[str, ...]
) -> None:
    folder = ddpexp.folder / "run"
    folder.mkdir()
    for name in left:
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(b"" if left == ("lock",) else (finished.run / name).read_bytes())
    done = again(ddpexp)
    assert (done.code, done.err) == (0, "")
    assert json.loads((ddpexp.folder / "run/result.json").read_text())["status"] == "done"


def test_what_is_no_run_of_ours_is_refused_as_ever(ddpexp: Ddpexp) -> None:
    folder = ddpexp.folder / "run"
    for names in (("config.yaml",), ("lock",), ("manifest.json", "lock"), ("ranks/0.log",)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("mine")
        command_refused(again(ddpexp), "run.dir=run: not empty")
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(names)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("manifest.json", "{", "damaged"),
        ("manifest.json", "[]", "JSON object"),
        ("result.json", "{", "damaged"),
        ("config.yaml", "a: [", "cannot be read"),
        ("config.yaml", "- a\n", "configuration"),
        ("config.yaml", "x: !!python/object/apply:os.system ['touch pwned']", "cannot be read"),
    ],
)
def test_a_damaged_run_is_refused_and_left_alone(ddpexp: Ddpexp, run: Path, name: str, text: str, word: str) -> None:
    (run / name).write_text(text)
    before = listing(run)
    command_refused(resumed(ddpexp, "run") if name == "config.yaml" else again(ddpexp), f"run/{name}: {word}")
    assert listing(run) == before
    assert not (ddpexp.folder / "pwned").exists()


def test_a_line_break_in_the_name_is_refused_before_anything_is_made(ddpexp: Ddpexp) -> None:
    for word in ("run.dir='a\nb'", "run.dir='a\x07b'"):
        command_refused(ddpexp(*SMALL, word), "run.dir: control character")
    assert os.listdir(ddpexp.folder) == []


# How an interrupted run is resumed.


def test_the_last_line_can_be_typed_whatever_the_names_are(ddpexp: Ddpexp, environ: dict[str, str]) -> None:
    inner = Ddpexp(ddpexp.folder / "a folder", environ)
    inner.folder.mkdir()
    recipe = Recipe(inner, SLOW)
    process, run = recipe.start(*LONG, "run.trust=[points]", "run.dir=-x")
    wait_for(lambda: (inner.folder / "-x/metrics.jsonl").is_file())
    process.send_signal(signal.SIGINT)
    done = finish(process, run)
    assert done.code == 128 + signal.SIGINT
    last = done.err.splitlines()[-1]
    conf = str(recipe.folder / "conf")
    assert shlex.split(last) == [
        "python", "-m", "ddpexp", "resume", "./-x", "--config-dir", conf, "run.trust=[points]",
    ]  # fmt: skip


@pytest.mark.slow
def test_ranks_that_are_started_externally_are_restarted_in_the_same_way(recipe: Recipe) -> None:
    arguments, run = recipe.words(*LONG, "launcher=torchrun-env")
    process = torchrun(recipe.ddpexp, *arguments)
    wait_for(lambda: (run / "metrics.jsonl").is_file())
    process.send_signal(signal.SIGTERM)
    done = finish(process, run)
    overrides = f"resume {run.name} --config-dir {recipe.folder / 'conf'} launcher=torchrun-env"
    assert re.search(f"; resume it with:\n\\S+ -m torch.distributed.run .*-m ddpexp {re.escape(overrides)}\n", done.err)
    again = finish(torchrun(recipe.ddpexp, *overrides.split(), *SHORTER), run, 60)
    assert again.code == 0, again.err
    assert again.out.count("changed: trainer.epochs 200 -> 25, task._target_ points.Slow -> points.Sides\n") == 1
    assert again.result()["status"] == "done"
    # Without torchrun the stored launcher cannot work, and says what can.
    change(run / "result.json", status="interrupted")
    alone = resumed(recipe.ddpexp, run.name, "--config-dir", str(recipe.folder / "conf"))
    command_refused(alone, "launcher=torchrun-env: launcher=spawn")
    spawned = resumed(recipe.ddpexp, run.name, "--config-dir", str(recipe.folder / "conf"), "launcher=spawn")
    assert spawned.code == 0, spawned.err
    assert "1 worker instead of 2" in spawned.out


@pytest.mark.slow
def test_elastic_starts_its_ranks_for_a_run_that_resumes(ddpexp: Ddpexp, stopped: Path) -> None:
    done = resumed(ddpexp, "run", "launcher=elastic", "optimizer.lr=0.02")
    assert done.code == 0, done.err
    assert done.err == "ddpexp: resuming run\n"
    assert "changed: optimizer.lr 0.1 -> 0.02\n" in done.out
    assert json.loads((stopped / "result.json").read_text())["status"] == "done"


SLURM = {
    "sbatch": "#!/bin/sh\necho 12\n",
    "srun": "#!/bin/sh\n",
    "scontrol": "#!/bin/sh\necho '   JobState=PENDING Reason=None'\n",
}
"""Programs that answer as Slurm does: whether a job is submitted twice can be seen without a cluster."""


@pytest.mark.slow
def test_a_submission_resumes_in_the_same_directory_and_not_twice(ddpexp: Ddpexp, stopped: Path) -> None:
    (ddpexp.folder / "bin").mkdir()
    for name, text in SLURM.items():
        (ddpexp.folder / "bin" / name).write_text(text)
        (ddpexp.folder / "bin" / name).chmod(0o755)
    environ = {"PATH": f"{ddpexp.folder}/bin:{os.environ['PATH']}"}
    done = resumed(ddpexp, "run", "launcher=slurm", "optimizer.lr=0.02", environ=environ)
    assert done.code == 0, done.err
    assert "submitted job 12  run directory run\n" in done.out
    assert f"member {stopped.resolve()}\n" in (stopped / "job.sbatch").read_text()
    result = json.loads((stopped / "result.json").read_text())
    assert (result["status"], result["job_id"]) == ("submitted", "12")
    for second in (
        resumed(ddpexp, "run", "launcher=slurm", environ=environ),
        again(ddpexp, "optimizer.lr=0.02", environ=environ),
    ):
        command_refused(second, "run: job 12")
    # The job itself continues, and its log says what was changed when it was submitted.
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}
    command = [sys.executable, "-m", "ddpexp", "member", str(stopped)]
    job = subprocess.run(
        command, cwd=ddpexp.folder, env={**ddpexp.environ, **environ, **step, "SLURM_LOCALID": "0"},
        capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "changed: optimizer.lr 0.1 -> 0.02\n" in job.stdout
    assert json.loads((stopped / "result.json").read_text())["status"] == "done"
    assert subprocess.run(command, cwd=ddpexp.folder, env={**ddpexp.environ, **environ, **step, "SLURM_LOCALID": "0"},
                          timeout=PATIENCE, capture_output=True).returncode == 0  # fmt: skip


def test_a_longer_finished_run_without_checkpoints_reports_that_it_starts_anew(tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run"))
    text = run.config.read_text().replace("allow_changes: []", "allow_changes: [code]")
    assert "[code]" in text
    longer = Start("run", text.replace("epochs: 2", "epochs: 9"), ["trainer.epochs=9", "run.allow_changes=[code]"])
    assert not any("starts from step 0" in note for note in inspect(run, longer).notes)
    shutil.rmtree(run.checkpoints)
    note = "the run was finished at step 12 and has no checkpoint any more: it starts from step 0"
    assert note in inspect(run, longer).notes


# Wrong words.


def test_resume_says_how_it_is_used(ddpexp: Ddpexp) -> None:
    done = resumed(ddpexp)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ddpexp: resume what?\nusage: ddpexp resume RUN_DIR [key=value ...]\n")
    asked = resumed(ddpexp, "run", "--help")
    assert (asked.code, asked.out, asked.err) == (0, done.err.removeprefix("ddpexp: resume what?\n"), "")


def test_what_is_no_run_is_refused_with_its_name(ddpexp: Ddpexp, run: Path) -> None:
    (ddpexp.folder / "empty").mkdir()
    for overrides, expected in {
        "nowhere": "resume nowhere: no such directory",
        "empty": "resume empty: run directory",
        "run/config.yaml": "resume run/config.yaml: did you mean run?",
        "run/checkpoints/step-00000010": "resume run/checkpoints/step-00000010: did you mean run?",
        "run -m": "resume -m: one value",
        "--cfg job run": "resume --cfg",
        "run run.dir=other": "run.dir=other",
        "run trainer.epoch=3": "trainer.epoch: trainer.epochs?",
        "run trainer.epochs": "trainer.epochs: no value",
        "run scheduler=cosin": "scheduler=cosin: scheduler=cosine?",
        "run recipe=mnist": "recipe=mnist: run.dir",
        "run optimizer=adamw": "run: optimizer._target_=torch.optim.AdamW",
        "run launcher=mpi": "launcher=mpi: mpirun",
        "run launcher=mpl": "launcher=mpl: launcher=mpi?",
    }.items():
        command_refused(resumed(ddpexp, *overrides.split()), expected)


@pytest.mark.slow
def test_code_of_ones_own_is_trusted_again_or_named(recipe: Recipe) -> None:
    done, run = interrupted(recipe, number=signal.SIGINT)
    conf = recipe.folder / "conf"
    ddpexp = recipe.ddpexp
    alone = resumed(ddpexp, str(run))
    command_refused(alone, f"{run}: data._target_=points.load")
    assert alone.err.endswith(f" python -m ddpexp resume {run} --config-dir project/conf\n")
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("trust: []", "trust:\n  - points").replace(f"code: {recipe.folder}", "code: null"))
    command_refused(resumed(ddpexp, str(run)), f"{run}: python -m ddpexp resume {run} 'run.trust=[points]'")
    config.write_text(text)
    assert json.loads((run / "manifest.json").read_text())["command"][1] == "--config-dir"
    assert done.code == 128 + signal.SIGINT
    last = resumed(ddpexp, "--config-dir", str(conf), str(run), *SHORTER)
    assert last.code == 0, last.err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_code_is_refused_even_when_it_is_given(recipe: Recipe, run: Path) -> None:
    os.chown(run / "config.yaml", 65534, 65534)
    assert resumed(recipe.ddpexp, "run").code == 0  # ddpexp's own code alone
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("_target_: ddpexp.recipes.mnist.Linear", "_target_: points.Net"))
    done = resumed(recipe.ddpexp, "run", "--config-dir", str(recipe.folder / "conf"))
    command_refused(done, "run: model._target_=points.Net")
    assert "another user" in done.err


def test_a_configuration_that_changes_while_a_run_starts_is_not_believed(ddpexp: Ddpexp, run: Path) -> None:
    # What another process would do between the command's look and the worker's.
    program = (
        "from ddpexp.train.worker import _read_configuration; from ddpexp.run.directory import RunDir\n"
        "from pathlib import Path\n"
        "_read_configuration(RunDir(Path('run')), '0' * 64)"
    )
    argv = [sys.executable, "-c", program]
    found = subprocess.run(
        argv, cwd=ddpexp.folder, env=ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert "RefusedError: run/config.yaml has changed since the command read it" in found.stderr


@pytest.mark.slow
@pytest.mark.slurm
def test_a_run_resumes_from_the_login_node_and_in_the_users_own_srun(ddpexp: Ddpexp, stopped: Path) -> None:
    if "SLURM_CONF" not in os.environ:
        pytest.skip("no Slurm cluster: SLURM_CONF is not set")
    overrides = ("launcher=slurm", "launcher.wait=true", "trainer.nodes=2", "trainer.gpus=1", "optimizer.lr=0.02")
    done = resumed(ddpexp, "run", *overrides)
    assert (done.code, done.err) == (0, "ddpexp: resuming run\n")
    assert "changed: optimizer.lr 0.1 -> 0.02\n" in done.out
    assert [len(start["hosts"]) for start in starts_of(stopped)] == [1, 2]
    srun = [
        "srun",
        "-N2",
        "-n2",
        sys.executable,
        "-m",
        "ddpexp",
        "resume",
        "run",
        "launcher=slurm",
        "trainer.nodes=auto",
    ]
    after = subprocess.run(
        [*srun, "trainer.gpus=auto"], cwd=ddpexp.folder, env={**ddpexp.environ, "SLURM_CONF": os.environ["SLURM_CONF"]},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (after.returncode, after.stdout) == (0, f"ddpexp: run {FINISHED}".replace("67.00", percent(stopped))), (
        after.stderr
    )


# What has changed between two starts.

CHANGING = """\
import helpers


class Helped(Sides):
    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        return helpers.scaled(loss), count, metrics


def load_counted(train=96, test=33):
    count, seed = map(int, open(os.path.join(os.path.dirname(__file__), "count.txt")).read().split())
    return Splits(points(count, seed), {"eval": points(test, 1)})


def load_counted_items(train=96, test=33):
    parts = load_counted(train, test)
    items = Items(1, 0)
    items.rows = parts.train
    return Splits(items, parts.evals)
"""
HELPED = ("task._target_=points.Helped", "trainer.epochs=1")


@pytest.fixture
def changing(ddpexp: Ddpexp) -> Recipe:
    """A recipe with a helper beside it, and data in a file."""
    recipe = Recipe(ddpexp, CHANGING)
    (recipe.folder / "helpers.py").write_text("def scaled(loss):\n    return loss\n")
    (recipe.folder / "count.txt").write_text("96 0")
    return recipe


def more(recipe: Recipe, run: Path, *overrides: str) -> Done:
    """Resume the run of a recipe."""
    return resumed(recipe.ddpexp, run.name, "--config-dir", str(recipe.folder / "conf"), *overrides)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def remedy(done: Done) -> str:
    """Return the word that a refusal says to type."""
    return str(re.findall(r"[Tt]ype (\S+=\S+)", done.err)[-1])


def test_code_that_has_changed_is_refused_until_that_is_allowed(changing: Recipe) -> None:
    done = changing(*HELPED)
    run = done.run
    assert done.code == 0, done.err
    edit(changing.folder / "points.py", "# The same points,", "# Just the same points,")  # changes nothing
    edit(changing.folder / "helpers.py", "return loss", "return 2 * loss")
    before = listing(run)
    again = more(changing, run, "trainer.epochs=2")
    command_refused(again, f"{run.name}: since step 4 helpers.py has changed")
    command_refused(
        changing(*HELPED, "trainer.epochs=2", run=run), f"run.dir={run.name}: since step 4 helpers.py has changed"
    )
    assert listing(run) == before
    shutil.copytree(run / "checkpoints", changing.folder / "checkpoints")
    done = more(changing, run, "trainer.epochs=2", remedy(again))
    assert done.code == 0, done.err
    line = "since step 4 helpers.py has changed (run.allow_changes=[code])"
    assert done.out.count(f"{line}\n") == 1
    first, second = starts_of(run)
    assert line in second["changes"]
    assert first["changes"] == []
    codes = [start["inputs"]["code"]["modules"]["helpers"]["sha256"] for start in (first, second)]
    patches = [(run / start["code_diff"]["file"]).read_text() for start in (first, second)]
    assert ["+    return 2 * loss\n" in patch for patch in patches] == [False, True]
    inputs = json.loads((run / "checkpoints/step-00000008/checkpoint.json").read_text())["inputs"]
    assert inputs["code"]["modules"]["helpers"]["sha256"] == codes[1] != codes[0]
    assert inputs["config_sha256"] == second["inputs"]["config_sha256"] != first["inputs"]["config_sha256"]
    # Ended before its first checkpoint, it needs no permission again; code other than what was allowed does.
    shutil.rmtree(run / "checkpoints")
    shutil.move(changing.folder / "checkpoints", run / "checkpoints")
    change(run / "result.json", status="interrupted")
    edit(changing.folder / "points.py", "nn.Tanh()", "nn.ReLU()")
    command_refused(
        more(changing, run),
        f"{run.name}: since step 4 points.py has changed (Net.__init__), helpers.py has changed (scaled)",
    )
    edit(changing.folder / "points.py", "nn.ReLU()", "nn.Tanh()")
    done = more(changing, run)
    assert done.code == 0, done.err
    assert "since step 4 helpers.py has changed, which the last start was allowed to use\n" in done.out


@pytest.mark.slow
def test_an_allowed_change_reaches_the_job_that_a_launcher_starts(changing: Recipe) -> None:
    ddpexp, run = changing.ddpexp, changing(*HELPED).run
    edit(changing.folder / "helpers.py", "return loss", "return 2 * loss")
    bins = ddpexp.folder / "bin"
    bins.mkdir()
    for name, text in SLURM.items():
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    ddpexp.environ = {**ddpexp.environ, "PATH": f"{bins}:{os.environ['PATH']}"}
    done = more(changing, run, "launcher=slurm", "trainer.epochs=2", "run.allow_changes=[code]")
    assert done.code == 0, done.err
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}
    job = subprocess.run(
        [sys.executable, "-m", "ddpexp", "member", str(run)], cwd=ddpexp.folder, capture_output=True, text=True,
        timeout=PATIENCE,
        env={**ddpexp.environ, **step, "SLURM_LOCALID": "0"},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "edited" not in job.stdout
    assert job.stdout.count("since step 4 helpers.py has changed (run.allow_changes=[code])\n") == 1
    # It was for that job alone, although config.yaml says it.
    edit(changing.folder / "helpers.py", "return 2 * loss", "return 3 * loss")
    refusal = more(changing, run, "launcher=spawn", "trainer.epochs=3")
    command_refused(refusal, f"{run.name}: since step 8 helpers.py has changed")
    done = more(changing, run, "launcher=elastic", "trainer.epochs=3", "run.allow_changes=[data,code]")
    assert done.code == 0, done.err
    assert done.out.count("since step 8 helpers.py has changed (run.allow_changes=[code])\n") == 1
    assert "run.allow_changes" not in " ".join(merge_overrides(RunDir(run), ["trainer.epochs=4"]))


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("target", "counted", "phrase", "step"),
    [
        ("points.load_counted", "72 0", "`train` had 96 samples and has 72 now", 6),
        ("points.load_counted_items", "96 5", "`train` has as many samples as before, and others", 8),
    ],
)
def test_data_that_has_changed_is_refused_until_that_is_allowed(
    changing: Recipe, target: str, counted: str, phrase: str, step: int
) -> None:
    first = changing(*HELPED, f"data._target_={target}", "trainer.gpus=2")
    assert first.code == 0, first.err
    run = first.run
    (changing.folder / "count.txt").write_text(counted)
    again = more(changing, run, "trainer.epochs=2")
    command_refused(
        again, f"{run.name}: since step 4 the data has changed: {phrase}", out="changed: trainer.epochs 1 -> 2\n"
    )
    assert json.loads((run / "result.json").read_text())["status"] == "done"  # as it was
    assert len(starts_of(run)) == 1
    done = more(changing, run, "trainer.epochs=2", remedy(again))
    assert done.code == 0, done.err
    line = (
        f"since step 4 the data has changed: {phrase} (run.allow_changes=[data]): {step // 2} steps an epoch from "
        "here on\n"
    )
    assert line in done.out
    assert json.loads((run / "result.json").read_text())["step"] == step
    change(run / "result.json", status="interrupted")
    assert more(changing, run).code == 0  # the newest checkpoint knows the new data


def test_other_data_by_its_name_is_allowed_in_the_same_way(ddpexp: Ddpexp, stopped: Path) -> None:
    manifest = json.loads((stopped / "manifest.json").read_text())
    change(stopped / "manifest.json", data={**manifest["data"], "sha256": "0" * 64})
    word = remedy(again(ddpexp))
    done = again(ddpexp, word)
    assert (word, done.code) == ("run.allow_changes=[data]", 0), done.err
    here = f"embedded-digits ({manifest['data']['sha256'][:12]})"
    assert f"data: embedded-digits (000000000000) -> {here} (run.allow_changes=[data])\n" in done.out


def test_an_edited_configuration_is_noticed(ddpexp: Ddpexp, run: Path) -> None:
    change(run / "result.json", status="interrupted")
    config = run / "config.yaml"
    text = config.read_text()
    edit(config, "seed: 0", "seed: 1")
    before = listing(run)
    command_refused(resumed(ddpexp, "run"), "run: edited to trainer.seed=1")
    command_refused(again(ddpexp, "trainer.seed=1"), "run.dir=run: edited to trainer.seed=1")
    assert listing(run) == before
    kept = resumed(ddpexp, "run", "trainer.seed=0")
    assert kept.code == 0, kept.err
    line = (
        "config.yaml was edited since the last start, but this command overrides it (the edited file is kept "
        "beside): trainer.seed 0 -> 1\n"
    )
    assert line in kept.out
    assert (config.read_text(), "seed: 1" in (run / "config-1.yaml").read_text()) == (text, True)
    change(run / "result.json", status="interrupted")
    edit(config, "weight_decay: 0.0005", "weight_decay: 0.01")
    edit(config, "log_every: 5", "log_every: 7")
    command_refused(resumed(ddpexp, "run"), "run: edited to optimizer.weight_decay=0.01")
    done = resumed(ddpexp, "run", "optimizer.weight_decay=0.01")
    assert done.code == 0, done.err
    edits = "trainer.log_every 5 -> 7, optimizer.weight_decay 0.0005 -> 0.01\n"
    assert f"config.yaml was edited since the last start: {edits}" in done.out
    assert starts_of(run)[-1]["changes"][0] == f"config.yaml was edited since the last start: {edits[:-1]}"
    # What was accepted is no edit any more, and a comment never was one.
    change(run / "result.json", status="interrupted")
    config.write_text(f"# mine\n{config.read_text()}")
    done = resumed(ddpexp, "run")
    assert (done.code, "edited" in done.out) == (0, False), done.err
    assert config.read_text().startswith("# mine\n")


def test_an_older_configuration_that_is_put_back_is_an_edit(ddpexp: Ddpexp, run: Path) -> None:
    change(run / "result.json", status="interrupted")
    done = resumed(ddpexp, "run", "trainer.max_steps=12", "trainer.epochs=null", "optimizer.lr=0.02")
    assert done.code == 0, done.err  # and its checkpoint was trained with that
    change(run / "result.json", status="interrupted")
    (run / "config.yaml").write_text((run / "config-1.yaml").read_text())
    command_refused(resumed(ddpexp, "run"), "run: edited to")
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["config"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    command_refused(resumed(ddpexp, "run"), "run: edited to")  # as its checkpoint says


def test_a_start_that_is_killed_before_it_has_replaced_the_configuration_has_edited_nothing(
    ddpexp: Ddpexp, stopped: Path
) -> None:
    before, manifest = (stopped / "config.yaml").read_text(), stopped / "manifest.json"
    after = before.replace("lr: 0.1", "lr: 0.02")
    assert after != before
    change(manifest, config=accepted(after, before))
    done = resumed(ddpexp, "run")
    assert (done.code, "edited" in done.out, "changed" in done.out) == (0, False, False), done.err


def test_run_allow_changes_counts_only_on_the_command_line(ddpexp: Ddpexp, changing: Recipe) -> None:
    command_refused(ddpexp(*SMALL, "run.allow_changes=[cod]"), "run.allow_changes=cod: code, data")
    command_refused(ddpexp(*SMALL, "run.allow_changes=code"), "run.allow_changes=code: list")
    edit(changing.folder / "conf/recipe/points.yaml", "trainer:\n", "run:\n  allow_changes: [code]\ntrainer:\n")
    command_refused(changing(), "run.allow_changes=['code']: command line")
