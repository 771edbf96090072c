"""Every error is data, its sentence is readable, and what it tells the user to type would be accepted."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from ddpexp.config.suggestions import drop_refused
from ddpexp.errors import CodeError, DdpexpError, RefusedError, subject
from tests import write_messages
from tests.conftest import Ddpexp
from tests.suggestions import refusals

MESSAGES = list(write_messages.messages())
OVERRIDE = re.compile(r"(trainer|data|run|launcher|strategy|optimizer|sweep)\.\w+[=:]? (?!and )")
ADVICE = re.compile(r"[:.] (use|set|leave|name|give|choose|remove|add|type|put|install|start) ", re.IGNORECASE)


def room(message: write_messages.Message) -> str:
    return message.path.relative_to(write_messages.ROOT / "ddpexp").parts[0]


def test_the_file_of_messages_is_current() -> None:
    assert write_messages.FILE.read_text() == write_messages.text(), "run python -m tests.write_messages, and read it"


def test_no_message_suggests_what_would_be_refused() -> None:
    wrong = [
        f"{message.path}:{message.line}: {refusal}"
        for message in MESSAGES
        for refusal in refusals(message.fields.get("suggestion", ""), shipped_only=True)
    ]
    assert not wrong


def test_a_key_and_a_suggestion_are_fields_and_not_in_the_reason() -> None:
    wrong = [
        f"{message.path}:{message.line}: {reason}"
        for message in MESSAGES
        if ((reason := message.fields.get("reason", "")) or "suggestion" not in message.fields)
        and (not reason or OVERRIDE.match(reason) or ADVICE.search(reason))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RefusedError("whole text"), "whole text"),
        (RefusedError(key="a.b", value=-1, suggestion="Use 0 or more."), "a.b=-1: use 0 or more."),
        (RefusedError("is unset", key="a.b", suggestion="Set it."), "a.b is unset. Set it."),
        (RefusedError("is too small", key="a", value=None), "a=null is too small."),
        (RefusedError("The set has none", key="a", value=[1]), "a=[1]: The set has none."),
        (RefusedError("is cut off", place="x.tar", key="a"), "a: x.tar is cut off."),
        (RefusedError("It stopped", suggestion="Resume."), "It stopped. Resume."),
    ],
)
def test_an_error_is_one_sentence_made_of_its_fields(error: RefusedError, text: str) -> None:
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.as_dict()) == (text, error.as_dict())


def test_the_error_of_a_users_code_keeps_its_place_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CodeError("ValueError", "no luck", "trace", "mine.py:3")))
    assert (error.kind, error.place, str(error)) == ("ValueError", "mine.py:3", "no luck")


def test_fields_have_the_value_as_it_is_typed() -> None:
    error = DdpexpError("is unset", key="a", value=None, suggestion="Set it.")
    fields = {"reason": "is unset", "key": "a", "value": "null", "suggestion": "Set it.", "place": None}
    assert error.as_dict() == fields


def test_an_error_is_about_a_key_only_where_nothing_stands_before_it() -> None:
    assert subject("data.root=x", "a.npy") == {"key": "data.root", "value": "x", "place": "a.npy"}
    assert subject("predict a=b.npz", "x") == {"place": "predict a=b.npz: x"}


@pytest.mark.parametrize(
    ("suggestion", "is_accepted"),
    [
        ("Use trainer.seed=0, or run.dir=DIR.", True),
        ("Use trainer.timeout.init_seconds=3 or trainer.lora.rank=8.", True),
        ("Use trainer.gpus=... .", True),
        ("Did you mean trainer.gpus=2?", True),
        ("Did you mean trainer.epochs=...?", True),
        ("Did you mean 'trainer.seed=range(0,4)'?", True),
        ("Did you mean trainer.seed=none?", False),
        ("Use trainer.sed=0.", False),
        ("Use trainer.seed=none.", False),
        ("Type python -m ddpexp resume DIR.", True),
        ("Type python -m ddpexp resum DIR.", False),
        ("Did you mean trainer.seed=2?", True),
        ("Did you mean trainer.seed='?", False),
        ("Use data=images and data.root=DIR.", True),
        ("Use data=pictures.", False),
        ("Use launcher=NAME.", True),
        ("Use data.rooot=DIR.", False),
        ("Use launcher.gpus_per_nod=3.", False),
        ("Use launcher={name}.", True),
        ("Did you mean run.trust=[['os]?", False),
        ("Quote it twice: 'launcher.sbatch_args=[\"--mail-type=END\"]'.", True),
        ("Quote it twice: 'launcher.sbatch_args=[--mail-type=END]'.", False),
        ("Did you mean run.init_from=a,b=c?", False),
        ("Write optimizer.lr=choice(0.1,0.2).", True),
        ("Did you mean ddpexp evaluate RUN --checkpoint best?", True),
        ("Did you mean ddpexp evaluate RUN --chekpoint best?", False),
        ("Did you mean ddpexp evaluate RUN --checkpoint?", False),
        ("Did you mean ddpexp evalute RUN?", False),
        ("python -m ddpexp check recipe=mnist tries two steps.", True),
    ],
)
def test_a_suggestion_is_parsed(suggestion: str, is_accepted: bool) -> None:
    assert (not list(refusals(suggestion, shipped_only=True))) == is_accepted


def test_a_suggestion_that_would_be_refused_is_not_printed(refused_suggestions: list[str]) -> None:
    error = RefusedError("is too small", key="trainer.seed", value=-1, suggestion="Use trainer.seed=none.")
    drop_refused(error)
    assert str(error) == "trainer.seed=-1 is too small."
    assert refused_suggestions == ["trainer.seed=none is not a whole number."]
    refused_suggestions.clear()  # each would fail this test


def test_a_command_with_json_prints_the_fields_of_its_error(ddpexp: Ddpexp) -> None:
    done = ddpexp("status", "nowhere", "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, done.err) == (2, f"ddpexp: {error['message']}\n")
    assert {"kind", "reason", "key", "value", "suggestion", "place"} < set(error)
