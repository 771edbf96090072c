"""`ddpexp.run` and `ddpexp.sweep`: commands as children, whose ends become exceptions."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest

import ddpexp
from ddpexp.cli.api.child import Ended, Interrupts
from ddpexp.cli.api.start import check_success, trust_of
from ddpexp.config.compose import compose
from ddpexp.errors import Failure
from ddpexp.system.caller import Directory, End
from tests.cli.api.conftest import NOISY, OWN
from tests.conftest import SMALL
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("surroundings")


def test_a_run_is_shown_and_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ddpexp.run([*SMALL, "trainer.gpus=1", "optimizer.lr=0", "trainer.seed=7"])
    shown = capsys.readouterr()
    assert "step 10/10" in shown.out
    assert shown.out.splitlines()[-1].startswith("done ")
    assert shown.err == ""
    assert run.path.parent == tmp_path / "outputs/mnist"
    assert (run.status, run.error) == ("done", None)
    # With a rate of zero the weights are those that the run has begun with.
    from ddpexp.checkpoint.reader import weights_sha256

    model = ddpexp.compose([*SMALL, "trainer.seed=7"]).model()
    assert weights_sha256({"model": model}) == run.result["weights_sha256"]
    other = ddpexp.compose([*SMALL, "trainer.seed=8"]).model()
    assert weights_sha256({"model": other}) != run.result["weights_sha256"]


def test_a_failed_run_raises_with_the_rank_and_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ddpexp.RunFailedError) as caught:
        ddpexp.run([*OWN, "task.fails=true"], cwd=tmp_path, quiet=True)
    error = caught.value
    assert str(error).startswith("rank 0 on ")
    assert re.search(r"ValueError: boom \(\S+noisy\.py:\d+\)$", str(error))
    assert (error.reason, str(error.place).partition(":")[0]) == ("boom", str(Path(NOISY).parent / "noisy.py"))
    assert (error.rank, error.exit_code) == (0, 1)
    assert error.traceback is not None
    assert 'raise ValueError("boom")' in error.traceback
    assert error.traceback.rstrip() in str(error.__cause__)
    assert error.run is not None
    assert error.run.status == "failed"
    assert error.run.error is not None
    assert error.run.error["message"] == "boom"
    assert error.run.config_dir == NOISY
    assert capsys.readouterr() == ("", "")


def test_a_refusal_has_the_sentence_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ddpexp.RefusedError) as expected:
        compose(["recipe=mnsit"])
    if sys.version_info >= (3, 11):  # a folder of the same name in the current folder of the command is not imported
        (tmp_path / "ddpexp").mkdir()
        (tmp_path / "ddpexp/__init__.py").write_text("raise SystemExit('a stranger')")
    with pytest.raises(ddpexp.RefusedError) as caught:
        ddpexp.run(["recipe=mnsit"], cwd=tmp_path)
    assert str(caught.value) == str(expected.value)
    assert [path.name for path in tmp_path.iterdir()] in (["ddpexp"], [])


def test_a_sweep_is_returned_with_its_runs(tmp_path: Path) -> None:
    words = ["optimizer.lr=0.1,0.2", "sweep.objective=eval/loss", "sweep.picture=false"]
    sweep = ddpexp.sweep([*OWN, *words], cwd=tmp_path, quiet=True)
    assert [run.status for run in sweep.runs] == ["done", "done"]
    assert [row["overrides"]["optimizer.lr"] for row in sweep.rows()] == ["0.1", "0.2"]
    assert sweep.best.model().training is False  # the config folder is trusted for its jobs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("recipe=mnist", "takes a list"),
        (["evaluate", "x"], "evaluate: ddpexp.open_run(DIR)"),
        (["plan"], "ddpexp plan, with --json"),
        (["recipe=mnist", "--cfg", "job"], "ddpexp.run: --cfg"),
        (["-m", "optimizer.lr=0.1,0.2"], "-m: ddpexp.sweep"),
    ],
)
def test_what_is_no_run_is_refused_before_anything_is_started(arguments: list[str], expected: str) -> None:
    with refused(expected):
        ddpexp.run(arguments)


RUN = ddpexp.Run(Path("outputs/x"))


def raised(ended: Ended) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        check_success(ended, run=RUN)
    assert getattr(caught.value, "run", RUN) is RUN
    return caught.value


def test_each_end_of_a_command_is_one_exception() -> None:
    check_success(Ended(0, Directory("x")))
    failure = Failure(rank=1, host="h", kind="ValueError", message="boom", traceback="Traceback ...").as_dict()
    failed = raised(Ended(1, end=End("failed", "rank 1 on h failed: ValueError: boom", failure=failure)))
    assert isinstance(failed, ddpexp.RunFailedError)
    assert (str(failed), failed.rank) == ("rank 1 on h failed: ValueError: boom", 1)
    stopped = raised(Ended(130, end=End("stopped", "interrupted by SIGINT; saved at step 3", signum=2)))
    assert isinstance(stopped, ddpexp.RunInterruptedError)
    assert isinstance(stopped, KeyboardInterrupt)
    assert (str(stopped), stopped.signum) == ("interrupted by SIGINT; saved at step 3", 2)
    assert str(raised(Ended(2, end=End("refused", "no\x1b[31m")))) == "no\\x1b[31m"


@pytest.mark.parametrize(
    ("ended", "kind", "sentence"),
    [
        (Ended(-9), ddpexp.RunFailedError, "the command was killed by SIGKILL; resume it with ddpexp.run"),
        (Ended(1, last="MemoryError"), ddpexp.RunFailedError, "MemoryError"),
        (Ended(1), ddpexp.RunFailedError, "the command ended with exit code 1"),
        (Ended(2, last="ddpexp: no"), ddpexp.RefusedError, "no"),
        (Ended(130, interrupted=True), ddpexp.RunInterruptedError, "interrupted by SIGINT; nothing was started"),
        (Ended(0, interrupted=True), ddpexp.RunInterruptedError, "the command was finished by then"),
    ],
)
def test_a_command_that_reports_no_end_is_an_exception_too(
    ended: Ended, kind: type[BaseException], sentence: str
) -> None:
    error = raised(ended)
    assert type(error) is kind
    assert sentence in str(error)


def test_what_a_run_connects_to_and_reads_is_trusted_by_who_has_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_FOLDER", str(tmp_path))
    run = ddpexp.run([*SMALL, "trainer.gpus=1", "data.root=${oc.env:DATA_FOLDER}"], cwd=tmp_path, quiet=True)
    assert run.trust == ("oc.env:DATA_FOLDER",)
    assert run.model() is not None
    with refused(": restated"):
        ddpexp.open_run(run.path).model()


def test_the_arguments_say_what_is_trusted() -> None:
    assert trust_of(["--config-dir", "mine/conf", "run.trust=[a,b]"], "/x") == ("/x/mine/conf", ("a", "b"))
    assert trust_of(["--config-dir=/y/conf"], None) == ("/y/conf", ())
    assert trust_of(["resume", "x"], None) == (None, ())


def test_an_interrupt_is_passed_on_once_the_command_handles_it_and_then_each_time() -> None:
    class Process:
        sent: ClassVar[list[int]] = []

        def send_signal(self, number: int) -> None:
            self.sent.append(number)

    interrupts, process = Interrupts(), Process()
    interrupts.handle(2, None)
    assert process.sent == []
    interrupts.pass_on(process)  # type: ignore[arg-type]
    assert process.sent == [2]
    interrupts.handle(2, None)
    assert (process.sent, interrupts.count) == ([2, 2], 2)


def test_a_current_folder_that_there_is_not_is_refused() -> None:
    with refused("cwd=nowhere"):
        ddpexp.run(["recipe=mnist"], cwd="nowhere")
