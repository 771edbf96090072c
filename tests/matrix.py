"""Run tests with other Pythons, and with other versions of what ddpexp stands on.

`python -m tests.matrix 3.12 torch-lowest -- tests/train/test_loop.py`.

Each row of the matrix is an environment made from nothing, with the versions of constraints.txt but for the packages
that the row is about: one row for each Python that the metadata promise and this machine has, on PATH or in pyenv's
folder; the oldest torch and the newest; the next Hydra. Without names all rows run; without words after `--`, the whole
suite. `--python` chooses the interpreter of the rows of packages; `--keep FOLDER` leaves the environments there, and a
later call with the same folder uses them again.

`--smoke` is the part of .ci/run: with every promised Python but this one, all at the same time, the README's first
command and the tests that are marked smoke. Pythons that were not found are named. All environments must train to the
same weights, and where CI is set, a Python that pyenv has must have been tried.

torch comes from where uv is set up to look, and its builds with CUDA take gigabytes: UV_FIND_LINKS may name a folder
with CPU builds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ddpexp import PYTHONS

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("torch", "hydra-core", "omegaconf", "numpy")
SMOKE = ("pytest", "pytest-timeout", "pytest-xdist", "pexpect")
"""What the tests that are marked smoke need, beside ddpexp and its extra optuna."""
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class Row:
    """An environment: its interpreter, what is installed beside ddpexp, and which names constraints.txt leaves free."""

    python: Path
    wanted: tuple[str, ...] = ()
    free: tuple[str, ...] = ()


@dataclass
class Tried:
    """What a row of the smoke has shown."""

    name: str
    said: list[str] = field(default_factory=list)
    weights: str | None = None
    failed: bool = False


def promised() -> list[str]:
    """Return the Pythons that the metadata promise."""
    (major, oldest), (_, newest) = PYTHONS
    return [f"{major}.{minor}" for minor in range(oldest, newest + 1)]


def interpreter(version: str) -> Path | None:
    """Return an interpreter of this version that can make environments, on PATH or in pyenv's folder."""
    name = f"python{version}"
    folders = os.environ.get("PATH", "").split(os.pathsep)
    candidates = [Path(sys.executable), *(Path(folder, name) for folder in folders if os.path.isabs(folder))]
    question = "import ensurepip, ssl, venv, sys; print('%d.%d' % sys.version_info[:2])"
    for path in (*candidates, *(folder / "bin" / name for folder in pyenv(version))):
        if os.access(path, os.X_OK):  # pyenv puts programs on PATH that find no interpreter
            asked = subprocess.run([path, "-c", question], capture_output=True, text=True, check=False)
            if asked.stdout.strip() == version:
                return path
    return None


def pyenv(version: str) -> list[Path]:
    """Return pyenv's folders of this version, the newest first."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [path for path in root.glob(f"versions/{version}.*") if re.fullmatch(r"[\d.]+", path.name)]
    return sorted(found, key=lambda path: [int(number) for number in path.name.split(".")], reverse=True)


def lowest(name: str) -> str:
    """Return the lowest version of a package that ddpexp's metadata promise, as a requirement."""
    for text in metadata.requires("ddpexp") or ():
        found = Requirement(text)
        if canonicalize_name(found.name) == name:
            [version] = [each.version for each in found.specifier if each.operator == ">="]
            return f"{name}=={version}"
    raise LookupError(name)


