"""Every byte of a checkpoint is under a hash.

And what is not whole neither counts nor stands in the place of what is.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.checkpoint.codec import decode, encode
from ddpexp.checkpoint.format import MANIFEST, Damaged, clean, newest_intact, open_checkpoint, scan, seal, set_aside
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.reader import read_part, read_rank_state
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.system.files import parse_json
from ddpexp.train.optimizers import optimizer_state, parameter_names, restore_optimizer
from tests.checkpoint.test_writer import ALONE, Tied
from tests.refusals import refused


def saved(folder: Path, step: int = 3, *, model: nn.Module | None = None, **options: Any) -> Path:
    """Write a checkpoint with everything that one can hold."""
    writer = Writer(folder, ALONE, **options)
    state = (model or nn.Linear(30, 20)).state_dict()
    parts = {
        "progress": {"step": step, "rate": 0.1},
        "optimizers": {"a": torch.ones(700)},
        "callbacks": {"early": {"left": 3}},
    }
    content = Content(
        {"model": state, "model.ema": state}, parts, {"random": {"numpy": torch.arange(9)}},
        {"config.yaml": b"trainer: {}\n"},
        {"epoch": 0.5, "metrics": {"eval/loss": 0.25}, "evaluated_at": step},
    )  # fmt: skip
    writer.save(step, content)
    writer.wait(end=True)
    return folder / f"step-{step:08d}"


def is_accepted(folder: Path) -> bool:
    found = scan(folder).complete
    return bool(found) and found[0].problem() is None


def test_no_changed_bit_of_any_file_is_accepted(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert is_accepted(tmp_path)
    chance = random.Random(0)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 10
    for name in names:
        path = folder / name
        data = path.read_bytes()
        places = range(len(data)) if name == MANIFEST else chance.sample(range(len(data)), min(40, len(data)))
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            assert not is_accepted(tmp_path), f"byte {place} of {name}"
        for other in (data[:-1], data + b"\0", data + b"\n", b""):
            path.write_bytes(other)
            assert not is_accepted(tmp_path), f"{len(other)} of {len(data)} bytes of {name}"
        path.unlink()
        assert not is_accepted(tmp_path), f"without {name}"
        path.write_bytes(data)
    assert is_accepted(tmp_path)


def test_a_manifest_of_the_older_format_does_not_stand_in_for_a_damaged_one(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / MANIFEST).write_bytes(b"{}")
    (folder / "manifest.json").write_text('{"format": 1, "step": 3, "world_size": 1, "pieces": []}')
    [one] = scan(tmp_path).damaged
    assert one == Damaged(folder, "checkpoint.json is damaged: it does not have its own hash")


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([(0, 5)], "the pieces of model.safetensors have 5 bytes, and the file 10"),
        ([(0, 5), (6, 4)], "a piece of model.safetensors has 4 bytes at 6, and the one before ends at 5"),
        ([], "the pieces of model.safetensors have 0 bytes"),
        ([(0, -5), (-5, 15)], "has -5 bytes at 0"),
    ],
)
def test_pieces_that_leave_a_gap_are_no_description_of_a_file(
    tmp_path: Path, pieces: list[tuple[int, int]], sentence: str
) -> None:
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    described = [{"offset": offset, "num_bytes": size, "sha256": "0" * 64} for offset, size in pieces]
    files = {"model.safetensors": {"num_bytes": 10, "pieces": described}}
    (folder / MANIFEST).write_bytes(seal({"format": 2, "step": 3, "files": files}))
    [one] = scan(tmp_path).damaged
    assert sentence in one.problem


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"metrics": {"eval/loss": "abc"}}, "no number for the metric eval/loss"),
        ({"metrics": {"eval/loss": [1.0]}}, "no number for the metric eval/loss"),
        ({"metrics": {"eval/loss": 10**400}}, "too large"),
        ({"metrics": "abc"}, "none of a checkpoint"),
        ({"evaluated_at": [3]}, "names no step for its evaluation"),
    ],
)
def test_a_manifest_whose_best_value_cannot_be_found_is_damaged(
    tmp_path: Path, fields: dict[str, object], sentence: str
) -> None:
    folder = saved(tmp_path)
    manifest = dict(open_checkpoint(folder).manifest)
    (folder / MANIFEST).write_bytes(seal({**manifest, "metrics": {"eval/loss": None}, "evaluated_at": 3}))
    assert scan(tmp_path).damaged == []
    (folder / MANIFEST).write_bytes(seal({**manifest, **fields}))
    [one] = scan(tmp_path).damaged
    assert sentence in one.problem


def test_the_newest_whole_one_is_found_with_the_damaged_ones_that_are_newer(tmp_path: Path) -> None:
    folders = [saved(tmp_path, step, keep_last=None) for step in range(1, 6)]
    for folder in (folders[0], folders[4]):
        (folder / "model.safetensors").write_bytes(b"x")
    (folders[3] / MANIFEST).unlink()
    (folders[2] / "state.progress.json").write_bytes(b"{}")
    chosen, damaged = newest_intact(tmp_path)
    assert chosen is not None
    assert chosen.step == 2
    assert [one.step for one in damaged] == [5, 4, 3]
    chosen, damaged = newest_intact(tmp_path, weights_only=True)
    assert chosen is not None
    assert chosen.step == 3


def test_what_is_set_aside_does_not_count_and_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step, keep_last=None)
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    (tmp_path / "step-00000003.damaged").mkdir()  # of an earlier time
    set_aside(scan(tmp_path).damaged)
    assert [one.step for one in scan(tmp_path).complete] == [2, 1]
    assert scan(tmp_path).damaged == []
    saved(tmp_path, 3, keep_last=2)
    assert [one.step for one in scan(tmp_path).complete] == [3, 2]
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000002", "step-00000003", "step-00000003.damaged", "step-00000003.damaged-2",
    }  # fmt: skip


def test_a_folder_in_the_place_of_a_new_checkpoint_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003/model.safetensors").write_bytes(b"half")
    saved(tmp_path, 3)
    assert is_accepted(tmp_path)
    assert (tmp_path / "step-00000003.damaged/model.safetensors").read_bytes() == b"half"


def test_damaged_ones_take_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step, keep_last=None)
    (tmp_path / "step-00000002" / MANIFEST).write_bytes(b"{")
    saved(tmp_path, 3, keep_last=2)
    assert [one.step for one in scan(tmp_path).complete] == [3, 1]


def test_parts_of_a_later_version_are_left_alone_and_missing_ones_are_none(tmp_path: Path) -> None:
    saved(tmp_path)
    [one] = scan(tmp_path).complete
    assert read_part(one, "callbacks") == {"early": {"left": 3}}
    assert read_part(one, "loggers") is None
    assert read_rank_state(one, 1) is None
    assert torch.equal(read_rank_state(one, 0)["random"]["numpy"], torch.arange(9))
    assert torch.equal(read_part(one, "optimizers")["a"], torch.ones(700))
    assert one.config == "trainer: {}\n"
    assert one.metrics == {"eval/loss": 0.25}
    assert sorted(one.weights) == ["model.ema.safetensors", "model.safetensors"]


def test_what_a_later_version_says_of_files_and_pieces_is_ignored(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    manifest = parse_json((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    for file in manifest["files"].values():
        file["codec"] = None
        for piece in file["pieces"]:
            piece["rank"] = 3
    (folder / MANIFEST).write_bytes(seal({**manifest, "mesh": [2, 2]}))
    assert is_accepted(tmp_path)


def test_weights_of_a_checkpoint_without_its_manifest_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / MANIFEST).unlink()
    for source in (folder, folder / "model.safetensors"):
        with refused("model.safetensors: checkpoint.json"):
            load_weights({"model": nn.Linear(30, 20)}, source, "evaluate")


def test_a_copy_under_another_name_is_a_checkpoint_too(tmp_path: Path) -> None:
    model = nn.Linear(30, 20)
    copy = shutil.copytree(saved(tmp_path / "checkpoints", model=model), tmp_path / "best")
    other = nn.Linear(30, 20)
    load_weights({"model": other}, copy, "run.init_from=best")
    assert torch.equal(other.weight, model.weight)


def test_the_bytes_do_not_depend_on_the_order_in_which_a_model_was_built(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(5.0), "a": torch.arange(3), "c": torch.tensor([True]), "d": torch.ones(2).double()}
    found = []
    for number, order in enumerate(("abcd", "dcba", "badc")):
        writer = Writer(tmp_path / str(number), ALONE)
        named = {name: tensors[name] for name in order}
        writer.save(1, Content({"model": named}, {"optimizers": named}))
        writer.wait(end=True)
        folder = tmp_path / str(number) / "step-00000001"
        found.append([(folder / name).read_bytes() for name in ("model.safetensors", "state.optimizers.safetensors")])
    assert found[0] == found[1] == found[2]


def test_names_that_would_meet_in_a_file_stay_apart() -> None:
    value = {"a/b": {"c": torch.ones(1)}, "a": {"b/c": torch.zeros(1), "b": {"c": torch.full((1,), 2.0)}}}
    tensors: dict[str, Tensor] = {}
    found = decode(encode(value, tensors), tensors.__getitem__)
    assert len(tensors) == 3
    assert [float(found["a/b"]["c"]), float(found["a"]["b/c"]), float(found["a"]["b"]["c"])] == [1, 0, 2]


def test_half_written_and_half_removed_folders_are_cleaned_away(tmp_path: Path) -> None:
    saved(tmp_path)
    for name in (".step-00000004.partial", ".step-00000002.removed"):
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


# --- The state of optimizers, by the names of parameters ---


def trained(models: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        total = torch.zeros(())
        for module in models.values():
            total = total + sum(
                ((number + 1) * p.float().square().sum() for number, p in enumerate(module.parameters())), total
            )
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def state_by_name(optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    first = {id(p): name for name, p in reversed(parameter_names(models).items())}
    return {first[id(p)]: dict(values) for p, values in optimizer.state.items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_the_state_of_an_optimizer_follows_the_names_in_whatever_order_it_is_given_them(
    kind: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    models = {"left": Tied(), "right": nn.Linear(2, 2)}
    parameters = [p for module in models.values() for p in module.parameters()]
    optimizer = kind([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}], lr=0.1)
    built = [{"lr": 0.1}, {"lr": 0.5}]
    trained(models, optimizer)
    names = parameter_names(models)
    assert [name for name in names if names[name] is models["left"].get_parameter("embed.weight")] == [
        "left.embed.weight", "left.head.weight",
    ]  # fmt: skip
    kept = {**optimizer_state(optimizer, names), "built": built}
    writer = Writer(tmp_path, ALONE)
    writer.save(1, Content({}, {"optimizers": kept}))
    writer.wait(end=True)
    [one] = scan(tmp_path).complete
    other = kind(
        [{"params": list(reversed(parameters[:3]))}, {"params": list(reversed(parameters[3:])), "lr": 0.5}], lr=0.1
    )
    restore_optimizer(other, read_part(one, "optimizers"), names, "optimizer")
    expected, found = state_by_name(optimizer, models), state_by_name(other, models)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[name][key])), (name, key)
            assert torch.as_tensor(value).dtype == torch.as_tensor(found[name][key]).dtype
