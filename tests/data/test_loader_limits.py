"""DataLoader workers that cannot pass a batch on: the rank is given the reason, and does not wait for the batch."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpexp.compat.data_loader import forget_half_made
from ddpexp.data import loader_limits
from ddpexp.data.adapters import MapStyle
from ddpexp.data.loader import Key, load
from ddpexp.data.loader_limits import error_at_limit
from ddpexp.data.transforms import Transformed
from ddpexp.errors import LoaderError
from tests.conftest import PATIENCE


class Numbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


class Unsent:
    """A batch that cannot be sent."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def first_batch(data: Any) -> Any:
    """Return the first batch of one worker: where two end, torch may raise the second end in a finalizer."""
    keys = iter([Key(0, [index]) for index in range(8)])
    return next(load(data, "train", keys, 1, torch.device("cpu"), PATIENCE))


LIMIT = r"^data\.num_workers=1: .* open files \(ulimit -n\): raise that limit\."


def test_a_worker_that_runs_out_of_descriptors_while_it_sends_ends_its_rank_with_the_limit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    batch = Unsent(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    with pytest.raises(LoaderError, match=LIMIT):
        first_batch(Transformed(MapStyle(Numbers()), collate=lambda samples: batch))
    assert "Traceback" not in capfd.readouterr().err


def test_a_batch_that_cannot_be_pickled_does_not_keep_its_rank_waiting(capfd: pytest.CaptureFixture[str]) -> None:
    batch = Unsent(TypeError("cannot pickle this"))
    with pytest.raises(LoaderError, match=r"^DataLoader worker 0 ended with exit code 1, and its batches are lost"):
        first_batch(Transformed(MapStyle(Numbers()), collate=lambda samples: batch))
    assert "TypeError: cannot pickle this" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "is_start", "sentence"),
    [
        (errno.EROFS, True, r"/dev/shm cannot be written \(Read-only file system\)\. Or use fewer data\.num_workers"),
        (errno.ENOSPC, True, "the batches of the DataLoader workers do not fit into shared memory"),
        (errno.EMFILE, False, r"open files \(ulimit -n\): raise that limit"),
    ],
)
def test_what_a_loader_lacks_is_named(number: int, is_start: bool, sentence: str) -> None:
    error = error_at_limit(OSError(number, os.strerror(number)), 2, is_start)
    assert error is not None
    with pytest.raises(LoaderError, match=sentence):
        raise error


def test_shared_memory_without_inodes_is_not_called_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_limits, "free_files", lambda path: 1)
    monkeypatch.setattr(loader_limits, "shared_memory", lambda: (1 << 30, 1 << 30))
    assert "too little room for files: 1" in str(error_at_limit(OSError(errno.ENOSPC, ""), 2))


def test_other_errors_are_about_no_limit() -> None:
    for error in (OSError(errno.EROFS, "x"), RuntimeError("x"), EOFError()):
        assert error_at_limit(error, 2) is None


def test_a_loader_that_cannot_be_made_prints_nothing_when_it_is_collected(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> Callable[[], None]:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("torch.multiprocessing.Queue", fails)
    with pytest.raises(LoaderError, match="/dev/shm cannot be written"):
        first_batch(Numbers())
    forget_half_made(OSError())  # one without a traceback
    assert "Exception ignored" not in capfd.readouterr().err
