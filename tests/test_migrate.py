"""docs/migrate.md: the programs of `examples/migrate` before and after, and the tables of flags."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ddpexp.config.declared import declared
from ddpexp.config.folders import our_options
from ddpexp.config.foreign import advice_on_key, advice_on_value
from tests.conftest import PATIENCE, ROOT, Ddpexp
from tests.examples import EXAMPLES

MIGRATE = EXAMPLES / "migrate"
DOCUMENT = (ROOT / "docs/migrate.md").read_text()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
BEFORE = {  # with the batch size of a worker: half of the training set
    "plain.py": (*TORCHRUN, str(MIGRATE / "plain.py"), "--batch-size=256"),
    "with_accelerate.py": (*TORCHRUN, str(MIGRATE / "with_accelerate.py"), "--batch-size=256"),
    "with_lightning.py": (str(MIGRATE / "with_lightning.py"), "--batch-size=256"),
    "train.py": (str(MIGRATE / "train.py"), "data.batch_size=256"),
}
NEEDS = {"with_accelerate.py": "accelerate", "with_lightning.py": "lightning", "train.py": "lightning"}


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a recipe computes is tested, not how fork servers start."""
    return warm_environ


def loss_in(table_row: str) -> float:
    """Return the final loss over the whole set that the document gives a program."""
    [row] = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{table_row}`")]
    return float(row.split("|")[3])


def test_the_recipe_ends_where_the_document_says(ddpexp: Ddpexp, tmp_path: Path) -> None:
    words = ("--config-dir", str(MIGRATE / "conf"), "recipe=migrate", "trainer.gpus=2", "trainer.threads=1")
    done = ddpexp(*words, "trainer.global_batch_size=512", f"run.dir={tmp_path}/run")
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["metrics"]["eval/loss"] == pytest.approx(loss_in("migrate.py"), abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("program", BEFORE)
def test_a_program_that_the_recipe_replaces_ends_with_the_same_loss(program: str, tmp_path: Path) -> None:
    needed = NEEDS.get(program)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"the package {needed} is not installed")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *BEFORE[program]], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    found = float(re.findall(r"eval/loss (\S+)", done.stdout)[-1])
    assert found == pytest.approx(loss_in(program), abs=2e-6)
    assert found == pytest.approx(loss_in("migrate.py"), abs=2e-6)


def named_in(heading: str, words: str = r"`(\w+)`") -> set[str]:
    """Return what the first column of the table under a heading such as `Trainer(...)` names."""
    table = DOCUMENT.partition(f"| `{heading}` | now |\n|---|---|\n")[2].partition("\n\n")[0]
    return set(re.findall(words, "\n".join(line.split("|")[1] for line in table.splitlines())))


def test_every_option_of_torchrun_has_ours_or_why_not() -> None:
    named = named_in("torchrun ...", r"`--([\w-]+)`")
    options = [action.option_strings for action in get_args_parser()._actions]
    spelled = {text.lstrip("-").replace("_", "-") for texts in options for text in texts if text.startswith("--")}
    assert named == spelled - {"help"}


def rows(heading: str) -> Iterator[tuple[str, str]]:
    """Yield what the first column of the last table under a heading names, `key` or `key=value`, with the second."""
    table = DOCUMENT.rpartition(f"| {heading} | now |\n|---|---|\n")[2].partition("\n\n")[0]
    for _, theirs, ours, _ in (row.split("|") for row in table.splitlines()):
        yield from ((word, ours) for word in re.findall(r"`(?:configs/)?([a-z]\w*(?:=\w+)?)`", theirs))


KEYS = re.compile(r"[a-z_]+(?:[./][a-z_]+)*(?=[=?.,])")


@pytest.mark.parametrize(("typed", "ours"), [*rows("`Trainer(...)`"), *rows("`Accelerator(...)`"), *rows("before")])
def test_a_habit_is_answered_with_the_words_of_the_page(typed: str, ours: str) -> None:
    key, _, value = typed.partition("=")
    if not value and (key in our_options() or f"trainer.{key}" in declared()):
        return  # the same word
    said = advice_on_value(key, value) or advice_on_key(key)
    assert said
    named = set(re.findall(r"[a-z_]+(?:[./][a-z_]+)*(?==)", ours))
    assert not named or named & set(KEYS.findall(said)), said


@pytest.mark.parametrize(
    ("package", "name", "least"), [("lightning", "Trainer", 35), ("accelerate", "Accelerator", 20)]
)
def test_every_argument_of_theirs_has_ours_or_why_not(package: str, name: str, least: int) -> None:
    named = named_in(f"{name}(...)")
    assert len(named) >= least
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    signature = inspect.signature(getattr(importlib.import_module(package), name).__init__)
    assert named == set(signature.parameters) - {"self"}
