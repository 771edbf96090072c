"""What manifest.json says: each thing once, and of older versions too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ddpexp.launch import Layout, Participants
from ddpexp.run import manifest
from ddpexp.run.directory import RunDir
from ddpexp.run.provenance import provenance
from ddpexp.run.repository import Snapshot
from ddpexp.system import files, nvml
from ddpexp.system.files import write
from ddpexp.system.nvml import Driver, Gpu
from tests.conftest import ROOT

LAYOUT = Layout(nodes=1, world_size=4, device="cpu", backend="gloo", threads=2)
CLEAN = Snapshot({"commit": "abc", "dirty": False}, b"")


def described(before: dict[str, Any] | None = None, *, code: Snapshot = CLEAN, **changed: Any) -> dict[str, Any]:
    """Return what a start leaves, as it is read again."""
    facts: dict[str, Any] = {
        "layout": LAYOUT,
        "argv": ["ddpexp", "recipe=mnist"],
        "participants": Participants(["a", "a"], []),
        **changed,
    }
    found = manifest.describe(manifest.Start(code=code, **facts), {"name": "points"}, before)
    read: dict[str, Any] = json.loads(files.dumps(found))
    return read


def test_the_manifest_says_where_and_on_what_a_run_happens(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    found = described()
    write(run.manifest, files.dumps(found))
    assert found["command"] == ["ddpexp", "recipe=mnist"]
    assert (found["world"]["world_size"], found["data"]["name"], found["hosts"]) == (4, "points", ["a"])
    assert found["git"] == {"commit": "abc", "dirty": False}
    assert run.layout() == LAYOUT


def test_a_run_on_gpus_names_their_models_and_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Driver((Gpu("GPU-0", name="H100"), Gpu("GPU-1", name="H100"), Gpu("GPU-2", name="L4")), version="580.95")
    monkeypatch.setattr(nvml, "driver", lambda: answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = described(layout=replace(LAYOUT, device="cuda", backend="nccl"))
    assert found["gpus"] == {"models": ["H100"], "driver": "580.95"}
    machine = provenance({}, found)["machine"]
    assert (machine["GPUs"], machine["driver"]) == (["H100"], "580.95")
    assert "gpus" not in described()


def test_each_thing_is_there_once() -> None:
    found = described()
    for count in range(5):
        found = described(found, argv=["ddpexp", "resume", f"start {count}"])
    text = files.dumps(found)
    for once in ('"packages"', '"platform"', '"world"', '"hosts"', '"torch"', '"python"'):
        assert text.count(once) == 1, once
    assert [one["command"][-1] for one in found["earlier"]] == [
        "recipe=mnist",
        "start 0",
        "start 1",
        "start 2",
        "start 3",
    ]
    assert all(set(one) == {"started", "command"} for one in found["earlier"])


def test_of_an_earlier_start_the_manifest_says_what_was_other() -> None:
    first = described(argv=["one"])
    second = described(first, argv=["one"], layout=Layout(1, 2, "cpu", "gloo", 2), changes=["2 workers instead of 4"])
    third = described(second, argv=["one"], layout=Layout(1, 2, "cpu", "gloo", 2))
    [one, two] = third["earlier"]
    assert one == {"started": first["started"], "world": first["world"], "changes": []}
    assert two == {"started": second["started"], "changes": ["2 workers instead of 4"]}


@pytest.mark.parametrize("odd", [{"earlier": {}}, {"earlier": 3}, {}])
def test_what_anybody_has_written_into_a_manifest_does_no_harm(odd: dict[str, Any]) -> None:
    assert len(described({"started": None, **odd})["earlier"]) == 1


def test_every_installed_package_is_listed_with_its_version() -> None:
    found = manifest.packages(sys.path)
    for name in ("torch", "hydra-core", "ddpexp", "pyyaml", "tensorboard"):
        assert found[name] == metadata.version(name), name
    assert list(found) == sorted(found)
    known = {manifest_name(one.metadata["Name"]) for one in metadata.distributions()}
    assert set(found) == known


def manifest_name(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def test_packages_are_found_as_python_finds_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (
        first / "My_Tool-1.0.dist-info",
        second / "my.tool-2.0.dist-info",
        second / "old-0.5-py3.10.egg-info",
    ):
        folder.mkdir(parents=True)
    (second / "bare.egg-info").mkdir()
    (second / "bare.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: bare\nVersion: 7\n")
    (second / "void.egg-info").mkdir()
    found = manifest.packages([str(tmp_path / "nowhere"), str(first), str(second), str(tmp_path / "python.zip")])
    assert found == {"bare": "7", "my-tool": "1.0", "old": "0.5", "void": ""}


def test_the_patch_of_a_start_is_kept_beside_those_of_others(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert manifest.diff_of(run, CLEAN, None) == (None, None)
    first, path = manifest.diff_of(run, Snapshot(None, b"one"), None)
    assert first is not None
    assert (path, first["file"]) == (run.diff, "code.diff")
    run.diff.write_bytes(b"one")
    assert manifest.diff_of(run, Snapshot(None, b"one"), {"code_diff": first}) == (first, None)
    second, path = manifest.diff_of(run, Snapshot(None, b"two", is_cut=True), {"code_diff": first})
    assert second is not None
    assert (path, second["file"], second["is_cut"]) == (tmp_path / "code-1.diff", "code-1.diff", True)
    run.diff.unlink()
    run.diff.symlink_to(tmp_path / "outside")
    _, path = manifest.diff_of(run, Snapshot(None, b"two"), None)
    assert path == tmp_path / "code-1.diff"


def test_listing_the_packages_imports_none_of_them() -> None:
    code = "import sys; from ddpexp.run import manifest; manifest.packages(sys.path); print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "numpy", "hydra", "rich"} & set(said.split())
