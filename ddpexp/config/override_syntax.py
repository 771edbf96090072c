"""Arguments that are not key=value, and overrides that Hydra's grammar does not read: what to type instead."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpexp.config.declared import takes_number, takes_text
from ddpexp.config.folders import our_options
from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8

_TRAINS = ("train", "fit", "run", "start", "launch", "main")  # names for it in other programs
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_MOST_NUMBERS = 1000  # of a range that is suggested
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*")
_DASHES, _QUOTES = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
_FUNCTIONS = {  # of Hydra's sweeps
    "choice": "choice(1,2,3)",
    "range": "range(0,10,2)",
    "interval": "interval(0.001,0.1)",
    "glob": "glob(*)",
    "tag": "tag(log,interval(0.001,0.1))",
    "shuffle": "shuffle(1,2,3)",
    "sort": "sort(1,2,3)",
}
_CASTS = ("int", "float", "str", "bool", "json_str", "extend_list")  # functions of Hydra's for single runs
_UNITS = r"[kmgt]i?b?|seconds?|s|minutes?|mins?|m|hours?|h|days?|d|%"
_BRACKETS = (("[", "]"), ("{", "}"), ("(", ")"))
_ASCII = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"))  # dashes and the minus of formatted texts
_EXAMPLE = "Write key=value, for example trainer.gpus=2."


def check_syntax(overrides: Sequence[str]) -> None:
    """Check that every argument is an override, as far as can be seen without Hydra.

    Raises:
        RefusedError: with what may be meant.
    """
    for index, override in enumerate(overrides):
        follows = [*overrides[index + 1 :], ""][0]
        empty = (
            override.endswith("=") and override.strip("=") and (not follows or re.search("[=~]", follows))
        )  # as in run.dir=
        if "=" in override.strip("=") or override.startswith("~") or empty:
            if not is_utf8(override):
                raise RefusedError(
                    "is not UTF-8, as the files that record it are",
                    suggestion="Rename the file or folder that it names, or make a symbolic link to it.",
                    place=override,
                )
            continue
        if index and (joined := _joined(overrides, index)) is not None:
            raise RefusedError(
                "has a space, at which the shell splits it",
                suggestion=joined,
                place=f"{overrides[index - 1]} {override}",
            )
        open_before = next(
            (other for other in overrides[:index] if any(other.count(a) > other.count(b) for a, b in _BRACKETS)), None
        )
        if open_before is not None and any(b in override for _, b in _BRACKETS):
            whole = " ".join(overrides[overrides.index(open_before) : index + 1])
            parts = re.sub(r",?\s+", ",", whole)
            raise RefusedError(
                "has spaces, at which the shell splits it", suggestion=f"Write {shlex.quote(parts)}.", place=whole
            )
        raise _no_override(override, overrides[index - 1] if index else "", [*overrides[index + 1 :], "", ""])


def _joined(overrides: Sequence[str], index: int) -> str | None:
    """Return what to type where an argument belongs to the one before it, as `gb` in `launcher.mem=64 gb`.

    None where it does not.
    """
    before, last = overrides[index - 1], index
    if not re.fullmatch(r"[^=]+=\S+", before) or not _KEY.fullmatch(before.partition("=")[0]):
        return None
    if any(before.count(opening) > before.count(closing) for opening, closing in _BRACKETS):
        return None
    key, _, value = before.partition("=")
    if _NUMBER.fullmatch(overrides[index]) and _NUMBER.fullmatch(value) and takes_number(key):
        while last + 1 < len(overrides) and _NUMBER.fullmatch(overrides[last + 1]):
            last += 1
        return f"With -m, several values are written {key}={','.join([value, *overrides[index : last + 1]])}."
    if before.endswith(","):
        while overrides[last].endswith(",") and last + 1 < len(overrides):
            last += 1
    elif not (re.search(r"\d$", before) and re.fullmatch(_UNITS, overrides[index], re.IGNORECASE)):
        return None
    return f"Leave out the space: {''.join(overrides[index - 1 : last + 1])}."


def _no_override(override: str, before: str, after: Sequence[str]) -> RefusedError:
    known = our_options()
    if override[:1] and override[0] in _DASHES:
        return RefusedError(
            "begins with a dash from a formatted text", suggestion=f"Type --{override.lstrip(_DASHES)}.", place=override
        )
    apart = re.fullmatch(
        r"([A-Za-z_][\w./]*) *([=:]) *(\S*)", f"{override} {after[0]} {after[1]}".strip().replace("= =", "=")
    )
    if override.startswith("=") and _KEY.fullmatch(before):
        apart = re.fullmatch(r"([A-Za-z_][\w./]*) *(=) *(\S*)", f"{before} = {override.lstrip('=') or after[0]}")
    if apart is not None:
        return RefusedError(
            "is not an override", suggestion=f"Write {apart[1]}={apart[3] or '...'}, without spaces.", place=override
        )
    value = after[0] if after[0] and not re.search(r"[=~]", after[0]) else "..."
    if override.partition(".")[0] in known:
        options_of = f" Available: {', '.join(known[override])}." if override in known else ""
        return RefusedError(
            "has no value",
            suggestion=f"Write {override}={value}{' ' if value == '...' else ''}.{options_of}",
            place=override,
        )
    group = next((group for group in ("recipe", *known) if override in known[group]), None)
    if group is not None:
        return RefusedError("is not an override", suggestion=f"Write {group}={override}.", place=override)
    if re.search(r"\.(py|ya?ml)$", override):
        return RefusedError(
            "is not an override: ddpexp takes no files",
            suggestion=rerun([override, *after]) or "A recipe is chosen by name: --config-dir DIR recipe=NAME.",
            place=override,
        )
    if (Path(override) / "config.yaml").is_file():
        return RefusedError(
            "is not an override",
            suggestion=f"A run is resumed with python -m ddpexp resume {shlex.quote(override)}, and trained again with "
            f"changes by python -m ddpexp rerun {shlex.quote(override)}.",
            place=override,
        )
    if override in _TRAINS:
        return RefusedError(
            "is not an override",
            suggestion="A training needs no command, as in python -m ddpexp recipe=mnist trainer.gpus=2.",
            place=override,
        )
    if not re.search(r"\w", override) or override.startswith("="):
        return RefusedError("is not an override", suggestion=_EXAMPLE, place=override)
    return RefusedError("is neither an override (key=value, for example trainer.gpus=2) nor a command", place=override)


def rerun(words: Sequence[str]) -> str:
    """Return a sentence on how a run is trained again whose directory, or config.yaml, is among the words; else empty.

    It has the overrides among the words.
    """
    for word in words:
        path = Path(word.partition("=")[2] or word)
        run = path.parent if path.name == "config.yaml" else path
        if (run / "config.yaml").is_file() and (run / "manifest.json").is_file():
            overrides = [other for other in words if re.match(r"[a-z][\w./]*=", other)]
            return f"Did you mean python -m ddpexp {shlex.join(['rerun', str(run), *overrides])}?"
    return ""


def unread(override: str, is_read: Callable[[str], bool]) -> RefusedError:  # noqa: C901, PLR0912  (a list of mistakes)
    """Return the error for an override that Hydra's grammar rejects: why, and what to type instead.

    `is_read` says whether the grammar reads another one, which is suggested then.
    """
    key, _, value = override.partition("=")
    if "=" not in override or not _KEY.fullmatch(key) or ".." in key:
        return RefusedError("is not an override", suggestion=_EXAMPLE, place=override)
    if value.startswith("="):
        return RefusedError("has = twice", suggestion=f"Write {key}={value.lstrip('=')}.", place=override)
    if value.endswith(",") and is_read(f"{key}={value.rstrip(',')}"):
        return RefusedError(
            "ends with a comma: overrides are separated by spaces",
            suggestion=f"Write {key}={value.rstrip(',')}.",
            place=override,
        )
    if (quote := re.search(f"[{_QUOTES}]", value)) is not None:
        return RefusedError(
            f"has the quote {quote[0]} of a formatted text",
            suggestion="Write ' or \", or leave the quotes out.",
            place=override,
        )
    plain = unicodedata.normalize("NFKC", value).translate(_ASCII).rstrip(",;")
    if not value.isascii() and plain.isascii() and is_read(f"{key}={plain}"):
        character = next(letter for letter in value if not letter.isascii())
        return RefusedError(
            f"has the character {character}, which only looks like a plain one",
            suggestion=f"Write {key}={plain}.",
            place=override,
        )
    is_path = takes_text(key) and "/" in value  # such as one in a sweep's directory
    if not is_path and (more := re.search(r"[;,&]\+?[a-z_]+([./][\w.]+)?=", value)) is not None:
        return RefusedError(
            "is not read", suggestion=f"Overrides are separated by spaces, not by {more[0][0]}.", place=override
        )
    if (more := re.search(r"\s(\+{0,2}[A-Za-z_][\w./]*=.*)", value)) is not None:
        first = f"{key}={value[: more.start()]}"
        text = f", or a text that holds both: {_quoted(key, value)}" if takes_text(key) and "." in key else ""
        return RefusedError(
            "has two overrides inside one pair of quotes",
            suggestion=f"Write {first} {more[1]}, each on its own{text}.",
            place=override,
        )
    if (error := _no_function(override, key, value, is_read)) is not None:
        return error
    inner = re.fullmatch(r"(\w[\w-]*)\.([\w.]+=.*)", value)
    if inner is not None and key in our_options():
        return RefusedError(
            "is not read: an option and its key are two overrides",
            suggestion=f"Write {key}={inner[1]} {key}.{inner[2]}.",
            place=override,
        )
    if value.startswith("~"):
        return RefusedError(
            "is not read: neither the shell nor Hydra makes a folder of ~ there",
            suggestion=f"Write {key}=$HOME{value[1:]}.",
            place=override,
        )
    if value[:1] == "(" and value[-1:] == ")" and is_read(f"{key}=[{value[1:-1]}]"):
        return RefusedError(
            "is not read",
            suggestion=f"A list is written in brackets, {shlex.quote(f'{key}=[{value[1:-1]}]')}.",
            place=override,
        )
    for opening, closing in _BRACKETS:
        if value.count(opening) != value.count(closing):
            return RefusedError(
                "has a bracket without its other half",
                suggestion=f"A value with spaces is quoted for the shell: {shlex.quote(f'{key}=[...]')}.",
                place=override,
            )
    if (items := _quoted_items(key, value)) is not None and is_read(shlex.split(items)[0]):
        return RefusedError(
            "is not read: an item has characters that mean something to Hydra",
            suggestion=f"Quote it twice: {items}.",
            place=override,
        )
    quoted = _quoted(key, value)
    if is_read(shlex.split(quoted)[0]):
        return RefusedError(
            "is not read: its value has characters that mean something to Hydra",
            suggestion=f"Quote it twice: {quoted}.",
            place=override,
        )
    return RefusedError("is not an override", suggestion=_EXAMPLE, place=override)


def _quoted(key: str, value: str) -> str:
    """Return an override whose value is a text for Hydra's grammar and for the shell."""
    return shlex.quote('{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"')))


