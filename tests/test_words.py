"""One word for a concept, the field's own: words that the project once used for itself do not come back.

Underscores count as spaces, so that a pattern finds a phrase, a name of a function and a name of a test alike.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

# Patterns that begin at the start of a word, in lower case.
OLD_WORDS = {
    r"(go|goes|going|gone|went) on\b": "continue, or resume",
    r"(take|takes|took|taken|taking) up\b": "restore, or load_state_dict",
    r"(cut|cuts|cutting) back\b": "truncate",
    r"told\b": "given, configured or informed",
    r"tell(s|ing)?,? ([\w,]+ ){0,4}whether\b": "return whether",
    r"say\(": "print_message, or send",
    r"hears?\b": "receive, or handle",
    r"hopeless\b": "pruned, or falling behind",
    r"typed again\b": "restated",
    r"words? of trust\b": "run.trust",
    r"own word\b": "its record, or what it records",
    r"(crew|crews|seat|seats)\b": "participants, or rank assignment",
    r"(guest|guests|door|doors)\b": "pending peer, or acceptor",
    r"farewell\b": "shutdown",
    r"folly\b": "unsafe",
    r"asked\(": "WorkerRequest",
    r"class (saves|page|board|update|movement|average)\b": "RunState, SharedStatus, StoreMailbox, OptimizerStep, EMA",
    r"carriers?\b": "reducer, or transport",
    r"(common|own) buffers\b": "synced buffers, or local buffers",
    r"def refuse \w+": "check_..., or validate_...",
    r"deviations?\b(?<!standard deviation)(?<!standard deviations)": "std, or standard deviation",
    r"thousand million\b": "billion",
    r"(does|do) not go with\b": "is incompatible with",
    r"has given nothing for\b": "produced no batch for",
    r"ended with it\b": "was terminated as a consequence",
    r"known here\b": "Available",
    r"as if nothing was\b": "with the same result",
    r"(optimiz\w+|trains?|training|train step) by hand\b": "manual optimization",
    r"map of the rooms\b": "code tour",
    r"mixed up with\b": "confused with",
    r"bomb of gzip\b": "gzip bomb",
    r"written behind\b": "written asynchronously",
    r"had a hand in\b": "untrusted",
    r"as people say it\b": "human-readable",
    r"make one sentence of\b": "convert to RefusedError",
    r"take leave of\b": "shut down",
    r"would change nothing any more\b": "has no effect",
    r"complete or not there\b": "atomic, or complete or absent",
    r"holds? the others up\b": "straggler, or hang",
    r"be the (other )?process\b": "subprocess entry point",
    r"whether that lives\b": "whether it is still running",
    r"somebody else starts\b": "started externally",
}

SEES = re.compile(rf"\b(?:{'|'.join(OLD_WORDS)})")  # all at once: of most files nothing more is looked at


def old_words(text: str) -> list[tuple[int, str, str]]:
    """Return the old words of a text: the line, counted from 1, the word, and the field's."""
    text = text.replace("_", " ").lower()
    if SEES.search(text) is None:
        return []
    return [
        (text.count("\n", 0, match.start()) + 1, match.group(), word)
        for pattern, word in OLD_WORDS.items()
        for match in re.finditer(rf"\b{pattern}", text)
    ]


def files() -> list[Path]:
    """Return the files that users and contributors read."""
    trees = (path for tree in ("ddpexp", "conf", "docs", "recipes", "examples") for path in (ROOT / tree).rglob("*"))
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(path for path in trees if path.suffix in (".py", ".yaml", ".md")),
    ]


def test_old_words_do_not_come_back() -> None:
    seen = [(str(path.relative_to(ROOT)), *old) for path in files() for old in old_words(path.read_text())]
    new = [f"{name}:{line}: {old!r}: {word}" for name, line, old, word in seen]
    assert not new, "the field's word for it stands behind each:\n" + "\n".join(new)


def test_names_of_tests_are_free_of_old_words() -> None:
    names = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")))
    assert len(names) > 1000
    assert not [(names[line - 1], *old) for line, *old in old_words("\n".join(names))]


def test_the_check_sees_phrases_and_names() -> None:
    text = "A run\ngoes on.\ndef take_up(state): ...\nclass Seat: ...\nTell, in a sentence, whether\n"
    assert [(line, old) for line, old, _ in old_words(text)] == [
        (2, "goes on"),
        (3, "take up"),
        (5, "tell, in a sentence, whether"),
        (4, "seat"),
    ]
    assert old_words("It was untold; go once, take it up; cut the back; a standard deviation; seated.") == []
