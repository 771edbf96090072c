"""The messages between the commands of a job, and those of workers, as they are on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddpexp.errors import Failure, RefusedError
from ddpexp.launch.supervise import messages
from ddpexp.launch.supervise.hangs import Account
from ddpexp.launch.supervise.messages import PeerMessage
from ddpexp.launch.supervise.severity import Severity

FAILURE = Failure(1, "a", "ValueError", "no luck", step=3)
ACCOUNT = Account(1, "b", 1, "train", 2, 9.0, 0.4, "step_seconds", "asleep", "in late (late.py:1)")
MESSAGES: list[tuple[PeerMessage, dict[str, Any]]] = [
    (
        messages.RankFailed(FAILURE, Severity.ERROR),
        {"kind": "failed", "failure": FAILURE.as_dict(), "severity": Severity.ERROR},
    ),
    (messages.RankWarned(1, "hot"), {"kind": "warning", "rank": 1, "text": "hot"}),
    (messages.CommandDone(), {"kind": "done"}),
    (messages.CommandStopped(15), {"kind": "stopped", "signal": 15}),
    (messages.SignalReceived(10, False), {"kind": "signal", "signal": 10, "again": False}),
    (messages.StopRun(15), {"kind": "stop", "signal": 15}),
    (messages.LeaveNow(15), {"kind": "leave", "signal": 15}),
    (messages.EndRun(None, None), {"kind": "end", "cause": None, "signal": None}),
    (messages.EndRun(FAILURE, 15), {"kind": "end", "cause": FAILURE.as_dict(), "signal": 15}),
    (messages.BeginAgreement(1), {"kind": "begin", "number": 1}),
    (messages.ReportBound(1, 7), {"kind": "bound", "number": 1, "step": 7}),
    (messages.CommitStep(1, 8, "save"), {"kind": "settle", "number": 1, "step": 8, "what": "save", "profile": 0}),
    (messages.ReportSilence(), {"kind": "silence"}),
    (messages.BeginInquiry(2), {"kind": "look", "number": 2}),
    (messages.ReportAccounts(2, [ACCOUNT]), {"kind": "seen", "number": 2, "accounts": [vars(ACCOUNT)]}),
]


@pytest.mark.parametrize(("message", "fields"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_has_its_form_on_the_wire(message: PeerMessage, fields: dict[str, Any]) -> None:
    assert messages.encode(message) == fields
    assert messages.decode(json.loads(json.dumps(fields))) == message


def test_every_message_between_commands_is_tried_here() -> None:
    assert {fields["kind"] for _, fields in MESSAGES} == set(messages._PEER_KINDS)


def test_a_message_of_an_unknown_kind_is_ignored() -> None:
    assert messages.decode({"kind": "hat", "size": 7}) is None
    assert messages.decode_worker({"kind": "hat"}) is None


def test_a_worker_message_is_parsed() -> None:
    fields = {"kind": "progress", "done": 1, "total": 6, "text": "loss 2", "line": "step 1", "after": 12}
    assert messages.decode_worker(fields) == messages.Progress(1, 6, "loss 2", "step 1", 12)


def test_a_refusal_by_a_worker_is_raised_again_with_all_its_fields() -> None:
    error = RefusedError("is damaged", key="data.root", value=1, suggestion="Remove it.", place="x.npy")
    failure = Failure(0, "a", "RefusedError", str(error), **error.as_dict())  # type: ignore[arg-type]
    assert RefusedError.from_dict(failure.error_fields()).as_dict() == error.as_dict()
