"""Runs on a table by `data=arrays` and `data=hf`: killed in the middle, at any number of workers, to equal weights."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples.table.table import write
from tests.conftest import PATIENCE, ROOT, Ddpexp, python_path

KINDS = {
    "arrays": ("data.path=flowers.csv",),
    "hf": (
        "data=hf", "data.path=flowers.csv", "data.inputs=[length,width]", "data.targets=species",
        "data.standardize=true", "data.validation_fraction=0.2",
    ),
}  # fmt: skip
SHORT = (
    "trainer.reduction=exact", "trainer.micro_batch_size=4", "trainer.max_steps=20", "trainer.checkpoint_every=3",
    "trainer.eval_every=0",
)  # fmt: skip
TABLE = ("--config-dir", str(ROOT / "examples/table/conf"), "recipe=table")


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What training does is tested, not how fork servers start."""
    return warm_environ


def needs(kind: str) -> None:
    if kind == "hf" and importlib.util.find_spec("datasets") is None:
        pytest.skip("needs the library datasets")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_mid_epoch_at_1_2_and_4_workers_gives_the_weights_of_the_undisturbed_run(
    kind: str, ddpexp: Ddpexp
) -> None:
    needs(kind)
    write(str(ddpexp.folder / "flowers.csv"))
    typed = (*TABLE, *KINDS[kind], *SHORT)
    undisturbed = ddpexp(*typed, "trainer.gpus=2", "run.dir=undisturbed")
    assert undisturbed.code == 0, undisturbed.err
    for before, after in ((1, 2), (2, 4), (4, 1)):
        folder = f"killed-{before}"
        fault = {"DDPEXP_FAULT": f"step:kill:{before - 1}:{14 + before}"}  # in the second epoch
        killed = ddpexp(*typed, f"trainer.gpus={before}", f"run.dir={folder}", environ=fault)
        assert "SIGKILL" in killed.err
        resumed = ddpexp(*typed, f"trainer.gpus={after}", f"run.dir={folder}")
        assert resumed.code == 0, resumed.err
        assert weights(ddpexp.folder / folder) == weights(ddpexp.folder / "undisturbed")


@pytest.mark.slow
def test_a_table_of_10000_columns_is_trained_on_evaluated_predicted_for_and_exported(ddpexp: Ddpexp) -> None:
    """What is known of so many columns is more than a packet, or an argument of a program, may have."""
    names = [f"column {number}" for number in range(10_000)]
    rows = ([*map(str, range(row, row + 10_000)), "ab"[row % 2]] for row in range(8))
    text = "".join(f"{','.join(row)}\n" for row in ([*names, "kind"], *rows))
    (ddpexp.folder / "wide.csv").write_text(text)
    trained = ddpexp(
        "recipe=tabular", "data.path=wide.csv", "data.targets=kind", "model.width=2", "model.depth=1", "trainer.gpus=2",
        "trainer.global_batch_size=4", "trainer.epochs=1", "run.dir=run",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    data = json.loads((ddpexp.folder / "run/manifest.json").read_text())["data"]
    assert data["facts"]["columns"] == names
    assert len(json.dumps(data)) > 1 << 18
    for command in (["evaluate"], ["predict", "--out=found.csv"], ["export", "--out=exported"]):
        done = ddpexp(command[0], "run", *command[1:])
        assert done.code == 0, done.err
    assert (ddpexp.folder / "exported/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_has_changed_since_the_start_is_not_resumed_with(kind: str, ddpexp: Ddpexp) -> None:
    needs(kind)
    write(str(ddpexp.folder / "flowers.csv"))
    typed = (*TABLE, *KINDS[kind], *SHORT, "trainer.gpus=1", "run.dir=run")
    killed = ddpexp(*typed, environ={"DDPEXP_FAULT": "step:kill:0:9"})
    assert "SIGKILL" in killed.err
    write(str(ddpexp.folder / "flowers.csv"), seed=1)
    resumed = ddpexp(*typed)
    assert resumed.code == 2
    assert len(resumed.err.strip().splitlines()) == 1, resumed.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_preparation_that_is_killed_leaves_nothing_that_is_used(kind: str, tmp_path: Path) -> None:
    """At many moments, of which the first are before anything is read and the last after the end."""
    needs(kind)
    write(str(tmp_path / "flowers.csv"), rows=60_000)
    environ = {"PYTHONPATH": python_path(), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"),
               "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}  # fmt: skip
    command = [sys.executable, "-m", "ddpexp", "data", *TABLE, *KINDS[kind], "--json"]

    def prepare(folder: Path, seconds: float) -> dict[str, Any] | None:
        folder.mkdir(exist_ok=True)
        if not (folder / "flowers.csv").exists():
            (folder / "flowers.csv").write_bytes((tmp_path / "flowers.csv").read_bytes())
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            try:
                out, _ = run.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
                run.communicate()
                return None
        assert run.returncode == 0
        found: dict[str, Any] = json.loads(out)
        return found

    began = time.monotonic()
    undisturbed = prepare(tmp_path / "undisturbed", PATIENCE)
    seconds = time.monotonic() - began
    assert undisturbed is not None
    for number in range(12):
        prepare(tmp_path / "killed", seconds * number / 10)
        complete = list((tmp_path / "killed").glob(".ddpexp-cache/[!.]*/identity.json"))
        for path in complete:
            sizes = json.loads(path.read_text())["sizes"]
            assert {name: (path.parent / name).stat().st_size for name in sizes} == sizes
    found = prepare(tmp_path / "killed", PATIENCE)
    assert found is not None
    assert (found["hash"], found["facts"]) == (undisturbed["hash"], undisturbed["facts"])
    for name in ("train-inputs.npy", "train-targets.npy"):
        assert Path(found["folder"], name).read_bytes() == Path(undisturbed["folder"], name).read_bytes()


def weights(run: Path) -> str:
    digest: str = json.loads((run / "result.json").read_text())["weights_sha256"]
    return digest
