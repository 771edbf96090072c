"""Where the time of the training goes: each moment of the training thread belongs to one phase.

A mark is a phase and the time at which it begins, kept as it is; what marks add up to is computed when a record is due.
On GPUs the time of a mark is an event on the device, so times are those of the device, and nobody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ddpexp.distributed.phases import CHECKPOINT, COLLECTIVE, EVALUATION, OTHER, PHASES

if TYPE_CHECKING:
    import torch

_BACK = len(PHASES)  # a mark: a collective ends, and the phase before it continues
_STEP = _BACK + 1  # a mark: a step ends
NOWHERE = _STEP + 1  # in place of a phase: time that counts nowhere
MOST_STEPS = 100  # whose collectives are kept one by one
_MOST_MARKS = 20_000  # kept until they are added up


class Window(NamedTuple):
    """The steps between two records on one rank. Units: seconds.

    Attributes:
        num_steps: Their number.
        phases: The time in each phase. Shapes: (len(PHASES),).
        collectives: The time in collectives of each of the last steps, negative where an evaluation or a checkpoint
            came before the step, for which ranks need differently long. Shapes: (at most MOST_STEPS,).
    """

    num_steps: int
    phases: list[float]
    collectives: list[float]


class Observer(Protocol):
    """What is told of phases as they begin: see `Times.observe`."""

    def begin_phase(self, phase: int) -> None:
        """The phase before it ends, and a collective in it."""

    def begin_collective(self) -> None:
        """The phase continues when it ends."""

    def end_collective(self) -> None:
        """End the collective, and return to the phase before it."""


class Times:
    """Marks of the training thread; before `start`, and inside of `apart`, nothing is marked."""

    def __init__(self) -> None:
        """Mark nothing yet."""
        self.started = False
        self.begin: Callable[[int], None] = _ignore
        self.collective = _Collective(self)  # a context for what ranks do together
        self._read: Callable[[], Any] = time.perf_counter
        self._seconds_between: Callable[[Sequence[Any]], list[float]] = _differences
        self._marks: list[tuple[int, Any]] = []
        self._window = _empty()
        self._in_collectives = 0.0  # in the step in progress, as far as it is added up
        self._interrupted = False  # an evaluation or a checkpoint came before the step in progress
        self._observer: Observer | None = None

    def start(self, device: torch.device) -> None:
        """Begin to mark, with the clock of the device."""
        if device.type == "cuda":
            self._read, self._seconds_between = _event, _seconds_between_events
        self._marks = [(OTHER, self._read())]
        self._window, self._in_collectives, self._interrupted = _empty(), 0.0, False
        self.started = True
        self.observe(self._observer)

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of all that begins and ends from now on, whether or not it is marked; None: nobody."""
        self._observer = observer
        mark = self._mark if self.started else _ignore
        self.begin = mark if observer is None else partial(_mark_and_tell, mark, observer)

    def end_step(self) -> None:
        """End a step."""
        self.begin(_STEP)
        if len(self._marks) > _MOST_MARKS:
            self._add_up()

    @contextmanager
    def apart(self, phase: int) -> Iterator[None]:
        """Spend the time inside in one phase, or `NOWHERE`, whatever is done there."""
        begin = self.begin
        begin(phase)
        self.begin = _ignore
        try:
            yield
        finally:
            self.begin = begin
            begin(OTHER)

    def take(self) -> Window:
        """Return what the steps since the last call have taken, in lists, and start again.

        Inside of `apart`, and when the host has waited for the device anyway.
        """
        self._add_up()
        window, self._window = self._window, _empty()
        return window

    def _mark(self, phase: int) -> None:
        self._marks.append((phase, self._read()))

    def _add_up(self) -> None:
        """Add the time between two marks to the phase in which it was spent. The last one is not of a collective.

        Not with numpy, which takes longer for the marks of 50 steps where the steps have emptied the caches.
        """
        if len(self._marks) < 2:
            return
        codes, times = zip(*self._marks, strict=True)
        num_steps, own, collectives = self._window
        phases = [*own, *[0.0] * (NOWHERE + 1 - len(own))]
        phase, inside, interrupted = codes[0], self._in_collectives, self._interrupted
        for code, seconds in zip(codes, self._seconds_between(times), strict=False):
            if code == COLLECTIVE:
                phases[COLLECTIVE] += seconds
                inside += seconds
                continue
            if code == _STEP:
                num_steps += 1
                collectives.append(-max(inside, 1e-12) if interrupted else inside)
                inside, interrupted = 0.0, False
                phase = OTHER
            elif code != _BACK:
                phase = code
                interrupted |= code in (EVALUATION, CHECKPOINT)
            phases[phase] += seconds
        self._window = Window(num_steps, phases[: len(PHASES)], collectives[-MOST_STEPS:])
        self._in_collectives, self._interrupted = inside, interrupted
        self._marks = [self._marks[-1]]


class _Collective(AbstractContextManager[None]):
    """A context for a collective. A class, because a generator takes four times as long."""

    def __init__(self, times: Times) -> None:
        self._times = times

    def __enter__(self) -> None:
        self._times.begin(COLLECTIVE)

    def __exit__(self, *error: object) -> None:
        self._times.begin(_BACK)


def _ignore(phase: int) -> None:
    """Mark nothing."""


def _mark_and_tell(mark: Callable[[int], None], observer: Observer, phase: int) -> None:
    mark(phase)
    if phase == COLLECTIVE:
        observer.begin_collective()
    elif phase == _BACK:
        observer.end_collective()
    elif phase < len(PHASES):
        observer.begin_phase(phase)


def _event() -> Any:
    import torch

    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _seconds_between_events(events: Sequence[Any]) -> list[float]:
    for event in events:
        event.synchronize()  # which the device has reached already: see `Times.take`
    return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(events)]


def _empty() -> Window:
    return Window(0, [0.0] * len(PHASES), [])
