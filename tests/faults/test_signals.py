"""Signals at the moments that are easily forgotten."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ddpexp.checkpoint.format import complete_checkpoints
from tests.conftest import PATIENCE, ddpexp_processes, finish, python_path
from tests.faults.harness import Running, ended, gone, trained
from tests.points import Recipe, wait_for

LONG = ("trainer.gpus=2", "trainer.epochs=10000", "trainer.log_every=1", "trainer.grace_seconds=600")
"""A run that nothing but the signal ends, and no limit for how long that takes."""


@pytest.mark.variants(1)
@pytest.mark.fault(12)
@pytest.mark.parametrize("point", ["written", "recorded", "renamed"])
def test_a_stop_while_a_checkpoint_is_written_waits_for_it(recipe: Recipe, tmp_path: Path, point: str) -> None:
    overrides = (*LONG, "trainer.checkpoint_every=3")
    process, run = recipe.start(*overrides, environ={"DDPEXP_FAULT": f"checkpoint.{point}:late={tmp_path}/here:0:2"})
    wait_for((tmp_path / "here").exists)
    process.send_signal(signal.SIGTERM)
    done = finish(process, run)
    assert (done.code, done.result()["status"]) == (143, "interrupted")
    step = done.result()["step"]
    assert f"; saved at step {step} in " in done.err
    assert next(path.name for path in complete_checkpoints(run / "checkpoints")) == f"step-{step:08}"


@pytest.mark.slow
@pytest.mark.fault(15)
def test_an_interrupt_of_one_rank_alone_is_no_success(recipe: Recipe) -> None:
    running = Running(recipe, *LONG)
    os.kill(running.pid(1), signal.SIGINT)
    done = running.ended().done
    assert (done.code, done.result()["status"]) == (130, "interrupted")
    assert f"; saved at step {done.result()['step']} in " in done.err


@pytest.mark.fault(11)
def test_a_stop_while_data_is_downloaded_leaves_nothing_of_it(recipe: Recipe, tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as mirror:
        # It accepts, and never says a word, for which the command would wait; the real mirrors cannot be had
        # everywhere.
        place = f"http://127.0.0.1:{mirror.getsockname()[1]}/"
        (early / "sitecustomize.py").write_text(
            f"import sys\nif 'ddpexp' in sys.orig_argv:\n    import ddpexp.data.mnist.prepare as files\n"
            f"    from ddpexp.data.mirrors import Patience\n"
            f"    files.prepare.__kwdefaults__.update(mirrors=({place!r},), patience=Patience(600, 600, 600))\n"
        )
        process, run = recipe.ddpexp.start(
            "recipe=mnist", "data.source=download", f"data.root={tmp_path}/data",
            environ={"PYTHONPATH": python_path(early), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )  # fmt: skip
        mirror.settimeout(PATIENCE)
        with mirror.accept()[0]:
            process.send_signal(signal.SIGTERM)
            done = finish(process, run)
    assert done.code == 143
    assert "Traceback" not in done.err
    assert not run.exists()
    assert [path for path in [*tmp_path.glob("data/**/*"), *tmp_path.glob("cache/**/*")] if path.is_file()] == []


TIMES = int(os.environ.get("DDPEXP_TEST_TIMES", "40"))
TRAINING = ("trainer.epochs=5000", "trainer.log_every=1", "trainer.eval_every=0", "trainer.checkpoint_every=0")


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal: a command makes that of SIGUSR2 last. Source.

    Proc(5), SigCgt.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def signal_command(
    recipe: Recipe, number: int, wait: Callable[[subprocess.Popen[str], Path], object], *overrides: str
) -> str:
    """Send a signal when a command has come so far, check its end, and say what that was."""
    before = ddpexp_processes()
    process, run = recipe.start("trainer.gpus=2", "trainer.threads=1", *overrides)
    with ended(before, process):
        wait(process, run)
        ours = process.poll() is None and has_handler(process.pid, signal.SIGUSR2)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        gone(before, [process], f"{signal.Signals(number).name}")
    code = process.returncode
    if ours or code in (0, 128 + number):  # 0: it came to its end before the signal was delivered
        assert "Traceback" not in err, err
        assert code == 128 + number or (code == 0 and "done" in out), (code, out, err)
    else:
        # Python itself was starting; it ends with 1 when SIGINT meets the import of its site module.
        assert code == -number or (number == signal.SIGINT and "init_import_site" in err), (code, err)
        assert not any(
            line.lstrip().startswith('File "') and "ddpexp/cli/main.py" in line for line in err.splitlines()
        ), err
    if code == 128 + number:
        assert f"interrupted by {signal.Signals(number).name}; " in err, err
    return "done" if code == 0 else "stopped" if code > 0 else "before the first line"


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.fault(11, 14)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_a_command_that_is_starting_ends_it_with_one_sentence(
    recipe: Recipe, number: signal.Signals
) -> None:
    wait = lambda process, _run: wait_for(lambda: has_handler(process.pid, signal.SIGUSR2))  # noqa: E731
    assert signal_command(recipe, number, wait, *TRAINING) == "stopped"


@pytest.mark.fault(11, 14)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_handlers_are_there_before_the_command_imports_anything_slow(
    recipe: Recipe, tmp_path: Path, number: signal.Signals
) -> None:
    reached = tmp_path / "reached"
    (tmp_path / "sitecustomize.py").write_text(f"""\
import sys
import time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("ddpexp.cli", "yaml", "hydra", "torch"):
            open({str(reached)!r}, "w").close()
            time.sleep({PATIENCE})

sys.meta_path.insert(0, Slow())
""")
    process, run = recipe.start(environ={"PYTHONPATH": python_path(tmp_path)})
    wait_for(reached.exists)
    process.send_signal(number)
    done = finish(process, run)
    assert done.code == 128 + number
    assert done.err == f"ddpexp: interrupted by {number.name}; nothing was started\n"


def counts(found: Sequence[str]) -> None:
    print(", ".join(f"{kind}: {found.count(kind)}" for kind in sorted(set(found))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(11, 14)
def test_a_signal_in_the_first_seconds_gives_its_exit_code(recipe: Recipe) -> None:
    draw = random.Random("signals")
    found = []
    for _ in range(5 * TIMES // 2):
        moment = draw.uniform(0, 1.5) if draw.random() < 0.6 else draw.uniform(0, 0.2)

        def wait(_process: subprocess.Popen[str], _run: Path, moment: float = moment) -> None:
            time.sleep(moment)

        found.append(signal_command(recipe, draw.choice(SIGNALS), wait, *TRAINING))
    counts(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(8, 14)
def test_a_signal_while_a_run_ends_gives_its_exit_code(recipe: Recipe) -> None:
    draw = random.Random("teardowns")
    found = []
    for _ in range(5 * TIMES):
        moment = draw.uniform(0, 0.4)

        def wait(process: subprocess.Popen[str], run: Path, moment: float = moment) -> None:
            wait_for(lambda: process.poll() is not None or trained(run, 1))
            time.sleep(moment)

        overrides = ("trainer.epochs=2", "trainer.log_every=1", "trainer.eval_every=0")
        found.append(signal_command(recipe, draw.choice(SIGNALS), wait, *overrides))
    counts(found)
