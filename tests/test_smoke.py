"""What every Python that the metadata promise must do: every verb, a kill and resume, a sweep."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from ddpexp.cli.verbs import NAMES
from tests.conftest import OWN_SERVER, SMALL, Ddpexp, Done, finish
from tests.points import ITEMS, Recipe, wait_for

pytestmark = pytest.mark.smoke
GPT = (
    "recipe=gpt", "data.block_size=8", "model.width=16", "model.num_layers=1", "trainer.max_steps=2", "logger=none",
    "trainer.eval_every=0",
)  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Verbs are tried, not how their processes start."""
    return warm_environ


@pytest.fixture(scope="module")
def runs(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """A classifier of digits and a language model."""
    folder = tmp_path_factory.mktemp("runs")
    start = Ddpexp(folder, environ)
    (folder / "text.txt").write_text("abc def ghi\n" * 100)
    found = {
        "digits": start(*SMALL, "trainer.gpus=2", "run.dir=digits"),
        "text": start(*GPT, f"data.path={folder}/text.txt", "run.dir=text"),
    }
    for name, done in found.items():
        assert (done.code, done.err) == (0, ""), name
    return {name: Done(done.code, done.out, done.err, folder / name) for name, done in found.items()}


# What each verb is called with, where DIGITS and TEXT are runs, and what it prints.
VERBS = {
    "resume": ("DIGITS", r"is finished at step 10 .*: nothing to do\."),
    "evaluate": ("DIGITS trainer.gpus=1", r"eval/loss .* eval/accuracy"),
    "predict": ("DIGITS --out=predictions.csv trainer.gpus=1", r"predictions\.csv"),
    "export": ("DIGITS --out=exported", r"exported"),
    "generate": ("TEXT --prompt=abc --tokens=5 --device=cpu", r"^abc[a-i \n]{5}\n$"),
    "status": ("DIGITS", r"done"),
    "profile": ("DIGITS --steps=5", r"does not run: it is done"),
    "stacks": ("DIGITS", r"does not run: it is done"),
    "save": ("DIGITS", r"does not run: it is done"),
    "stop": ("DIGITS", r"does not run: it is done"),
    "sync": ("DIGITS", r"has no remote logger"),  # the trackers' packages are extras
    "table": ("DIGITS TEXT", r"digits"),
    "list": ("DIGITS --where status==done", r"digits"),
    "tag": ("DIGITS", r"no tags"),
    "prune": ("DIGITS --older-than 1h", r"nothing to remove"),
    "diff": ("DIGITS TEXT", r"recipe"),
    "report": ("DIGITS TEXT", r"report\.html \(2 runs"),
    "rerun": ("DIGITS trainer.gpus=1 run.dir=again", r"trainer\.gpus"),
    "plan": ("recipe=mnist data.source=embedded trainer.gpus=2", r"GB|MB"),
    "summary": ("recipe=mnist data.source=embedded", r"Conv2d"),
    "find": ("batch_size recipe=mnist model=linear data.source=embedded trainer.global_batch_size=4", r"largest"),
    "doctor": ("recipe=mnist data.source=embedded", r"versions"),
    "check": ("recipe=mnist model=linear data.source=embedded", r"gradient"),
    "data": ("recipe=mnist data.source=embedded", r"synthetic digits"),
    "trust": ("", r"trust"),
    "new": ("mine", r"pip install -e"),
    "schema": ("trainer", r"json-schema"),
    "help": ("trainer.gpus", r"trainer\.gpus"),
    "completion": ("bash", r"complete -"),
}


def test_every_verb_is_tried() -> None:
    assert sorted(VERBS) == sorted(NAMES)


LIVE = ("profile", "stacks", "save", "stop")
"""These ask something of a running run: `tests/cli/test_running.py` has one."""
LONGER = ("plan", "summary", "find", "export", "generate", "check", "doctor", "rerun")
"""With real runs in tests of their own; with other Pythons they are tried here."""


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb in LONGER)) for verb in VERBS])
def test_every_verb_answers(ddpexp: Ddpexp, runs: dict[str, Done], tmp_path: Path, verb: str) -> None:
    arguments, said = VERBS[verb]
    for name, done in runs.items():
        arguments = arguments.replace(name.upper(), str(done.run))
    found = ddpexp(verb, *arguments.split(), environ={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert found.code == (2 if verb in ("sync", *LIVE) else 0), found.err
    assert "Traceback" not in found.out + found.err
    assert re.search(said, found.out or found.err), found.out + found.err


@pytest.mark.slow
def test_a_killed_run_with_loader_workers_resumes_to_the_same_weights(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp)
    words = (*ITEMS, "trainer.gpus=2", "trainer.checkpoint_every=2")
    undisturbed = recipe(*words)
    assert (undisturbed.code, undisturbed.err) == (0, "")
    process, run = recipe.start(*words, environ={**OWN_SERVER, "DDPEXP_FAULT": "step:sleep:1:7"})
    wait_for(lambda: len(list(run.glob("checkpoints/step-*"))) > 0)
    process.send_signal(signal.SIGKILL)
    assert finish(process, run).code == -signal.SIGKILL
    resumed = recipe(*words, f"run.dir={run}")
    assert resumed.code == 0, resumed.err
    hashes = [json.loads((path / "result.json").read_text())["weights_sha256"] for path in (run, undisturbed.run)]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_a_small_sweep_is_done(ddpexp: Ddpexp, tmp_path: Path) -> None:
    done = ddpexp("-m", *SMALL, "trainer.seed=0,1", "trainer.gpus=1", f"hydra.sweep.dir={tmp_path}/sweep")
    assert (done.code, done.err.count("\n")) == (0, 1), done.err  # what it starts
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/result.json"))]
    assert [result["status"] for result in results] == ["done", "done"]
