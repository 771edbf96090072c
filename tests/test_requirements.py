"""constraints.txt and the lock files say the same, for every Python."""

from __future__ import annotations

from importlib import metadata
from typing import cast

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ddpexp import PYTHONS as PYTHON_RANGE
from ddpexp import TESTED_PYTHONS
from tests.conftest import ROOT
from tests.matrix import promised
from tests.requirements import BUILD, CUDA, GPU, LOCK, LOWEST_PYTHON, entries

_CLASSIFIER = "Programming Language :: Python :: "
PYTHONS = [
    text.removeprefix(_CLASSIFIER)
    for text in metadata.metadata("ddpexp").get_all("Classifier", [])
    if _CLASSIFIER in text
]
MACHINES = ("x86_64", "aarch64")


def applies(requirement: Requirement, python: str, machine: str, extra: str = "") -> bool:
    environment = {
        **cast("dict[str, str]", default_environment()),
        "python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine, "extra": extra,
    }  # fmt: skip
    return requirement.marker is None or requirement.marker.evaluate(environment)


def pins(texts: list[str], python: str, machine: str) -> dict[str, str]:
    """Return the version that each package has there; no package has two."""
    found: dict[str, str] = {}
    for requirement in map(Requirement, texts):
        if applies(requirement, python, machine):
            [pin] = requirement.specifier
            assert pin.operator == "=="
            assert found.setdefault(canonicalize_name(requirement.name), pin.version) == pin.version
    return found


def constraints(python: str, machine: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return pins([line for line in lines if line], python, machine)


def locked(python: str, machine: str) -> dict[str, str]:
    found = entries(LOCK.read_text()) + entries(CUDA.read_text())
    return pins([entry.partition("\\")[0] for entry in found], python, machine)


def needed(extra: str, python: str, machine: str) -> list[Requirement]:
    texts = metadata.requires("ddpexp") or []
    return [
        one
        for one in map(Requirement, texts)
        if ("extra" in str(one.marker)) == bool(extra) and applies(one, python, machine, extra)
    ]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_files_hold_what_ddpexp_needs_at_the_versions_of_the_constraints(python: str, machine: str) -> None:
    held, fixed = locked(python, machine), constraints(python, machine)
    for one in needed("", python, machine):
        assert one.specifier.contains(held[canonicalize_name(one.name)]), (
            f"{one}: `python -m tests.requirements` writes the files"
        )
    both = held.keys() & fixed.keys()
    assert {name: held[name] for name in both} == {name: fixed[name] for name in both}, (
        "`python -m tests.requirements` writes the files"
    )


@pytest.mark.parametrize(
    "extra", ["etcd", "optuna", "benchmark", "wandb", "mlflow", "hf", "parquet", "text", "remote", "test"]
)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_hold_a_version_of_all_that_an_extra_requires(python: str, extra: str) -> None:
    fixed = constraints(python, "x86_64")
    asked = [
        one for one in needed(extra, python, "x86_64") if one.name != "ddpexp"
    ]  # [test] includes other extras of ours
    assert asked
    for one in asked:
        assert one.specifier.contains(fixed[canonicalize_name(one.name)]), str(one)


def test_every_locked_file_has_its_hash_and_torch_comes_apart() -> None:
    for path in (LOCK, CUDA):
        found = entries(path.read_text())
        assert found
        for entry in found:
            assert "--hash=sha256:" in entry
            assert bool(GPU.match(entry)) == (path == CUDA)


def test_every_place_names_the_pythons_that_the_tests_are_run_with() -> None:
    assert promised() == PYTHONS
    assert metadata.metadata("ddpexp")["Requires-Python"] == "<{}.{},>={}.{}".format(
        PYTHON_RANGE[1][0], PYTHON_RANGE[1][1] + 1, *PYTHON_RANGE[0]
    )
    assert promised()[0] == LOWEST_PYTHON
    for name in ("README.md", LOCK.name, BUILD.name):
        assert f"Python {TESTED_PYTHONS}" in (ROOT / name).read_text(), name
