"""Weights to disk and back: a hash that anyone can compute, complete or not there, refused when damaged."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import Tensor, nn

from ddpexp.checkpoint.codec import decode, encode
from ddpexp.checkpoint.format import FORMAT, MANIFEST, clean, scan
from ddpexp.checkpoint.layout import lay_out, share
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.reader import weights_sha256
from ddpexp.checkpoint.staging import Stage
from ddpexp.checkpoint.tensors import read_tensors
from ddpexp.checkpoint.writer import CheckpointError, Content, Writer
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.strategy.base import Shard
from tests.refusals import refused

ALONE = World(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def save(folder: Path, models: Mapping[str, nn.Module], step: int = 4, **options: Any) -> Path:
    """Save models as the only worker does, and wait."""
    writer = Writer(folder, ALONE, **options)
    writer.save(
        step, Content({name: module.state_dict() for name, module in models.items()}, {"progress": {"step": step}})
    )
    writer.wait(end=True)
    return folder / f"step-{step:08d}"


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
    assert weights_sha256({"model": model}) == hash_of(model)
    before = hash_of(model)
    model.get_buffer("steps").add_(1)
    assert weights_sha256({"model": model}) == hash_of(model) != before


def test_the_hash_does_not_depend_on_the_memory_format_but_on_names_shapes_and_types() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2)
    plain = weights_sha256({"model": conv})
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert weights_sha256({"model": conv}) == plain
    assert weights_sha256({"other": conv}) != plain
    ones = [nn.ParameterDict({name: torch.ones(*shape)}) for name, shape in (("a", (4,)), ("b", (4,)), ("a", (2, 2)))]
    assert len({weights_sha256({"model": one}) for one in ones}) == 3
    assert weights_sha256({"model": ones[0].double()}) != weights_sha256({"model": ones[2]})


def test_weights_come_back_to_the_bit_with_their_ties(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    folder = save(tmp_path / "checkpoints", {"model": model})
    [one] = scan(folder.parent).complete
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    assert {name: [asdict(piece) for piece in file.pieces] for name, file in one.files.items()} == {
        name: [{"offset": 0, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}]
        for name, data in files.items()
    }
    assert (one.step, one.manifest["format"]) == (4, FORMAT)
    for source in (folder, folder / "model.safetensors"):
        other = Tied()
        load_weights({"model": other}, source, "run.init_from")
        assert hash_of(other) == hash_of(model)
        assert other.head.weight is other.embed.weight
    alone = Tied()
    assert not any(load_model(alone, folder / "model.safetensors"))  # without ddpexp, nothing is missing or left
    assert hash_of(alone) == hash_of(model)
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000004"]


def test_several_models_have_a_file_each(tmp_path: Path) -> None:
    models = {"left": nn.Linear(2, 2), "right": nn.Linear(2, 3)}
    folder = save(tmp_path, models)
    assert {path.name for path in folder.glob("*.safetensors")} == {"left.safetensors", "right.safetensors"}
    others = {"left": nn.Linear(2, 2), "right": nn.Linear(2, 3)}
    load_weights(others, folder, "evaluate")
    assert weights_sha256(others) == weights_sha256(models)
    with refused("evaluate"):
        load_weights(others, folder / "left.safetensors", "evaluate")


def test_a_reader_never_sees_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    seen: list[set[str]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for folder in tmp_path.glob("step-*"):
                with suppress(FileNotFoundError):  # removed meanwhile
                    seen.append({path.name for path in folder.iterdir()})

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(10):
        save(tmp_path, {"model": nn.Linear(300, 300)}, number, keep_last=None)
    ended.set()
    reader.join()
    assert seen
    assert all(names == {"model.safetensors", "state.progress.json", MANIFEST} for names in seen)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_ranks_shares_are_every_byte_once_and_nearly_equal(world_size: int) -> None:
    files = [
        lay_out("model", {f"w{i}": Shard.whole(torch.empty(700_000 + i)) for i in range(9)}),
        lay_out("state", {"m": Shard.whole(torch.empty(3))}),
    ]
    seen: dict[str, list[tuple[int, int]]] = {}
    sizes = []
    for rank in range(world_size):
        pieces = share(files, rank, world_size)
        sizes.append(sum(piece.num_bytes for piece in pieces))
        for piece in pieces:
            assert piece.offset % (1 << 20) == 0  # two hosts never write into one page
            seen.setdefault(piece.file, []).append((piece.offset, piece.offset + piece.num_bytes))
    for file in files:
        spans = sorted(seen[file.name])
        assert spans[0][0] == 0
        assert spans[-1][1] == file.num_bytes
        assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert max(sizes) - min(sizes) <= 2 << 20


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "betas": (0.9, 0.999), 3: [1, None, True, "x"], "odd": [math.inf, -math.inf, 0.1 + 0.2],
        "deep": {"t": torch.arange(3)},
        "$": "ours", ("a", 1): {}, "number": np.float32(0.5),
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, tensors), allow_nan=False)
    found = decode(json.loads(text), tensors.__getitem__)
    assert list(found) == list(value)
    assert found.pop("deep")["t"] is value.pop("deep")["t"]
    assert found == value
    assert math.isnan(decode(encode(math.nan, {}), tensors.__getitem__))
    with refused("a/b", DdpexpError):
        encode({"a": {"b": object()}}, {})
    with refused("state.json: 'call'"):
        decode({"$": "call", "value": "os.system"}, tensors.__getitem__)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ALONE, keep_last=2, keep_best="max:eval/accuracy")
    for step, value in ((10, 0.3), (20, 0.9), (30, 0.9), (40, math.nan), (50, 0.5), (60, None)):
        facts = {} if value is None else {"metrics": {"eval/accuracy": value}, "evaluated_at": step}
        writer.save(step, Content({"model": nn.Linear(2, 2).state_dict()}, facts=facts))
    writer.wait(end=True)
    assert [one.step for one in scan(tmp_path).complete] == [60, 50, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000050", "step-00000060"]


def test_a_step_that_is_saved_again_is_replaced_and_survives_a_kill_in_between(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ALONE)
    for loss in (0.5, 0.25):
        writer.save(
            7,
            Content({"model": nn.Linear(2, 2).state_dict()}, facts={"metrics": {"test/loss": loss}, "evaluated_at": 7}),
        )
    writer.wait(end=True)
    [path] = tmp_path.iterdir()
    [found] = scan(tmp_path).complete
    assert found.metrics == {"test/loss": 0.25}
    path.rename(tmp_path / ".step-00000007.replaced")  # the new one was not in its place yet
    clean(tmp_path)
    assert [one.step for one in scan(tmp_path).complete] == [7]
    (tmp_path / ".step-00000007.replaced").mkdir()  # it was
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_copied_is_what_was_there_when_it_was_saved(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(3_000_000)}
    writer = Writer(tmp_path, ALONE, keep_last=None)
    for step in range(1, 4):
        weights["w"].fill_(step)
        writer.save(step, Content({"model": weights}))
        weights["w"].fill_(-1)  # the next step of the training
    writer.wait(end=True)
    for one in scan(tmp_path).complete:
        assert one.problem() is None
        found = read_tensors(one.folder / "model.safetensors")
        assert set(found["w"].tolist()) == {float(one.step)}


@pytest.mark.variants(1)
@pytest.mark.parametrize("stops", [True, False])
def test_a_checkpoint_that_cannot_be_written_leaves_those_before_it(tmp_path: Path, stops: bool) -> None:
    folder = tmp_path / "checkpoints"
    writer = Writer(folder, ALONE, stops=stops)
    weights = Content({"model": nn.Linear(2, 2).state_dict()})
    writer.save(1, weights)
    writer.wait()
    (folder / ".step-00000002.partial").write_text("in the way")  # root may write into any directory
    writer.save(2, weights)
    with refused("the checkpoint of step 2: File exists", CheckpointError):
        writer.wait(end=True)
    (folder / ".step-00000002.partial").unlink()
    writer.save(3, weights)
    writer.wait(end=True)
    assert [one.step for one in scan(folder).complete] == [3, 1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(tmp_path, {"model": nn.Linear(4, 3)})


def refusal(source: Path, model: nn.Module | None = None) -> str:
    with pytest.raises(RefusedError) as caught:
        load_weights({"model": model or nn.Linear(4, 3)}, source, f"run.init_from={source}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"run.init_from={source}")
    return str(caught.value)


def test_a_file_that_was_changed_is_refused_by_its_hash(saved: Path) -> None:
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "its hash is not the one in the manifest" in refusal(saved)
    assert "its hash is not the one in the manifest" in refusal(path)


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
        (nn.Linear(4, 4), "weight is (3, 4) there and (4, 4) here"),
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


class Lost(Writer):
    """Does as a file system that loses the folder between the shares and their completion."""

    def _write_share(self, job: Any) -> Any:
        found = super()._write_share(job)
        shutil.rmtree(self._partial(job.step))
        return found


class Fails(Writer):
    """Fails outside of what a disk does: while rank zero waits for the others."""

    def _awaited(self, name: str) -> str:
        raise MemoryError


def test_a_folder_that_vanishes_before_it_counts_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpexp.checkpoint.writer._PAUSE_SECONDS", 0.01)
    writer = Lost(tmp_path, ALONE)
    writer.save(1, Content({"model": nn.Linear(2, 2).state_dict()}))
    with refused("written", CheckpointError):
        writer.wait(end=True)
    assert scan(tmp_path).complete == []


def test_an_error_while_rank_zero_waits_is_no_finished_save(tmp_path: Path) -> None:
    writer = Fails(tmp_path, ALONE)
    writer._world = replace(ALONE, world_size=2)  # whose other rank never comes to it
    writer.save(1, Content({"model": nn.Linear(2, 2).state_dict()}))
    with refused("memoryerror", CheckpointError):
        writer.wait(end=True)


class Pinning:
    """Notes what is pinned and released, as CUDA would do it."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        assert not any(one <= pointer < one + size for one, size in self.pinned.items())
        if self.answer == 0:
            self.pinned[pointer] = num_bytes
        return self.answer

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0


def staged(stage: Stage, tensor: Tensor) -> bytes:
    shards = {"weight": Shard.whole(tensor)}
    plan = lay_out("model", shards)
    spans = share([plan], 0, 1)
    copied = stage.copy([plan], {"model": shards}, spans).numpy().tobytes()
    assert copied == plan.header + tensor.numpy().tobytes()
    return copied


def test_staging_pins_as_many_bytes_as_it_holds_and_releases_them_when_it_grows() -> None:
    pins = Pinning()
    stage = Stage(torch.device("cpu"), pins)
    small = len(staged(stage, torch.rand(5 << 10)))
    assert list(pins.pinned.values()) == [small]
    staged(stage, torch.rand(4 << 10))
    assert list(pins.pinned.values()) == [small]  # kept
    large = len(staged(stage, torch.rand(9 << 10)))
    assert list(pins.pinned.values()) == [large]


def test_memory_that_cannot_be_pinned_is_used_as_it_is() -> None:
    pins = Pinning(answer=2)  # cudaErrorMemoryAllocation
    stage = Stage(torch.device("cpu"), pins)
    staged(stage, torch.rand(100))
    staged(stage, torch.rand(1000))
    assert pins.pinned == {}
