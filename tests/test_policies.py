"""What nothing in ddpexp or its recipes may call: each of these runs code that somebody else has written."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import threading
from collections.abc import Iterator

import pytest

import ddpexp
from ddpexp.cli.schema import DRAFT
from ddpexp.data.cifar10.archive import ARCHIVE
from ddpexp.data.cifar10.prepare import MIRRORS as CIFAR10_MIRRORS
from ddpexp.data.mnist.idx import FILES
from ddpexp.data.mnist.prepare import MIRRORS as MNIST_MIRRORS
from tests.conftest import LONGEST, ROOT

SOURCES = sorted(path for folder in ("ddpexp", "recipes") for path in (ROOT / folder).rglob("*.py"))

FORBIDDEN = {
    "torch.load", "torch.jit.load", "torch.export.load", "torch.hub.load", "torch.package.PackageImporter",
    "torch.serialization.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.loads", "dill.load",
    "dill.loads",
    "cloudpickle.load", "cloudpickle.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open",
    "eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "commands.getoutput", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
    "yaml.unsafe_load_all", "runpy.run_path", "runpy.run_module", "PIL.Image.open",
}  # fmt: skip
COLLECTIVES_OF_OBJECTS = {
    "broadcast_object_list", "gather_object", "all_gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
SAFE_LOADERS = ("CSafeLoader", "SafeLoader", "LOADER", "get_yaml_loader()")


def problems(text: str) -> Iterator[str]:
    """Yield what a module calls that it must not, under whatever name it imports it."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):  # not calls alone: a function can be handed on
            head, _, rest = ast.unparse(node).partition(".")
            name = ".".join(filter(None, (names.get(head, head), rest)))
            if name in FORBIDDEN:
                yield name
            if name.rpartition(".")[2] in COLLECTIVES_OF_OBJECTS:
                yield name
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            value = ast.unparse(keyword.value)
            if (keyword.arg, value) in (("shell", "True"), ("weights_only", "False")) or (
                keyword.arg == "allow_pickle" and value != "False"
            ):
                yield f"{keyword.arg}={value}"
        if ast.unparse(node.func) in ("yaml.load", "yaml.parse", "yaml.scan"):
            loader = " ".join(
                ast.unparse(argument) for argument in [*node.args[1:], *(word.value for word in node.keywords)]
            )
            if not any(safe in loader for safe in SAFE_LOADERS) or "Unsafe" in loader or "FullLoader" in loader:
                yield ast.unparse(node)


@pytest.mark.fault("S1", "S4", "S7", "S9")
def test_nothing_that_runs_others_code_is_called() -> None:
    found = {path: problem for path in SOURCES if (problem := list(problems(path.read_text())))}
    # With weights_only=True, which test_layering.py checks, in a process with limits.
    assert found.pop(ROOT / "ddpexp/checkpoint/pickled.py") == ["torch.load"]
    assert found.pop(ROOT / "ddpexp/data/open_image.py") == ["PIL.Image.open"]  # of three formats alone
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(path)",
        "from torch import load\nload(path)",
        "import torch as t\nread = t.load",
        "import pickle\npickle.loads(text)",
        "from pickle import loads as read\nread(text)",
        "import marshal\nmarshal.loads(text)",
        "import shelve\nshelve.open(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import os\nos.system(text)",
        "import torch\ntorch.export.load(path)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.load(text, yaml.UnsafeLoader)",
        "import yaml\nyaml.unsafe_load(text)",
        "import torch.distributed as dist\ndist.broadcast_object_list(values)",
        "from torch.distributed import all_gather_object\nall_gather_object(found, value)",
        "import torch\ntorch.distributed.scatter_object_list(found, values)",
        "group.gather_object(value)",
    ],
)
def test_the_policy_sees_what_it_forbids(text: str) -> None:
    assert list(problems(text))


def test_the_policy_lets_pass_what_is_safe() -> None:
    lines = [
        "import yaml, json, numpy as np",
        "yaml.load(t, Loader=yaml.SafeLoader)",
        "np.load(p, mmap_mode='c')",
        "model.eval()",
    ]
    assert list(problems("\n".join(lines))) == []


