"""Write requirements.lock, requirements-cuda13.lock and requirements-build.lock: `python -m tests.requirements`.

uv resolves the dependencies for every Python and platform at once, within constraints.txt. Versions that
constraints.txt leaves open stay as they are in the files unless `--upgrade` is typed; then nothing younger than a week
is taken. `--check` writes nothing and only sees whether constraints.txt can be resolved for every Python, with all
extras and the packages of tests/extras.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK, CUDA = ROOT / "requirements.lock", ROOT / "requirements-cuda13.lock"
BUILD = ROOT / "requirements-build.lock"
BUILDERS = ("hatchling>=1.27", "setuptools")
"""What builds ddpexp itself, as pyproject.toml names it, and antlr4-python3-runtime."""
LOWEST_PYTHON = "3.10"
GPU = re.compile(r"(torch|triton|nvidia-|cuda-)")
"""What depends on which GPU there is: torch itself, and what only its builds for GPUs need."""
HEADS = {
    LOCK: """\
# What ddpexp needs but for torch, with the hashes of all files, for Python 3.10 to 3.13:
#     pip install --require-hashes -r requirements.lock && pip install --no-deps -e .
# torch is not here: there are builds for the CPU, CUDA 12 and CUDA 13, of which a machine needs one (README.md).
# antlr4-python3-runtime is a source archive: pip builds it with a setuptools that it fetches without a hash.
# Written by `python -m tests.requirements`.
""",
    CUDA: """\
# torch as pip takes it by default on Linux, built for CUDA 13, with NVIDIA's packages: 2.7 GB. Together with
# requirements.lock:
#     pip install --require-hashes -r requirements.lock -r requirements-cuda13.lock && pip install --no-deps -e .
# PyTorch serves the builds for the CPU and for CUDA 12 itself. uv writes a lock file for them in the same way:
#     uv pip compile --torch-backend=cpu --generate-hashes pyproject.toml -c constraints.txt
# Written by `python -m tests.requirements`.
""",
}
BUILD_HEAD = """\
# What builds wheels of ddpexp and of antlr4-python3-runtime, with the hashes of all files, for Python 3.10 to 3.13. The
# Dockerfile and ddpexp.def install it, so that pip fetches nothing without a hash (--no-build-isolation).
# Written by `python -m tests.requirements`.
"""


def resolve(*words: str, source: str = "pyproject.toml") -> str:
    """Resolve ddpexp's dependencies, or those of another file, within constraints.txt, for every Python and platform.

    Return the lines that uv prints.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--universal"]
    command += [
        "--python-version",
        LOWEST_PYTHON,
        "--no-header",
        "--no-annotate",
        source,
        "-c",
        "constraints.txt",
        *words,
    ]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def entries(text: str) -> list[str]:
    """Return the requirements of a lock file, each with its marker and the lines of its hashes."""
    lines = [line for line in text.splitlines(keepends=True) if line.strip() and not line.startswith("#")]
    return re.findall(r"^\S.*\n(?:\s.*\n)*", "".join(lines), re.MULTILINE)


def locked(upgrade: bool, present: list[Path], source: str = "pyproject.toml") -> list[str]:
    """Resolve, with hashes; the versions in the files that are `present` stay, unless `upgrade`."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"  # uv keeps what its output file holds already
        words = ["--generate-hashes", "--output-file", str(pins)]
        if upgrade:
            words += ["--exclude-newer", "7 days"]
        else:
            pins.write_text("".join(entry for path in present if path.exists() for entry in entries(path.read_text())))
        resolve(*words, source=source)
        return entries(pins.read_text())


def write(upgrade: bool) -> None:
    """Write the files."""
    found = locked(upgrade, list(HEADS))
    for path, head in HEADS.items():
        path.write_text(head + "".join(entry for entry in found if bool(GPU.match(entry)) == (path == CUDA)))
    with tempfile.NamedTemporaryFile("w", suffix=".in") as source:
        source.write("\n".join(BUILDERS))
        source.flush()
        BUILD.write_text(BUILD_HEAD + "".join(locked(upgrade, [BUILD], source.name)))


def check() -> None:
    """See whether the constraints can be resolved with all extras and all that tests install for themselves."""
    from tests.extras import PACKAGES

    with tempfile.NamedTemporaryFile("w", suffix=".in") as packages:
        packages.write("\n".join(" ".join(PACKAGES.values()).split()))
        packages.flush()
        resolve("--all-extras", packages.name)


def main() -> int:
    """Write the files, or see whether the constraints can be resolved; return 1 when they cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.requirements", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--upgrade", action="store_true", help="take newer versions of what constraints.txt leaves open"
    )
    arguments = parser.parse_args()
    try:
        if arguments.check:
            check()
        else:
            write(arguments.upgrade)
    except subprocess.CalledProcessError:  # uv has said why
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
