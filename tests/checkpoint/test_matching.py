"""Which tensor of a file each tensor of a model is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ddpexp.checkpoint.headers import read_header, read_source
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.matching import Selection, advice, check_selection, match, renamed
from ddpexp.checkpoint.source import Source
from ddpexp.strategy.base import Shard
from tests.refusals import refused

MODEL = {"body.0.weight": (4, 3), "body.0.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}
FILE = {"body.0.weight": (4, 3), "body.0.bias": (4,), "head.weight": (9, 4), "head.bias": (9,)}


@pytest.mark.parametrize(
    ("rename", "before", "after"),
    [
        ({"backbone": "body"}, "backbone.0.weight", "body.0.weight"),
        ({"backbone": "body"}, "backbones.0.weight", "backbones.0.weight"),
        ({"backbone": ""}, "backbone.0.weight", "0.weight"),
        ({"backbone.*": "*"}, "backbone.0.weight", "0.weight"),
        ({"*": "body.*"}, "0.weight", "body.0.weight"),
        ({"h.*.attn.*": "blocks.*.attention.*"}, "h.3.attn.out.bias", "blocks.3.attention.out.bias"),
        ({"h.*.attn.*": "blocks.*.attention.*"}, "h.3.mlp.bias", "h.3.mlp.bias"),
        ({"a.b": "x", "a": "y"}, "a.b.c", "x.c"),
        ({"a": "b", "b": "c"}, "a.w", "b.w"),  # once, by the first that matches
        ({"a[0]*": "b*"}, "a[0].w", "b.w"),
        ({"a.w": "b"}, "a.w", "b"),
    ],
)
def test_names_are_changed_by_prefix_or_by_pattern(rename: dict[str, str], before: str, after: str) -> None:
    assert renamed(before, rename) == after


def test_what_is_skipped_stays_as_built_and_the_rest_is_taken() -> None:
    found = match(FILE, MODEL, Selection(skip=("head.*",)))
    assert found.fits()
    assert found.taken == {"body.0.weight": "body.0.weight", "body.0.bias": "body.0.bias"}
    assert (found.kept, found.left_out) == (["head.weight", "head.bias"], ["head.weight", "head.bias"])
    assert found.summary() == (
        "2 of 4 tensors taken; left as built: head.weight, head.bias; left in the file: head.weight, head.bias"
    )


def test_what_does_not_fit_is_listed_with_what_to_type() -> None:
    found = match({**FILE, "pool.weight": (1,)}, {**MODEL, "norm.weight": (3,)})
    assert not found.fits()
    assert found.problem() == (
        "head.weight is (9, 4) there and (2, 4) here; head.bias is (9,) there and (2,) here; it lacks norm.weight; it "
        "also has pool.weight"
    )
    assert advice(found, ()) == "To take the others: 'run.init_skip=[head.*,norm.*,pool.*]'."
    assert advice(found, ["old.*"]) == "To take the others: 'run.init_skip=[old.*,head.*,norm.*,pool.*]'."
    assert advice(match({"a": (1,)}, {"b": (1,)}), MODEL) == ""


def test_prefixes_of_wrappers_are_removed_unless_the_model_or_the_override_has_them() -> None:
    wrapped = {f"module._orig_mod.{name}": shape for name, shape in MODEL.items()}
    found = match(wrapped, MODEL)
    assert found.fits()
    assert (found.prefix, found.taken["head.bias"]) == ("module._orig_mod.", "module._orig_mod.head.bias")
    assert match(wrapped, wrapped).prefix == ""
    assert match(wrapped, MODEL, Selection({"module._orig_mod.*": "*"})).fits()
    assert match(wrapped, {f"net.{name}": shape for name, shape in MODEL.items()}, Selection({"*": "net.*"})).fits()


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        (
            Selection(skip=("hed.*",)),
            "run.init_skip=[hed.*]: body.0.weight",
        ),
        (Selection(skip=("*",)), "run.init_skip=[*]"),
        (Selection({"encoder": "body"}), "run.init_rename={encoder: body}"),
        (Selection({"*.weight": "*.bias"}), "run.init_rename: body.0.bias"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(selection: Selection, sentence: str) -> None:
    with refused(sentence):
        match(FILE, MODEL, selection)


def test_a_new_name_has_as_many_stars_as_the_old_one() -> None:
    check_selection(Selection({"a.*": "b.*"}))
    with refused("run.init_rename"):
        check_selection(Selection({"a.*": "b"}))


def net(outputs: int = 2) -> nn.ModuleDict:
    torch.manual_seed(outputs)
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "head": nn.Linear(4, outputs)})


def sharded(folder: Path, model: nn.Module, **changes: str) -> Path:
    """Write weights as Hugging Face's libraries do, in two files and an index."""
    state = model.state_dict()
    places = {name: f"model-0000{1 + name.startswith('head')}-of-00002.safetensors" for name in state}
    for file in set(places.values()):
        save_file({name: value for name, value in state.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**places, **changes}}))
    return folder


def test_weights_in_several_files_are_read_through_their_index(tmp_path: Path) -> None:
    sharded(tmp_path, net(9))
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = net()
        kept = model.get_parameter("head.weight").clone()
        [found] = load_weights(
            {"model": model}, source, "run.init_from=x", selection=Selection(skip=("head.*",))
        ).values()
        assert len(found.taken) == 7
        assert torch.equal(model.get_parameter("body.0.weight"), net(9).get_parameter("body.0.weight"))
        assert torch.equal(model.get_parameter("head.weight"), kept)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"extra": "model-00009-of-00009.safetensors"}, "model.safetensors.index.json: beside"),
        ({"extra": "../model.safetensors"}, "model.safetensors.index.json: beside"),
        ({"extra": "model-00001-of-00002.safetensors"}, "model.safetensors.index.json: extra"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    with refused(sentence):
        read_source(sharded(tmp_path, net(), **changes))


def test_a_header_is_checked_against_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(net().state_dict(), path)
    assert read_source(tmp_path)["body.0.weight"].shape == (4, 3)
    path.write_bytes(path.read_bytes()[:-8])
    with refused("model.safetensors"):
        read_header(path)
    path.unlink()
    with refused(": neither"):
        read_source(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with refused(": pytorch"):
        read_source(tmp_path)


def test_rows_are_read_alone(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).reshape(6, 2)}, tmp_path / "model.safetensors")
    source = Source.of(tmp_path)
    assert torch.equal(source.read("w", 2, 3), torch.arange(4.0, 10.0).reshape(3, 2))
    assert source.entries["w"].dtype == "F32"
    model = nn.ParameterDict({"w": torch.zeros(6, 2)})
    load_weights({"model": model}, tmp_path, "x", held=lambda tensor: Shard(tensor[4:], (6, 2), 4))
    assert torch.equal(model["w"], torch.tensor([[0.0, 0.0]] * 4 + [[8.0, 9.0], [10.0, 11.0]]))


def test_old_weights_lack_the_counters_of_batch_norm(tmp_path: Path) -> None:
    state = {name: value for name, value in net().state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "model.safetensors")
    [found] = load_weights({"model": net(2)}, tmp_path, "x").values()
    assert found.kept == ["body.1.num_batches_tracked"]
