"""Checkpoints, weights, run directories and configurations made by others.

They run no code and reach nothing outside.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ddpexp.checkpoint.format import seal
from tests.conftest import PATIENCE, ROOT, SMALL, Ddpexp, python_path
from tests.refusals import command_refused

LONGER = "trainer.epochs=3"


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is wrong here meets the command or the ranks, not their fork server."""
    return warm_environ


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Path:
    """A run of two checkpoints, which the tests copy."""
    done = Ddpexp(tmp_path_factory.mktemp("trained"), environ)(
        *SMALL, "trainer.gpus=1", "trainer.checkpoint_every=5", "trainer.max_steps=null", "trainer.epochs=2"
    )
    assert done.code == 0, done.err
    return done.run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that hostile code would make; after the test it must not be there."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "hostile code has run"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def bombs(canary: Path, folder: Path) -> list[bytes]:
    """Return the canary as a bare pickle and as torch saves it."""
    torch.save({"model": Bomb(canary)}, folder / "saved.pt")
    return [pickle.dumps(Bomb(canary)), (folder / "saved.pt").read_bytes()]


def test_the_canary_works(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bare, saved = bombs(canary, tmp_path)
    pickle.loads(bare)
    canary.unlink()
    torch.load(io.BytesIO(saved), weights_only=False)
    canary.unlink()


def newest(run: Path) -> Path:
    return run / "checkpoints/step-00000010"


def rehash(folder: Path) -> None:
    """Write down the hashes of what is in a checkpoint now, as an attacker would."""
    manifest = read_manifest(folder)
    files = {}
    for name in sorted({path.name for path in folder.iterdir()} - {"checkpoint.json"}):
        content = (folder / name).read_bytes()
        piece = {"offset": 0, "num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files[name] = {"num_bytes": len(content), "pieces": [piece]}
    (folder / "checkpoint.json").write_bytes(seal({**manifest, "files": files}))


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
    del manifest["sha256"]
    return manifest


# --- Code in place of data ---


@pytest.mark.variants(1)
@pytest.mark.fault("S1")
@pytest.mark.parametrize("kind", [0, 1], ids=["pickle", "torch.save"])
def test_code_in_place_of_a_checkpoints_file_is_refused(
    ddpexp: Ddpexp, run: Path, canary: Path, tmp_path: Path, kind: int
) -> None:
    content = bombs(canary, tmp_path)[kind]
    saved = {path.name: path.read_bytes() for path in newest(run).iterdir()}
    names = sorted(saved.keys() - {"checkpoint.json", "config.yaml"})
    assert {"model.safetensors", "state.optimizers.safetensors", "state.progress.json"} < set(names)
    for name in names[kind::2]:  # every file gets one of the two
        (newest(run) / name).write_bytes(content)
        rehash(newest(run))
        command_refused(ddpexp("resume", str(run), LONGER), f"{name}: cannot be read", out=None)
        (newest(run) / name).unlink()
        for other, original in saved.items():
            (newest(run) / other).write_bytes(original)
    (newest(run) / "checkpoint.json").write_bytes(content)
    done = ddpexp("resume", str(run), LONGER)
    assert done.code == 0, done.err
    assert "checkpoint.json is damaged" in done.out + done.err
    assert "resumed after step 5 of 15" in done.out


@pytest.mark.fault("S1")
def test_code_in_place_of_weights_is_refused(ddpexp: Ddpexp, run: Path, canary: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    for content, overrides, word in zip(
        bombs(canary, tmp_path),
        [
            ("evaluate", str(weights), *(word for word in SMALL if not word.startswith("trainer."))),
            (*SMALL, f"run.init_from={weights}"),
        ],
        ["cannot be read as safetensors", "posix.system"],
        strict=True,
    ):
        weights.write_bytes(content)
        command_refused(ddpexp(*overrides), f"weights.safetensors: {word}")
    (newest(run) / "model.safetensors").write_bytes(weights.read_bytes())
    rehash(newest(run))
    command_refused(ddpexp("evaluate", str(run)), "model.safetensors: cannot be read as safetensors")


# --- More than there is room for ---


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DEEP = b"[" * 100_000 + b"]" * 100_000
WEIGHTS = {
    "an exabyte": safetensors({"w": tensor("F32", [2**58], 0, 2**60)}, bytes(64)),
    "a shape that overflows": safetensors({"w": tensor("F32", [2**62, 8], 0, 0)}),
    "a negative shape": safetensors({"w": tensor("F32", [-4], 0, -16)}, bytes(64)),
    "overlapping": safetensors({"v": tensor("F32", [4], 0, 16), "w": tensor("F32", [4], 8, 24)}, bytes(24)),
    "a huge header": struct.pack("<Q", 2**62) + b"{}",
    "a deep header": safetensors(b'{"w":' + DEEP + b"}"),
    "quantised": safetensors({"w": tensor("QINT8", [4], 0, 4)}, bytes(4)),
    "six bits": safetensors({"w": tensor("F6_E2M3", [4], 0, 3)}, bytes(3)),
    "no weights at all": b"",
}
LITTLE_MEMORY = """\
import resource, signal, sys
from pathlib import Path
from ddpexp.checkpoint.format import scan
from ddpexp.checkpoint.reader import read_part
from ddpexp.checkpoint.tensors import read_tensors
from ddpexp.errors import RefusedError

signal.alarm(30)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        for name in sys.argv[2:]:
            if name == "complete":
                found = scan(folder)
                if found.damaged:
                    raise RefusedError(found.damaged[0].problem)
                [one] = found.complete
            elif name == "problem":
                problem = one.problem()
                if problem:
                    raise RefusedError(problem)
            elif name == "state":
                read_part(one, "progress")
            else:
                read_tensors(folder / name)
        print(f"{folder.name}: taken")
    except RefusedError as error:
        print(f"{folder.name}: {error}")
"""


def in_little_memory(folder: Path, environ: dict[str, str], *names: str) -> dict[str, str]:
    """Read what lies in each folder with 300 MiB of memory more than the start took; return what was said of it."""
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, str(folder), *names],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.fault("S17")
def test_weights_that_claim_more_than_there_is_are_refused_in_little_memory(
    environ: dict[str, str], tmp_path: Path
) -> None:
    for name, content in WEIGHTS.items():
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "w.safetensors").write_bytes(content)
    (tmp_path / "weights/a pipe").mkdir()
    os.mkfifo(tmp_path / "weights/a pipe/w.safetensors")
    found = in_little_memory(tmp_path / "weights", environ, "w.safetensors")
    assert set(found) == {*WEIGHTS, "a pipe"}
    for name, said in found.items():
        assert "w.safetensors cannot be read as safetensors (" in said, name


def sparse(path: Path) -> None:
    """Make a file that claims a tebibyte."""
    with path.open("ab") as file:
        file.truncate(1 << 40)


def piece(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        manifest = read_manifest(folder)
        files = manifest["files"]
        name = changes.pop("file", None)
        if name is not None:
            files[name] = files.pop("state.progress.json")
        files[name or "state.progress.json"]["pieces"][0].update(changes)
        (folder / "checkpoint.json").write_bytes(seal(manifest))

    return change


def state(content: bytes) -> Any:
    def change(folder: Path) -> None:
        (folder / "state.progress.json").write_bytes(content)
        rehash(folder)

    return change


def sealed_deep() -> bytes:
    text = b'{"deep": ' + DEEP + b',\n  "sha256": "'
    return text + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n'


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Any, str]] = {
    "deep manifest": (lambda folder: (folder / "checkpoint.json").write_bytes(DEEP), "is damaged"),
    "deep manifest that is sealed": (
        lambda folder: (folder / "checkpoint.json").write_bytes(sealed_deep()),
        "nested too deeply",
    ),
    "huge manifest": (lambda folder: sparse(folder / "checkpoint.json"), "more than 67,108,864"),
    "piped manifest": (lambda folder: pipe(folder / "checkpoint.json"), "it is a named pipe, not a regular file"),
    "manifest of nothing": (lambda folder: (folder / "checkpoint.json").write_text("null"), "is damaged"),
    "manifest without files": (
        lambda folder: (folder / "checkpoint.json").write_bytes(seal({"format": 2})),
        "KeyError: 'files'",
    ),
    "manifest of texts": (
        lambda folder: (folder / "checkpoint.json").write_bytes(seal({**read_manifest(folder), "step": "x"})),
        "of another step",
    ),
    "deep state": (state(DEEP), "nested too deeply"),
    "deeper than it is read": (state(b"[" * 900 + b"]" * 900), "state.progress.json cannot be read: "),
    "odd keys": (
        state(b'{"$": "mapping", "value": [[[1], 2]]}'),
        "state.progress.json cannot be read: unhashable type",
    ),
    "huge state": (lambda folder: sparse(folder / "state.progress.json"), "bytes where"),
    "piped state": (
        lambda folder: pipe(folder / "state.progress.json"),
        "state.progress.json: it is not a regular file",
    ),
    "negative size": (piece(num_bytes=-5), "has -5 bytes at 0"),
    "negative offset": (piece(offset=-8), "at -8"),
    "endless piece": (piece(num_bytes=1 << 60), "and the file"),
    "another folder": (piece(file="../../../secret"), "'../../../secret' is no name of a file"),
    "the root folder": (piece(file="/etc/hostname"), "'/etc/hostname' is no name of a file"),
}


