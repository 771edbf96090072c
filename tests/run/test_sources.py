"""Which files a recipe's code is, and which changes of them count."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from ddpexp.run import sources

NET = '''\
"""The network."""
import os
from torch import nn
import helpers
from parts.blocks import Block


class Net(nn.Module):
    """A network."""

    def forward(self, x):
        # Doubled.
        return helpers.twice(x)
'''
FILES = {
    "mine.py": NET,
    "helpers.py": "def twice(x):\n    from parts import late\n    return 2 * x\n",
    "parts/__init__.py": "",
    "parts/blocks.py": "from . import deep\nfrom .deep.core import *\n\nBlock = 1\n",
    "parts/deep/core.py": "from ... import parts\nfrom ..late import x\n",
    "parts/late.py": "x = 1\n",
    "unused.py": "x = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def read(folder: Path, *targets: str, path: tuple[str, ...] = ()) -> dict[str, Any]:
    return dict(sources.find(targets or ("mine.Net",), folder, path or tuple(sys.path)).fingerprint)


def changed(folder: Path, name: str, text: str) -> list[str]:
    """Return what is said when one file has another text."""
    before, old = read(folder), (folder / name).read_text()
    (folder / name).write_text(text)
    found = sources.differences(before, read(folder))
    (folder / name).write_text(old)
    return found


def test_the_targets_modules_count_and_what_they_import_beside_them(folder: Path) -> None:
    found = read(folder, "mine.Net", "torch.optim.SGD", "mnist", "constant")
    assert {name: one["file"] for name, one in found["modules"].items()} == {
        "helpers": "helpers.py",
        "mine": "mine.py",
        "parts": "parts/__init__.py",
        "parts.blocks": "parts/blocks.py",
        "parts.deep.core": "parts/deep/core.py",
        "parts.late": "parts/late.py",
    }
    assert found["targets"] == ["mine.Net"]
    earlier = {**found, "targets": ["ddpexp.data.mnist.load", "ddpexp.schedule.Constant", "mine.Net"]}
    assert sources.differences(found, found) == sources.differences(earlier, found) == []


def test_the_files_of_a_recipe_are_those_of_its_modules_that_nobody_has_installed(folder: Path) -> None:
    (folder / "mine.py").write_text("import helpers, yaml\n")
    found = sources.find(["mine.Net", "yaml.load", "ddpexp.recipes.mnist.LeNet"], folder, sys.path)
    assert found.files == [
        str(folder / "mine.py"),
        str(folder / "helpers.py"),
        str(folder / "parts/__init__.py"),
        *found.files[3:],
    ]
    assert {os.path.relpath(path, folder) for path in found.files} == {
        "mine.py", "helpers.py", "parts/__init__.py", "parts/late.py",
    }  # fmt: skip


def test_our_own_recipes_count_and_the_rest_of_us_does_not(folder: Path) -> None:
    (folder / "mine.py").write_text("from ddpexp.recipes.mnist import LeNet\nfrom ddpexp.data import images\n")
    assert list(read(folder)["modules"]) == ["ddpexp.recipes.mnist", "mine"]
    assert list(sources.find(["ddpexp.recipes.mnist.LeNet"], None, []).fingerprint["modules"]) == [
        "ddpexp.recipes.mnist"
    ]


def test_comments_blank_lines_and_docstrings_change_nothing(folder: Path) -> None:
    text = (
        NET.replace('"""A network."""', '"""The same."""')
        .replace("# Doubled.", "# Twice.\n")
        .replace('"""The network."""\n', "")
    )
    assert text != NET
    assert changed(folder, "mine.py", text) == []
    assert changed(folder, "mine.py", text.replace('    """The same."""\n\n', "")) == []
    assert (
        changed(folder, "mine.py", NET.replace("class Net", "x = 'a text that is no docstring'\n\n\nclass Net")) != []
    )
    before = {**read(folder), "python": "3.9"}  # where syntax is written down in another way
    (folder / "mine.py").write_text(text)
    assert sources.differences(before, read(folder)) == ["mine.py has changed"]


def test_what_has_changed_is_named_with_the_targets_own_first(folder: Path) -> None:
    assert changed(folder, "helpers.py", FILES["helpers.py"].replace("2 *", "3 *")) == ["helpers.py has changed"]
    assert changed(folder, "unused.py", "x = 2\n") == []
    before = read(folder)
    (folder / "helpers.py").write_text("def twice(x):\n    import unused\n    return 3 * x\n")
    (folder / "mine.py").write_text(NET.replace("helpers.twice", "3 * helpers.twice"))
    after = read(folder)
    assert sources.differences(before, after) == ["mine.py has changed", "helpers.py has changed", "unused.py is new"]
    assert sources.differences(after, before) == ["mine.py has changed", "helpers.py has changed", "unused.py is gone"]


TASK = """
COLOR = 'red'


