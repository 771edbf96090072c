"""What a person reads of the metrics: on standard output, in the log, or over the channel to whoever watches."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.lines import Lines
from ddpexp.loggers.progress import ProgressLogger, _training_texts
from ddpexp.train.due import next_evaluation
from tests.fitting import asked

TRAIN = {
    "train/loss": 0.123456, "train/accuracy": 0.98765, "train/lr": 0.05, "train/grad_norm": 1.5,
    "train/samples_per_second": 12345.6,
}  # fmt: skip


@pytest.fixture
def log() -> logging.Logger:
    log = logging.getLogger("ddpexp.tests.console")
    log.setLevel(logging.INFO)
    return log


def test_without_a_watcher_everything_is_a_line_of_the_log(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    console = ProgressLogger(Control(None), log, 100)
    console.scalars(50, 0.5, TRAIN)
    console.scalars(100, 1.0, {"eval/loss": 0.2, "eval/accuracy": 0.5})
    assert caplog.messages == [
        "step  50/100  epoch  0.50  loss 0.1235  accuracy 98.77%  lr 0.05  grad_norm 1.5  12,346 samples/s",
        "step 100/100  epoch  1.00  eval/loss 0.2  eval/accuracy 50.00%",
    ]
    assert not any(vars(record)["watched"] for record in caplog.records[:1])


def test_a_watcher_gets_progress_and_shows_it_itself(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    lines = Lines(ours)
    ProgressLogger(Control(theirs), log, 100).scalars(50, 0.5, TRAIN)
    [message], open_ = lines.read()
    assert open_
    assert isinstance(message.pop("after"), int)
    assert message == {
        "kind": "progress", "done": 50, "total": 100, "text": "loss 0.1235  accuracy 98.77%",
        "line": caplog.messages[0],
    }  # fmt: skip
    assert vars(caplog.records[0])["watched"]  # kept in run.log, left out of standard output
    ours.close()
    theirs.close()


def test_a_metric_that_a_recipe_lacks_is_left_out(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    ProgressLogger(Control(None), log, 9).scalars(3, 0.1, {"train/loss": 2.0, "train/lr": 1e-5})
    assert caplog.messages == ["step 3/9  epoch  0.10  loss 2  lr 1e-05"]


def test_many_rates_are_shown_as_the_lowest_and_the_highest() -> None:
    rates = {f"lr/{name}": 0.1 * number for number, name in enumerate("abcde", 1)}
    assert _training_texts({"loss": 1.0, **rates, "grad_norm": 2.0}) == [
        "loss 1",
        "lr 0.1 to 0.5 in 5 groups",
        "grad_norm 2",
    ]
    few = {"loss": 1.0, "lr/a": 0.1, "lr/b": 0.2}
    assert _training_texts(few) == ["loss 1", "lr/a 0.1", "lr/b 0.2"]


def test_the_time_that_is_left_and_the_wait_for_data_are_shown(
    log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    times = {"times/data": 0.5, "times/forward": 1.0, "times/backward": 0.5, "times/evaluation": 7.0}
    ours, theirs = socket.socketpair()
    control = Control(theirs, leads=True)
    console = ProgressLogger(control, log, 1000, lambda step: 300 if step < 300 else 1000)
    for step, now in ((50, 100.0), (100, 300.0), (300, 1100.0), (1000, 4000.0)):  # noqa: B007
        console.scalars(step, 0.0, {"train/loss": 2.0, **times})
    texts = [message["text"] for message in Lines(ours).read()[0]]
    assert texts == [
        "loss 2  waits for data 25%  evaluation in 8:20",
        "loss 2  waits for data 25%  1:00:00 left, evaluation in 6:40",
        "loss 2  waits for data 25%  46:40 left",  # the next one is that at the end
        "loss 2  waits for data 25%",
    ]
    assert caplog.messages[1] == "step  100/1000  epoch  0.00  loss 2  waits for data 25%  1:00:00 left"
    console.scalars(50, 0.0, {"train/loss": 2.0, "times/data": 0.01, "times/forward": 1.0})
    assert "waits" not in caplog.messages[-1]
    ours.close()
    theirs.close()


def test_an_activity_is_sent_now_and_then_but_always_its_begin_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ours, theirs = socket.socketpair()
    control = Control(theirs, leads=True)
    for now, done in ((100.0, 0), (100.01, 1), (100.3, 2), (100.31, 3), (100.32, 4)):  # noqa: B007
        control.show_activity("evaluation of eval", done, 4)
    Control(theirs).show_activity("evaluation of eval", 0, 4)  # of another rank
    messages = Lines(ours).read()[0]
    assert [(message["kind"], message["text"], message["done"]) for message in messages] == [
        ("activity", "evaluation of eval", 0),
        ("activity", "evaluation of eval", 2),
        ("activity", "evaluation of eval", 4),
    ]
    ours.close()
    theirs.close()


def test_the_next_evaluation_follows_from_the_period() -> None:
    trainer = asked(eval_every=30).trainer
    assert [next_evaluation(step, 100, 50, trainer) for step in (0, 29, 30, 95)] == [30, 30, 60, 100]
    trainer = asked(eval_every="epoch").trainer
    assert [next_evaluation(step, 100, 40, trainer) for step in (1, 40, 81)] == [40, 80, 100]
    assert next_evaluation(1, 100, 40, asked(eval_every=0).trainer) is None
