"""`ddpexp evaluate`: the numbers of a run's weights again, and nobody else's code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.weights import find
from ddpexp.cli import evaluate as verbs
from tests.conftest import PATIENCE, SMALL, Ddpexp, Done, finish, python_path
from tests.launch.starters import free_port
from tests.refusals import command_refused, refused
from tests.typed import call


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is evaluated is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """One run of two workers for all tests here, which leave it as it is."""
    folder = tmp_path_factory.mktemp("trained")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DDPEXP_", "HYDRA_"))}
    done = Ddpexp(folder, {**kept, "PYTHONPATH": python_path(), "XDG_CACHE_HOME": str(folder / "cache")})(
        *SMALL, "trainer.gpus=2"
    )
    assert done.code == 0, done.err
    before = listing(done.run)
    yield done
    assert listing(done.run) == before


def test_the_best_checkpoint_is_taken_where_a_run_keeps_one_and_the_first_line_says_so(ddpexp: Ddpexp) -> None:
    kept = (
        "trainer.eval_every=3",
        "trainer.checkpoint_every=3",
        "trainer.keep_best=max:eval/loss",
        "trainer.keep_last=1",
    )
    done = ddpexp(*SMALL, *kept)
    assert done.code == 0, done.err
    steps = {record["step"]: record["eval/loss"] for record in done.metrics() if "eval/loss" in record}
    best = max(steps, key=lambda step: steps[step])
    assert best < max(steps)
    line = (
        f"ddpexp: the weights of {done.run.name} are those of step {best}, the best by trainer.keep_best=max:eval/loss"
    )
    for words in ((), ("--checkpoint", "best")):
        evaluated = evaluate(ddpexp, done.run.name, *words)
        assert evaluated.err.splitlines()[0] == f"{line} ({steps[best]:.6g})"
        assert metrics(evaluated)["eval/loss"] == pytest.approx(steps[best], rel=1e-5)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    started = [
        ddpexp.start(
            "evaluate", done.run.name, "launcher=torchrun-env",
            environ={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [finish(*one) for one in started]
    assert [one.code for one in ended] == [0, 0]
    assert "".join(one.err for one in ended).count("the best by trainer.keep_best") == 1  # of all commands one says it
    for word in ("last", f"step-{max(steps)}", max(steps)):
        evaluated = evaluate(ddpexp, done.run.name, "--checkpoint", word)
        assert evaluated.err == ""
        assert metrics(evaluated)["eval/loss"] == pytest.approx(steps[max(steps)], rel=1e-5)
    command_refused(
        evaluate(ddpexp, done.run.name, "--checkpoint", "bst"), "--checkpoint bst: best nor last nor a step"
    )
    single = done.run / f"checkpoints/step-{max(steps):08}"
    command_refused(evaluate(ddpexp, single, "--checkpoint", "best"), "--checkpoint best: a single checkpoint")


@pytest.fixture
def copied(trained: Done, tmp_path: Path) -> Path:
    return shutil.copytree(trained.run, tmp_path / "copy")


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def evaluate(ddpexp: Ddpexp, *arguments: object) -> Done:
    return ddpexp("evaluate", *map(str, arguments))


def metrics(done: Done) -> dict[str, float]:
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.startswith("eval/"))
    fields = line.split()
    return {name: float(value) for name, value in zip(fields[::2], fields[1::2], strict=True)}


WORDS = [word for word in SMALL if not word.startswith("trainer.")]


def test_a_run_directory_gives_the_numbers_of_its_result(ddpexp: Ddpexp, trained: Done) -> None:
    done = evaluate(ddpexp, trained.run)
    assert metrics(done) == pytest.approx(trained.result()["metrics"], rel=1e-5)
    assert trained.result()["weights_sha256"] in done.out
    assert list(ddpexp.folder.iterdir()) == []  # it writes nothing


def test_a_checkpoint_and_its_file_give_the_same_numbers_at_any_number_of_workers(
    ddpexp: Ddpexp, trained: Done
) -> None:
    checkpoint = trained.run / "checkpoints/step-00000010"
    for arguments in ((checkpoint, "trainer.gpus=1"), (checkpoint / "model.safetensors", "trainer.gpus=4")):
        assert metrics(evaluate(ddpexp, *arguments)) == pytest.approx(trained.result()["metrics"], rel=1e-5)


def test_bare_weights_are_evaluated_with_the_overrides_of_a_recipe(
    ddpexp: Ddpexp, trained: Done, tmp_path: Path
) -> None:
    weights = shutil.copy(trained.run / "checkpoints/step-00000010/model.safetensors", tmp_path / "weights.safetensors")
    assert metrics(evaluate(ddpexp, weights, *WORDS)) == pytest.approx(trained.result()["metrics"], rel=1e-5)
    with refused(f"evaluate {weights}: recipe=mnist"):
        verbs.evaluation_of(call("evaluate", str(weights)))
    command_refused(evaluate(ddpexp, weights, *WORDS, "model=lenet"), f"evaluate {weights}: another model")
    with refused("recipe=mnsit: recipe=mnist?"):
        verbs.evaluation_of(call("evaluate", str(weights), "recipe=mnsit"))


def test_single_keys_of_the_run_can_be_changed_and_wrong_ones_are_refused(ddpexp: Ddpexp, trained: Done) -> None:
    fewer = metrics(evaluate(ddpexp, trained.run, "data.embedded_test=50"))
    assert fewer != pytest.approx(trained.result()["metrics"], rel=1e-5)
    for override, word in (("trainer.gpu=1", "trainer.gpus?"), ("model=lenet", "single keys")):
        with refused(f"{override.partition('=')[0]}: {word}"):
            verbs.evaluation_of(call("evaluate", str(trained.run), override))


def test_what_is_not_there_is_refused_with_its_name(ddpexp: Ddpexp, tmp_path: Path, copied: Path) -> None:
    (tmp_path / "text.safetensors").write_text("these are no weights")
    command_refused(evaluate(ddpexp, tmp_path / "text.safetensors", *WORDS), "text.safetensors: as safetensors")
    (tmp_path / "empty").mkdir()
    shutil.rmtree(copied / "checkpoints")
    for words, expected in (
        (["nowhere"], "evaluate nowhere: no such"),
        (["recipe=mnist"], "evaluate recipe=mnist: RUN_DIR recipe=mnist"),
        ([__file__], "test_evaluate.py: code"),
        ([str(tmp_path / "empty"), *WORDS], "empty: no weights"),
        ([str(copied)], "checkpoints: complete"),
    ):
        with refused(expected):
            verbs.evaluation_of(call("evaluate", *words))


def test_damaged_weights_are_refused_and_of_a_run_older_ones_evaluated_with_a_warning(
    ddpexp: Ddpexp, copied: Path
) -> None:
    path = copied / "checkpoints/step-00000010/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    command_refused(evaluate(ddpexp, path), "model.safetensors: hash")
    command_refused(evaluate(ddpexp, path.parent), "model.safetensors: hash")
    done = evaluate(ddpexp, copied)
    assert done.code == 0, done.err
    assert re.search(
        r"warning: .*step-00000010 is damaged and not used: model\.safetensors is damaged: its hash", done.err
    )
    assert "the weights are of step 5; resume the run" in done.err
    assert "step-00000005 " in done.out


@pytest.mark.fault("S5")
@pytest.mark.parametrize("key", ["model", "data", "task", "optimizer", "scheduler"])
def test_a_run_directory_of_others_cannot_run_code(copied: Path, key: str) -> None:
    text = (copied / "config.yaml").read_text()
    poisoned = re.sub(rf"^({key}:\n(?:  .*\n)*?)  _target_: .*$", r"\1  _target_: os.system", text, flags=re.MULTILINE)
    assert poisoned != text
    (copied / "config.yaml").write_text(poisoned)
    with refused(f"{key}._target_=os.system: not allowed"):
        verbs.evaluation_of(call("evaluate", str(copied)))


@pytest.mark.fault("S5")
def test_run_trust_recorded_in_a_run_directory_is_ignored(ddpexp: Ddpexp, copied: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "stranger.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nfrom ddpexp.recipes.mnist import *\n"
    )
    text = (copied / "config.yaml").read_text()
    for old, new in [
        ("ddpexp.recipes.mnist.Linear", "stranger.Linear"),
        ("trust: []", "trust: [stranger]"),
        ("code: null", f"code: {code}"),
    ]:
        assert old in text
        text = text.replace(old, new)
    (copied / "config.yaml").write_text(text)
    command_refused(evaluate(ddpexp, copied), "copy: model._target_=stranger.Linear")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "config.yaml: configuration of a run"),
        ("run: {", "config.yaml: cannot be read"),
        ("run: !!python/object/apply:os.system ['touch imported']", "config.yaml: cannot be read"),
        ("run: {trust: [], code: null}", ": missing"),
    ],
)
def test_a_damaged_configuration_is_refused(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (copied / "config.yaml").write_text(text)
    with refused(expected):
        verbs.evaluation_of(call("evaluate", str(copied)))
    assert not (tmp_path / "imported").exists()


def test_how_a_run_was_started_does_not_matter_to_its_evaluation(ddpexp: Ddpexp, copied: Path) -> None:
    text = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(
        re.sub(r"^launcher:\n(?:  .*\n)*", "launcher:\n  _target_: os.system\n", text, flags=re.MULTILINE)
    )
    assert evaluate(ddpexp, copied).code == 0
    command_refused(evaluate(ddpexp, copied, "launcher=mpi"), "launcher=mpi: mpirun")
    with refused("launcher=mpl: launcher=mpi?"):
        verbs.evaluation_of(call("evaluate", str(copied), "launcher=mpl"))


def test_evaluate_alone_says_how_it_is_used_and_ends_with_2(ddpexp: Ddpexp) -> None:
    done = evaluate(ddpexp)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ddpexp: evaluate what?\nusage: ddpexp evaluate RUN_DIR_OR_WEIGHTS")
    shown = evaluate(ddpexp, "--help")
    assert (shown.code, shown.out, shown.err) == (0, done.err.removeprefix("ddpexp: evaluate what?\n"), "")


@pytest.mark.parametrize(
    "part",
    [
        ".",
        *(
            pytest.param(part, marks=pytest.mark.slow)
            for part in ("checkpoints/step-00000010/model.safetensors", "checkpoints")
        ),
    ],
)
def test_weights_start_another_run(ddpexp: Ddpexp, trained: Done, part: str) -> None:
    done = ddpexp(
        *SMALL, f"run.init_from={trained.run / part}", "trainer.max_steps=1", "optimizer.lr=0", "trainer.gpus=2"
    )
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == trained.result()["weights_sha256"]
    assert re.search(r"^run\.init_from=\S+: the weights of \S+/step-00000010", done.out, re.MULTILINE)


def test_the_sets_to_evaluate_are_typed_with_split(ddpexp: Ddpexp, trained: Done) -> None:
    done = evaluate(ddpexp, "--split=eval", trained.run)
    assert {name.partition("/")[0] for name in metrics(done)} == {"eval"}
    command_refused(evaluate(ddpexp, trained.run, "--split", "test"), "--split test: eval")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--split"], "evaluate --split: --split test"),
        (["--split="], "evaluate --split: --split test"),
        (["--split", "--json"], "evaluate --split: --split test"),
        (["--split", "a", "--split=b"], "evaluate --split: once"),
        (["--split=a,"], "--split: --split eval,test"),
    ],
)
def test_a_split_without_names_is_refused(options: list[str], expected: str) -> None:
    with refused(expected):
        verbs.evaluation_of(call("evaluate", "run", *options))


def test_a_run_without_checkpoints_starts_no_other(ddpexp: Ddpexp, copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    done = ddpexp(*SMALL, f"run.init_from={copied}")
    command_refused(done, f"run.init_from={copied}: checkpoints holds no complete checkpoint")
    assert not done.run.exists()


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", ["left.pth", "it's $left.bin", "left.safetensors"])
def test_a_file_of_torch_save_is_named_with_a_line_that_converts_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tied()
    torch.save({"step": 3, "state_dict": model.state_dict()}, tmp_path / name)
    with refused(f"{name}: torch.save") as caught:
        find(tmp_path / name, "evaluate x", pytest.fail)
    assert "\n" not in str(caught.value)
    command = str(caught.value).rpartition(" once with python ")[2].rpartition(", and name ")[0]
    stem = "left-converted" if name == "left.safetensors" else (tmp_path / name).stem
    converted = tmp_path / f"{stem}.safetensors"
    words = [sys.executable, *shlex.split(command)]
    said = subprocess.run(words, cwd="/", check=True, timeout=PATIENCE, capture_output=True, text=True).stdout
    assert said == f"{converted} has the tensors of {tmp_path / name}, its part state_dict.\n"
    again = subprocess.run(words, cwd="/", timeout=PATIENCE, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (1, f"ddpexp: {converted} exists already.\n")
    found = find(converted, "evaluate x", pytest.fail)
    other = Tied()
    load_weights({"model": other}, found, "evaluate x")
    assert torch.equal(other.head.weight, model.head.weight)


def test_an_old_pickle_and_a_name_alone_do_not_decide(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "old", _use_new_zipfile_serialization=False)
    with refused("old: torch.save"):
        find(tmp_path / "old", "evaluate old", pytest.fail)
    save_file({"a": torch.ones(2)}, tmp_path / "weights.pth")
    assert find(tmp_path / "weights.pth", "evaluate weights.pth", pytest.fail) == tmp_path / "weights.pth"


class Tied(nn.Module):
    """One tensor under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.tail = nn.Linear(3, 5)
        self.head.weight = self.tail.weight = self.embed.weight


