"""The folder `examples`: what is in it, and how a test installs or runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import PATIENCE, ROOT

EXAMPLES = ROOT / "examples"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def install(example: str | Path, folder: Path) -> Path:
    """Install the package in `examples/EXAMPLE`, or elsewhere, as pip does; return the folder to add to PYTHONPATH."""
    source, target = folder / "source", folder / "installed"
    shutil.copytree(EXAMPLES / example, source, ignore=shutil.ignore_patterns("__pycache__"))  # builds write into it
    _pip(target, str(source))
    return target


def install_editable(project: Path, target: Path) -> list[Path]:
    """Install a package as `pip install -e` does; return the folders that it adds to Python's path."""
    _pip(target, "-e", str(project))
    return [*(Path(line) for file in target.glob("*.pth") for line in file.read_text().splitlines()), target]


def _pip(target: Path, *packages: str) -> None:
    options = "-q --no-index --no-deps --no-build-isolation --disable-pip-version-check --target".split()
    command = [sys.executable, "-m", "pip", "install", *options, str(target), *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
