"""The HTML page of a report: one file that asks for nothing, and in which every text of a run is text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from ddpexp.system.files import open_regular

_HERE = Path(__file__).parent
_FIRST = "<!doctype html>\n<!-- ddpexp report -->\n"
_AS_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def page_of(contents: Mapping[str, Any]) -> str:
    """Return the page.

    The texts of runs stand in it as JSON alone, in which no character can end the element, and its script puts them
    into text nodes. The policy allows this script and this style, and pictures that are in the page.
    """
    style, script = ((_HERE / f"report.{kind}").read_text() for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    template = Template((_HERE / "report.html").read_text())
    return _FIRST + template.substitute(
        policy=policy,
        title=html.escape(f"{contents['title']}: ddpexp report"),
        style=style,
        script=script,
        data=embedded(contents),
    )


def embedded(value: Any) -> str:
    """Return a value as JSON that is safe inside an element of a page: ASCII, without <, > and &."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_AS_ESCAPES)


def is_report(path: Path) -> bool:
    """Return whether a file is a report, which another one may replace."""
    with suppress(OSError), open_regular(path) as file:
        return file.read(len(_FIRST)) == _FIRST.encode()
    return False


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
