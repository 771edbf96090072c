"""What a remote logger gets of a run, however often the run, the logger or the process between them is interrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.loggers.jsonl import JsonLines
from ddpexp.loggers.remote.base import Medium, NotReadyError, Remote, Row
from ddpexp.loggers.remote.feed import Feed, Mark
from ddpexp.loggers.remote.media import MediaFile
from ddpexp.loggers.remote.source import Records


class Server(Remote):
    """A tracker: what has arrived, by name and step; it fails on request, before or after a row has arrived."""

    def __init__(self, answers: bool = True) -> None:
        self.values: dict[tuple[str, int], list[float]] = {}
        self.media: list[tuple[str, int]] = []
        self.fails: str | None = None
        self.answers, self.opened, self.closed = answers, 0, 0
        self.where = ""
        self.best_values: dict[str, tuple[int, float]] = {}

    def destination(self) -> str:
        return self.where

    def open(self) -> None:
        self.opened += 1
        if self.fails == "open":
            raise ConnectionError("down")
        if self.fails == "login":
            raise NotReadyError("log in first.")

    def arrived(self, sent: Mapping[str, int], sending: Mapping[str, int]) -> Mapping[str, int]:
        scalars = [name for name in sending if not Medium.is_key(name)]
        names = {name: [step for other, step in self.values if other == name] for name in scalars}
        return {name: max(steps, default=-1) for name, steps in names.items()} if self.answers else {}

    def send(self, row: Row) -> None:
        if self.fails == "before":
            raise ConnectionError("down")
        for name, value in row.scalars.items():
            self.values.setdefault((name, row.step), []).append(value)
        self.media += [(medium.key, row.step) for medium in row.media]
        if self.fails == "after":
            raise TimeoutError("no answer")

    def best(self, step: int, metric: str, value: float) -> None:
        self.best_values[metric] = (step, value)

    def close(self, done: bool) -> None:
        self.closed += 1

    def steps(self, name: str) -> list[int]:
        assert all(len(values) == 1 for values in self.values.values()), "something was sent twice"
        return sorted(step for other, step in self.values if other == name)


class Run:
    """A run that records, and a feed that is started again as often as the run is."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server = folder, server
        self.reports: list[str] = []
        self.start()

    def start(self, at: Mapping[str, Any] | None = None, step: int = 0) -> None:
        self.metrics, self.media = JsonLines(self.folder / "metrics.jsonl"), MediaFile(self.folder)
        for logger in (self.metrics, self.media):
            logger.truncate(at, step)
        self.feed = Feed(
            Records(self.folder), Mark.of(self.folder, "mine"), lambda identity: self.server, self.reports.append
        )

    def record(self, *steps: int, name: str = "train/loss") -> None:
        for step in steps:
            self.metrics.scalars(step, step / 100, {name: step / 10})

    def position(self) -> dict[str, Any]:
        return {**self.metrics.position(), **self.media.position()}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, Server())


def test_a_step_is_sent_when_the_next_one_begins_and_at_the_end_everything_is(run: Run) -> None:
    run.record(10, 20)
    assert run.feed.push()
    assert run.server.steps("train/loss") == [10]
    run.record(20, name="eval/loss")
    run.record(30)
    assert run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30]
    assert run.server.steps("eval/loss") == [20]


def test_what_a_resumed_run_records_again_is_not_sent_again(run: Run) -> None:
    run.record(10, 20)
    at = run.position()
    run.record(30, 40, 50)
    run.feed.push(final=True)
    run.start(at, 20)
    run.record(30, 40, 50, 60)
    run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30, 40, 50, 60]


def test_an_evaluation_that_was_interrupted_is_sent_after_the_rest_of_its_step(run: Run) -> None:
    run.record(10, 20)
    at = run.position()
    run.feed.push(final=True)
    run.start(at, 20)
    run.record(20, name="eval/loss")
    run.record(30)
    run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30]
    assert run.server.steps("eval/loss") == [20]


@pytest.mark.parametrize("fails", ["open", "before", "after"])
def test_an_outage_delays_the_records_and_loses_and_repeats_none(run: Run, fails: str) -> None:
    run.record(10, 20, 30)
    run.server.fails = fails
    assert not run.feed.push()
    run.record(40, 50)
    assert not run.feed.push()
    opened = run.server.opened
    assert opened == 1, "it is tried again after a pause only"
    run.server.fails, run.feed._retry_at = None, 0.0
    assert run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30, 40, 50]
    assert len(run.reports) == 2
    assert "down" in run.reports[0] or "no answer" in run.reports[0]


