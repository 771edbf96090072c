"""Make the README's pictures by running what they show.

    python docs/make_pictures.py FOLDER_WITH_MNIST

Needs pyte (a terminal emulator) and playwright from pip, and chromium on the PATH.
"""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pyte
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
COLUMNS, ROWS = 112, 30


def main() -> None:
    """Run MNIST on two workers in a terminal, then look at its TensorBoard in a browser."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "mnist"
        data.mkdir()
        for path in Path(sys.argv[1]).resolve().glob("*.gz"):
            shutil.copy(path, data)
        os.environ["DDPEXP_DATA"] = str(data)
        os.chdir(folder)
        words = ["python", "-m", "ddpexp", "recipe=mnist", "launcher=spawn", "trainer.gpus=2"]
        _terminal([sys.executable, *words[1:]], " ".join(words))
        _tensorboard(next(Path("outputs/mnist").iterdir()))


def _terminal(command: list[str], typed: str) -> None:
    """Run a command on a pseudo-terminal of our size and draw the screen that it leaves."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execv(command[0], command)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        stream.feed(data)
    os.waitpid(child, 0)
    text = Text(f"$ {typed}\n", style="bold")
    for number in range(ROWS):
        row = screen.buffer[number]
        for column in range(COLUMNS):
            cell = row[column]
            color = (
                ""
                if cell.fg == "default"
                else f"#{cell.fg}"
                if len(cell.fg) == 6 and not cell.fg.isalpha()
                else cell.fg
            )
            text.append(cell.data, style=f"{'bold ' if cell.bold else ''}{color}".replace("brown", "yellow").strip())
        text.append("\n")
    text.rstrip()
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(text)
        console.save_svg(str(HERE / "terminal.svg"), title="ddpexp")


def _tensorboard(run: Path) -> None:
    """Open the run in TensorBoard and photograph the page."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(run), "--port", str(port), "--host", "127.0.0.1"],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(f"http://127.0.0.1:{port}/data/runs")
        with sync_playwright() as browsers:
            browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 1130})
            page.goto(f"http://127.0.0.1:{port}/#timeseries")
            page.get_by_label("Close side pane").click()
            page.get_by_text("train", exact=True).click()  # this group opens
            page.wait_for_timeout(5000)
            page.screenshot(path=str(HERE / "tensorboard.png"))
            browser.close()
    finally:
        server.terminate()
        server.wait()


def _wait(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


if __name__ == "__main__":
    main()