@pytest.mark.parametrize("names", [("embed",), ("head",), ("tail",), ("embed", "tail"), ("embed", "head", "tail")])
def test_tied_weights_are_there_under_any_of_their_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    model, kept = Tied(), torch.randn(5, 3)
    state = {"tail.bias": torch.randn(5), **{f"{name}.weight": kept.clone() for name in names}}
    save_file(state, tmp_path / "model.safetensors")
    load_weights({"model": model}, tmp_path / "model.safetensors", "evaluate")
    assert torch.equal(model.embed.weight, kept)
    assert model.head.weight is model.tail.weight is model.embed.weight


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"head.weight": torch.zeros(5, 3)}, "embed.weight and head.weight"),
        ({"tail.bias": None}, "lacks tail.bias"),
        ({"tail.bias": None, "tail.bais": torch.zeros(5)}, "has tail.bais"),
        ({"embed.weight": None}, "lacks embed.weight, head.weight, tail.weight"),
        ({"tail.bias": torch.zeros(4)}, "tail.bias is (4,)"),
    ],
)
def test_weights_of_another_model_are_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], problem: str
) -> None:
    state = {"embed.weight": torch.ones(5, 3), "tail.bias": torch.zeros(5), **change}
    save_file({name: value for name, value in state.items() if value is not None}, tmp_path / "model.safetensors")
    with refused(f"evaluate x: {problem}"):
        load_weights({"model": Tied()}, tmp_path / "model.safetensors", "evaluate x")


