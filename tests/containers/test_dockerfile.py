"""The Dockerfile and the Apptainer definition, as far as they can be checked without building them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpexp.system.secrets import secret_variables
from tests.conftest import ROOT
from tests.containers.dockerfile import Stage, context, expand, instructions, stages

TEXT = (ROOT / "Dockerfile").read_text()
APPTAINER = (ROOT / "ddpexp.def").read_text()
BUILD, FINAL = stages(TEXT, {})[0]


def copied(stage: Stage) -> list[str]:
    """Return the sources in the build context that a stage copies."""
    words = [one.rest.split() for one in stage.instructions if one.name == "COPY"]
    return [source for *sources, _ in words for source in sources if not sources[0].startswith("--from=")]


def test_the_container_runs_as_an_unprivileged_user_with_an_init_that_gets_the_signal_to_stop() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", FINAL.last("USER").rest)  # numbers: Kubernetes can check runAsNonRoot
    assert FINAL.last("ENTRYPOINT").exec_form() == ["/usr/bin/tini", "--"]
    assert FINAL.last("CMD").exec_form() == ["python", "-m", "ddpexp", "--help"]
    assert FINAL.last("STOPSIGNAL").rest == "SIGTERM"
    after = [one.name for one in FINAL.instructions[FINAL.instructions.index(FINAL.last("USER")) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


def test_the_last_stage_gets_nothing_but_the_installed_package() -> None:
    assert copied(FINAL) == []
    assert [one.rest for one in FINAL.instructions if one.name == "COPY"] == ["--from=build /opt/ddpexp /opt/ddpexp"]
    assert not [one for one in instructions(TEXT) if one.name == "ADD"]  # it downloads, and unpacks


def test_every_file_that_is_copied_is_in_the_build_context_and_nothing_else_is() -> None:
    files = context()
    patterns = copied(BUILD)
    used = [path for path in files if any(path.match(one) or path.parts[0] == one for one in patterns)]
    assert used == files
    for pattern in patterns:
        assert any(path.match(pattern) or path.parts[0] == pattern for path in files), pattern
    assert {path.parts[0] for path in files if len(path.parts) > 1} == {"conf", "recipes", "ddpexp"}
    assert not [path for path in files if path.suffix == ".pyc" or "outputs" in path.parts]


def test_packages_are_installed_by_hash_and_debian_packages_leave_no_lists() -> None:
    runs = " && ".join(one.rest for one in BUILD.instructions if one.name == "RUN")
    fetching = [text for text in re.split(r"&&|;", runs) if re.search(r"pip (install|wheel)", text)]
    unhashed = [text for text in fetching if "--require-hashes" not in text and "--no-index" not in text]
    [torch, package] = unhashed
    assert '--index-url "${TORCH_INDEX}" -c constraints.txt torch' in torch
    assert package.split()[-1] == "."  # ddpexp itself, with the builders that are installed by hash
    assert all("--no-build-isolation" in text for text in fetching if "pip wheel" in text)
    assert all("--no-deps" in text for text in fetching)
    [debian] = [one.rest for one in FINAL.instructions if one.name == "RUN" and "apt-get" in one.rest]
    assert "--no-install-recommends" in debian
    assert debian.endswith("rm -rf /var/lib/apt/lists/*")
    for name in re.findall(r"requirements-\w+\.lock", TEXT):
        assert (ROOT / name).is_file() or name == "requirements-cpu.lock"


def test_no_secret_is_an_argument_or_a_variable_of_the_image() -> None:
    """What an image was built with stays readable in its history."""
    names = {one.rest.partition("=")[0]: "0123456789abcdef" for one in instructions(TEXT) if one.name == "ARG"}
    for stage in (BUILD, FINAL):
        for one in stage.instructions:
            names |= one.pairs() if one.name == "ENV" else {}
    assert secret_variables({name: f"{value}-0123456789" for name, value in names.items()}) == []


def test_arguments_choose_the_python_that_the_metadata_promise() -> None:
    assert BUILD.base == FINAL.base == "python:3.12-slim-bookworm"
    assert stages(TEXT, {"PYTHON": "3.11"})[0][0].base == "python:3.11-slim-bookworm"
    with pytest.raises(KeyError):
        expand("${NOWHERE}", {})


def test_the_apptainer_definition_takes_the_steps_of_the_dockerfile() -> None:
    """It repeats them, since Apptainer reads no Dockerfile: what is installed, and from which files."""

    def steps(text: str) -> list[str]:
        plain = re.sub(r"\{\{ (\w+) \}\}", r"${\1}", text).replace("\\\n", " ").replace("&&", "\n").replace(";", "\n")
        found = re.findall(r"(?:/opt/\w+/bin/pip|python -m venv).*", plain)
        return [" ".join(line.split()) for line in found if not line.startswith("#")]

    commands = "\n".join(one.rest for one in BUILD.instructions if one.name == "RUN")
    post = APPTAINER.partition("%post")[2].partition("Bootstrap:")[0]
    assert steps(post) == steps(commands)
    files = APPTAINER.partition("%files")[2].partition("%post")[0].split()[::2]
    assert all((ROOT / name).exists() for name in files)
    assert {name for name in files if "lock" in name} == {path.name for path in ROOT.glob("requirements*.lock")}
    assert {Path(name).name for name in files} >= set(copied(BUILD)) - {"requirements*.lock"}
    defaults = dict(re.findall(r"^ARG (\w+)=([^\s\"]+)$", TEXT, re.MULTILINE))
    assert dict(re.findall(r"^    (\w+)=(\S+)$", APPTAINER, re.MULTILINE)) == defaults
    assert 'exec python -m ddpexp "$@"' in APPTAINER
