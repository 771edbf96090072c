"""Run tests with other versions of what ddpexp stands on.

`python -m tests.matrix torch-lowest -- tests/train/test_loop.py`.

Each row of the matrix is an environment made from nothing, with the versions of constraints.txt but for the packages
that the row is about. Without names all rows run; without words after `--`, the whole suite. `--python` chooses the
interpreter of the environments; `--keep FOLDER` leaves them there, and a later call with the same folder uses them
again.

torch comes from where pip is set up to look, and its builds with CUDA take gigabytes: PIP_FIND_LINKS may name a folder
with CPU builds. This is not part of .ci/run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("torch", "hydra-core", "omegaconf", "numpy")


@dataclass(frozen=True)
class Row:
    """An environment: what pip installs beside ddpexp's test extra.

    And which names constraints.txt does not hold there.
    """

    wanted: tuple[str, ...]
    free: tuple[str, ...]


def lowest(name: str) -> str:
    """Return the lowest version of a package that ddpexp's metadata promise, as a requirement."""
    for text in metadata.requires("ddpexp") or ():
        found = Requirement(text)
        if canonicalize_name(found.name) == name:
            [version] = [each.version for each in found.specifier if each.operator == ">="]
            return f"{name}=={version}"
    raise LookupError(name)


def rows() -> dict[str, Row]:
    """Return the matrix, by name."""
    hydra = (
        "hydra-core",
        "omegaconf",
        "antlr4-python3-runtime",
        "hydra-optuna-sweeper",
        "optuna",
        "hydra-joblib-launcher",
    )
    return {
        "pinned": Row((), ()),  # for other interpreters
        "torch-lowest": Row((lowest("torch"),), ("torch",)),
        "torch-newest": Row(("torch",), ("torch", "sympy", "typing-extensions", "setuptools")),
        "hydra-next": Row(  # the one for Python 3.14, which our metadata leave out until it is released
            (
                "--ignore-requires-python",
                "hydra-core>=1.4.0rc0",
                "hydra-optuna-sweeper>=1.4.0rc0",
                "omegaconf>=2.4.0rc0",
            ),
            hydra,
        ),
    }


def constraints(free: tuple[str, ...]) -> str:
    """Return constraints.txt without the lines of some packages."""
    kept = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text or canonicalize_name(Requirement(text).name) not in free:
            kept.append(line)
    return "\n".join(kept) + "\n"


def install(row: Row, folder: Path, python: str) -> Path:
    """Make the environment of a row, unless it is there, and return its Python."""
    found = folder / "bin/python"
    if (folder / "complete").exists():
        return found
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    held = folder / "constraints.txt"
    held.write_text(constraints(row.free))
    words = [found, "-m", "pip", "install", "-q", "--no-compile", "-e", f"{ROOT}[test]", *row.wanted, "-c", held]
    subprocess.run([str(word) for word in words], check=True)
    (folder / "complete").touch()
    return found


def versions(python: Path) -> str:
    """Return what an environment holds, in one line."""
    code = (
        "import platform; from importlib.metadata import version; "
        f"print('python ' + platform.python_version(), *(f'{{name}} {{version(name)}}' for name in {SHOWN!r}), sep=', "
        "')"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Run the chosen rows one after the other, and return 1 when the tests of one have failed."""
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    typed, words = sys.argv[1:place], sys.argv[place + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="row", help=f"one of {', '.join(rows())}; all without any")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environments stay")
    arguments = parser.parse_args(typed)
    if unknown := set(arguments.rows) - rows().keys():
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(rows())}")
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        for name in arguments.rows or rows():
            python = install(rows()[name], folder / name, arguments.python)
            print(f"== {name}: {versions(python)}", flush=True)
            environ = {
                key: value
                for key, value in os.environ.items()
                if key not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
            }
            environ["PATH"] = os.pathsep.join([str(python.parent), os.environ["PATH"]])
            if (
                subprocess.run([python, "-m", "pytest", "-q", *words], cwd=ROOT, env=environ, check=False).returncode
                != 0
            ):
                failed.append(name)
    print("== failed: " + ", ".join(failed) if failed else "== all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