def rows(python: Path) -> dict[str, Row]:
    """Return the matrix, by name; `python` is the interpreter of the rows of packages."""
    hydra = (
        "hydra-core",
        "omegaconf",
        "antlr4-python3-runtime",
        "hydra-optuna-sweeper",
        "optuna",
        "hydra-joblib-launcher",
    )
    pythons = {version: interpreter(version) for version in promised()}
    return {
        **{version: Row(path) for version, path in pythons.items() if path is not None},
        "torch-lowest": Row(python, (lowest("torch"),), ("torch",)),
        "torch-newest": Row(python, ("torch",), ("torch", "sympy", "typing-extensions", "setuptools")),
        "hydra-next": Row(
            python, ("hydra-core>=1.4.0rc0", "hydra-optuna-sweeper>=1.4.0rc0", "omegaconf>=2.4.0rc0"), hydra
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


def install(row: Row, folder: Path, *wanted: str) -> Path:
    """Make the environment of a row, unless it is there, and return its Python."""
    found = folder / "bin/python"
    if (folder / "complete").exists():
        return found
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config"]
    run([*uv, "venv", "--clear", "--python", str(row.python), str(folder)])
    held = folder / "constraints.txt"
    held.write_text(constraints(row.free))
    run([*uv, "pip", "install", "--python", str(found), *wanted, *row.wanted, "-c", str(held)])
    (folder / "complete").touch()
    return found


def run(command: list[str], **environ: str) -> str:
    """Run a program in the checkout, and return what it prints.

    Raises:
        RuntimeError: it has failed; with what it has printed.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environ_of(Path(command[0])), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def environ_of(python: Path) -> dict[str, str]:
    """Return the variables of an environment's programs, without those of this one."""
    kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    return {**kept, "PATH": os.pathsep.join([str(python.parent), kept["PATH"]])}


def versions(python: Path) -> str:
    """Return what an environment holds, in one line."""
    code = (
        "import platform; from importlib.metadata import version; "
        f"print('python ' + platform.python_version(), *(f'{{name}} {{version(name)}}' for name in {SHOWN!r}), sep=', "
        "')"
    )
    return run([str(python), "-c", code]).strip()


def first_command() -> list[str]:
    """Return the words of the README's first command, after `python`."""
    [line] = re.findall(r"^ +pip install .* && python (-m ddpexp .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return shlex.split(line)


def files() -> list[str]:
    """Return the files with tests that are marked smoke: to collect all others takes half a minute."""
    paths = sorted(str(path) for path in ROOT.glob("tests/**/test_*.py") if "mark.smoke" in path.read_text())
    return [os.path.relpath(path, ROOT) for path in paths]


def smoke(name: str, row: Row, folder: Path) -> Tried:
    """Make an environment, and run the README's first command for 20 steps and the tests marked smoke in it."""
    tried, begin = Tried(name), time.monotonic()
    root = os.environ.get("DDPEXP_TEST_MNIST")
    data = {"DDPEXP_DATA": root} if root else {}
    try:
        python = install(row, folder / name, "-e", f"{ROOT}[optuna]", *SMOKE)
        tried.said.append(f"{versions(python)}: installed in {time.monotonic() - begin:.0f} s")
        directory = folder / f"run-{name}"
        run([str(python), *first_command(), "trainer.max_steps=20", f"run.dir={directory}"], **data)
        tried.weights = json.loads((directory / "result.json").read_text())["weights_sha256"]
        begin = time.monotonic()
        said = run([str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "smoke", *files()])
        tried.said.append(f"weights {tried.weights[:16]}, {said.splitlines()[-1].strip('= ')}")
    except (RuntimeError, OSError) as error:
        tried.failed = True
        tried.said.append(str(error))
    return tried


def try_every_python(folder: Path) -> int:
    """Try every promised Python but this one, and return 1 when something is wrong."""
    found = {version: interpreter(version) for version in promised() if version != OWN}
    with ThreadPoolExecutor(len(found) or 1) as pool:
        waiting = [pool.submit(smoke, name, Row(path), folder) for name, path in found.items() if path is not None]
        tried = [one.result() for one in waiting]
    for one in tried:
        print(f"== Python {one.name}: {'failed' if one.failed else 'passed'}", *one.said, sep="\n   ")
    absent = [version for version, path in found.items() if path is None]
    if absent:
        print(f"== not found, and not tried: Python {', '.join(absent)}")
    wrong = any(one.failed for one in tried)
    if len({one.weights for one in tried if one.weights}) > 1:
        print("== the Pythons have trained to different weights")
        wrong = True
    if "CI" in os.environ and (unused := [version for version in absent if pyenv(version)]):
        print(f"== pyenv has Python {', '.join(unused)}, which cannot make an environment")
        wrong = True
    return int(wrong)


def main() -> int:
    """Run the chosen rows one after the other, and return 1 when the tests of one have failed."""
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    typed, words = sys.argv[1:place], sys.argv[place + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="row", help="a version of Python, torch-lowest, torch-newest or hydra-next"
    )
    parser.add_argument("--python", default=OWN, choices=promised(), help=f"of the rows of packages; {OWN}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environments stay")
    parser.add_argument("--smoke", action="store_true", help="a short trial of every Python, as in .ci/run")
    arguments = parser.parse_args(typed)
    chosen = interpreter(arguments.python)
    if chosen is None:
        parser.error(f"there is no Python {arguments.python} here")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        if arguments.smoke:
            return try_every_python(folder)
        known = rows(chosen)
        if unknown := set(arguments.rows) - known.keys():
            parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        failed = []
        for name in arguments.rows or known:
            python = install(known[name], folder / name, "-e", f"{ROOT}[test]")
            print(f"== {name}: {versions(python)}", flush=True)
            command = [str(python), "-m", "pytest", "-q", *words]
            if subprocess.run(command, cwd=ROOT, env=environ_of(python), check=False).returncode:
                failed.append(name)
    print("== failed: " + ", ".join(failed) if failed else "== all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
