"""Files of torch.save: tensors are read, nothing in them runs."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddpexp.checkpoint.convert import check_archive, convert
from ddpexp.checkpoint.headers import read_header
from ddpexp.checkpoint.pickled import choose, explained
from tests.refusals import refused

W = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("loaded", "averaged", "part"),
    [
        ({"w": W}, False, None),
        ({"epoch": 3, "state_dict": {"w": W}, "optimizer": {"a": 1}}, False, "state_dict"),
        ({"model": {"state_dict": {"w": W}, "epoch": 1}}, False, "model.state_dict"),
        ({"model": {"w": -W}, "model_ema": {"w": W}}, True, "model_ema"),
    ],
)
def test_the_tensors_are_found_below_the_usual_keys(loaded: Any, averaged: bool, part: str | None) -> None:
    tensors, there = choose(loaded, averaged)
    assert torch.equal(tensors["w"], W)
    assert there == part


@pytest.mark.parametrize(
    ("loaded", "averaged", "sentence"),
    [
        (W, False, "tensor"),
        ({}, False, "things"),
        ({"a": 1, "b": {"w": W}}, False, "alone"),
        ({"w": W}, True, "average"),
    ],
)
def test_other_contents_are_refused(loaded: Any, averaged: bool, sentence: str) -> None:
    with refused(sentence):
        choose(loaded, averaged)


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_is_named_and_not_run(tmp_path: Path) -> None:
    for number, protocol in enumerate((True, False)):
        file, canary = tmp_path / f"{number}.pth", tmp_path / "canary"
        torch.save({"w": W, "x": Code(canary)}, file, _use_new_zipfile_serialization=protocol)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (of torch's own kinds)
            torch.load(file, weights_only=True)
        assert explained(caught.value).startswith(f"holds code, {os.system.__module__}.system, which is not run")
        assert not canary.exists()


def test_a_file_becomes_safetensors_in_a_process_of_its_own(tmp_path: Path) -> None:
    state = {"w": W.T, "v": (same := torch.ones(3)), "u": same, "n": torch.tensor(3)}
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    target = tmp_path / "w.safetensors"
    assert convert(tmp_path / "w.pth", target, "run.init_from=w.pth", averaged=False) == "state_dict"
    tensors = load_file(target)
    assert torch.equal(tensors["w"], W.T)
    assert set(read_header(target)) == set(state)  # tied ones under each of their names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pth", "w.safetensors"]


def test_an_archive_that_would_grow_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with refused("run.init_from=x"):
        check_archive(path, "run.init_from=x")
    torch.save({"w": W}, path)
    check_archive(path, "run.init_from=x")
