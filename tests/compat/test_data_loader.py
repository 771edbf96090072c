from __future__ import annotations

import gc
import os
import queue
from multiprocessing import connection, get_context, queues
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddpexp.compat.data_loader import forget_half_made, on_unsent, use_addresses_without_files, worker_processes

DATA = TensorDataset(torch.arange(4))


def test_the_workers_of_a_loader() -> None:
    batches = iter(DataLoader(DATA, num_workers=2))
    pids = [process.pid for process in worker_processes(batches)]
    assert len(set(pids)) == 2
    assert all(process.exitcode is None for process in worker_processes(batches))
    assert worker_processes(iter(DataLoader(DATA))) == ()


def test_what_cannot_be_sent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues.Queue, "_on_queue_feeder_error", queues.Queue._on_queue_feeder_error)  # type: ignore[attr-defined]
    errors: queue.Queue[BaseException] = queue.Queue()
    on_unsent(errors.put)
    sender: Any = get_context("fork").Queue()
    sender.put(lambda: None)  # which cannot be pickled
    assert "lambda" in str(errors.get(timeout=60))
    sender.close()


def test_listening_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "arbitrary_address", connection.arbitrary_address)  # type: ignore[attr-defined]
    use_addresses_without_files()
    with connection.Listener(authkey=b"key") as listener:
        assert bytes(listener.address).startswith(f"\0ddpexp-{os.getpid()}-".encode())


def test_an_iterator_that_could_not_be_made_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError("no semaphores")

    monkeypatch.setattr("torch.multiprocessing.Queue", fails)
    with pytest.raises(OSError, match="no semaphores") as caught:
        iter(DataLoader(DATA, num_workers=1))
    forget_half_made(caught.value)
    del caught
    gc.collect()
    assert "Exception ignored" not in capfd.readouterr().err
