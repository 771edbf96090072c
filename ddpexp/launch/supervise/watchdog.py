"""Detect ranks that hang, from their shared pages, their processes and their stacks; used by the supervisor.

A rank that makes no progress for longer than its phase may take starts an inquiry: every command has its ranks dump
their stacks and reports what it observes; the leading one decides which rank is the cause. Usually no rank makes
progress then, since each waits for the one that is stopped, sleeps or spins, and the stacks tell them apart. Where a
rank only waits for another one that is still within its limit (it saves, or evaluates more), nothing happens yet.

A run is ended on current evidence only. A stack counts only if the rank has made no progress since it was asked for
it; a late answer to an earlier question, or a report for an earlier inquiry, does not count. Time in which a rank was
ready to run but waited for a CPU is not silence: on an overloaded host a healthy rank may need many times as long.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpexp.errors import Failure
from ddpexp.launch.supervise.activity import activity_of, cpu_delays, cpu_ticks, seconds_starved
from ddpexp.launch.supervise.hangs import LOADER_SECONDS, Account, How, classify, verdict
from ddpexp.launch.supervise.messages import BeginInquiry, InquiryMessage, ReportAccounts, ReportSilence
from ddpexp.launch.supervise.stacks import Frame, threads
from ddpexp.settings.trainer import Timeout
from ddpexp.system.process import is_stopped

if TYPE_CHECKING:
    from ddpexp.launch.rendezvous.wire import Peer
    from ddpexp.launch.supervise.worker import Worker

_LOOK_SECONDS = 0.25
_GAP_SECONDS = 1.0  # the most that one look counts: a command or host that was itself suspended has seen no silence
_BUSY_FACTOR = 10  # a rank that is busy importing or building may take this much longer
_RECORD_SECONDS = 1.0  # for a rank to report which collectives it has called
_STACK_SECONDS = 1.5  # for a stack to be written, not counting the time in which the rank waits for a CPU
_STARVED_MOST = 0.9  # of the time between two looks may count as waiting for a CPU; the rest is silence in any case
_ANSWER_SECONDS = 4.0  # for the other commands to report
_LEADER_SECONDS = 5.0  # for the leading command to begin an inquiry after a report of silence
_AGAIN_SECONDS = 15.0  # from an inquiry without a result to the next


@dataclass
class _Silence:
    """How long a rank has made no progress."""

    progress: tuple[int, int, int]
    seconds: float = 0.0
    busy_seconds: float = 0.0  # in addition, while it was busy importing, building or writing a profile
    activity: tuple[int, ...] = ()
    delays: Mapping[int, int] = field(default_factory=dict)  # of its threads at the last look, see `cpu_delays`
    starved_seconds: float = 0.0  # waited for a CPU, and not subtracted yet


@dataclass
class _Question:
    """A request to one rank for its stack."""

    worker: Worker
    progress: tuple[int, int, int]  # of the rank, when it was asked
    size: int  # of its log then
    ticks: int  # of CPU time that it had used then
    delays: Mapping[int, int]
    inquiry: int | None  # the number of the inquiry which collectives it has called; None without NCCL

    @property
    def record(self) -> bytes | None:
        """Return which collectives the rank has called, packed."""
        return None if self.inquiry is None else self.worker.page.collectives.packed(self.inquiry)

    @property
    def answer(self) -> str:
        """Return what the rank has written since it was asked."""
        return self.worker.log.text(self.size)

    @property
    def is_answered(self) -> bool:
        """Return whether the answer ends with a complete stack."""
        answer = self.answer
        return answer.endswith("\n") and answer.rstrip().count("\n") > 1

    @property
    def starved_seconds(self) -> float:
        """Return how long the rank has waited for a CPU since it was asked."""
        return seconds_starved(self.delays, cpu_delays(self.worker.pid, self.worker.page.status.phase))


@dataclass
class _Round:
    """The questions of one inquiry to the ranks of this command."""

    began: float
    questions: Mapping[int, _Question]  # by rank

    def is_over(self, now: float) -> bool:
        """Return whether every rank has answered, or has had the time to."""
        seconds = now - self.began
        if seconds < _STACK_SECONDS / 3:  # CPU use takes a while to become visible
            return False
        if seconds < _RECORD_SECONDS and any(
            question.inquiry is not None and question.record is None for question in self.questions.values()
        ):
            return False
        late = [question for question in self.questions.values() if not question.is_answered]
        return all(
            seconds - min(question.starved_seconds, _STARVED_MOST * seconds) > _STACK_SECONDS for question in late
        )


@dataclass
class Watchdog:
    """One command's part: the silence of its ranks, and the state of the inquiry.

    `send` sends to all other commands from the leading one, else to the leading one.
    """

    workers: Sequence[Worker]
    timeout: Timeout
    leads: bool
    send: Callable[[InquiryMessage], None]
    dump: Callable[[], None]  # makes all ranks of this command dump their stacks
    lives: Callable[[int], bool]  # whether a rank has neither ended nor failed
    server: int  # the process id of the fork server
    peers: Mapping[int, Peer] = field(default_factory=dict)  # the other commands, by number
    on_gpus: bool = False  # ranks wait for their device, whatever that waits for
    uses_nccl: bool = False  # ranks record which collectives they have called
    leader_is_silent: bool = False
    absent: list[int] = field(default_factory=list)  # commands that do not answer
    _silences: dict[int, _Silence] = field(default_factory=dict)
    _looked_at: float = field(default_factory=time.monotonic)
    _round: _Round | None = None  # while the stacks are being written
    # The progress of ranks that have not answered an earlier question yet.
    _unanswered: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _number: int = 0  # of the newest inquiry
    _asked: int = 0  # how often the ranks of this command were asked
    _accounts: dict[int, list[Account]] | None = None  # of the inquiry in progress, by command
    _asked_at: float = 0.0  # when the inquiry began, or the silence was reported to the leading command
    _inquired: frozenset[int] = frozenset()  # the silent ranks for which there was an inquiry
    _again_at: float = 0.0  # when to inquire again
    _requested: bool = False  # another command has reported silence during an inquiry
    _awaits_leader: bool = False  # silence was reported, and the leading command has not begun an inquiry yet
    # The rank, with step and phase, that did not answer last time.
    _suspect: tuple[int, int | None, str | None] | None = None

    @property
    def writes_stacks(self) -> bool:
        """Return whether the stacks that ranks write now are for an inquiry, and not to be shown."""
        return self._round is not None

    def look(self, others: Collection[int] = ()) -> Failure | None:
        """Measure, inquire, decide; never waits. `others` are the other commands that are connected.

        Returns the cause of a hang, on the leading command.
        """
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._measure(min(now - self._looked_at, _GAP_SECONDS))
            self._looked_at = now
            overdue = frozenset(worker.rank for worker in self._living() if self._account(worker).overdue)
            self._awaits_leader &= bool(overdue)
            is_new = overdue - self._inquired or now > self._again_at
            if (is_new or self._requested) and (overdue or self._requested):
                self._inquire(now, overdue)
        if self._round is not None and self._round.is_over(now):
            self._report(self._round, now)
        if not self.leads:
            waited = now - self._asked_at > _LEADER_SECONDS
            self.leader_is_silent = self._awaits_leader and self._accounts is None and waited
            return None
        return self._decide(now, others)

    def forget(self) -> None:
        """Begin anew: what was observed does not count, since a rank was at a debugger's prompt."""
        self._silences.clear()
        self._unanswered.clear()
        self._looked_at = time.monotonic()
        self._round = None
        self._accounts = None

    def on_message(self, message: InquiryMessage, sender: int) -> None:
        """Handle a message of another command."""
        if isinstance(message, ReportSilence):
            self._requested = True
        elif isinstance(message, BeginInquiry):
            self._awaits_leader = False
            self._accounts = {}
            self._number = message.number
            self._ask(time.monotonic())
        elif self._accounts is not None and message.number == self._number:
            self._accounts[sender] = list(message.accounts)

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers if self.lives(worker.rank)]

    def _measure(self, seconds: float) -> None:
        """Add the time since the last look to the silence of each rank that has made no progress."""
        for worker in self._living():
            silence = self._silences.get(worker.rank)
            if silence is None or silence.progress != worker.page.status.progress:
                self._silences[worker.rank] = _Silence(worker.page.status.progress)
                continue
            pid = worker.pid or self.server  # the server finishes its imports before it starts a rank
            delays = cpu_delays(pid, worker.page.status.phase)
            # The kernel counts a wait when it is over, so a wait longer than a look also counts for earlier looks.
            starved = silence.starved_seconds + seconds_starved(silence.delays, delays)
            counted = min(starved, _STARVED_MOST * seconds)
            silence.delays, silence.starved_seconds = delays, starved - counted
            silent = seconds - counted
            if worker.page.status.phase in ("start", "build", "profile"):
                activity = activity_of(pid)
                if activity != silence.activity:
                    silence.activity, silence.busy_seconds = activity, silence.busy_seconds + silent
                    continue
            silence.seconds += silent

    def _account(
        self, worker: Worker, how: How = "asleep", where: Frame | str | None = None, stack: str | None = None
    ) -> Account:
        page, silence = worker.page, self._silences.get(worker.rank)
        limit, key = self._limit(page.status.phase, page.status.step is None)
        silent = silence.seconds if silence and silence.progress == page.status.progress else 0.0
        if silent and silence and silence.busy_seconds > _BUSY_FACTOR * limit:
            silent = silence.busy_seconds
        return Account(
            rank=worker.rank,
            host=platform.node(),
            pid=worker.pid,
            phase=page.status.phase,
            step=page.status.step,
            silent_seconds=silent,
            limit_seconds=limit,
            key=key,
            how=how,
            where=None if where is None else str(where),
            stack=stack,
            is_ours=not isinstance(where, Frame) or where.is_ours,
        )

    def _limit(self, phase: str, is_first: bool) -> tuple[float, str]:
        timeout = self.timeout
        if phase in ("start", "join", "build"):
            return timeout.init_seconds, "init_seconds"
        if phase == "data":
            return timeout.data_seconds + LOADER_SECONDS, "data_seconds"
        if phase in ("save", "profile"):
            return timeout.save_seconds, "save_seconds"
        return timeout.step_seconds + (timeout.init_seconds if is_first and phase == "train" else 0.0), "step_seconds"

    def _inquire(self, now: float, overdue: frozenset[int]) -> None:
        """Begin an inquiry, or ask the leading command to; if one is in progress, later."""
        if self._accounts is not None or self._awaits_leader:
            return
        self._inquired = overdue
        self._again_at = now + _AGAIN_SECONDS
        self._requested = False
        self._asked_at = now
        if self.leads:
            self._accounts = {}
            self._number += 1
            self.send(BeginInquiry(self._number))
            self._ask(now)
        else:
            self._awaits_leader = True
            self.send(ReportSilence())

    def _ask(self, now: float) -> None:
        """Make the ranks of this command dump their stacks and, with NCCL, report their collectives."""
        self._asked += 1
        questions = {
            worker.rank: _Question(
                worker,
                worker.page.status.progress,
                worker.log.size(),
                cpu_ticks(worker.pid),
                cpu_delays(worker.pid, worker.page.status.phase),
                self._asked if self.uses_nccl else None,
            )
            for worker in self._living()
        }
        self._round = _Round(now, questions)
        for question in questions.values():
            if question.inquiry is not None:
                question.worker.control.inquire(question.inquiry)
        self.dump()

    def _report(self, round_: _Round, now: float) -> None:
        """Report the answers of this command's ranks to the leading command."""
        self._round = None
        seconds = now - round_.began
        accounts = []
        for worker in self._living():
            question = round_.questions.get(worker.rank)
            if question is None:
                continue
            account = self._account(worker, *self._observe(question, seconds))
            if not self._is_present(question):
                account, self._again_at = replace(account, silent_seconds=0.0), now
            elif question.record is not None:
                account = replace(account, record=question.record.decode())
            accounts.append(account)
        self._unanswered = {
            rank: self._unanswered.get(rank, question.progress)
            for rank, question in round_.questions.items()
            if not question.is_answered
        }
        if self.leads:
            assert self._accounts is not None
            self._accounts[-1] = accounts
        else:
            self.send(ReportAccounts(self._number, accounts))
            self._accounts = None

    def _is_present(self, question: _Question) -> bool:
        """Return whether the observation is current: the rank has made no progress since it was asked.

        An answer may be a late one to an earlier question, so the rank must not have made progress since that one.
        """
        rank, progress = question.worker.rank, question.progress
        since = self._unanswered.get(rank, progress) if question.is_answered else progress
        return bool(question.worker.page.status.progress == progress == since)

    def _observe(self, question: _Question, seconds: float) -> tuple[How, Frame | str | None, str | None]:
        """Return what a rank does, where, and its formatted stack."""
        pid = question.worker.pid
        if pid is not None and is_stopped(pid):
            return "stopped", None, None
        if not question.is_answered and is_stopped(self.server):
            return "orphaned", str(self.server), None
        if pid is None:
            return "absent", None, None
        used = (cpu_ticks(pid) - question.ticks) / os.sysconf("SC_CLK_TCK") + question.starved_seconds
        return classify(threads(question.answer), used / seconds)

    def _decide(self, now: float, others: Collection[int]) -> Failure | None:
        if self._accounts is None or self._round is not None:
            return None
        if len(self._accounts) <= len(others) and now - self._asked_at < _ANSWER_SECONDS:
            return None  # some are missing; this avoids the loop below
        absent = [number for number in others if number not in self._accounts]
        if absent and now - self._asked_at < _ANSWER_SECONDS:
            return None
        accounts = [account for reported in self._accounts.values() for account in reported]
        self._accounts = None
        self.absent = absent
        if absent:
            peer = self.peers[absent[0]]
            text = (
                f"the command of rank {peer.first_rank} on {peer.host} does not answer: it is stopped, or its host is"
            )
            return Failure(rank=peer.first_rank, host=peer.host, kind="Hang", message=text)
        cause = verdict(accounts, self.on_gpus)
        mute = {(account.rank, account.step, account.phase) for account in accounts if account.how == "mute"}
        suspect = (cause.rank, cause.step, cause.phase) if cause is not None else None
        if suspect in mute and suspect != self._suspect:  # a missing answer is no evidence yet: ask once more
            self._suspect, self._again_at = suspect, now
            return None
        self._suspect = None
        return cause