class Task:
    size = 3

    def step(self, model, batch):
        return model(batch)

    def on_eval(self, model, batch, logger, step):
        logger.image('a', paint('red'), step)


def paint(color):
    return color
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("paint('red')", "paint('blue')", []),
        ("    def on_eval(self, model, batch, logger, step):\n        logger.image('a', paint('red'), step)\n", "", []),
        ("return model(batch)", "return model(2 * batch)", ["(Task.step)"]),
        ("size = 3", "size = 4", ["(Task)"]),
        ("return color", "return [color]", ["(paint)"]),
        ("COLOR = 'red'", "COLOR = 'blue'", ["(statements outside of functions and classes)"]),
        ("def step", "def later", ["(Task.later, Task.step)"]),
    ],
)
def test_what_logs_an_evaluation_may_change_and_other_parts_are_named(
    folder: Path, old: str, new: str, expected: list[str]
) -> None:
    (folder / "mine.py").write_text(NET + TASK)
    before = read(folder)
    assert old in TASK
    (folder / "mine.py").write_text(NET + TASK.replace(old, new))
    found = sources.differences(before, read(folder), with_parts=True)
    assert found == [f"mine.py has changed {one}" for one in expected]


def test_a_trusted_package_is_found_along_the_path_and_only_it_counts(folder: Path, tmp_path: Path) -> None:
    found = sources.find(["parts.blocks.Block"], None, [str(tmp_path / "nowhere"), str(folder)]).fingerprint
    assert set(found["modules"]) == {"parts", "parts.blocks", "parts.deep.core", "parts.late"}


class Finder:
    """What `pip install -e` adds to the search for modules, behind Python's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top, *rest = name.split(".")
        file = (
            self.folder.joinpath(*rest, "__init__.py") if not rest else self.folder.joinpath(*rest).with_suffix(".py")
        )
        return spec_from_file_location(name, file) if top == self.folder.name and file.is_file() else None


def test_the_code_of_an_editable_project_is_the_same_from_the_folder_above(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "above" / "cells" / "cells"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "recipe.py").write_text("class Net:\n    pass\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder(package)])
    inside, above, apart = (
        sources.find(["cells.recipe.Net"], None, [str(place)]).fingerprint
        for place in (tmp_path / "above/cells", tmp_path / "above", folder)
    )
    assert set(inside["modules"]) == {"cells", "cells.recipe"}
    assert inside == above == apart


def test_of_an_installed_package_the_version_counts() -> None:
    found = sources.find(["yaml.load", "hydra.main", "pytest.main"], None, sys.path).fingerprint
    assert found["modules"]["pytest"] == {"version": pytest.__version__}
    assert set(found["modules"]) == {"hydra", "pytest", "yaml"}  # two have distributions of other names
    assert set(found["modules"]["yaml"]) == {"file", "sha256", "syntax", "parts"}
    older = {**found, "modules": {**found["modules"], "pytest": {"version": "1.0"}}}
    assert sources.differences(older, found) == [f"pytest is {pytest.__version__} instead of 1.0"]


def test_files_that_cannot_be_read_as_python_are_hashed_as_they_are(folder: Path) -> None:
    broken = {"helpers.py": "def (", "parts/late.py": "x = 1" + " + 1" * 5000, "parts/blocks.py": "#" * (2 << 20)}
    for name, text in broken.items():
        (folder / name).write_text(text)
    (folder / "parts/__init__.py").write_bytes(b"\xff\0")
    (folder / "unused.py").unlink()
    (folder / "unused.py").symlink_to("unused.py")  # a loop
    (folder / "mine.py").write_text(f"{NET}\nimport parts.late, unused, folder, fifo\n")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "fifo.py")
    before = read(folder)
    assert set(before["modules"]) == {"mine", "helpers", "parts", "parts.blocks", "parts.late"}
    assert "syntax" not in before["modules"]["helpers"]
    (folder / "helpers.py").write_text("def ( #")
    assert sources.differences(before, read(folder)) == ["helpers.py has changed"]


def test_modules_that_import_one_another_end(folder: Path) -> None:
    (folder / "helpers.py").write_text("import mine, helpers\n")
    (folder / "parts/late.py").write_text("\n".join(f"import m{number}" for number in range(2000)))
    for number in range(2000):
        (folder / f"m{number}.py").write_text("import mine\n")
    assert 400 < len(read(folder)["modules"]) <= 600  # bounded


@pytest.mark.parametrize(
    "stored", [{}, {"modules": []}, {"modules": {"mine": 3}, "targets": 7}, {"modules": {"mine": {"sha256": []}}}]
)
def test_what_was_stored_by_others_is_compared_without_a_traceback(folder: Path, stored: dict[str, Any]) -> None:
    assert all(isinstance(phrase, str) for phrase in sources.differences(stored, read(folder)))
