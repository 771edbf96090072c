"""The requests of other commands to a running run, in the leading command: see `ddpexp.launch.requests`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddpexp.launch import requests
from ddpexp.launch.requests import Answer, Request
from ddpexp.launch.supervise import events
from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.messages import Profiled

_LOOK_SECONDS = 0.5


class Inbox:
    """Takes requests, makes events of them, and writes the answers; in a command that does not lead it does nothing."""

    def __init__(self, decider: Decider, folder: Path | None) -> None:
        """Make the folder, by which other commands see that requests are taken; older ones are dropped."""
        self._decider = decider
        self._folder = folder if decider.state.leads else None
        self._looked_at = 0.0
        self._open: dict[Path, tuple[Request, Answer, int]] = {}  # not done, with the number of the agreement
        if self._folder is not None:
            with suppress(OSError):  # without it there are no requests
                self._folder.mkdir(exist_ok=True)
            for path in self._paths():
                with suppress(OSError):
                    path.unlink()

    def look(self) -> None:
        """Take what is new, and answer what is known by now."""
        now = time.monotonic()
        if self._folder is None or now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        for path in self._paths():
            if path not in self._open:
                with suppress(OSError, ValueError):
                    request, answer = requests.read(path)
                    if answer is None:
                        self._take(path, request)
        for path in list(self._open):
            self._follow(path)

    def on_profiled(self, message: Profiled) -> None:
        """Answer the requests for the profile that rank zero reports."""
        for path in list(self._open):
            self._follow(path)  # its steps may be done before anybody has looked
        for path, (request, answer, _) in list(self._open.items()):
            if request.kind == "profile" and answer.step is not None and message.begin <= answer.step < message.end:
                self._answer(path, Answer("done", message.begin, message.end, message.missing))

    def close(self) -> None:
        """Say that the run has ended, and remove the folder if nobody waits for an answer."""
        if self._folder is None:
            return
        for path in list(self._open):
            self._follow(path)
            if path in self._open:
                request, answer, _ = self._open[path]
                stops = request.kind == "stop" and answer.state == "agreed"
                self._answer(path, replace(answer, state="done" if stops else "ended"))
        with suppress(OSError):
            self._folder.rmdir()

    def _paths(self) -> Iterator[Path]:
        """Yield the files of requests, the oldest first."""
        assert self._folder is not None
        try:
            with os.scandir(self._folder) as entries:
                found = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries]
        except OSError:
            return
        yield from (self._folder / name for _, name in sorted(found) if requests.NAME.fullmatch(name))

    def _take(self, path: Path, request: Request) -> None:
        state = self._decider.state
        if request.kind == "stacks":
            self._decider.take(events.Requested(request.kind))
            requests.write(path, request, Answer("done"))
            return
        if request.kind != "stop" and not state.rank_zero_has_stepped:
            self._open[path] = request, Answer("waits"), 0
            requests.write(path, request, Answer("waits"))
            return
        self._request(path, request)

    def _request(self, path: Path, request: Request) -> None:
        agreement = self._decider.state.agreement
        # Its number: of the one that begins now, or after the one in progress; a stop that has begun keeps its own.
        is_new = agreement.next_what is not None or not agreement.stops
        self._open[path] = request, Answer("waits"), agreement.number + is_new
        self._decider.take(events.Requested(request.kind, request.steps))

    def _follow(self, path: Path) -> None:
        """Go on with a request that is not done."""
        request, answer, number = self._open[path]
        state = self._decider.state
        if answer.state != "waits":
            return
        if number == 0:
            if state.rank_zero_has_stepped:
                self._request(path, request)
        elif (step := self._decider.committed.get(number)) is not None:
            self._answer(path, Answer("agreed" if request.kind != "save" else "done", step))
        elif request.kind == "stop" and state.stops_at_once:
            self._answer(path, Answer("done"))

    def _answer(self, path: Path, answer: Answer) -> None:
        request, _, number = self._open.pop(path)
        if answer.state not in ("done", "ended"):
            self._open[path] = request, answer, number
        with suppress(OSError):
            if path.exists():  # else nobody waits for it
                requests.write(path, request, answer)
