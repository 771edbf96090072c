"""Sending a run's records to its remote loggers: the process that follows a run, and `ddpexp sync`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpexp.checkpoint.format import best_first, scan
from ddpexp.checkpoint.weights import best_step
from ddpexp.config.build import build
from ddpexp.config.instantiate import check_arguments, instantiate, locate
from ddpexp.config.parse import load
from ddpexp.config.registry import is_remote_logger, key_of
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.loggers.remote.base import Keys, Remote, RunInfo
from ddpexp.loggers.remote.feed import FOLDER, Feed, Mark, reason_of
from ddpexp.loggers.remote.source import Records
from ddpexp.run.directory import RunDir
from ddpexp.settings.experiment import NamedChecked
from ddpexp.settings.node import Node
from ddpexp.system.process import die_with_parent
from ddpexp.system.secrets import masked, masked_tree
from ddpexp.system.yaml_text import load_yaml

_POLL_SECONDS = 1.0
_LOCK_SECONDS = 5.0  # for the process of an earlier start to end
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")  # rank zero decides when this ends
_NICENESS = 5


def check_usable(experiment: Experiment) -> None:
    """Check that the packages and logins of our remote loggers are there.

    Raises:
        RefusedError: one is not.
    """
    for name, node in experiment.logger.items():
        where = f"logger.{name}"
        if key_of(where, node.target) is not None and is_remote(experiment, name):
            problem = locate(node.target, experiment.trust, where).problem(where, node.kwargs, os.environ)
            if problem is not None:
                raise RefusedError(problem)


def is_remote(experiment: Experiment, name: str) -> bool:
    """Return whether a logger is fed by a process of its own; imports its class if it is not ddpexp's.

    Raises:
        RefusedError: it is, and files cannot have its name.
    """
    where, target = f"logger.{name}", experiment.logger[name].target
    if key_of(where, target) is not None:
        found = is_remote_logger(where, target)
    else:
        kind = locate(target, experiment.trust, where)
        found = isinstance(kind, type) and issubclass(kind, Remote)
    if found and not re.fullmatch(r"\w[\w.-]*", name):
        raise RefusedError(
            "cannot be a part of file names", suggestion="Use letters, digits, _, - and . in its key.", place=where
        )
    return found


def remote_keys(experiment: Experiment, name: str) -> Keys:
    """Return the keys that the remote logger of this name has in common with all others.

    Raises:
        RefusedError: one of them has a wrong value, or the class of the logger does not take the rest.
    """
    where, node = f"logger.{name}", experiment.logger[name]
    fields = Keys.__dataclass_fields__
    keys = build(Keys, {key: value for key, value in node.kwargs.items() if key in fields}, where)
    keys.check(experiment, where)
    kind = locate(node.target, experiment.trust, where)
    if isinstance(kind, NamedChecked):
        kind.check(experiment, where)
    check_arguments(_without_keys(node), experiment.trust, where, None)
    return keys


def _without_keys(node: Node) -> Node:
    """Return a logger with the keys that its class gets."""
    return Node(node.target, {key: value for key, value in node.kwargs.items() if key not in Keys.__dataclass_fields__})


def follow(parent: int, reports: int, path: str, name: str) -> int:
    """Subprocess entry point: send the records of a run while they are written, until rank zero ends.

    `parent` is rank zero's process, and `reports` the descriptor for lines of JSON that rank zero logs.
    """
    die_with_parent(parent)
    for number in _IGNORED:
        signal.signal(getattr(signal, number), signal.SIG_IGN)
    os.nice(_NICENESS)  # the ranks come first
    end = _end_of_run()

    def notify(**message: Any) -> None:
        os.write(reports, json.dumps(message).encode() + b"\n")

    run = RunDir(Path(path))
    try:
        with _only_sender(run, name):
            experiment = load(run.config.read_text())
            feed = _feed(run, experiment, name, lambda text: notify(report=text))
            notify(left=not _until_the_end(feed, end, partial(_end, feed, run, experiment, name)))
    except Exception as error:
        notify(report=f"cannot be used: {reason_of(error)}")
    return 0


def _until_the_end(feed: Feed, end: queue.Queue[bool], end_remote: Callable[[bool], bool]) -> bool:
    """Send until the run ends, and then what is left; return whether everything was sent."""
    while True:
        try:
            done = end.get(timeout=_POLL_SECONDS)
            break
        except queue.Empty:
            feed.push()
    feed.retry_now()
    while not feed.push(final=True) or not end_remote(done):
        if feed.gave_up:
            return False
        time.sleep(_POLL_SECONDS / 5)  # rank zero ends this process when its patience is over
    return True


def _end_of_run() -> queue.Queue[bool]:
    """Return a queue that gets whether the run is done when rank zero says so; without rank zero this process ends."""
    end: queue.Queue[bool] = queue.Queue()

    def listen() -> None:
        line = sys.stdin.readline()
        if line:
            end.put(bool(json.loads(line)["done"]))
            line = sys.stdin.readline()  # rank zero closes it when it ends
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    return end


@dataclass(frozen=True)
class Sent:
    """What `ddpexp sync` did for a logger."""

    sent: int  # steps
    left: int
    problem: str | None


def send(run: RunDir, experiment: Experiment) -> dict[str, Sent]:
    """Send what the run's remote loggers have not got. The run must not be running.

    Raises:
        RefusedError: it has no remote logger, or its records cannot be read.
    """
    experiment.trust.make_importable()
    names = [name for name in experiment.logger if is_remote(experiment, name)]
    if not names:
        raise RefusedError(
            f"has no remote logger: its loggers are {', '.join(experiment.logger) or 'none'}, which write "
            "files: there is nothing to send",
            place=run.path,
        )
    for name in names:
        remote_keys(experiment, name)
    return {name: _send(run, experiment, name) for name in names}


def _send(run: RunDir, experiment: Experiment, name: str) -> Sent:
    reported: list[str] = []
    done = run.status() == "done"
    try:
        with _only_sender(run, name), contextlib.redirect_stdout(sys.stderr):
            feed = _feed(run, experiment, name, reported.append)
            if not feed.count_unsent() and feed.mark.ended and done:
                return Sent(0, 0, None)
            if feed.push(final=True):
                _end(feed, run, experiment, name, done)
            return Sent(feed.num_sent, feed.num_left, feed.problem)
    except (OSError, ValueError) as error:
        raise RefusedError(f"cannot be sent to logger.{name}: {reason_of(error)}", place=run.path) from None


def _feed(run: RunDir, experiment: Experiment, name: str, report: Callable[[str], None]) -> Feed:
    experiment.trust.make_importable()
    mark = Mark.of(run.path, name)
    config = masked_tree(load_yaml(run.config.read_text()))
    chosen, where = experiment.logger[name], f"logger.{name}"
    node = _without_keys(chosen)
    if is_remote_logger(where, chosen.target):  # which take no credentials here: others may need theirs
        node = Node(node.target, masked_tree(node.kwargs))

    def connect(identity: str) -> Remote:
        info = RunInfo(run.path.resolve(), experiment.recipe.name, identity, config)
        remote: Remote = instantiate(node, experiment.trust, where, info)
        return remote

    return Feed(Records(run.path), mark, connect, report)


def _end(feed: Feed, run: RunDir, experiment: Experiment, name: str, done: bool) -> bool:
    """End the remote run of a run, `done` or not; return whether that succeeded."""
    best = best_step(run.checkpoints) if done else None
    return feed.end(
        done,
        _checkpoint(run, experiment, name) if done else None,
        None if best is None else (best.step, masked(best.metric), best.value),
    )


def _checkpoint(run: RunDir, experiment: Experiment, name: str) -> tuple[Path, int] | None:
    """Return the checkpoint that a logger is to get, and its step."""
    wanted = remote_keys(experiment, name).checkpoint
    checkpoints = scan(run.checkpoints).complete if wanted else []  # the newest first
    if wanted == "best" and experiment.trainer.keep_best is not None:
        checkpoints = best_first(checkpoints, experiment.trainer.keep_best)
    return (checkpoints[0].folder, checkpoints[0].step) if checkpoints else None


@contextmanager
def _only_sender(run: RunDir, name: str) -> Iterator[None]:
    """Hold a lock, so that a logger is fed by one process."""
    folder = run.path / FOLDER
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RefusedError(f"another process sends this run to logger.{name}") from None
                time.sleep(0.1)
            except OSError:
                break  # a file system without locks: the lock of the run directory must do
        yield
    finally:
        with suppress(OSError):
            os.close(descriptor)
