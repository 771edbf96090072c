"""Weights to disk and back: a hash that anyone can compute, complete or not there, refused when damaged."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ddpexp import checkpoint
from ddpexp.errors import RefusedError


class Tied(nn.Module):
    """Two names for one tensor, a buffer, a scalar and several types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.brief = nn.Parameter(torch.randn(2, 2).to(torch.bfloat16))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)


def hash_of(model: nn.Module) -> str:
    """Compute the hash from its definition: parameters and buffers by name, each as name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage()))
    return digest.hexdigest()


def test_the_hash_is_what_it_is_defined_to_be() -> None:
    torch.manual_seed(0)
    model = Tied()
    assert checkpoint.weights_sha256({"model": model}) == hash_of(model)
    before = hash_of(model)
    model.get_buffer("steps").add_(1)
    assert checkpoint.weights_sha256({"model": model}) == hash_of(model) != before


def test_the_hash_does_not_depend_on_the_memory_format_but_on_names_shapes_and_types() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2)
    plain = checkpoint.weights_sha256({"model": conv})
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert checkpoint.weights_sha256({"model": conv}) == plain
    assert checkpoint.weights_sha256({"other": conv}) != plain
    ones = [nn.ParameterDict({name: torch.ones(*shape)}) for name, shape in (("a", (4,)), ("b", (4,)), ("a", (2, 2)))]
    assert len({checkpoint.weights_sha256({"model": one}) for one in ones}) == 3
    assert checkpoint.weights_sha256({"model": ones[0].double()}) != checkpoint.weights_sha256({"model": ones[2]})


def test_weights_come_back_to_the_bit_with_their_ties(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    folder = checkpoint.save(tmp_path / "checkpoints/step-00000004", {"model": model}, {"step": 4})
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
    assert manifest == {"step": 4, "files": {"model.safetensors": hashlib.sha256(data).hexdigest()}}
    for source in (folder, folder / "model.safetensors"):
        other = Tied()
        checkpoint.load_weights({"model": other}, source, "run.init_from")
        assert hash_of(other) == hash_of(model)
        assert other.head.weight is other.embed.weight
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000004"]


def test_several_models_have_a_file_each(tmp_path: Path) -> None:
    models = {"left": nn.Linear(2, 2), "right": nn.Linear(2, 3)}
    folder = checkpoint.save(tmp_path / "step", models, {})
    assert {path.name for path in folder.iterdir()} == {"left.safetensors", "right.safetensors", "manifest.json"}
    others = {"left": nn.Linear(2, 2), "right": nn.Linear(2, 3)}
    checkpoint.load_weights(others, folder, "evaluate")
    assert checkpoint.weights_sha256(others) == checkpoint.weights_sha256(models)
    with pytest.raises(RefusedError, match=r"is one file, but there are several models: name the checkpoint's folder\.$"):
        checkpoint.load_weights(others, folder / "left.safetensors", "evaluate")


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def state_dict(self, *_: object, **__: object) -> dict[str, object]:  # type: ignore[override]
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path / "step", {"model": nn.Linear(2, 2), "other": Broken(2, 2)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    seen: list[set[str]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for folder in tmp_path.glob("step-*"):
                seen.append({path.name for path in folder.iterdir()})

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(10):
        checkpoint.save(tmp_path / f"step-{number}", {"model": nn.Linear(300, 300)}, {})
    ended.set()
    reader.join()
    assert seen
    assert all(names == {"model.safetensors", "manifest.json"} for names in seen)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return checkpoint.save(tmp_path / "step", {"model": nn.Linear(4, 3)}, {})


def refusal(source: Path, model: nn.Module | None = None) -> str:
    with pytest.raises(RefusedError) as caught:
        checkpoint.load_weights({"model": model or nn.Linear(4, 3)}, source, f"run.init_from={source}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"run.init_from={source}")
    return str(caught.value)


def test_a_file_that_was_changed_is_refused_by_its_hash(saved: Path) -> None:
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "its hash is not the one in manifest.json beside it" in refusal(saved)
    assert "its hash is not the one in manifest.json beside it" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"<!DOCTYPE html>", b"\xff" * 100])
def test_a_file_that_holds_no_tensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    assert "weights.safetensors cannot be read as safetensors (" in refusal(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (nn.Linear(4, 4), "size mismatch for weight"),
        (nn.Linear(4, 3, bias=False), "bias"),
        (nn.Sequential(nn.Linear(4, 3)), "0.weight"),
    ],
    ids=["shape", "fewer", "names"],
)
def test_the_weights_of_another_model_are_refused_with_what_differs(saved: Path, model: nn.Module, word: str) -> None:
    reason = refusal(saved, model)
    assert re.search(rf"holds the weights of another model: .*{re.escape(word)}", reason)


def test_the_files_are_plain_safetensors(saved: Path) -> None:
    with safe_open(saved / "model.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["bias", "weight"]
