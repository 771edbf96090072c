"""breakpoint() in a rank, on a real pseudo-terminal: whose turn it is, who waits, and how it ends."""

from __future__ import annotations

import inspect
import os
import pdb
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from ddpexp.errors import DdpexpError
from ddpexp.launch.workers.control import Control
from ddpexp.train.debugger import Debugger
from tests.conftest import Ddpexp, Done, living, python_path
from tests.points import Recipe, wait_for
from tests.refusals import refused
from tests.terminals import Session

CODE = """\
class Looks(Sides):
    # Starts a debugger in the third step, in some of the ranks.
    def __init__(self, ranks=(1,), how="breakpoint"):
        self.ranks, self.how, self.steps = ranks, how, 0

    def step(self, model, batch):
        self.steps += model.training
        if self.steps == 3 and model.training:
            if self.how == "torch":
                torch.distributed.breakpoint(rank=1)
            elif self.how == "post-mortem" and RANK in self.ranks:
                import pdb
                try:
                    raise ValueError("found")
                except ValueError as error:
                    pdb.post_mortem(error.__traceback__)
            elif RANK in self.ranks:
                secret = 6 * 7
                breakpoint()
        return super().step(model, batch)
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a rank does is tested, not how it starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("debugger"), environ), CODE)


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> str:
    """The weights of the undisturbed run."""
    done = recipe("trainer.gpus=2")
    assert done.code == 0, done.err
    return str(done.result()["weights_sha256"])


def session(recipe: Recipe, *overrides: str, ranks: str = "[1]") -> tuple[Session, Done]:
    words, run = recipe.words("task._target_=points.Looks", f"+task.ranks={ranks}", "trainer.gpus=2", *overrides)
    command = [sys.executable, "-m", "ddpexp", *words]
    return Session(command, recipe.folder, recipe.ddpexp.environ), Done(0, "", "", run)


def test_each_rank_gets_its_turn_while_all_else_waits(recipe: Recipe, expected: str) -> None:
    shell, done = session(recipe, "trainer.timeout.step_seconds=1", "trainer.log_every=1", ranks="[0,1]")
    with shell:
        shell.expect(" is at a breakpoint; the other ranks wait. c continues, q saves and stops the run.")
        shell.expect(f"> {recipe.folder}/points.py(")
        shell.expect("(Pdb rank ")
        first = int(shell.expect(") "))
        time.sleep(3.0)  # beyond the timeout
        shell.type("p sec\t\n")  # completed by readline
        shell.expect("42")
        prompt = f"(Pdb rank {first}) "
        shell.expect(prompt)
        shell.type("\x03")
        shell.expect("--KeyboardInterrupt--")
        shell.at(prompt, "print('to the', 'terminal')")
        shell.expect("to the terminal")
        shell.at(prompt, "n")
        assert "━" not in shell.expect("-> return super().step(model, batch)")
        shell.at(prompt, "c")
        shell.expect(f"ddpexp: rank {1 - first} is at a breakpoint")
        shell.at(f"(Pdb rank {1 - first}) ", "c")
        assert shell.end() == 0, shell.shown
        assert shell.is_sane()
    assert "terminal" not in (done.run / f"ranks/{first}.log").read_text()
    assert done.result()["weights_sha256"] == expected


PROMPT = """\
import ctypes, functools, readline
from types import SimpleNamespace
from ddpexp.train.debugger import Debugger

strike = ctypes.CFUNCTYPE(ctypes.c_int)(functools.partial(ctypes.CDLL(None)["raise"], 2))  # runs no Python code
hook = ctypes.c_void_p.in_dll(ctypes.CDLL(readline.__file__), "rl_pre_input_hook")
debugger = Debugger(SimpleNamespace(terminal=None, in_process=True), 0, 1)
with debugger._handling_signals():
    for text in ("first> ", "second> "):
        hook.value = ctypes.cast(strike, ctypes.c_void_p).value if text == "first> " else None
        try:
            print(f"typed {input(text)}")
        except KeyboardInterrupt:
            print("interrupted")
