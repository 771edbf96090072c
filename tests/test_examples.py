"""Every example runs, and what the documents quote of it is what its files contain.

An example is a folder `examples/NAME` with `NAME.py` and `conf/recipe/NAME.yaml`; a new one is found by itself. In a
document, the first line of a block names the file that the rest of it is from: `# examples/NAME/NAME.py` or
`# recipes/NAME.py`.
"""

from __future__ import annotations

import json
import math
import pstats
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from safetensors.torch import save_file

from ddpexp.config.compose import compose_command
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.settings.node import Node
from examples.mine.mine import Stable
from examples.nextbyte.nextbyte import load as load_text
from examples.palindromes.palindromes import Transformer
from examples.photos.draw import main as draw_photos
from examples.table.table import write as write_table
from tests.conftest import PATIENCE, ROOT, Ddpexp, Done
from tests.examples import DOCUMENTS, EXAMPLES
from tests.families.table import FAMILIES
from tests.refusals import refused
from tests.terminals import Session

RECIPES = {path.stem: path.parts[-4] for path in sorted(EXAMPLES.glob("*/conf/recipe/*.yaml"))}  # and their folders
# Examples without a recipe of their own, and what runs them.
OTHERS = {
    "launcher": "launch/test_plugins.py",
    "package": "test_packages.py",
    "python": "cli/api/test_notebook.py",
    "rows": "test_packages.py",
    "strategy": "strategy/test_outside.py",
    "tracker": "loggers/remote/test_runs.py",
}
# Blocks that are of no example, by their first line.
FRAGMENTS = {
    "docs/containers.md: spec:": "a part of a pod",
}
FEW_DIGITS = ("data.source=embedded", "data.embedded_train=640", "data.embedded_test=100")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What examples do is tested, not how fork servers start."""
    return warm_environ


def blocks() -> list[tuple[str, str, str]]:
    """Return the blocks of Python, YAML and TOML in the documents: the document, the first line and the others."""
    found = []
    for document in DOCUMENTS:
        for match in re.finditer(r"^( *)```(?:python|yaml|toml)\n(.*?)^\1```", document.read_text(), re.M | re.S):
            text = re.sub(f"^{match[1]}", "", match[2], flags=re.M)
            first, _, rest = text.partition("\n")
            found.append((str(document.relative_to(ROOT)), first, rest))
    return found


def test_every_example_has_a_recipe_or_a_test_of_its_own() -> None:
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    assert sorted({*RECIPES.values(), *OTHERS}) == folders
    for folder in RECIPES.values():
        assert (EXAMPLES / folder / f"{folder}.py").is_file()
    for name, test in OTHERS.items():
        assert re.search(rf"\b{name}\b", (ROOT / "tests" / test).read_text()), f"{test} does not run examples/{name}"


def test_every_block_of_a_document_is_from_a_file_of_an_example() -> None:
    fragments = {f"{document}: {first}" for document, first, _ in blocks()} & FRAGMENTS.keys()
    assert fragments == FRAGMENTS.keys(), "not needed: remove them from FRAGMENTS"
    for document, first, rest in blocks():
        if f"{document}: {first}" in FRAGMENTS:
            continue
        name = first.removeprefix("# ")
        assert re.fullmatch(r"# (examples|recipes)/\S+", first), (
            f"{document}: the block {first!r} does not begin with its file"
        )
        assert (ROOT / name).is_file(), f"{document}: {name} does not exist"
        assert f"\n{rest}" in "\n" + (ROOT / name).read_text(), f"{document} quotes what {name} does not contain"


def test_every_example_is_in_a_document() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert [path.name for path in EXAMPLES.iterdir() if f"examples/{path.name}" not in text] == []


def train(ddpexp: Ddpexp, name: str, *overrides: str) -> Done:
    config, run = EXAMPLES / RECIPES[name] / "conf", ddpexp.folder / "run"
    few: tuple[str, ...] = FEW_DIGITS if "/data: mnist" in (config / f"recipe/{name}.yaml").read_text() else ()
    if name == "palindromes":  # from the weights of another run
        save_file(Transformer(classes=8).state_dict(), ddpexp.folder / "pretrained.safetensors")
        few = (f"run.init_from={ddpexp.folder}/pretrained.safetensors",)
    if name == "photos":
        draw_photos(ddpexp.folder / "photos")
    if name == "table":
        write_table(str(ddpexp.folder / "flowers.csv"))
    done = ddpexp("--config-dir", str(config), f"recipe={name}", f"run.dir={run}", *few, *overrides)
    assert (done.code, done.err) == (0, "")
    return replace(done, run=run)


# Importing torchmetrics takes longer than all else; of families, other tests train as much and compare the weights.
LONGER = ("metrics", *(family.name for family in FAMILIES))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGER)) for name in RECIPES])
def test_the_example_trains(ddpexp: Ddpexp, name: str) -> None:
    done = train(ddpexp, name, "trainer.gpus=2", "trainer.max_steps=3")
    assert done.result()["step"] == 3
    assert done.result()["metrics"]


def test_batches_by_tokens_visit_every_sequence_once_at_any_number_of_workers(ddpexp: Ddpexp) -> None:
    keys = ("data.batch_tokens=400", "trainer.global_batch_size=4", "trainer.micro_batch_size=8", "trainer.epochs=1")
    one = train(ddpexp, "lengths", *keys, "trainer.reduction=exact", "launcher=inline")
    assert "92 batches an epoch of at most 400 tokens" in one.out
    assert "4 = micro-batch of 400 tokens x 4 accumulation steps x 1 rank" in one.out
    assert (one.result()["step"], one.result()["samples"]) == (23, 640)
    digest = one.result()["weights_sha256"]
    two = train(ddpexp, "lengths", *keys, "trainer.reduction=exact", "trainer.gpus=2", f"run.dir={ddpexp.folder}/two")
    assert json.loads((ddpexp.folder / "two/result.json").read_text())["weights_sha256"] == digest, two.err


@pytest.mark.slow
def test_a_trained_gpt_continues_a_prompt(ddpexp: Ddpexp) -> None:
    small = ("model.width=16", "model.layers=1", "data.context=16", "trainer.max_steps=2", "trainer.gpus=1")
    done = train(ddpexp, "nextbyte", *small)
    metrics = done.result()["metrics"]
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(metrics["eval/loss"]))
    script = [sys.executable, str(EXAMPLES / "nextbyte/sample.py")]
    sampled = subprocess.run([*script, str(done.run), "After ten"], capture_output=True, text=True, timeout=PATIENCE)
    assert (sampled.returncode, sampled.stderr) == (0, "")
    assert sampled.stdout.startswith("After ten")
    assert len(sampled.stdout.encode()) > 300


@pytest.mark.parametrize(
    ("path", "context", "expected"),
    [("nowhere.txt", 64, "data.path=nowhere.txt"), (None, 100000, "data.context=100000: 137468 bytes")],
)
def test_a_text_that_a_gpt_cannot_learn_is_refused(path: str | None, context: int, expected: str) -> None:
    with refused(expected):
        load_text(path, context)


def test_the_schedule_of_the_readme_is_accepted_and_has_a_plateau() -> None:
    overrides = ["recipe=mine", "scheduler._target_=mine.Stable", "scheduler.decay=0.2"]
    composed = compose_command(["--config-dir", str(EXAMPLES / "mine/conf"), *overrides])
    assert isinstance(composed, ResolvedConfig)
    assert parse(composed.values).scheduler == Node("mine.Stable", {"decay": 0.2})
    factors = [Stable(0.2).factor(step, 1000) for step in (0, 99, 800, 900, 999)]
    assert factors == pytest.approx([0.01, 1.0, 1.0, 0.5, 0.005])


def test_the_debugger_session_of_the_documents(ddpexp: Ddpexp) -> None:
    """What the document shows is what the terminal shows, up to paths and the line and step at which it stops."""
    text = (ROOT / "docs/debugging.md").read_text()
    command = re.search(r"^    \$ python -m ddpexp (.*)$", text, re.M)
    assert command is not None
    overrides = [*command[1].replace("examples/", f"{EXAMPLES}/").split(), "run.dir=run"]
    steps = re.compile(r"\bstep \d+")  # all ranks agree on a step that none of them has passed
    document = steps.sub("step N", text.replace("RUN_DIR", "run"))
    typed = re.findall(r"^    \(Pdb rank 1\) (.*)$", text, re.M)
    with Session([sys.executable, "-m", "ddpexp", *overrides], ddpexp.folder, ddpexp.environ) as shell:
        shell.at("(Pdb rank 1) ", *typed)
        assert shell.end() == 128 + signal.SIGINT
    shown = shell.shown[shell.shown.index("ddpexp: rank 1") :].splitlines()
    assert len(shown) > 8
    for line in shown:
        assert (
            line.startswith((">", "->", "python -m ddpexp resume run"))
            or f"    {steps.sub('step N', line)}\n" in document
        ), line


@pytest.mark.slow
def test_profilers_of_the_documents(ddpexp: Ddpexp) -> None:
    assert (
        "python -m cProfile -o out.prof -m ddpexp recipe=mnist launcher=inline trainer.max_steps"
        in (ROOT / "docs/debugging.md").read_text()
    )
    overrides = ["recipe=mnist", "launcher=inline", "trainer.max_steps=3", *FEW_DIGITS, "run.dir=run"]
    done = subprocess.run(
        [sys.executable, "-m", "cProfile", "-o", "out.prof", "-m", "ddpexp", *overrides],
        cwd=ddpexp.folder, env=ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    names = {name for _, _, name in pstats.Stats(str(ddpexp.folder / "out.prof")).stats}  # type: ignore[attr-defined]
    assert {"forward", "train_step"} <= names
