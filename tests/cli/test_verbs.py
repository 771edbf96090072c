"""The table of verbs, and how the words behind one are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.cli import verbs
from ddpexp.cli.forks import will_fork
from ddpexp.cli.verb import Verb, load
from ddpexp.errors import RefusedError
from tests.refusals import refused
from tests.typed import call


@pytest.mark.parametrize("verb", [*verbs.VERBS, verbs.MEMBER], ids=lambda verb: verb.name)
def test_what_a_verb_names_is_there(verb: Verb) -> None:
    assert callable(verb.load())
    for name in (verb.list_more, *(option.values for option in verb.options)):
        if name not in ("", "paths"):
            assert load(name)()
    for option in verb.options:
        assert bool(option.value) == bool(option.example), option.name


def test_no_two_verbs_have_a_name_in_common() -> None:
    names = [name for verb in verbs.VERBS for name in (verb.name, *verb.also)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("words", "operands", "options"),
    [
        ("evaluate run a=b --json", ["run", "a=b"], {"--json": ""}),
        ("evaluate run --split test a=b", ["run", "a=b"], {"--split": "test"}),
        ("evaluate --split=eval,test run a=b", ["run", "a=b"], {"--split": "eval,test"}),
        ("plan --memory-gb 80 a=b", ["a=b"], {"--memory_gb": "80"}),
        ("check --config-dir conf a=b", ["--config-dir", "conf", "a=b"], {}),
        ("table --config-dir x", None, {}),
        ("evaluate run --json=x", None, {}),
        ("check --multirun a=b", None, {}),
    ],
)
def test_options_may_stand_anywhere(words: str, operands: list[str] | None, options: dict[str, str]) -> None:
    if operands is None:
        with pytest.raises(RefusedError):
            call(*words.split())
        return
    called = call(*words.split())
    assert (called.operands, called.options) == (operands, options)


def test_a_directory_is_no_override(tmp_path: Path) -> None:
    with refused(f"check {tmp_path}: overrides.yaml"):
        call("check", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "forks"),
    [
        ("recipe=mnist", True),
        ("recipe=mnist --help", False),
        ("recipe=mnist launcher=inline", False),
        ("recipe=mnist launcher=spawn,slurm -m", False),
        ("recipe=mnist launcher.start_method=spawn", False),
        ("member run", True),
        ("check recipe=mnist launcher=slurm", True),
        ("check", False),
        ("doctor", True),
        ("doctor launcher=slurm", False),
        ("evaluate run", True),
        ("evaluate run --help", False),
        ("evaluate", False),
        ("export run --out x", False),
        ("plan recipe=mnist", False),
    ],
)
def test_a_fork_server_starts_where_workers_will_be_forked(
    words: str, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    argv = words.split()
    assert will_fork(verbs.BY_NAME.get(argv[0]), argv) is forks


def test_a_verb_about_one_directory_takes_one_that_is_there(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    verb = verbs.BY_NAME["evaluate"]
    assert verb.parse([str(one), "trainer.gpus=2"]).source() == (str(one), ["trainer.gpus=2"])
    assert verb.parse(["--config-dir", str(one), str(other)]).source() == (str(other), ["--config-dir", str(one)])
    assert verb.parse([str(tmp_path / "none"), str(one)]).source() == (str(tmp_path / "none"), [str(one)])
    with refused(f"evaluate {one} {other}: one directory"):
        verb.parse([str(one), str(other)]).source()
