"""`ddpexp generate`: what it takes, and what a run writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpexp.cli.generate import GenerateArguments
from tests.conftest import Ddpexp, Done
from tests.refusals import command_refused, refused
from tests.typed import call


def test_options_stand_anywhere_among_the_arguments() -> None:
    typed = [
        "--prompt",
        "--x 3",
        "run",
        "--tokens=5",
        "--config-dir",
        "mine/conf",
        "--top-k",
        "null",
        "--temperature",
        "0",
    ]
    called = call("generate", *typed)
    assert called.typed(GenerateArguments()) == GenerateArguments(prompt="--x 3", tokens=5, top_k=None, temperature=0.0)
    assert called.operands == ["run", "--config-dir", "mine/conf"]
    called = call("generate", "run", "--prompt", "7", "--checkpoint", "30")
    assert called.typed(GenerateArguments()) == GenerateArguments(prompt="7", checkpoint="30")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--token 3", "generate --token: --tokens"),
        ("--tokens", "generate --tokens: --tokens 200"),
        ("--seed 1 --seed 2", "generate --seed: once"),
        ("--tokens 0", "generate --tokens=0: from 1"),
        ("--temperature -1", "generate --temperature=-1: from 0"),
        ("--top_k x", "generate --top_k=x"),
        ("--device gpu", "generate --device=gpu"),
    ],
)
def test_an_option_that_means_nothing_is_refused(typed: str, expected: str) -> None:
    with refused(expected):
        call("generate", "run", *typed.split()).typed(GenerateArguments())


def trained(ddpexp: Ddpexp) -> tuple[Done, Path]:
    """Return a run of a tiny GPT, and the file of its text, which is there no more."""
    text = ddpexp.folder / "text.txt"
    text.write_text("abc def ghi\n" * 100)
    done = ddpexp(
        "recipe=gpt", f"data.path={text}", "data.block_size=8", "model.width=16", "model.num_layers=1",
        "trainer.max_steps=2", "logger=none", "launcher=inline", "trainer.eval_every=0",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    text.unlink()
    return done, text


def test_a_run_writes_without_its_data(ddpexp: Ddpexp) -> None:
    done, _ = trained(ddpexp)
    written = ddpexp("generate", str(done.run), "--prompt", "abc", "--tokens", "20", "--device", "cpu")
    assert (written.code, written.err) == (0, "")
    assert re.fullmatch(r"abc[a-i \n]{20}\n", written.out)
    failed = ddpexp("generate", str(done.run), "--prompt", "xyz")
    command_refused(failed, "the text: 'x'")


@pytest.mark.slow
def test_a_run_writes_the_same_for_a_seed_and_names_what_it_would_read_from_the_environment(ddpexp: Ddpexp) -> None:
    done, text = trained(ddpexp)
    words = ("generate", str(done.run), "--prompt", "abc", "--tokens", "20", "--device", "cpu")
    written = ddpexp(*words)
    config = done.run / "config.yaml"
    config.write_text(config.read_text().replace(f"path: {text}", "path: ${oc.env:DATA_FOLDER}/text.txt"))
    environ = {"DATA_FOLDER": str(ddpexp.folder)}
    failed = ddpexp(*words, environ=environ)
    restated = "data.path=${oc.env:DATA_FOLDER}/text.txt"
    assert (failed.code, failed.err.endswith(f" '{restated}'\n")) == (2, True), failed.err
    for more in (restated, "run.trust=[oc.env:DATA_FOLDER]"):
        assert ddpexp(*words, more, environ=environ).out == written.out
