"""Who may import whom: the order of packages in CONTRIBUTING.md, held by reading the imports."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, ROOT

# From the ground up: a room imports only from rows above its own, type-checking imports too. Rooms of one row do not
# know each other.
ROWS = [
    ["ddpexp"],  # the package itself: its version and its path
    ["errors"],
    ["settings"],  # the keys, declared
    ["compat"],  # private names of other libraries
    ["system"],
    ["launch"],  # the contracts
    ["launch/workers"],
    ["launch/rendezvous"],
    ["launch/supervise"],
    ["launch/launchers"],
    ["distributed", "loggers"],
    ["task"],
    ["data", "strategy"],
    ["config"],
    ["checkpoint"],
    ["run"],
    ["train"],
    ["sweep"],
    ["plan", "doctor", "check", "predict", "export", "report"],
    ["find"],
    ["cli"],
    ["__main__"],
]
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
# The one module that has Hydra compose, the one that runs its sweepers, and their private names.
HYDRA = {"config.tree", "sweep.hydra_sweeper", "compat.hydra"}
OMEGACONF = {*HYDRA, "compat.omegaconf", "config.interpolations", "config.resolve", "config.sentences"}
# The stages of a configuration, in order: none imports a later one.
STAGES = ["arguments", "override_checks", "tree", "resolve", "compose"]
# What the command loads before it hands over to the workers.
COMMAND = (
    "__main__", "cli.main", "cli.evaluate", "cli.resume", "run.prepare", "config", "config.compose", "run.directory",
    "data.mnist.prepare", "data.cifar10.prepare",
    "data.images.files", "data.text.prepare",
    "launch.launchers.local", "launch.launchers.inline", "launch.supervise.coordinator",
    "launch.supervise.in_process", "run.training",
    "cli.doctor", "cli.find",
)  # fmt: skip
HEAVY = {"torch", "torchvision", "numpy", "rich", "safetensors", "tensorboard", "recipes"}

FILES = sorted((ROOT / "ddpexp").rglob("*.py"))


def room(path: Path) -> str:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def room_of(name: str) -> str:
    """Return the room of a module, or of a name in it."""
    parts = name.split(".")[1:]
    inner = "/".join(parts[:2])
    return (
        inner
        if inner in ROW
        else parts[0]
        if parts and (parts[0] in ROW or (ROOT / "ddpexp" / parts[0]).exists())
        else "ddpexp"
    )


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, typed: bool = False) -> Iterator[str]:
    """Yield the full names that a file imports, late imports too.

    Those for the type checker alone where `typed` is true.
    """

    def walk(node: ast.AST) -> Iterator[str]:
        if not typed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(parsed(path))


def known_rooms(path: Path) -> set[str]:
    typed = path != ROOT / "ddpexp/__init__.py"  # it names what it offers to type checkers, and imports nothing
    return {room_of(name) for name in imports(path, typed) if name == "ddpexp" or name.startswith("ddpexp.")}


def test_a_room_imports_only_from_rows_above() -> None:
    assert len(FILES) > 100
    for path in FILES:
        own = room(path)
        assert own in ROW, f"{own} is a new package: give it a row here, and a place in the order in CONTRIBUTING.md"
        for other in known_rooms(path) - {own}:
            assert ROW[other] < ROW[own], f"{path} imports {other}, which is not above {own}"


# Both ways, for a reason: an error of a run carries the run, whose methods raise it.
RAISE = {("ddpexp.cli.api.opened", "ddpexp.cli.api.start"), ("ddpexp.cli.api.errors", "ddpexp.cli.api.opened"),
         ("ddpexp.cli.api.errors", "ddpexp.cli.api.opened_sweep")}  # fmt: skip


def test_no_file_imports_itself_by_way_of_others() -> None:
    known = {module(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        found = set(imports(path, typed=True)) if name != "ddpexp" else set()  # what it offers is imported when used
        targets = {other if other in known else other.rpartition(".")[0] for other in found} & set(known)
        graph[name] = {other for other in targets - {name} if (name, other) not in RAISE}
    TopologicalSorter(graph).prepare()  # its error names the circle


@pytest.mark.parametrize(("library", "modules"), [("hydra", HYDRA), ("omegaconf", OMEGACONF)])
def test_hydra_and_omegaconf_are_known_to_a_few_modules(library: str, modules: set[str]) -> None:
    users = {module(path).removeprefix("ddpexp.") for path in FILES if library in tops(set(imports(path)))}
    assert users == modules


def test_a_configuration_goes_through_its_stages_in_one_direction() -> None:
    for number, stage in enumerate(STAGES):
        known = set(imports(ROOT / f"ddpexp/config/{stage}.py"))
        for later in STAGES[number + 1 :]:
            assert not any(name.startswith(f"ddpexp.config.{later}.") for name in known), f"{stage} imports {later}"


def test_a_stored_configuration_is_read_without_hydra() -> None:
    assert "hydra" not in tops(loaded_by("ddpexp.config.stored", "ddpexp.config.parse"))


UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BY_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
              "recv_object_list")  # fmt: skip


@pytest.mark.fault("S7")
def test_nothing_is_unpickled() -> None:
    """Whoever reaches a port or a file of a run could run code with it. torch.load takes weights alone."""
    for path in FILES:
        assert not tops(set(imports(path))) & UNPICKLING, path
        for node in ast.walk(parsed(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in BY_OBJECTS, f"{name} in {path}:{node.lineno}"  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert {word.arg: ast.unparse(word.value) for word in node.keywords}.get("weights_only") == "True", path


def test_recipes_know_nothing_of_us_but_the_task_protocol_and_data() -> None:
    """Errors are for data of their own that is refused."""
    for path in (ROOT / "recipes").rglob("*.py"):
        assert known_rooms(path) <= {"task", "data", "loggers", "errors"}, path


def test_the_launching_room_could_be_cut_out() -> None:
    below = {"ddpexp", "errors", "settings", "compat", "system"}
    for path in (ROOT / "ddpexp/launch").rglob("*.py"):
        assert {other.partition("/")[0] for other in known_rooms(path)} <= {"launch", *below}, path


def loaded_by(*modules: str) -> set[str]:
    program = f"import sys; import {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return set(done.stdout.split())


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_the_command_imports_no_torch_and_no_numpy() -> None:
    loaded = loaded_by(*(f"ddpexp.{name}" for name in COMMAND))
    assert "hydra" in tops(loaded)  # the check can see what is loaded
    assert not tops(loaded) & HEAVY


def test_what_the_command_imports_does_not_even_know_torch() -> None:
    loaded = {name for name in loaded_by(*(f"ddpexp.{name}" for name in COMMAND)) if name.startswith("ddpexp")}
    files = [path for path in FILES if module(path) in loaded]
    assert len(files) > 15
    for path in files:
        assert not tops(set(imports(path))) & {"torch", "torchvision", "safetensors", "tensorboard"}, path


def test_the_commands_first_imports_are_of_the_standard_library() -> None:
    outside = tops(loaded_by("ddpexp.cli.main")) - sys.stdlib_module_names
    of_the_installation = ("_", "sitecustomize", "usercustomize", "distutils")
    assert {name for name in outside if not name.startswith(of_the_installation)} == {"ddpexp"}


def test_workers_do_not_pay_for_hydra_or_the_terminal() -> None:
    assert not tops(loaded_by("ddpexp.train.worker", "ddpexp.recipes.mnist")) & {
        "hydra",
        "omegaconf",
        "rich",
        "tensorboard",
    }


def test_importing_has_no_effects() -> None:
    projects = ROOT / "ddpexp/cli/projects"  # whose tests import the project that is made of them
    names = [module(path) for path in FILES if not (projects in path.parents and path.parent.name == "tests")]
    program = (
        "import os, signal, sys, threading; sys.argv = ['x', '--help']\n"
        "def state(): return (sorted(os.listdir('.')), dict(os.environ), os.getcwd(), threading.active_count(),"
        " [signal.getsignal(n) for n in (2, 15)])\n"
        f"before = state(); import {', '.join(names)}; after = state()\n"
        "assert before == after, (before, after)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
