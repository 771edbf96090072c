"""The page in a real browser: it draws, asks for nothing, and runs nothing of a stranger."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PATIENCE
from tests.report.made import HOSTILE, hostile, sweep
from tests.report.test_page import Elements, page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH to open a page with"),
]


@dataclass(frozen=True)
class Opened:
    """A page that a browser has opened.

    Attributes:
        dom: The page as its script has left it.
        console: What it has written to the console.
        requested: The addresses that it has asked for, but for those of files and in the page itself.
    """

    dom: str
    console: list[str]
    requested: set[str]


def opened(path: Path, width: int = 1200) -> Opened:
    """Open a page in headless Chromium, which resolves no name."""
    network = path.with_suffix(".net")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu",
            f"--user-data-dir={path.with_suffix('.user')}", "--disable-background-networking",
            "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--window-size={width},900", "--virtual-time-budget=5000", "--enable-logging=stderr",
            f"--log-net-log={network}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [event.get("params", {}) for event in json.loads(network.read_text())["events"]]
    of_the_page = {event["url"] for event in events if "url" in event and event.get("initiator") == "null"}
    return Opened(
        done.stdout,
        [line for line in done.stderr.splitlines() if "CONSOLE" in line],
        {url for url in of_the_page if not url.startswith(("file:", "data:"))},
    )


def test_what_a_page_writes_and_asks_for_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<!doctype html><img src="http://127.0.0.1:9/asked"><script>missing()</script>')
    found = opened(path)
    assert found.requested == {"http://127.0.0.1:9/asked"}
    assert "missing is not defined" in "".join(found.console)


def test_the_page_of_a_sweep_is_drawn_and_asks_for_nothing(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    page(sweep(tmp_path / "first"), out=out)
    found = opened(out)
    assert (found.console, found.requested) == ([], set())
    elements = Elements(found.dom).found
    curves = [a for tag, a in elements if tag == "path" and (a.get("class") or "").startswith("curve")]
    assert len(curves) == 3 * 6  # two metrics and the parallel coordinates
    assert all((a.get("d") or "").startswith("M") and "NaN" not in (a.get("d") or "") for a in curves)
    assert sum(a.get("class") == "bar" for _, a in elements) == 6
    assert sum(tag == "img" for tag, _ in elements) == 6
    assert [tag for tag, _ in elements].count("tr") > 10


def test_the_texts_of_a_stranger_are_text(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    page(hostile(tmp_path / f"theirs{HOSTILE.replace('/', '')}"), out=out)
    found = opened(out, width=390)
    assert (found.console, found.requested) == ([], set())
    elements = Elements(found.dom)
    assert sum(tag == "script" for tag, _ in elements.found) == 2
    assert elements.comments == []
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    sources = [a["src"] or "" for tag, a in elements.found if tag == "img"]
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in found.dom
    assert sum(tag == "path" for tag, _ in elements.found) > 3