@pytest.mark.fault("S11")
def test_what_is_downloaded_is_known_by_its_hash_and_comes_over_https() -> None:
    """The configurations name no address at all, and the code only those of the mirrors, whose files have hashes."""
    for path in (ROOT / "conf").rglob("*.yaml"):
        values = re.sub(r"(^|\s)#.*", "", path.read_text())
        assert not re.search(r"https?://|ftp://|s3://", values), path
    mirrors = {*MNIST_MIRRORS, *CIFAR10_MIRRORS}
    addresses = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"\w+://\S+", node.value)
            ):
                addresses[node.value] = path.name
    found = {address for address in addresses if address.startswith(("http", "ftp", "s3"))}
    assert found - {DRAFT} == mirrors  # that of the JSON schema is a name
    assert all(address.startswith("https://") for address in mirrors)
    assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) and file.size > 0 for file in (*FILES, ARCHIVE))


def test_the_files_that_are_started_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
    assert len({*LONGEST}) == len(LONGEST)


def own_names(kind: type) -> set[str]:
    """Return the private names that a class written in Python has, and that its methods set on an object."""
    names = {name for name in vars(kind) if re.fullmatch(r"_[a-z]\w*", name)}
    try:
        return names | set(re.findall(r"\bself\.(_[a-z]\w*)(?:: [^=\n]+)? = ", inspect.getsource(kind)))
    except (OSError, TypeError):  # written in C
        return names


def shared_names(kind: type) -> set[str]:
    """Return the private names of a class that another library's class from which it derives has as well."""
    written = {"_abc_impl", "_backward_cls"}  # by metaclasses, into each class
    own = {"ddpexp", "builtins", "abc", "typing", "enum"}
    theirs = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] not in own]
    return own_names(kind) & {name for base in theirs for name in own_names(base)} - written


@pytest.mark.smoke  # Python 3.13 has given `threading.Thread` a `_handle`
def test_no_class_shares_a_private_name_with_a_class_of_another_library_from_which_it_derives() -> None:
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages([ddpexp.__path__[0]], "ddpexp."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and kind.__module__.startswith("ddpexp") and ".compat." not in kind.__module__:
                found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    assert len(found) > 500
    assert {name: shared for name, kind in found.items() if (shared := shared_names(kind))} == {}


def test_a_shared_private_name_is_seen() -> None:
    class Loop(threading.Thread):
        def _bootstrap(self) -> None: ...

        def mark(self) -> None:
            self._started = None

    assert shared_names(Loop) == {"_bootstrap", "_started"}


def collectives_in(text: str) -> set[str]:
    """Return the functions of torch.distributed with which a module communicates."""
    names = {
        "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "batch_isend_irecv",
        "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
        "send",
    }  # fmt: skip
    called = (ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {name for name in called if name.rpartition(".")[0] in ("dist", "torch.distributed")} & {
        f"{module}.{name}" for module in ("dist", "torch.distributed") for name in names
    }


def test_collectives_are_those_of_the_world_which_checks_devices() -> None:
    assert collectives_in("dist.all_reduce(x)\ntorch.distributed.isend(x, 1)") == {
        "dist.all_reduce", "torch.distributed.isend",
    }  # fmt: skip
    calling = {str(path.relative_to(ROOT)) for path in SOURCES if collectives_in(path.read_text())}
    assert calling == {"ddpexp/distributed/world.py", "ddpexp/doctor/worker.py"}  # doctor measures the backend itself


def unreadable_expressions(text: str) -> Iterator[str]:
    """Yield the calls whose arguments a reader has to count, and the conditional expressions inside others."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and len(node.args) >= 8:
            yield f"line {node.lineno}: {len(node.args)} positional arguments. Name those after the fifth."
        if isinstance(node, ast.IfExp) and ast.IfExp in map(type, (node.test, node.body, node.orelse)):
            yield f"line {node.lineno}: a conditional expression inside another. Write statements."


def test_no_call_has_eight_positional_arguments_and_no_conditional_expression_is_inside_another() -> None:
    own = sorted((ROOT / "ddpexp").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): list(unreadable_expressions(path.read_text())) for path in own}
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("text", "is_readable"),
    [
        ("f(1, 2, 3, 4, 5, 6, 7)", True),
        ("f(1, 2, 3, 4, 5, 6, 7, 8)", False),
        ("f(1, 2, 3, 4, 5, 6, seven=7, eight=8)", True),
        ("a if b else c", True),
        ("a if b else c if d else e", False),
        ("(a if b else c) if d else e", False),
    ],
)
def test_unreadable_expressions_are_seen(text: str, is_readable: bool) -> None:
    assert (list(unreadable_expressions(text)) == []) == is_readable
