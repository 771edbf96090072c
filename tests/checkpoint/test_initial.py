"""Which weights run.init_from and the keys beside it name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.checkpoint.initial import find
from ddpexp.checkpoint.weights import check_usable
from ddpexp.config.build import build
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.errors import RefusedError
from ddpexp.settings.run import Run
from tests.conftest import ROOT
from tests.refusals import refused

SAMPLES = ROOT / "tests/samples/stopped"
RUN = build(Run, {"dir": str(SAMPLES), "init_from": str(SAMPLES)}, "run")


def found(**changes: Any) -> Path:
    return find(replace(RUN, **changes), pytest.fail)


def refusal(**changes: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        found(**changes)
    assert str(caught.value).startswith("run.init_")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_of_a_run_is_chosen() -> None:
    newest = found()
    assert newest.name.startswith("step-")
    assert found(init_checkpoint=int(newest.name.removeprefix("step-"))) == newest
    assert "has no intact checkpoint of that step" in refusal(init_checkpoint=999)
    assert "keeps no best checkpoint" in refusal(init_checkpoint="best")
    assert found(init_weights="ema") == newest
    without = str(ROOT / "tests/samples/mnist")
    assert "Use run.init_weights=raw." in refusal(init_from=without, init_weights="ema")
    assert refusal(init_from=str(newest), init_checkpoint=3).endswith(
        f"{newest.name} is a single checkpoint. Leave it out."
    )


def test_what_is_no_run_has_no_best_and_no_average(tmp_path: Path) -> None:
    shutil.copy(found() / "model.safetensors", tmp_path)
    assert found(init_from=str(tmp_path)) == tmp_path
    assert "is not a run directory" in refusal(init_from=str(tmp_path), init_checkpoint="best")
    assert "run.init_weights=ema " in refusal(init_from=str(tmp_path), init_weights="ema")


@pytest.mark.parametrize("name", ["", "adapter_model.safetensors", "adapter_model.bin"])
def test_adapters_of_peft_are_refused_with_how_to_merge_them(tmp_path: Path, name: str) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        (tmp_path / file).write_text("{}")
    with refused(": merge_and_unload"):
        check_usable(tmp_path / name, "x", converts=True)


def test_names_are_looked_up_before_workers_start() -> None:
    sentence = refusal(init_rename={"encodr": "encoder"})
    assert "run.init_rename={encodr: encoder} " in sentence
    assert "same number of *" in refused_selection()


def refused_selection() -> str:
    with pytest.raises(RefusedError) as caught:
        found(init_rename={"a.*": "b"})
    return str(caught.value)


def test_a_damaged_checkpoint_that_was_named_is_refusal(tmp_path: Path) -> None:
    run = shutil.copytree(SAMPLES, tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    assert "is damaged: model.safetensors is damaged" in refusal(init_from=str(run), init_checkpoint=step)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.init_skip=[head.*]", r"run\.init_skip=\[head\.\*\] is for the weights of run\.init_from"),
        ("run.init_rename={a:1}", r"run\.init_rename=.* is not keys, each with a text or null\."),
        ("run.init_checkpoint=newest", r"run\.init_checkpoint=newest is not one of best, last or a whole number\."),
        ("trainer.lora=8", r"trainer\.lora=8 is not a section with the keys match, rank, alpha,"),
        ("trainer.lora.match=[a]", r"trainer\.lora is null and has no keys\. Set it as a whole, as in "),
        ("trainer.lora={match:[],rank:8}", r"trainer\.lora\.match=\[\] names no layers"),
        ("trainer.lora={match:[a],rank:0}", r"trainer\.lora\.rank=0: use "),
        ("trainer.lora={match:[a],dropout:1}", r"trainer\.lora\.dropout=1.0: use "),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_are_refused_before_anything_starts(override: str, sentence: str) -> None:
    with pytest.raises(RefusedError, match=f"^{sentence}"):
        _parsed(override)


def _parsed(override: str) -> None:
    composed = compose(["recipe=mnist", override])
    assert composed is not None
    parse(composed.values)