class Counted(nn.Linear):
    """A layer that keeps more than tensors in its state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_a_model_that_keeps_more_than_tensors_takes_weights(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, tmp_path / "model.safetensors")
    model = Counted(2, 1)
    load_weights({"model": model}, tmp_path / "model.safetensors", "evaluate")
    assert torch.equal(model.weight, torch.ones(1, 2))


@pytest.mark.variants(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("delay", [0.9, pytest.param(0.3, marks=pytest.mark.slow)])
def test_no_end_leaves_a_temporary_file(
    ddpexp: Ddpexp, trained: Done, tmp_path: Path, number: int, delay: float
) -> None:
    (tmp_path / "tmp").mkdir()
    process, _ = ddpexp.start("evaluate", str(trained.run), environ={"TMPDIR": str(tmp_path / "tmp")})
    time.sleep(delay)
    process.send_signal(number)
    try:
        process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode in (128 + number, -number, 0)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_manifest_beside_the_weights_holds_their_hash(trained: Done) -> None:
    folder = trained.run / "checkpoints/step-00000010"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    for name, file in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert len(data) == file["num_bytes"]
        for piece in file["pieces"]:
            assert piece["sha256"] == hashlib.sha256(data[piece["offset"] :][: piece["num_bytes"]]).hexdigest()
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "checkpoint.json"}
    assert {"model.safetensors", "state.optimizers.json", "config.yaml"} < set(manifest["files"])