@pytest.mark.fault("S17")
def test_a_hostile_checkpoint_is_read_in_little_memory_and_time(
    environ: dict[str, str], trained: Path, tmp_path: Path
) -> None:
    for name, (damage, _) in DAMAGES.items():
        folder = shutil.copytree(newest(trained), tmp_path / "all" / name / "step-00000010")
        damage(folder)
    found = in_little_memory(tmp_path / "all", environ, "complete", "problem", "state")
    assert {name: sentence in found[name] for name, (_, sentence) in DAMAGES.items()} == dict.fromkeys(DAMAGES, True), (
        found
    )


# --- Out of the run directory ---


@pytest.mark.fault("S1")
def test_records_of_files_elsewhere_are_not_cut_off(ddpexp: Ddpexp, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_text("mine\n")
    manifest = read_manifest(newest(run))
    manifest["records"] |= {"../outside.jsonl": 0, str(outside): 0, "../../outside.jsonl": 0}
    (newest(run) / "checkpoint.json").write_bytes(seal(manifest))
    done = ddpexp("resume", str(run), LONGER)
    assert done.code == 0, done.err
    assert outside.read_text() == "mine\n"


# --- Code in a configuration ---


def at(key: str, value: Any) -> Any:
    def change(tree: dict[str, Any]) -> None:
        *sections, name = key.split(".")
        for section in sections:
            tree = tree[section]
        tree[name] = value

    return change


def call(target: str) -> dict[str, Any]:
    return {"_target_": target, "_args_": ["touch canary"]}


POISON: dict[str, tuple[Any, str]] = {
    "task": (at("task", call("os.system")), "task._target_=os.system: not allowed"),
    "eval": (
        at("model", {"_target_": "builtins.eval", "_args_": ["1"]}),
        "model._target_=builtins.eval: not allowed",
    ),
    "nested": (
        at("model.layers", [1, [call("posix.system")]]),
        "model.layers[1][0]._target_=posix.system: not allowed",
    ),
    "partial": (
        at("optimizer", {"_target_": "functools.partial", "function": call("os.system"), "lr": 1}),
        "optimizer._target_=functools.partial: not allowed",
    ),
    "prepare": (at("data.prepare", "os.system"), "data.prepare=os.system: not allowed"),
    "launcher": (at("launcher", call("subprocess.Popen")), "launcher._target_=subprocess.Popen: not allowed"),
    "scheduler": (
        at("scheduler", call("hydra.utils.instantiate")),
        "scheduler._target_=hydra.utils.instantiate: not allowed",
    ),
    "logger": (at("logger", call("os.system")), "logger._target_=os.system: not allowed"),
    "resolver": (at("task._target_", "${oc.env:PAYLOAD}"), "run: task._target_=${oc.env:PAYLOAD}"),
    "trust": (
        lambda tree: (tree["run"].update(trust=["stranger"], code="."), tree["task"].update(_target_="stranger.Task")),
        "run: task._target_=stranger.Task",
    ),
    "hydra": (
        at("hydra", {"job_logging": {"handlers": {"a": {"class": "subprocess.Popen", "args": ["touch", "canary"]}}}}),
        "hydra: section",
    ),
    "setup": (
        at("launcher", {"_target_": "slurm", "setup": ["touch canary"]}),
        'run: launcher.setup=["touch canary"]',
    ),
    "rendezvous": (
        at("launcher", {"_target_": "elastic", "rdzv_endpoint": "127.0.0.1:9"}),
        "run: launcher.rdzv_endpoint=127.0.0.1:9",
    ),
}
RAW = {
    "python object": "run: !!python/object/apply:os.system ['touch canary']\n",
    "deep": "run: " + "[" * 50_000 + "]" * 50_000,
    "laughs": "a0: &a0 [lol]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    + "run: {}\n",
}


@pytest.mark.fault("S4", "S5")
@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_run_directory_runs_nothing(ddpexp: Ddpexp, run: Path, poison: str) -> None:
    change, expected = POISON[poison]
    (ddpexp.folder / "stranger.py").write_text("open('canary', 'w')")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    change(tree)
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    environ = {"PAYLOAD": "os.system", "PYTHONPATH": python_path(ROOT, ddpexp.folder)}
    command_refused(ddpexp("resume", str(run), LONGER, environ=environ), expected)
    if poison in ("task", "nested", "resolver"):  # test_evaluate.py has the others
        command_refused(ddpexp("evaluate", str(run), environ=environ), expected)
    assert not (ddpexp.folder / "canary").exists()


@pytest.mark.fault("S5", "S17")
@pytest.mark.parametrize("raw", RAW)
def test_a_configuration_that_is_no_configuration_is_refused_at_once(ddpexp: Ddpexp, run: Path, raw: str) -> None:
    (run / "config.yaml").write_text(RAW[raw])
    command_refused(ddpexp("resume", str(run)), "config.yaml")
    assert not (ddpexp.folder / "canary").exists()
