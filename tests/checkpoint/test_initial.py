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
from ddpexp.settings.run import RunSettings
from tests.conftest import ROOT
from tests.refusals import refused

SAMPLES = ROOT / "tests/samples/stopped"
RUN = build(RunSettings, {"dir": str(SAMPLES), "init_from": str(SAMPLES)}, "run")


def found(**changes: Any) -> Path:
    return find(replace(RUN, **changes), pytest.fail)


def test_a_checkpoint_of_a_run_is_chosen() -> None:
    newest = found()
    assert newest.name.startswith("step-")
    assert found(init_checkpoint=int(newest.name.removeprefix("step-"))) == newest
    with refused("run.init_checkpoint=999: 6, 3"):
        found(init_checkpoint=999)
    with refused("run.init_checkpoint=best: trainer.keep_best"):
        found(init_checkpoint="best")
    assert found(init_weights="ema") == newest
    with refused("run.init_weights=ema: run.init_weights=raw"):
        found(init_from=str(ROOT / "tests/samples/mnist"), init_weights="ema")
    with refused("run.init_checkpoint=3: a single checkpoint"):
        found(init_from=str(newest), init_checkpoint=3)


def test_what_is_no_run_has_no_best_and_no_average(tmp_path: Path) -> None:
    shutil.copy(found() / "model.safetensors", tmp_path)
    assert found(init_from=str(tmp_path)) == tmp_path
    with refused("run.init_checkpoint=best: not a run directory"):
        found(init_from=str(tmp_path), init_checkpoint="best")
    with refused("run.init_weights=ema: neither"):
        found(init_from=str(tmp_path), init_weights="ema")


@pytest.mark.parametrize("name", ["", "adapter_model.safetensors", "adapter_model.bin"])
def test_adapters_of_peft_are_refused_with_how_to_merge_them(tmp_path: Path, name: str) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        (tmp_path / file).write_text("{}")
    with refused(": merge_and_unload"):
        check_usable(tmp_path / name, "x", converts=True)


def test_names_are_looked_up_before_workers_start() -> None:
    for rename, expected in (({"encodr": "encoder"}, "embed.weight"), ({"a.*": "b"}, "same number of *")):
        with refused(f"run.init_rename: {expected}"):
            found(init_rename=rename)


def test_a_damaged_checkpoint_that_was_named_is_refused(tmp_path: Path) -> None:
    run = shutil.copytree(SAMPLES, tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    with refused(f"{newest.name}: model.safetensors is damaged"):
        found(init_from=str(run), init_checkpoint=step)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.init_skip=[head.*]", "run.init_skip=[head.*]: run.init_from"),
        ("run.init_rename={a:1}", "run.init_rename: text or null"),
        ("run.init_checkpoint=newest", "run.init_checkpoint=newest: best, last or a step"),
        ("trainer.lora=8", "trainer.lora=8: match, rank, alpha"),
        ("trainer.lora.match=[a]", "trainer.lora: trainer.lora={match:"),
        ("trainer.lora={match:[],rank:8}", "trainer.lora.match=[]: blocks.*"),
        ("trainer.lora={match:[a],rank:0}", "trainer.lora.rank=0: from 1"),
        ("trainer.lora={match:[a],dropout:1}", "trainer.lora.dropout=1: from 0"),
    ],
)
def test_keys_that_cannot_be_are_refused_before_anything_starts(override: str, expected: str) -> None:
    with refused(expected):
        _parsed(override)


def _parsed(override: str) -> None:
    composed = compose(["recipe=mnist", override])
    assert composed is not None
    parse(composed.values)
