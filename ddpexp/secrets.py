"""Secrets of the environment: kept out of what is written and shown, and put back as references where they were typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAMES = re.compile(
    r"(?:^|[_.-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|PW|KEY|APIKEY|CREDENTIAL|CRED|AUTH|BEARER)S?\d*(?:[_.-]|$)",
    re.IGNORECASE,
)
_LEAST = 8  # characters; a shorter value may be any word
_NUMBER = re.compile(r"[+-]?[\d.,:_]+(?:[eE][+-]?\d+)?")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")


def found(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Return (value, name) of the variables whose names look secret, the longest value first; paths and numbers are none."""
    known = [
        (value, name)
        for name, value in environ.items()
        if len(value) >= _LEAST and _NAMES.search(name) and not _NUMBER.fullmatch(value) and not _is_path(value)
    ]
    return sorted(known, key=lambda one: (-len(one[0]), one[1]))


def masked(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Write `${NAME}` where a text has the value of a secret variable, as it is or as Python and JSON quote it."""
    return masker(environ)(text)


def masker(environ: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """Look at the environment once, for many texts."""
    known = [
        (form, f"${{{name}}}")
        for value, name in found(environ)
        for form in {value, repr(value)[1:-1], value.replace("\\", "\\\\").replace('"', '\\"')}
    ]

    def mask(text: str) -> str:
        for form, shown in known:
            text = text.replace(form, shown)
        return text

    return mask


def masked_tree(tree: Any, mask: Callable[[str], str] | None = None) -> Any:
    """Mask every text of a tree, its keys too."""
    mask = mask or masker()
    if isinstance(tree, str):
        return mask(tree)
    if isinstance(tree, Mapping):
        return {mask(key) if isinstance(key, str) else key: masked_tree(value, mask) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked_tree(value, mask) for value in tree]
    return tree


def referenced(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Undo what the shell does to `key=$TOKEN`: return the words with `${oc.env:TOKEN}` for the value, and what to say of that."""
    known, changed, said = found(environ), [], []
    for word in words:
        start = _OVERRIDE.match(word)
        value = word[start.end() :] if start else ""
        for secret, name in known:
            if secret in value:
                value = value.replace(secret, f"${{oc.env:{name}}}")
                said.append(f"{word[: start.end() - 1].lstrip('+~')} is written as ${{oc.env:{name}}}")  # type: ignore[union-attr]
        changed.append(word[: start.end()] + value if start else word)
    return changed, said


def _is_path(value: str) -> bool:
    """Tell whether a value names a place on the disk; a secret may begin with a slash too, but then nothing is there."""
    place = os.path.expanduser(value)
    if "\0" in place or os.sep not in place:
        return False
    parent = os.path.dirname(place.rstrip(os.sep))
    try:
        return os.path.exists(place) or (parent not in ("", os.sep) and os.path.exists(parent))
    except (OSError, ValueError):
        return False
