"""The commands' agreement on the step at which all ranks save, end or stop, as functions of its state.

The leading command writes a new agreement number to the shared pages of its ranks, and the other commands do the same:
from then on each rank waits at its next step boundary. Each command reports the boundary that none of its ranks can be
past, the leading one chooses the latest of them as the step, and all publish it. Ranks that have not reached it
continue up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddpexp.launch.supervise.events import COMMAND, Action, BeginBoundary, CommitBoundary, Send
from ddpexp.launch.supervise.messages import BeginAgreement, CommitStep
from ddpexp.launch.supervise.state import Agreement
from ddpexp.launch.workers.page import What


def want(agreement: Agreement, what: What, profile: int = 0) -> Agreement:
    """Request that all ranks save, save and stop, or profile some steps; ignored after a stop.

    For the leading command.
    """
    if agreement.stops:
        return agreement
    if what == "profile":
        next_what, steps = agreement.next_what or what, max(agreement.next_profile, profile)
        return replace(agreement, next_what=next_what, next_profile=steps)
    return replace(agreement, next_what=what, stops=what == "stop")


def wish(agreement: Agreement, number: int, what: What) -> Agreement:
    """Request an agreement because rank zero wishes it, unless one of this number has begun or another is due."""
    if agreement.what is None and agreement.next_what is None and not agreement.stops and number > agreement.number:
        return replace(agreement, next_what=what)
    return agreement


def begin(agreement: Agreement, others: frozenset[int]) -> tuple[Agreement, Sequence[Action]]:
    """Begin the next agreement, if one was requested and none is in progress. For the leading command."""
    is_in_progress = agreement.what is not None
    if is_in_progress or agreement.next_what is None:
        return agreement, ()
    number = agreement.number + 1
    begun = replace(
        agreement,
        number=number,
        what=agreement.next_what,
        profile=agreement.next_profile,
        next_what=None,
        next_profile=0,
        bound=0,
        awaited=others | {COMMAND},
    )
    return begun, (Send(BeginAgreement(number)), BeginBoundary(number))


def answer(agreement: Agreement, command: int, number: int, step: int) -> tuple[Agreement, Sequence[Action]]:
    """Count a command's boundary, COMMAND for this one; the last answer settles the step. For the leading command."""
    if number != agreement.number:
        return agreement, ()
    return forget(replace(agreement, bound=max(agreement.bound, step)), command)


def forget(agreement: Agreement, command: int) -> tuple[Agreement, Sequence[Action]]:
    """Wait no longer for a command: it has answered, or has ended."""
    awaited = agreement.awaited - {command}
    if awaited or agreement.what is None:
        return replace(agreement, awaited=awaited), ()
    # Never before an older agreement's step: a rank that acted on it has done that step, so the bounds include it.
    step = max(agreement.step, agreement.bound)
    committed = CommitStep(agreement.number, step, agreement.what, agreement.profile)
    return replace(agreement, awaited=awaited, step=step, what=None), (CommitBoundary(committed), Send(committed))
