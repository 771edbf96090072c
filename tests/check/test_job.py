"""What `ddpexp check` gives its workers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from ddpexp.check.job import Check
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.launch import Layout, Participants


def test_weights_of_torch_save_reach_the_workers_as_those_of_a_run_do(tmp_path: Path) -> None:
    weights = {"layer.weight": torch.arange(6.0).view(2, 3)}
    torch.save({"model": weights, "epoch": 3}, tmp_path / "net.pth")
    composed = compose(["recipe=mnist", "data.source=embedded", f"run.init_from={tmp_path}/net.pth"])
    assert composed is not None
    check = Check(parse(composed.values), composed.text, tmp_path, "one")
    work = check.begin(Layout(1, 1, "cpu", "gloo", 1), Participants(["here"], []))
    request = json.loads(work.arguments[0])
    found = load_file(request["init_from"])
    assert {name: one.tolist() for name, one in found.items()} == {"layer.weight": weights["layer.weight"].tolist()}
