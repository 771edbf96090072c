"""Names become objects behind an allowlist, and nothing outside it is even imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpexp.config.instantiate import TORCH, Trust, check_trusted, instantiate, locate
from ddpexp.errors import RefusedError
from ddpexp.settings.node import Node
from tests.conftest import ROOT
from tests.refusals import refused

STRANGERS = [
    "os.system",
    "posix.system",
    "subprocess.run",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "importlib.import_module",
    "pickle.loads",
    "shutil.rmtree",
    "runpy.run_path",
    "ctypes.CDLL",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load",
    "torch.utils.data.DataLoader",
    "torch.nn.modules.linear.torch.hub.load",
    "torch.nn.Linear.from_config",
    "numpy.load",
    "hydra.utils.instantiate",
    "omegaconf.OmegaConf.load",
    "ddpexp.system.files.write",
    "ddpexp.config.instantiate.locate",
    "ddpexp.run.prepare.call_prepare",
    "ddpexp.launch.workers.server.call",
    "ddpexp.launch.workers.client.Server",
    "ddpexp.launch.launchers.local.Spawn",
    "ddpexp.train.schedule.Cosine",
    "ddpexp.data.order.os.system",
    "ddpexp.data.batches.os.system",
    "ddpexp.data.batches.DataLoader",
    "ddpexp.data.images.dataset.np.load",
    "ddpexp.data.images.dataset._part",
    "ddpexp.recipes.mnist.torch.load",
    "ddpexp.recipes.mnist.torch.hub.load",
    "ddpexp.recipes.mnist.Linear.__init__.__globals__",
    "ddpexp.recipes..mnist.Linear",
    "ddpexp.recipes.mnist.Linear\n",
    "ddpexp.ddpexp.system.files.write",
    "ddpexp_evil.system",
    "torchvision.models.resnet18",
    "system",
    "",
    ".",
    "os.",
    "os/system",
]


@pytest.mark.fault("S4")
@pytest.mark.parametrize("target", STRANGERS)
@pytest.mark.parametrize("where", ["model", "model.layers[3].inner", "data", "task"])
def test_names_outside_the_allowlist_are_refused_with_their_key(target: str, where: str) -> None:
    before = set(sys.modules)
    with pytest.raises(RefusedError) as caught:
        check_trusted({"_target_": target}, Trust(), where)
    assert str(caught.value).startswith(f"{where}._target_={target}")
    with pytest.raises(RefusedError):
        instantiate(Node(target), Trust(), where)
    # what reads the names of installed packages imports a part of `email` once
    assert not {name for name in set(sys.modules) - before if not name.startswith("email.")}


@pytest.mark.parametrize("target", [None, 5, ["os.system"], {"_target_": "os.system"}, True])
def test_a_target_that_is_no_text_is_refused(target: Any) -> None:
    with pytest.raises(RefusedError):
        check_trusted({"model": {"_target_": target}}, Trust())


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"model": {"_target_": "os.system"}}, "model._target_"),
        ({"model": {"a": {"b": {"_target_": "os.system"}}}}, "model.a.b._target_"),
        ({"model": [{"x": 1}, [{"_target_": "os.system"}]]}, "model[1][0]._target_"),
        ({"run": {"dir": {"_target_": "os.system"}}}, "run.dir._target_"),
        ({"model": {"_target_": "torch.nn.Linear", "_args_": [{"_target_": "os.system"}]}}, "model._args_[0]._target_"),
        ({"model": ({"_target_": "os.system"},)}, "model[0]._target_"),
    ],
)
@pytest.mark.fault("S4")
def test_a_stranger_is_found_anywhere_in_the_tree(tree: Any, key: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_trusted(tree, Trust())
    assert str(caught.value).startswith(f"{key}=os.system is not allowed")


def test_a_refused_module_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "imported"
    (tmp_path / "stranger.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("model._target_=stranger.Net: run.trust=[stranger]"):
        instantiate(Node("stranger.Net"), Trust(), "model")
    with refused("model._target_=stranger.Net: run.trust=[stranger]"):
        locate("stranger.Net", Trust(), "model")
    assert not marker.exists()
    assert "stranger" not in sys.modules
    try:
        locate("stranger.Net", Trust(("stranger",)), "model")  # the marker works: trusted, it is imported
        assert marker.exists()
    finally:
        sys.modules.pop("stranger", None)


def test_a_prefix_trusts_whole_names_only() -> None:
    trust = Trust(("torchvision.models", "mine."))
    assert trust.allows("torchvision.models.resnet18", "model")
    assert trust.allows("mine.Net", "model")
    assert not trust.allows("torchvision.models_evil.resnet18", "model")
    assert not trust.allows("torchvision.io.read_file", "model")
    assert not trust.allows("mine", "model")
    assert not trust.allows("minestrone.Net", "model")


def test_launchers_and_schedules_belong_to_their_sections() -> None:
    assert Trust().allows("spawn", "launcher")
    assert Trust().allows("cosine", "scheduler")
    for where in ("model", "launcher.inner", "data.prepare", "scheduler"):
        assert not Trust().allows("spawn", where)


def test_modules_beside_the_config_folder_are_trusted_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "package").mkdir()
    trust = Trust(code=tmp_path)
    assert trust.allows("mine.Net", "model")
    assert trust.allows("package.models.Net", "model")
    assert not trust.allows("other.Net", "model")
    assert not trust.allows("os.system", "model")


def test_a_namesake_from_elsewhere_is_not_taken_for_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("")
    (tmp_path / "torch").mkdir()
    for target in ("os.system", "torch.load"):
        with refused("model._target_: another name"):
            locate(target, Trust(code=tmp_path), "model")


def test_what_only_shows_up_in_a_trusted_module_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "borrower.py").write_text("import os\nfrom os import system\nfrom subprocess import Popen\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    trust = Trust(code=tmp_path)
    try:
        with refused("model._target_=borrower.os.system: the module os"):
            locate("borrower.os.system", trust, "model")
        for target in ("borrower.system", "borrower.Popen", "borrower.value"):
            with refused(f"model._target_={target}: allowed module"):
                locate(target, trust, "model")
    finally:
        sys.modules.pop("borrower", None)


def test_every_torch_name_of_the_closed_set_is_there() -> None:
    for target in sorted(TORCH):
        assert isinstance(locate(target, Trust(), "model"), type), target


def test_the_refusal_of_a_near_miss_names_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "schedule.py").write_text("class Triangle: ...")
    for target, meant in [
        ("SGD", "torch.optim.SGD"),
        ("torch.optim.sgd", "torch.optim.SGD"),
        ("torch.optim.AdmaW", "torch.optim.AdamW"),
        ("ddpexp.recipes.mnist.LeNett", "ddpexp.recipes.mnist.LeNet"),
        ("mien.Net", "mine.Net"),
        ("shedule.Triangl", "schedule.Triangl"),
    ]:
        with refused(f"model._target_={target}: {meant}?"):
            check_trusted({"_target_": target}, Trust(code=tmp_path), "model")
    # schedule.py has nothing like it
    with refused("optimizer._target_=schedulefree.AdamWScheduleFree: run.trust=[schedulefree]"):
        check_trusted({"_target_": "schedulefree.AdamWScheduleFree"}, Trust(code=tmp_path), "optimizer")


def test_nobody_is_advised_to_trust_python_itself() -> None:
    for target in ("os.system", "subprocess.run", "builtins.eval", "torch.hub.load"):
        with pytest.raises(RefusedError) as caught:
            check_trusted({"_target_": target}, Trust(), "model")
        assert f"run.trust=[{target.split('.')[0]}]" not in str(caught.value)


def test_nested_nodes_lists_and_positional_arguments_are_built() -> None:
    import torch

    node = Node(
        "torch.nn.Sequential",
        {
            "_args_": [
                {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2},
                {"_target_": "torch.nn.ReLU"},
            ]
        },
    )
    made = instantiate(node, Trust(), "model")
    assert made(torch.zeros(3, 4)).shape == (3, 2)


def test_a_partial_node_gives_a_function_that_takes_the_rest() -> None:
    node = Node("torch.nn.Linear", {"_partial_": True, "out_features": 2})
    assert instantiate(node, Trust(), "model")(5).in_features == 5


def test_arguments_that_do_not_fit_are_refused_with_their_section() -> None:
    with refused("torch.nn.Linear: ~model.width"):
        instantiate(Node("torch.nn.Linear", {"width": 3, "in_features": 1, "out_features": 1}), Trust(), "model")


def test_a_name_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf.py").write_text("class Network: ...\n")
    (tmp_path / "halfway.py").write_text("import a_library_that_is_missing\n")
    (tmp_path / "hollow").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    trust = Trust(code=tmp_path)
    with pytest.raises(RefusedError) as caught:
        locate("shelf.Netwrk", trust, "model")
    error = caught.value
    assert (error.key, error.value, error.suggestion) == ("model._target_", "shelf.Netwrk", "Did you mean Network?")
    with pytest.raises(RefusedError):
        locate("hollow.nothing.Net", trust, "model")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        locate("halfway.Net", trust, "model")
    for name in ("shelf", "hollow"):
        sys.modules.pop(name, None)


def test_only_the_functions_meant_for_it_are_open_to_a_configuration() -> None:
    allowed = {
        f"{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}.{name}"
        for path in (ROOT / "ddpexp").rglob("*.py")
        for name in re.findall(r"^(?:class|def) (\w+)", path.read_text(), re.MULTILINE)
    }
    sections = ("model", "task", "optimizer", "data", "data.prepare", "data.part", "model.part")
    found = {(section, target) for section in sections for target in allowed if Trust().allows(target, section)}
    assert not found  # its parts go by keys: see test_registry


@pytest.mark.parametrize(
    ("key", "suggestion"), [("momentum", "~optimizer.momentum"), ("_target", "optimizer._target_?")]
)
def test_for_a_key_that_does_not_fit_the_error_says_how_to_remove_it(key: str, suggestion: str) -> None:
    with refused(f"torch.nn.Linear: {suggestion}"):
        instantiate(Node("torch.nn.Linear", {"in_features": 1, "out_features": 1, key: 0}), Trust(), "optimizer")