def _quoted_items(key: str, value: str) -> str | None:
    """Return an override whose value is a list of texts for Hydra's grammar and for the shell; None if it is no list.

    A comma inside an option, such as `--mail-type=BEGIN,END`, does not end it.
    """
    if value[:1] + value[-1:] != "[]" or re.search("[\\[\\]{}\"']", value[1:-1]):
        return None
    inner = value[1:-1]
    items = re.split(r",\s*(?=-)" if inner.startswith("-") else ",", inner)
    return shlex.quote(f"{key}=[{','.join(json.dumps(item.strip()) for item in items)}]")


def _no_function(override: str, key: str, value: str, is_read: Callable[[str], bool]) -> RefusedError | None:
    """Return the error for an unknown or misspelt function of sweeps; None where the value is no function."""
    called = re.match(r"(\w+)([(\[])", value)
    if called is not None and called[1] in _FUNCTIONS:
        suggestion = f"{key}={_FUNCTIONS[called[1]]}"
        if called[2] == "[" and value.endswith("]") and is_read(f"{key}={called[1]}({value[len(called[0]) : -1]})"):
            suggestion = f"{key}={called[1]}({value[len(called[0]) : -1]})"
        return RefusedError(
            "is not read",
            suggestion=f"The function {called[1]} is written as in {shlex.quote(suggestion)}.",
            place=override,
        )
    braces = value[:1] + value[-1:] == "{}" and several(value)
    if braces:
        return RefusedError(
            "is not read", suggestion=f"Several values are written {key}={braces}, with -m.", place=override
        )
    if called is not None and called[1] not in _CASTS and (called[2] == "(" or takes_number(key)):
        known = ", ".join(_FUNCTIONS[name] for name in ("choice", "range", "interval"))
        text = f" As a text: {_quoted(key, value)}." if takes_text(key) else ""
        return RefusedError(
            f"is not read: there is no function {called[1]}",
            suggestion=f"With -m there are {known}, and several values as 0.1,0.01.{text}",
            place=override,
        )
    return None


def unescaped(value: str) -> str:
    """Return the value of an override without the backslashes of Hydra's grammar, with which a sweep writes colons."""
    return re.sub(r"\\([\\()\[\]{}:=,\s])", r"\1", value)


def several(value: object) -> str | None:
    """Return how a sweep's values are typed that somebody has written as one, such as `0.1:0.01` or `0..3`."""
    if isinstance(value, list | tuple):
        numbers = [str(item) for item in value]
        return ",".join(numbers) if len(numbers) > 1 and all(map(_NUMBER.fullmatch, numbers)) else None
    text = str(value).strip()
    if (ends := re.fullmatch(r"(\d+)(?:\.\.+|-)(\d+)", text)) is not None:
        first, last = int(ends[1]), int(ends[2])
        return f"range({first},{last + 1})" if 0 < last - first < _MOST_NUMBERS else None
    inside = text[1:-1] if text[:1] + text[-1:] in ("[]", "{}", "()") else text
    numbers = [part for part in re.split(r"[\s,:;]+", inside) if part]
    return ",".join(numbers) if len(numbers) > 1 and all(map(_NUMBER.fullmatch, numbers)) else None
