"""Run directories of strangers reach nothing: no connection, no secret, no program and no file outside.

Every command and every Python function that takes a run directory gets some that name addresses, the environment and
paths in many keys, and their records.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from ddpexp.system.yaml_text import load_yaml
from tests.conftest import ROOT

SECRET, VALUE = "CANARY_TOKEN", "canary-4711-of-the-reader"
SHORT = ("trainer.gpus=1", "trainer.max_steps=2", "logger=none", "trainer.global_batch_size=8")
RUNS = {
    "table": (
        "recipe=tabular", "data=arrays", "data.path=../data/t.csv", "data.targets=y", "data.validation_fraction=0.2",
    ),
    "text": (
        "recipe=gpt", "model=gpt_tiny", "data.path=../data/t.txt", "data.block_size=16", "model.block_size=16",
    ),
    "tar": (
        "recipe=mnist", "model=resnet18", "model.num_classes=10", "data=tar_shards", "data.path=../data/x.tar",
        "data.files=[jpg,cls]", "data.image_size=28", "data.validation_fraction=0.3",
    ),
    "folder": ("recipe=imagenet", "model=resnet18", "data.root=../data/photos", "data.size=32"),
}  # fmt: skip
KEYS = {
    "table": ("data.path", "data.eval_path", "data.targets", "data.group_by", "data.weights"),
    "text": ("data.path", "data.eval_path", "data.tokenizer", "data.end_token"),
    "tar": ("data.path", "data.eval_path"),
    "folder": ("data.root", "data.cache"),
}
EVERYWHERE = (
    "model.extra", "model._target_", "task.extra", "optimizer.extra", "recipe.name", "run.init_from", "run.dir",
    "logger.alert_url", "logger.theirs", "logger.mlflow", "logger.wandb", "launcher.python", "launcher.rdzv_endpoint",
    "callbacks.theirs", "trainer.keep_best", "strategy.kind", "manifest",
)  # fmt: skip
SECTIONS = {
    "logger.theirs": {"_target_": "theirs.Tracker", "server": None},
    "logger.mlflow": {"_target_": "mlflow", "experiment": None},
    "logger.wandb": {"_target_": "wandb", "entity": None, "mode": "online"},
    "callbacks.theirs": {"_target_": "theirs.Callback", "address": None},
    "launcher.python": {"_target_": "slurm", "python": None},
    "launcher.rdzv_endpoint": {"_target_": "elastic", "rdzv_endpoint": None},
}
COMMANDS = (
    ("evaluate", "RUN"), ("predict", "RUN", "--out", "OUT.npz"), ("export", "RUN", "--out", "OUT"), ("resume", "RUN"),
    ("sync", "RUN"), ("generate", "RUN", "--tokens", "3"), ("status", "RUN"), ("table", "RUN"),
)  # fmt: skip
FUNCTIONS = (
    "open_run(RUN).model()", "open_run(RUN).evaluate()", "open_run(RUN).predict(out=OUT + '.npz')", "open_run(RUN).config",
    "open_run(RUN).export(OUT)", "open_run(RUN).experiment()", "open_run(RUN).checkpoints, repr(open_run(RUN))",
)  # fmt: skip


class Stranger:
    """Run directories that somebody has left, a server of theirs, and the reader's files."""

    def __init__(self, folder: Path, port: int, environ: dict[str, str]) -> None:
        self.folder, self.port, self.environ = folder, port, environ
        self.hits: list[str] = []
        self.count = 0

    def plants(self) -> list[str]:
        """Return an address with a secret, a secret, and a path."""
        address = f"ftp://127.0.0.1:{self.port}/${{oc.env:{SECRET}}}/x.tar"  # fsspec needs no package for FTP
        return [address, f"${{oc.env:{SECRET}}}", str(self.folder / "outside/file")]

    def left(self, base: str, key: str, plant: str, without_checkpoint: bool) -> Path:
        """Make a copy of a run in which a key has another value, as if it had been trained so."""
        self.count += 1
        path = self.folder / "work" / f"theirs{self.count}"
        shutil.copytree(self.folder / "work" / base, path)
        tree, manifest = load_yaml((path / "config.yaml").read_text()), json.loads((path / "manifest.json").read_text())
        manifest.pop("config", None)
        if key == "manifest":
            poison(manifest.get("data"), plant)
            tree["model"]["extra"] = "${facts:name}"
        elif key in SECTIONS:
            section, name = key.split(".")
            planted = {one: plant if value is None else value for one, value in SECTIONS[key].items()}
            tree[section] = planted if section == "launcher" else {**(tree[section] or {}), name: planted}
        else:
            section, name = key.split(".")
            tree[section] = {**(tree[section] or {}), name: plant}
        if without_checkpoint:
            shutil.rmtree(path / "checkpoints")
            (path / "result.json").unlink()
        (path / "config.yaml").write_text(yaml.safe_dump(tree))
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    def outside(self) -> dict[str, Any]:
        """Return all that the reader has, beside the folder of the runs and the user's cache."""
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else sorted(os.listdir(path)))
            for name in ("data", "outside", "home") for path in [self.folder / name, *(self.folder / name).rglob("*")]
        }  # fmt: skip

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *argv], cwd=self.folder / "work", env=self.environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