"""


def test_ctrl_c_between_the_prompt_and_the_wait_for_a_key_interrupts(tmp_path: Path) -> None:
    """The signal is raised after the prompt is shown, where no system call is interrupted by it."""
    environ = {**os.environ, "PYTHONPATH": python_path()}
    with Session([sys.executable, "-c", PROMPT], tmp_path, environ) as shell:
        shell.expect("first> ")
        shell.expect("interrupted")
        shell.expect("second> ")
        time.sleep(0.3)  # nothing is sent again
        shell.type("x\n")
        shell.expect("typed x")
        assert shell.end() == 0, shell.shown


@pytest.mark.slow
@pytest.mark.parametrize("how", ["q", pytest.param("\x04", marks=pytest.mark.slow)])
def test_quitting_saves_and_the_run_resumes_to_the_same_weights(recipe: Recipe, expected: str, how: str) -> None:
    shell, done = session(recipe, ranks="[0,1]")  # the other one waits for its turn, and gets none
    with shell:
        shell.expect("(Pdb rank ")
        shell.type(f"{how}\n" if how == "q" else how)
        assert shell.end() == 128 + signal.SIGINT
        assert shell.is_sane()
    last, command = shell.shown.splitlines()[-2:]
    assert last == f"ddpexp: quit in the debugger; saved at step 3 in {done.run}; resume it with:"
    assert command.startswith("python -m ddpexp resume ")
    assert done.result()["status"] == "interrupted"
    words = ("task._target_=points.Looks", "+task.ranks=[0,1]", "trainer.gpus=2")
    again = recipe(*words, run=done.run, environ={"PYTHONBREAKPOINT": "0"})
    assert (again.code, again.result()["weights_sha256"]) == (0, expected), again.err


@pytest.mark.variants(1)
@pytest.mark.parametrize("whom", ["command", "rank"])
def test_a_kill_at_the_prompt_leaves_nothing_and_a_sane_terminal(recipe: Recipe, whom: str) -> None:
    kill_at_prompt(recipe, whom)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("whom", ["command", "rank"])
def test_many_kills_at_the_prompt(recipe: Recipe, whom: str) -> None:
    for _ in range(20):
        kill_at_prompt(recipe, whom)


def kill_at_prompt(recipe: Recipe, whom: str) -> None:
    shell, done = session(recipe)
    with shell:
        shell.expect("(Pdb rank 1) ")
        if whom == "command":
            shell.type("p 1")
            wait_for(lambda: not shell.is_sane())  # readline edits the line
            shell.process.kill()
            shell.process.wait()
        else:
            shell.type("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
            assert shell.end() == 1
            assert ": SIGKILL: killed by SIGKILL (rank 0 terminated as a consequence)" in shell.shown
        wait_for(shell.is_sane, 5.0)
        wait_for(lambda: not living(done.run), 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_the_prompt_and_saves(recipe: Recipe, number: signal.Signals) -> None:
    shell, _ = session(recipe)
    with shell:
        shell.expect("(Pdb rank 1) ")
        shell.type("p 1")
        wait_for(lambda: not shell.is_sane())
        shell.process.send_signal(number)
        assert shell.end() == 128 + number
        assert shell.is_sane()
    assert f"ddpexp: interrupted by {number.name}; saved at step 3 in " in shell.shown


@pytest.mark.slow
def test_a_closed_window_saves_as_sighup_does(recipe: Recipe, expected: str) -> None:
    shell, done = session(recipe, ranks="[0,1]")  # the other one waits for its turn
    with shell:
        shell.expect("(Pdb rank ")
        shell.close_window()
        assert shell.end() == 128 + signal.SIGHUP
    assert done.result()["status"] == "interrupted"
    assert not (done.run / "error.json").exists()
    words = ("task._target_=points.Looks", "+task.ranks=[0,1]", "trainer.gpus=2")
    again = recipe(*words, run=done.run, environ={"PYTHONBREAKPOINT": "0"})
    assert (again.code, again.result()["weights_sha256"]) == (0, expected), again.err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "post-mortem"])
def test_other_ways_into_pdb(recipe: Recipe, expected: str, how: str) -> None:
    shell, done = session(recipe, f"+task.how={how}")
    with shell:
        shell.at("(Pdb rank 1) ", "p RANK", "c")
        assert shell.end() == 0, shell.shown
    assert done.result()["weights_sha256"] == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_sessions(recipe: Recipe, expected: str) -> None:
    for _ in range(20):
        shell, done = session(recipe, ranks="[0,1]")
        with shell:
            shell.at("(Pdb rank ", "p secret", "n", "c", "c")
            assert shell.end() == 0, shell.shown
            assert shell.is_sane()
        assert done.result()["weights_sha256"] == expected


@pytest.mark.parametrize("in_process", [True, False])
def test_processes_that_a_worker_has_started_have_no_terminal(
    in_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    debugger = Debugger(Control(None, in_process=in_process), 0, 1)
    frame = inspect.currentframe()
    assert frame is not None
    if in_process:
        assert debugger.start(frame)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with refused(": debugger", DdpexpError):
        debugger.start(frame)


def test_ctrl_c_at_the_prompt_is_for_the_debugger_alone_and_other_signals_are_forwarded() -> None:
    """However late the supervisor looks: what it reads decides, and not whether a prompt is there by then."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    control = Control(None, signals=theirs.fileno(), in_process=True)
    debugger = Debugger(control, 0, 1)

    def interrupt() -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def terminate() -> None:
        signal.raise_signal(signal.SIGTERM)

    def forward(number: int, _frame: object) -> None:
        if control.at_prompt:
            control.forward(number)

    prompt = pdb.Pdb(nosigint=True)
    prompt.reset()
    before = signal.signal(signal.SIGTERM, forward), signal.set_wakeup_fd(theirs.fileno())
    try:
        debugger.prompt(prompt, interrupt)
        assert not select.select([ours], [], [], 0)[0]
        debugger.prompt(prompt, terminate)
        assert ours.recv(9) == bytes([signal.SIGTERM])
        signal.raise_signal(signal.SIGTERM)
        assert ours.recv(9) == bytes([signal.SIGTERM])  # by the C-level handler again
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGTERM, before[0])
        ours.close()
        theirs.close()


@pytest.mark.slow
def test_a_command_in_the_background_waits_for_the_foreground(recipe: Recipe) -> None:
    words, _ = recipe.words("task._target_=points.Looks", "trainer.gpus=2")
    # The shell continues the command once a key is typed, which it reads as the terminal's foreground process.
    script = f"set -m; {sys.executable} -m ddpexp {' '.join(words)} & read -n 1; fg"
    with Session(["bash", "-c", script], recipe.folder, recipe.ddpexp.environ) as shell:
        shell.expect("ddpexp: a rank is at a breakpoint: bring this command to the foreground (fg)")
        shell.type("x")
        shell.at("(Pdb rank 1) ", "c")
        assert shell.end() == 0, shell.shown
