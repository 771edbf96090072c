"""The Python functions in a real Jupyter kernel, and the examples in `examples/python`."""

from __future__ import annotations

import json
import os
import runpy
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE, SMALL, living
from tests.examples import EXAMPLES

jupyter_client = pytest.importorskip("jupyter_client", reason="the extra `test` has it")
pytest.importorskip("ipykernel", reason="the extra `test` has it")

LONG = [*(word for word in SMALL if not word.startswith("trainer.max_steps")), "trainer.gpus=1", "trainer.epochs=1000000",
        "trainer.eval_every=0"]  # fmt: skip


@dataclass
class Answer:
    """What a cell has shown, and how it ended."""

    text: str = ""
    pictures: int = 0
    error: dict[str, Any] = field(default_factory=dict)


class Notebook:
    """A kernel, and the cells that it has run."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.kernel = jupyter_client.KernelManager(connection_file=str(folder / "kernel.json"))
        self.kernel.start_kernel(cwd=str(folder), env={**environ, "IPYTHONDIR": str(folder / "ipython")})
        self.client = self.kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def run(self, code: str, when: str = "", then: Callable[[], object] = lambda: None) -> Answer:
        """Run a cell; once `when` is shown, call `then`."""
        answer, waiting = Answer(), bool(when)
        cell = self.client.execute(code)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream":
                answer.text += content["text"]
            elif kind == "error":
                answer.error = content
            elif kind in ("display_data", "execute_result"):
                answer.pictures += "image/png" in content["data"]
            elif kind == "status" and content["execution_state"] == "idle":
                return answer
            if waiting and when in answer.text:
                waiting = False
                if then() == "gone":
                    return answer
        pytest.fail(f"no end of the cell:\n{answer.text}")

    def close(self) -> None:
        self.client.stop_channels()
        if self.kernel.has_kernel:
            self.kernel.shutdown_kernel(now=True)
        self.kernel.cleanup_resources()


@pytest.fixture(scope="module")
def notebook(warm_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("notebook"), warm_environ)
    yield notebook
    notebook.close()


def test_an_interrupted_cell_leaves_a_saved_run_and_says_how_to_resume(notebook: Notebook) -> None:
    notebook.run("import ddpexp")
    answer = notebook.run(f"ddpexp.run({LONG})", "loss", notebook.kernel.interrupt_kernel)
    assert answer.error["ename"] == "RunInterruptedError"
    assert answer.error["evalue"].startswith("interrupted by SIGINT; saved at step ")
    assert "\npython -m ddpexp resume outputs/mnist/" in answer.error["evalue"]
    answer = notebook.run(
        "import sys\nrun = sys.last_value.run\nprint(run.status, isinstance(sys.last_value, KeyboardInterrupt))\n"
        "print(run.checkpoints[-1].step == run.result['step'] > 0)"
    )
    assert answer.text == "interrupted True\nTrue\n"


@pytest.mark.slow
def test_the_notebook_of_the_examples_shows_a_line_of_progress_and_plots(notebook: Notebook) -> None:
    cells = json.loads((EXAMPLES / "python/notebook.ipynb").read_text())["cells"]
    answers = [notebook.run("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    assert [answer.error for answer in answers if answer.error] == []
    lines = next(answer for answer in answers if answer.text.startswith("recipe  mnist")).text.splitlines()
    # A carriage return ends a line here.
    assert any(line.startswith("━" * 10 + "─" * 10 + " 20/40  loss ") for line in lines)
    assert any(line.startswith("━" * 20 + " 40/40  loss ") for line in lines)
    assert lines[-1].startswith("done ")
    assert sum(answer.pictures for answer in answers) == 2
    assert "'eval/accuracy': " in answers[-1].text


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_a_saved_run_and_no_process(notebook: Notebook) -> None:
    before = {path.name for path in notebook.folder.glob("outputs/mnist/*")}

    def kill() -> str:
        os.kill(notebook.kernel.provisioner.pid, signal.SIGKILL)
        return "gone"

    notebook.run(f"import ddpexp\nddpexp.run({LONG})", "loss", kill)
    [run] = [path for path in notebook.folder.glob("outputs/mnist/*") if path.name not in before]
    deadline = time.monotonic() + PATIENCE
    while living(run) or not (run / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert result["step"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
def test_the_script_of_the_examples_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "python/train.py"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "trainer.global_batch_size=99 does not split over 2 workers. Use a multiple of 2, for example "
        "trainer.global_batch_size=100."
    )
    assert not (tmp_path / "second").exists()