class Keeping(Server):
    """A tracker that is sent several rows in one request."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Row] = []
        self.requests = 0

    def open(self) -> None:
        super().open()
        self.kept = []

    def send(self, row: Row) -> None:
        self.kept.append(row)

    def flush(self) -> None:
        self.requests += 1
        rows, self.kept = self.kept, []
        for row in rows:
            super().send(row)


def test_rows_that_wait_are_sent_in_few_requests(tmp_path: Path) -> None:
    server = Keeping()
    run = Run(tmp_path, server)
    server.fails = "open"
    run.record(*range(1, 251))
    assert not run.feed.push(final=True)
    server.fails, run.feed._retry_at = None, 0.0
    assert run.feed.push(final=True)
    assert server.steps("train/loss") == [*range(1, 251)]
    assert server.requests == 3


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_request_with_several_rows_that_fails_loses_and_repeats_none(fails: str, tmp_path: Path) -> None:
    server = Keeping()
    run = Run(tmp_path, server)
    server.fails = fails
    run.record(10, 20, 30)
    assert not run.feed.push(final=True)
    server.fails, run.feed._retry_at = None, 0.0
    assert run.feed.push(final=True)
    assert server.steps("train/loss") == [10, 20, 30]


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_process_that_is_killed_while_it_sends_is_followed_by_one_that_asks_what_arrived(
    run: Run, fails: str
) -> None:
    run.record(10, 20)
    run.feed.push(final=True)
    run.record(30, 40)
    run.server.fails = fails
    run.feed.push(final=True)  # the mark says that 30 and 40 are on their way
    run.server.fails = None
    run.start(run.position(), 40)
    run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30, 40]


def test_a_server_that_cannot_say_what_arrived_may_get_the_last_rows_again(tmp_path: Path) -> None:
    run = Run(tmp_path, Server(answers=False))
    run.record(10)
    run.server.fails = "after"
    run.feed.push(final=True)
    run.server.fails, run.feed._retry_at = None, 0.0
    run.feed.push(final=True)
    assert run.server.values == {("train/loss", 10): [1.0, 1.0]}


def test_what_the_server_lost_is_sent_again(run: Run) -> None:
    run.record(10, 20, 30)
    run.feed.push(final=True)
    del run.server.values["train/loss", 20], run.server.values["train/loss", 30]
    run.start(run.position(), 30)
    run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30]


def test_what_a_logger_lost_that_failed_later_is_sent_again_by_the_same_process(run: Run) -> None:
    run.record(10, 20, 30, 40)
    run.feed.push()
    run.server.values.clear()
    run.server.fails = "before"
    run.record(50)
    assert not run.feed.push()
    run.server.fails, run.feed._retry_at = None, 0.0
    run.record(60)
    assert run.feed.push()
    assert run.server.steps("train/loss") == [10, 20, 30, 40, 50]
    assert run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20, 30, 40, 50, 60]


def test_another_place_gets_everything(run: Run) -> None:
    run.record(10, 20)
    run.feed.push(final=True)
    run.feed.end(True, None)
    run.server = Server()
    run.server.where = "https://other.example"
    run.start(run.position(), 20)
    assert run.feed.count_unsent() == 2
    assert not run.feed.mark.ended
    run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20]


def test_texts_images_and_histograms_come_with_their_step_and_once(run: Run) -> None:
    run.media.text("note", "hello")
    run.media.text("config", "known by other means")
    run.record(10)
    run.media.image("digits", torch.zeros(2, 3, 3, dtype=torch.uint8), 10)
    run.media.histogram("weights", torch.tensor([0.0, 1.0, math.nan]), 10)
    at = run.position()
    run.media.histogram("weights", torch.arange(4.0), 15)
    run.record(20)
    run.feed.push()
    expected = [("text:note", 0), ("image:digits", 10), ("histogram:weights", 10), ("histogram:weights", 15)]
    assert run.server.media == expected
    run.start(at, 10)
    run.media.histogram("weights", torch.arange(4.0), 15)
    run.record(20)
    run.feed.push(final=True)
    assert run.server.media == expected
    assert run.server.steps("train/loss") == [10, 20]


def test_the_contents_of_media_survive_the_file(run: Run) -> None:
    run.media.image("digits", torch.full((2, 3, 3), 7, dtype=torch.uint8), 1)
    run.media.histogram("weights", torch.tensor([0.0, 1.0, 1.0]), 1)
    run.media.histogram("nothing", torch.tensor([math.nan]), 1)
    (row,) = Records(run.folder).take(final=True)
    image, histogram = row.media
    assert image.png.startswith(b"\x89PNG")
    assert sum(histogram.counts) == 3
    assert len(histogram.edges) == len(histogram.counts) + 1


def test_a_missing_login_is_reported_once_and_not_tried_again(run: Run) -> None:
    run.server.fails = "login"
    run.record(10, 20)
    assert not run.feed.push()
    run.feed._retry_at = 0.0
    assert not run.feed.push(final=True)
    assert run.feed.gave_up
    assert run.reports == ["records nothing: log in first."]
    assert run.server.opened == 1


def test_a_number_that_is_not_finite_is_sent_as_one(run: Run) -> None:
    run.metrics.scalars(1, 0.1, {"train/loss": math.inf})
    run.feed.push(final=True)
    assert math.isnan(run.server.values["train/loss", 1][0])


def test_a_full_disk_stops_sending_and_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Mark) -> None:
        raise OSError(28, "No space left on device")

    run.record(10, 20)
    with monkeypatch.context() as patched:
        patched.setattr(Mark, "write", full)
        assert not run.feed.push()
    why = "OSError: [Errno 28] No space left on device"
    assert run.reports == [f"waits ({why}): what it lacks stays in metrics.jsonl, and is sent later"]
    assert run.server.values == {}
    run.feed._retry_at = 0.0
    run.feed.push(final=True)
    assert run.server.steps("train/loss") == [10, 20]


def test_a_damaged_mark_is_not_believed(tmp_path: Path) -> None:
    Mark.of(tmp_path, "mine").path.write_text(json.dumps({"id": "x"}))
    with pytest.raises(ValueError, match="is damaged: remove it"):
        Mark.of(tmp_path, "mine")


def test_a_checkpoint_is_sent_once_and_the_best_value_with_every_end(run: Run, tmp_path: Path) -> None:
    sent: list[int] = []
    run.server.send_checkpoint = lambda folder, step: sent.append(step)  # type: ignore[method-assign]
    for _ in range(2):
        assert run.feed.end(True, (tmp_path, 30), (20, "eval/loss", 0.5))
    assert sent == [30]
    assert run.server.best_values == {"eval/loss": (20, 0.5)}
    assert run.server.closed == 2
    assert Mark.of(tmp_path, "mine").checkpoint == 30
