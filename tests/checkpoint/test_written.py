"""What lies in the files of one checkpoint after another, and in which order they come to the disk.

Real files, real fsync.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddpexp.checkpoint.format import scan
from ddpexp.checkpoint.reader import read_part
from ddpexp.checkpoint.tensors import read_tensors
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.distributed.world import World

ALONE = World(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def test_each_checkpoint_holds_its_own_tensors_whatever_the_one_before_held(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ALONE, keep_last=None)
    saved: list[Mapping[str, Mapping[str, Tensor]]] = [
        {"model": {"w": torch.randn(2, 3), "b": torch.randn(3)}},
        {"model": {"w": torch.randn(2, 3), "b": torch.randn(3)}},
        {"model": {"w": torch.randn(3, 2), "b": torch.randn(3)}},  # as many bytes
        {"model": {"w": torch.randn(5, 4), "b": torch.randn(3)}},
        {"model": {"w": torch.randn(5, 4).int(), "b": torch.randn(3)}},
        {"model": {"v": torch.randn(5, 4).int(), "b": torch.randn(3)}},
        {"model": {"v": torch.randn(2)}, "other": {"b": torch.randn(3)}},
        {"model": {"v": torch.randn(2)}, "another": {"b": torch.randn(3)}},
        {"model": {"w": torch.randn(2, 3), "b": torch.randn(3)}},
    ]
    for step, files in enumerate(saved):
        writer.save(step, Content(files, {"progress": {"moment": torch.full((step + 1,), float(step))}}))
    writer.wait(end=True)
    found = scan(tmp_path).complete[::-1]
    assert [one.step for one in found] == list(range(len(saved)))
    for one, files in zip(found, saved, strict=True):
        assert one.problem() is None
        assert read_part(one, "progress")["moment"].tolist() == [float(one.step)] * (one.step + 1)
        names = {path.stem for path in one.folder.glob("*.safetensors")}
        assert names == {*files, "state.progress"}
        for name, tensors in files.items():
            kept = load_file(one.folder / f"{name}.safetensors")
            assert kept.keys() == tensors.keys()
            assert all(
                torch.equal(kept[key], value) and kept[key].dtype == value.dtype for key, value in tensors.items()
            )


def test_a_weight_that_is_tied_no_more_is_written_by_itself(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ALONE, keep_last=None)
    tied, own = torch.ones(3), torch.zeros(3)
    for step, head in enumerate((tied, own, tied)):
        writer.save(step, Content({"model": {"embed": tied, "head": head}}))
    writer.wait(end=True)
    for one, head in zip(scan(tmp_path).complete[::-1], (tied, own, tied), strict=True):
        found = read_tensors(one.folder / "model.safetensors")
        assert torch.equal(found["head"], head)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What comes to the disk, as (how, where): every fsync and every change of a name is done and noted."""
    seen: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def named(how: Any) -> Any:
        def change(source: Any, target: Any, **options: Any) -> None:
            how(source, target, **options)
            seen.append(("name", os.fspath(target)))

        return change

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "rename", named(rename))
    monkeypatch.setattr(os, "replace", named(replace))
    return seen


def test_records_and_shares_are_on_the_disk_before_a_checkpoint_counts_and_its_name_after(
    tmp_path: Path, order: list[tuple[str, str]]
) -> None:
    folder = tmp_path / "checkpoints"
    records = [tmp_path / "metrics.jsonl", tmp_path / "events.out"]
    for path in records:
        path.write_text("{}\n")
    gone = tmp_path / "removed"  # by the user, meanwhile
    writer = Writer(folder, ALONE)
    positions = {"metrics.jsonl": 3, "rows": {"table": [1, 2]}}
    models = {"model": {"w": torch.ones(4)}}
    own = {"buffers": {"x": torch.ones(1)}}
    writer.save(7, Content(models, {"a": torch.ones(2)}, own, records=positions, log_files=[*records, gone]))
    writer.wait(end=True)
    final = folder / "step-00000007"
    counts = order.index(("name", str(final)))
    [checkpoint] = scan(folder).complete
    assert (checkpoint.step, checkpoint.manifest["records"]) == (7, positions)
    before = {where for how, where in order[:counts] if how == "sync"}
    assert before >= {str(path) for path in records}
    manifest = min(place for place, (_, where) in enumerate(order) if "checkpoint.json" in where)
    for path in records:
        assert order.index(("sync", str(path))) < manifest
    files = {path.name for path in final.iterdir()}
    assert files == {
        "checkpoint.json", "model.safetensors", "state.a.json", "state.a.safetensors", "state.rank-00000.json",
        "state.rank-00000.safetensors",
    }  # fmt: skip
    assert {Path(where).name for where in before} >= files - {"checkpoint.json"}
    assert any("checkpoint.json" in where for where in before)
    assert ("sync", str(folder)) in order[counts:]  # without it a crash of the host may take the name back
    assert any(
        Path(where).parent == folder for where in before
    )  # the folder's own list of files, before it has its name
