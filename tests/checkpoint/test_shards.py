"""Files of tensors of which ranks hold different rows: every byte is written once, at every number of ranks."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from ddpexp.checkpoint import format as on_disk
from ddpexp.checkpoint import tensors as on_file
from ddpexp.checkpoint.format import Checkpoint, File, Piece, scan
from ddpexp.checkpoint.layout import copy_span, lay_out, share
from ddpexp.checkpoint.pages import route
from ddpexp.checkpoint.reader import copy_into
from ddpexp.checkpoint.tensors import open_tensors, read_tensors
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.base import Shard
from ddpexp.train import weights_hash
from tests.ranks import on_ranks
from tests.refusals import refused

TENSORS = {
    "whole": torch.arange(700_000, dtype=torch.float32),
    "rows": torch.arange(600_000, dtype=torch.float64).view(-1, 100),
    "few": torch.arange(6, dtype=torch.int64).view(2, 3),  # fewer rows than ranks
    "half": torch.arange(1000, dtype=torch.float16).view(-1, 10),
    "scalar": torch.tensor(3.0),
}
SHARDED = ("rows", "few", "half")


def held(rank: int, num_shards: int, replica: int) -> dict[str, Shard]:
    """Return what a rank holds: rows as `torch.chunk` cuts them, or all."""
    shards = {}
    for name, tensor in TENSORS.items():
        if name not in SHARDED:
            shards[name] = Shard.whole(tensor)
            continue
        size = -(-len(tensor) // num_shards)
        first = min(rank * size, len(tensor))
        shards[name] = Shard(tensor[first : first + size], tuple(tensor.shape), first, replica)
    return shards


def written(held_by_rank: Sequence[Mapping[str, Shard]]) -> bytes:
    """Return the file that the ranks write together; a byte that is written twice, or by nobody, fails."""
    content, times = None, None
    for rank, shards in enumerate(held_by_rank):
        file = lay_out("model", shards)
        if content is None or times is None:
            content, times = torch.zeros(file.num_bytes, dtype=torch.uint8), torch.zeros(file.num_bytes)
        for span in share([file], rank, len(held_by_rank)):
            part = slice(span.offset, span.offset + span.num_bytes)
            copy_span(file, shards, span, content[part])
            times[part] += 1
    assert content is not None
    assert times is not None
    assert times.eq(1).all()
    return content.numpy().tobytes()


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (1, 3)])
def test_the_ranks_write_the_file_of_one(num_shards: int, num_replicas: int) -> None:
    alone = written([{name: Shard.whole(tensor) for name, tensor in TENSORS.items()}])
    ranks = [held(rank, num_shards, replica) for replica in range(num_replicas) for rank in range(num_shards)]
    assert written(ranks) == alone
    assert written([{name: Shard.whole(tensor) for name, tensor in TENSORS.items()}] * 3) == alone
    read = load(alone)
    assert all(read[name].equal(tensor) for name, tensor in TENSORS.items())


def test_a_type_that_the_format_lacks_is_named() -> None:
    with refused("rows", DdpexpError):
        lay_out("model", {"rows": Shard(torch.zeros(2, 2, dtype=torch.complex128), (4, 2), 0)})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file as the ranks write it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(written([{name: Shard.whole(tensor) for name, tensor in TENSORS.items()}]))
    return path


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_a_rank_reads_its_rows_and_no_other_byte(file: Path, num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        read.append((offset, num_bytes := preadv(descriptor, buffers, offset)))
        return num_bytes

    monkeypatch.setattr(os, "preadv", counted)
    for rank in range(num_shards):
        expected = held(rank, num_shards, 0)
        target = {
            name: Shard(torch.zeros_like(shard.tensor), shard.shape, shard.first_row)
            for name, shard in expected.items()
        }
        read.clear()
        copy_into(target, open_tensors(file), "the checkpoint")
        assert all(target[name].tensor.equal(shard.tensor) for name, shard in expected.items())
        num_bytes = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in expected.values())
        assert sum(count for _, count in read) == num_bytes


def test_rows_are_read_into_tensors_of_other_dtypes_and_strides(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_file, "_BUFFER_BYTES", 5000)  # several parts
    stored = open_tensors(file)
    out = torch.zeros(100, 4000, dtype=torch.float32).t()
    stored["rows"].read_into(out, 1000)
    assert out.equal(TENSORS["rows"][1000:5000].float())
    single = torch.zeros((), dtype=torch.float64)
    stored["scalar"].read_into(single)
    assert single == 3
    assert stored["few"].read(1, 1).equal(TENSORS["few"][1:])
    assert stored["few"].read(2, 0).shape == (0, 3)
    assert all(tensor.read().equal(TENSORS[name]) for name, tensor in stored.items())
    assert all(tensor.equal(TENSORS[name]) for name, tensor in read_tensors(file).items())


def test_another_model_and_a_file_that_has_changed_are_refused(file: Path) -> None:
    stored = open_tensors(file)
    target = {name: Shard.whole(torch.zeros_like(tensor)) for name, tensor in TENSORS.items()}
    with refused("the checkpoint"):
        copy_into({**target, "half": Shard.whole(torch.zeros(100, 10))}, stored, "the checkpoint")
    os.truncate(file, file.stat().st_size - 1)
    with refused("model.safetensors: early"):
        stored["half"].read()
    with refused("model.safetensors: read"):
        open_tensors(file)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"w": ("F32", [3], 0, 8)}, "model.safetensors: shape"),
        ({"w": ("F32", [2], 0, 8), "v": ("F32", [2], 4, 12)}, "model.safetensors: fill"),
        ({"w": ("F32", [1], 0, 4), "v": ("F32", [1], 8, 12)}, "model.safetensors: fill"),
        ({"w": ("F32", [2], 0, 8)}, "model.safetensors: fill"),
        ({"w": ("F32", [4], 0, 16)}, "model.safetensors: cut"),
        ({"w": ("F4", [24], 0, 12)}, "model.safetensors: type"),
    ],
)
def test_a_header_that_describes_another_file_is_refused(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int], int, int]], sentence: str
) -> None:
    header = json.dumps(
        {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            for name, (dtype, shape, begin, end) in tensors.items()
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with refused(sentence):
        open_tensors(path)


def test_a_file_larger_than_the_memory_that_is_allowed_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"w": {"dtype": "U8", "shape": [1073741824], "data_offsets": [0, 1073741824]}}'
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))
    child = os.fork()
    if child == 0:
        [used] = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        limit = (int(used) << 10) + (100 << 20)  # the file would count where it is mapped as memory of the process
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        ended = 1
        with suppress(BaseException):
            ended = int(open_tensors(path)["w"].read(1 << 20, 3).tolist() != [0, 0, 0])
        os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0


def test_long_files_are_written_in_pieces_of_which_each_rank_of_a_start_hashes_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 1_000_000_000
    file = lay_out("model", {"w": Shard.whole(torch.empty(size, dtype=torch.uint8, device="meta"))})
    spans = share([file], 0, 1)
    assert max(span.num_bytes for span in spans) <= 65 << 20
    assert sum(span.num_bytes for span in spans) == file.num_bytes
    rows = lay_out("model", {"w": Shard(torch.empty(size, dtype=torch.uint8, device="meta"), (2 * size,), size)})
    assert max(span.num_bytes for span in share([rows], 1, 2)) <= 65 << 20
    pieces = [Piece(span.offset, span.num_bytes, "") for span in spans]
    hashed: list[int] = []

    def hash_of(path: Path, piece: Piece) -> str:
        hashed.append(piece.num_bytes)
        return ""

    monkeypatch.setattr(on_disk, "_sha256", hash_of)
    small = {"state.json": File(10, [Piece(0, 10, "")]), "empty": File(0, [Piece(0, 0, "")])}
    checkpoint = Checkpoint(Path(), {}, {"model.safetensors": File(file.num_bytes, pieces), **small})
    monkeypatch.setattr(Checkpoint, "wrong_size", lambda self, files: None)
    for world_size in (1, 2, 3, 4, 7):
        counts = []
        for rank in range(world_size):
            hashed.clear()
            assert checkpoint.problem(rank, world_size) is None
            counts.append((len(hashed), sum(hashed)))
        assert sum(number for number, _ in counts) == len(pieces) + 2
        assert max(num_bytes for _, num_bytes in counts) < size / world_size + (66 << 20)


def test_a_sharded_tensor_is_gathered_on_rank_zero_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_hash, "_PART_BYTES", 50_000)

    def gathered(world: World) -> list[list[int]]:
        sizes = []
        for name, shard in held(world.rank % 2, 2, world.rank // 2).items():
            if name in SHARDED:
                parts = list(weights_hash._gathered(shard, world))
                assert not parts or torch.cat(parts).equal(TENSORS[name])
                sizes.append([len(part) for part in parts])
        return sizes

    for size in (2, 4):
        by_rank = on_ranks(tmp_path, size, gathered)
        assert by_rank == [[[62] * 96 + [48], [2], [100]], *[[[], [], []]] * (size - 1)]


def test_rows_in_the_memory_of_the_host_are_gathered_through_the_device() -> None:
    class Sums:
        """Carries the sums of a world whose device is not the CPU, and sees where they are."""

        def __init__(self) -> None:
            self.devices: list[str] = []

        def sum(self, tensor: torch.Tensor) -> None:
            self.devices.append(tensor.device.type)

        def broadcast(self, tensor: torch.Tensor, source: int) -> None:
            raise AssertionError("nothing is broadcast")

    sums = Sums()
    world = World(0, 0, 0, 2, 2, torch.device("meta"), memory=sums)
    [part] = weights_hash._gathered(Shard(torch.ones(4, 4), (4, 4), 0), world)  # as strategy.offload=true leaves them
    assert (sums.devices, part.shape) == (["meta"], (4, 4))


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1)])
def test_no_two_hosts_write_to_a_page(nodes: tuple[int, ...]) -> None:
    shards = [held(rank, 4, 0) for rank in range(4)]
    file = lay_out("model", shards[0])
    spans = [share([lay_out("model", shards[rank])], rank, 4) for rank in range(4)]
    routings = [route(spans, nodes, rank, 4096) for rank in range(4)]
    hosts: dict[int, set[int]] = {}
    times = torch.zeros(file.num_bytes)
    for rank, routing in enumerate(routings):
        for span in [*routing.kept, *(span for span, _ in routing.written)]:
            times[span.offset : span.offset + span.num_bytes] += 1
            for page in range(span.offset // 4096, (span.offset + span.num_bytes - 1) // 4096 + 1):
                hosts.setdefault(page, set()).add(nodes[rank])
    assert times.eq(1).all()
    assert max(map(len, hosts.values())) == 1
    assert 0 < routings[0].num_bytes < 40 * 4096
    alone = route(spans, (0,) * 4, 1, 4096)
    assert (alone.kept, alone.num_bytes) == (spans[1], 0)


def test_ranks_of_several_hosts_write_the_file_of_one(tmp_path: Path) -> None:
    alone = written([{name: Shard.whole(tensor) for name, tensor in TENSORS.items()}])
    (tmp_path / "ranks").mkdir()

    def write(world: World) -> None:
        writer = Writer(tmp_path / "saved", replace(world, node_rank=world.rank // 2, local_world_size=2))
        for step in (1, 2):
            writer.save(step, Content({"model": held(world.rank, 4, 0)}))
        writer.wait(end=True)

    assert on_ranks(tmp_path / "ranks", 4, write) == [None] * 4
    for checkpoint in scan(tmp_path / "saved").complete:
        assert checkpoint.problem() is None
        assert (checkpoint.folder / "model.safetensors").read_bytes() == alone
    assert len(scan(tmp_path / "saved").complete) == 2