def poison(value: Any, plant: str) -> None:
    """Replace every text in the description of the data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        if isinstance(inner, str):
            value[key] = plant
        else:
            poison(inner, plant)
    if isinstance(value, dict) and isinstance(value.get("facts"), dict):
        value["facts"]["name"] = plant


def draw(folder: Path) -> None:
    """Write small data of each kind."""
    folder.mkdir()
    numbers = random.Random(0)
    rows = [f"{numbers.random()},{numbers.random()},{index % 2}" for index in range(60)]
    (folder / "t.csv").write_text("\n".join(["a,b,y", *rows, ""]))
    (folder / "t.txt").write_text("to be or not to be, that is the question. " * 60)
    with tarfile.open(folder / "x.tar", "w") as archive:
        for index in range(48):
            for name, data in ((f"{index:03}.jpg", jpeg(index)), (f"{index:03}.cls", str(index % 10).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (folder / "photos" / place).mkdir(parents=True)
        for index in range(12):
            (folder / "photos" / place / f"{index}.jpg").write_bytes(jpeg(index))


def jpeg(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (shade * 5 % 255, 9, 9)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    folder = tmp_path_factory.mktemp("stranger")
    draw(folder / "data")
    for name in ("work", "outside", "home", "cache"):
        (folder / name).mkdir()
    (folder / "outside/file").write_text("1\n2\n")
    environ = {
        **os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": str(folder / "home"), "WANDB_API_KEY": "0" * 40, "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Stranger(folder, server.getsockname()[1], {**environ, SECRET: VALUE})

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                found.hits.append("a connection")
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield found


def trained(stranger: Stranger, base: str) -> None:
    if not (stranger.folder / "work" / base).exists():
        done = stranger.run("-m", "ddpexp", *RUNS[base], *SHORT, f"run.dir={base}")
        assert done.returncode == 0, done.stderr


def attack(stranger: Stranger, base: str, key: str, plant: str, words: tuple[str, ...] | str) -> str:
    """Try one command or function, and return what it did to the outside beside refusing or working; empty: nothing."""
    path = stranger.left(base, key, plant, without_checkpoint=words[0] == "resume")
    out = str(path.with_name(f"{path.name}-out"))
    if isinstance(words, str):
        code = f"import ddpexp; RUN, OUT = {str(path)!r}, {out!r}; print(ddpexp.{words})"
        done = stranger.run("-c", code.replace("repr(open_run", "repr(ddpexp.open_run"))
    else:
        replaced = [word.replace("RUN", path.name).replace("OUT", out) for word in words]
        done = stranger.run("-m", "ddpexp", *replaced)
    problems = []
    if VALUE in done.stdout + done.stderr:
        problems.append("the secret was printed")
    problems += leaked(path, Path(out), Path(f"{out}.npz"))
    if "Traceback" in done.stderr and not isinstance(words, str):
        problems.append(f"a traceback: {done.stderr[-2000:]}")
    reaches = plant != stranger.plants()[2] and key != "manifest" and words not in (COMMANDS[6], COMMANDS[7])
    is_used = not (key.split(".")[0] in ("logger", "launcher") and words[0] not in ("resume", "sync"))
    if isinstance(words, str):
        is_used = is_used and any(name in words for name in ("model", "evaluate", "predict", "experiment"))
    if reaches and is_used and key != "run.dir" and done.returncode == 0:
        problems.append(f"it was accepted: {done.stdout} {done.stderr}")
    shutil.rmtree(path)
    return f"{base}: {key}={plant} by {words}: {'; '.join(problems)}" if problems else ""


def leaked(*places: Path) -> list[str]:
    """Return the files with the secret in their name or content."""
    files = [file for place in places for file in (place, *place.rglob("*"))]
    found = [file for file in files if VALUE in file.name or (file.is_file() and VALUE.encode() in file.read_bytes())]
    return [f"the secret is in {file}" for file in found]


def attacks(stranger: Stranger, chosen: list[tuple[str, str, str, tuple[str, ...] | str]], threads: int) -> None:
    for base in dict.fromkeys(base for base, *_ in chosen):
        trained(stranger, base)
    before = copy.deepcopy(stranger.outside())
    with ThreadPoolExecutor(threads) as pool:
        problems = [problem for problem in pool.map(lambda one: attack(stranger, *one), chosen) if problem]
    assert problems == []
    assert leaked(stranger.folder / "cache", stranger.folder / "work") == []
    assert stranger.hits == []
    assert stranger.outside() == before


def all_attacks(stranger: Stranger) -> list[tuple[str, str, str, tuple[str, ...] | str]]:
    return [
        (base, key, plant, words)
        for base in RUNS for key in (*KEYS[base], *EVERYWHERE) for plant in stranger.plants()
        for words in (*COMMANDS, *FUNCTIONS)
        if words[0] != "generate" or base == "text"
    ]  # fmt: skip


@pytest.mark.fault("S20")
@pytest.mark.parametrize("words", [COMMANDS[0], COMMANDS[2], COMMANDS[3], FUNCTIONS[0]], ids=str)
def test_an_address_with_a_secret_in_a_run_directory_is_not_asked(
    stranger: Stranger, words: tuple[str, ...] | str
) -> None:
    attacks(stranger, [("tar", "data.path", stranger.plants()[0], words)], 1)


@pytest.mark.fault("S20")
def test_a_strangers_sweep_writes_nothing_beside_the_data_that_it_names(stranger: Stranger) -> None:
    before, path = stranger.outside(), stranger.folder / "work/swept"
    path.mkdir()
    data = stranger.folder / "data/t.csv"
    words = [*(word for word in RUNS["table"] if not word.startswith("data.path")), f"data.path={data}", *SHORT]
    (path / "sweep.yaml").write_text(
        yaml.safe_dump({"words": [*words, "trainer.seed=1,2", "sweep.picture=false"], "options": []})
    )
    (path / "sweep.jsonl").write_text("")
    done = stranger.run("-m", "ddpexp", "resume", "swept")
    assert done.returncode == 0, done.stderr
    assert stranger.outside() == before
    assert any((stranger.folder / "cache").rglob("arrays-*"))
    (path / "sweep.yaml").write_text(
        yaml.safe_dump({"words": [*words, f"+data.x=ftp://127.0.0.1:{stranger.port}/"], "options": []})
    )
    refused = stranger.run("-m", "ddpexp", "resume", "swept")
    assert (refused.returncode, stranger.hits) == (2, []), refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_hundred_run_directories_of_strangers_reach_nothing(stranger: Stranger) -> None:
    chosen = random.Random(int(os.environ.get("STRANGERS_SEED", "0"))).sample(all_attacks(stranger), 300)
    attacks(stranger, chosen, 3)
