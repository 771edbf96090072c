"""Real ranks without a launcher: forks of this process in a group of their own, for tests of what collectives give."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ddpexp.distributed.world import World

_SECONDS = 60


def on_ranks(folder: Path, size: int, function: Callable[[World], Any]) -> list[Any]:
    """Call `function` on `size` ranks connected by gloo; return what each has returned, or its exception's text."""
    store = folder / f"store{len(list(folder.iterdir()))}"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be_rank(rank, size, store, function)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0] * size, codes
    return [pickle.loads(_result(store, rank).read_bytes()) for rank in range(size)]


def _be_rank(rank: int, size: int, store: Path, function: Callable[[World], Any]) -> None:
    signal.alarm(_SECONDS)
    torch.set_num_threads(1)
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        rendezvous = FileStore(str(store), size)
        dist.init_process_group(
            "gloo", store=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=_SECONDS)
        )
        result = function(World(rank, rank, 0, size, size, torch.device("cpu")))
        dist.barrier()
    except BaseException as error:
        result = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    _result(store, rank).write_bytes(pickle.dumps(result))
    os._exit(0)


def _result(store: Path, rank: int) -> Path:
    return store.with_suffix(f".{rank}")
