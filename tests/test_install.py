"""What users install: a wheel in an environment of its own, a checkout that is not installed, and both at once."""

from __future__ import annotations

import ast
import email
import errno
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ddpexp import TESTED_PYTHONS, __version__
from tests.conftest import ROOT, SMALL
from tests.test_user_recipes import CODE, CONFIGS, write

pytestmark = pytest.mark.timeout(600)


def run(*overrides: str | Path, cwd: Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with as little of our environment as can be."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("DDPEXP_", "HYDRA_", "PYTHON", "VIRTUAL_ENV"))
    }
    return subprocess.run(
        list(map(str, overrides)),
        cwd=cwd,
        env={**kept, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def with_cache(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this project as a clone has them."""
    folder = tmp_path_factory.mktemp("clone") / "ddpexp"
    folder.mkdir()
    for name in ("ddpexp", "conf", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "__main__.py"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--wheel", "--outdir", built, checkout, cwd=built)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = built.glob("*.whl")
    return path


def required(wheel: Path) -> dict[str, metadata.Distribution]:
    """Return the distributions that the wheel's metadata ask for, and those that these ask for, as installed here."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        waiting = [(set[str](), email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", []))]
    found: dict[str, metadata.Distribution] = {}
    seen = set()
    while waiting:
        extras, texts = waiting.pop()
        for requirement in map(Requirement, texts):
            needed = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            )
            key = (requirement.name, *sorted(requirement.extras))
            if needed and key not in seen:
                seen.add(key)
                found[requirement.name] = metadata.distribution(requirement.name)
                waiting.append((requirement.extras, found[requirement.name].requires or []))
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, what it requires, and nothing else.

    The requirements are links to the files of this environment: to install them once more takes 15 s.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for distribution in required(wheel).values():
        for file in files_of(distribution):
            source, target = Path(str(distribution.locate_file(file))), packages / file
            if ".." in file.parts:  # a script, in bin
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                link(source, target)
    found = folder / "bin/python"
    done = run(found, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", wheel, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def files_of(distribution: metadata.Distribution) -> list[Path]:
    """Return the files of a distribution, as paths in site-packages."""
    text = distribution.read_text("installed-files.txt")
    if text is None:
        return [Path(file) for file in distribution.files or []]
    # The pip of Python 3.10 has installed it from its source; its metadata list what the source holds.
    root = Path(str(distribution.locate_file("")))
    [folder] = root.glob(f"{distribution.metadata['Name'].replace('-', '_')}-*.egg-info")
    return [Path(os.path.relpath(folder / line, root)) for line in text.splitlines()]


def link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy(source, target)


def test_the_wheel_holds_every_file_that_a_run_needs_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"ddpexp/conf/{path.relative_to(ROOT / 'conf')}" in names
    for folder, place in (("ddpexp", "ddpexp"), ("recipes", "ddpexp/recipes")):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{place}/{path.relative_to(ROOT / folder)}" in names
    assert "ddpexp/py.typed" in names
    assert {f"ddpexp/report/report.{kind}" for kind in ("html", "css", "js")} <= names
    assert {name.split("/")[0] for name in names} == {"ddpexp", f"ddpexp-{__version__}.dist-info"}


def test_an_installed_wheel_runs_from_any_folder(python: Path, tmp_path: Path) -> None:
    shown = run(python.with_name("ddpexp"), "--help", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\nrecipe=mnist: Classify handwritten digits" in shown.stdout
    done = run(
        python, "-m", "ddpexp", *SMALL, "trainer.gpus=2", "run.dir=run", cwd=tmp_path, environ=with_cache(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["world_size"] == 2
    packages = json.loads((tmp_path / "run/manifest.json").read_text())["packages"]
    assert packages["ddpexp"] == __version__
    assert run(python, "-m", "pip", "check", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_an_installed_wheel_runs_a_users_recipe(python: Path, tmp_path: Path) -> None:
    for name, text in CONFIGS.items():
        write(tmp_path / "conf" / name, text)
    write(tmp_path / "mine.py", CODE)
    done = run(python.with_name("ddpexp"), "--config-dir", "conf", "recipe=mine", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["recipe"] == "mine"


@pytest.mark.slow
def test_an_installed_wheel_runs_from_inside_a_checkout(python: Path, checkout: Path, tmp_path: Path) -> None:
    overrides = (*SMALL, "trainer.gpus=2")
    commands: list[list[str | Path]] = [[python.with_name("ddpexp")], [python, "-m", "ddpexp"]]
    for number, command in enumerate(commands):
        folder = tmp_path / f"run{number}"
        done = run(*command, *overrides, f"run.dir={folder}", cwd=checkout, environ=with_cache(tmp_path))
        assert done.returncode == 0, done.stderr
        assert (folder / "result.json").is_file()


@pytest.mark.variants(1)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "elsewhere"])
def test_a_checkout_that_is_not_installed_works(checkout: Path, tmp_path: Path, inside: bool) -> None:
    environ = {} if inside else {"PYTHONPATH": str(checkout)}
    cwd = checkout if inside else tmp_path
    where = run(sys.executable, "-c", "import ddpexp; print(ddpexp.__file__)", cwd=cwd, environ=environ)
    assert where.stdout.strip() == str(checkout / "ddpexp/__init__.py")
    shown = run(sys.executable, "-m", "ddpexp", "--cfg", "job", cwd=cwd, environ=environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "_target_: ddpexp.recipes.mnist.LeNet" in shown.stdout
    environ |= with_cache(tmp_path)
    done = run(sys.executable, "-m", "ddpexp", *SMALL, f"run.dir={tmp_path}/run", cwd=cwd, environ=environ)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the clone is installed with -e; its requirements are those of the tests."""
    folder = tmp_path_factory.mktemp("editable") / "venv"
    venv.create(folder, with_pip=True)
    found = folder / "bin/python"
    done = run(found, "-m", "pip", "install", "-q", "--no-deps", "-e", checkout, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    [packages] = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "zz_of_the_tests.pth").write_text("\n".join(ours))
    return found


@pytest.mark.slow
def test_a_clone_named_as_the_package_works_from_the_folder_above_it(
    editable: Path, checkout: Path, tmp_path: Path
) -> None:
    above = checkout.parent
    assert checkout.name == "ddpexp"
    where = run(
        editable, "-c", "import ddpexp, ddpexp.task; print(ddpexp.__file__)", cwd=above
    )  # as in a notebook there
    assert (where.stdout.strip(), where.stderr) == (str(checkout / "ddpexp/__init__.py"), "")
    overrides = (*SMALL, "trainer.gpus=2", f"run.dir={tmp_path}/run")
    done = run(editable, "-m", "ddpexp", *overrides, cwd=above, environ=with_cache(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["world_size"] == 2


def test_an_installation_from_a_clone_adds_no_files_of_its_own(editable: Path) -> None:
    [packages] = editable.parent.parent.glob("lib/python*/site-packages")
    assert not (
        packages / "ddpexp"
    ).exists()  # conf and recipes would be copies, of which edits of the clone know nothing


def test_from_above_a_clone_that_is_not_installed_the_command_says_so(checkout: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    done = run(tmp_path / "venv/bin/python", "-m", "ddpexp", "recipe=mnist", cwd=checkout.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"ddpexp: not installed in {tmp_path}/venv: the folder ddpexp here is a clone of the repository, not the "
        "package. "
        "Install it with pip install -e ddpexp -c ddpexp/constraints.txt, or run the command inside ddpexp.\n"
    )


@pytest.mark.parametrize("version", [(2, 99), (3, 9), (3, 14)])
def test_another_python_is_refused_in_one_line(version: tuple[int, int]) -> None:
    # As `python -m ddpexp` and `import ddpexp` of that Python would do; the file parses there, too.
    ast.parse((ROOT / "ddpexp/__init__.py").read_text(), feature_version=(3, 6))
    program = f"import sys; sys.version_info = ({version[0]}, {version[1]}, 0); sys.argv[0] = {{!r}}; import ddpexp"
    what = f"this is Python {version[0]}.{version[1]} ({sys.executable}), and ddpexp runs on Python {TESTED_PYTHONS}"
    command = run(sys.executable, "-c", program.format("-m"), cwd=ROOT)
    assert (command.returncode, command.stdout) == (2, "")
    assert command.stderr == f"ddpexp: {what}: make an environment with one of them.\n"
    imported = run(sys.executable, "-c", program.format("-c"), cwd=ROOT)
    assert imported.stderr.endswith(f"ImportError: {what}\n")


def test_a_clone_whose_requirements_are_not_installed_says_so() -> None:
    for arguments in (["recipe=mnist"], ["--help"], ["table", "."], ["status", "."], ["plan", "recipe=mnist"]):
        done = run(sys.executable, "-S", "-m", "ddpexp", *arguments, cwd=ROOT)  # without site-packages
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f" is not installed for this Python ({sys.executable}). Install ddpexp " in done.stderr
