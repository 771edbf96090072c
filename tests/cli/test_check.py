"""`ddpexp check`: sound recipes pass, and each mistake is found with its sentence."""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpexp.check import trials
from ddpexp.check.attributes import Attributes
from ddpexp.check.global_loss_trials import wrong_global_loss
from ddpexp.check.job import Part, temporary_folder
from ddpexp.check.short_run import shortened
from ddpexp.check.subject import Subject, loss_of_batch
from ddpexp.check.train_step_trials import means_in_train_step, never_trained, uneven_calls
from ddpexp.check.verdict import judge
from ddpexp.cli.check import check
from ddpexp.config.compose import compose
from ddpexp.config.parse import load, parse
from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.errors import DdpexpError
from ddpexp.run.lock import Owner
from ddpexp.train.precision import Precision
from tests.cli.broken.kinds import broken, faulty, odd
from tests.conftest import ROOT, Ddpexp
from tests.refusals import refused
from tests.typed import call

CONF = ROOT / "tests/cli/broken/conf"
FILE = ROOT / "tests/cli/broken/kinds/broken.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is found is tested, not how processes start."""
    return warm_environ


def line(text: str) -> str:
    """Return the place of the only line of the recipes that contains a text."""
    numbers = [number for number, one in enumerate(FILE.read_text().splitlines(), start=1) if text in one]
    assert len(numbers) == 1, text
    return f"{FILE}:{numbers[0]}"


def subject(task: Any, model: Any = None) -> Subject:
    torch.manual_seed(0)
    model = broken.Net() if model is None else model
    modules = {"model": model} if isinstance(model, torch.nn.Module) else model
    return Subject(task, model, modules, Precision("fp32", CPU, False), CPU)


def batch(data: Any = None, count: int = 12) -> Any:
    return EvalBatches(broken.points(96, 0) if data is None else data, count, 0, 1, CPU).first()


# The trials.


def test_a_sound_recipe_has_no_problem_in_any_trial() -> None:
    train = TrainBatches(broken.points(96, 0), plan_batches(24, 12, 1), 0, 0, CPU)
    evals = {"eval": EvalBatches(broken.points(33, 1), 12, 0, 1, CPU)}
    sound = subject(broken.Sound())
    assert trials.different_samples(train, evals) is None
    assert trials.different_losses(sound, batch()) is None
    assert trials.wrong_sums(sound, batch()) == []
    assert trials.changing_names(sound, list(evals["eval"]), "eval") is None
    assert trials.unused_parameters(sound, batch()) == ([], "")
    assert sound.task.calls == 0  # type: ignore[attr-defined]


def test_a_mean_for_a_sum_is_found() -> None:
    [problem] = trials.wrong_sums(subject(broken.Mean()), batch())
    assert "seems to return the mean of the loss, not its sum" in problem
    assert str(FILE) in problem


def test_a_metric_that_is_no_sum_is_found() -> None:
    [problem] = trials.wrong_sums(subject(broken.NotAdditive()), batch())
    place = line('{"spread"').rpartition(":")[2]
    assert f"returns the metric 'spread' in line {place}, but it must be a sum over samples: " in problem


def test_what_draws_random_numbers_in_an_evaluation_is_left_out() -> None:
    class Noisy(broken.NotAdditive):
        adds = True

        def step(self, model: Any, batch: Any) -> Any:
            loss, count, metrics = super().step(model, batch)
            return loss + torch.rand(len(batch[0])).sum(), count, {} if self.adds else metrics

    with refused("random numbers of an evaluation are in loss", DdpexpError):
        trials.wrong_sums(subject(Noisy()), batch())
    noisy = Noisy()
    noisy.adds = False
    [problem] = trials.wrong_sums(subject(noisy), batch())
    assert "the metric 'spread'" in problem


def test_counts_that_are_not_those_of_the_losses_are_found() -> None:
    assert trials.wrong_counts(subject(broken.Parts()), [batch()]) is None
    labels = batch()[1]
    ones = int(labels.sum())
    problem = trials.wrong_counts(subject(broken.OtherCounts()), [batch()])
    assert problem is not None
    assert f"OtherCounts.counts ({FILE}:" in problem
    assert f"gives the count {ones + len(labels)} for the loss 'ones', and Parts.step ({FILE}:" in problem
    assert f") the count {ones} for the same batch" in problem
    problem = trials.wrong_counts(subject(broken.OtherNames()), [batch()])
    assert problem is not None
    assert "gives no tensor as a count for the loss 'ones'" in problem


def test_a_loss_that_is_normalized_by_its_micro_batch_is_found() -> None:
    assert trials.wrong_sums(subject(broken.Parts()), batch()) == []
    [problem] = trials.wrong_sums(subject(broken.ByMicroBatch()), batch())
    assert f"Parts.step ({FILE}:" in problem
    assert "returns the loss 'ones' in line " in problem
    assert "but it must be a sum over samples: " in problem


def test_an_embed_that_mixes_samples_and_a_mean_over_the_global_batch_are_found() -> None:
    def found(task: Any) -> list[str]:
        return wrong_global_loss(subject(task), task, batch())

    assert found(broken.Contrast()) == []
    assert found(odd.Noisy()) == []
    [problem] = found(broken.ContrastMean())
    assert f"ContrastMean.loss ({FILE}:" in problem
    assert "seems to return the mean of the loss, not its sum: " in problem
    [problem] = found(broken.ContrastCentred())
    assert f"ContrastCentred.embed ({FILE}:" in problem
    assert "returns other rows for the same samples in smaller batches" in problem


def test_a_mean_that_a_train_step_gives_to_backward_is_found() -> None:
    problem, are_sums = means_in_train_step(subject(broken.ManualMean()), batch())
    assert problem is not None
    place = line("micro_batch.backward(losses.mean()").rpartition(":")[2]
    assert f"ManualMean.train_step ({FILE}:" in problem
    assert f"seems to give backward in line {place} the mean of a loss, not its sum: " in problem
    assert not are_sums
    assert means_in_train_step(subject(broken.Manual()), batch()) == (None, True)
    adversarial = subject(broken.Adversarial(), broken.networks())
    pairs = torch.randn(12, 4), torch.zeros(12)
    assert means_in_train_step(adversarial, pairs) == (None, False)  # its noise is other noise for a half
    assert means_in_train_step(subject(broken.Manual()), batch(count=1)) == (None, False)


def test_losses_are_compared_in_training_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    for task, differ in ((broken.EvalByRank(), [False, True]), (broken.ManualByRank(), [True, False])):
        losses = []
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            losses.append([trials.loss_of(subject(task), batch(), trains) for trains in (True, False)])
        assert [one != other for one, other in zip(*losses, strict=True)] == differ


def test_random_numbers_of_python_are_found() -> None:
    assert trials.draws_on_host(subject(broken.PythonRandom()), batch())
    assert not trials.draws_on_host(subject(broken.Sound()), batch())
    assert not trials.draws_on_host(subject(broken.Manual()), batch())


def test_sums_of_any_shape_and_constants_are_no_problem() -> None:
    class Others(broken.Sound):
        def step(self, model: Any, batch: Any) -> Any:
            loss, count, _ = super().step(model, batch)
            return (
                loss,
                count,
                {"table": (torch.bincount(batch[1], minlength=2), count), "rate": (0.5, 1), "none": (0, 0)},
            )

    assert trials.wrong_sums(subject(Others()), batch()) == []


def test_a_data_set_that_changes_is_found() -> None:
    noisy = broken.load_noisy().train
    train = TrainBatches(noisy, plan_batches(24, 12, 1), 0, 0, CPU)
    problem = trials.different_samples(train, {})
    place = line("def fetch")
    assert problem is not None
    assert problem.startswith(f"the set `train` returns different samples at the same index: Noisy.fetch ({place}). ")


def test_a_loss_that_depends_on_the_time_is_found() -> None:
    problem = trials.different_losses(subject(broken.ByTime()), batch())
    assert problem is not None
    assert "for the same batch, weights and random seed" in problem


def test_a_number_that_is_another_one_at_the_end_of_an_epoch_is_found() -> None:
    rows = broken.points(96, 0)
    train = TrainBatches(rows, plan_batches(24, 12, 1), 0, 0, CPU)
    *_, last = train.steps(0, train.steps_per_epoch)
    place = last[1][0][0]  # the first row of the last micro-batch

    class Chunks(broken.Sound):
        def step(self, model: Any, batch: Any) -> Any:
            loss, count, metrics = super().step(model, batch)
            return loss, count - int(batch[0][0].equal(place)), metrics

    assert trials.last_batches(subject(broken.Sound()), train, {}) is None
    problem = trials.last_batches(subject(Chunks()), train, {})
    assert problem is not None
    assert "returns the counts 12 and 11 in the last step of an epoch: a number must be the same" in problem


def test_a_last_batch_of_an_evaluation_that_is_left_out_here_is_tried() -> None:
    evals = {"eval": EvalBatches(broken.points(33, 1), 12, 0, 1, CPU, limit=24)}
    train = TrainBatches(broken.points(96, 0), plan_batches(24, 12, 1), 0, 0, CPU)
    problem = trials.last_batches(subject(broken.Renaming()), train, evals)
    assert problem is not None
    assert "returns the metrics accuracy for one batch of `eval` and none for another" in problem


def test_rounds_that_depend_on_the_batch_are_found_and_calls_of_the_model_may() -> None:
    batches = [batch(broken.points(12, seed)) for seed in range(4)]
    problem = uneven_calls(subject(faulty.UnevenRounds()), batches)
    assert problem is not None
    assert re.search(r"calls update\.micro_batch\(last=True\) \d times for one batch and \d times for another", problem)
    assert uneven_calls(subject(broken.Manual()), batches) is None


def test_parameters_that_a_train_step_never_trains_are_named_and_those_that_it_trains_rarely_are_not() -> None:
    networks = broken.networks()
    names = [f"{key}.{name}" for key, module in networks.items() for name, _ in module.named_parameters()]
    missing, _ = never_trained(subject(faulty.Forgotten(), networks), [batch()], names)
    assert missing == ["generator.weight", "generator.bias"]
    assert never_trained(subject(broken.Adversarial(), networks), [batch()], names)[0] == []
    rarely, net = odd.Rarely(), odd.Headed()
    assert never_trained(subject(rarely, net), [batch()], [name for name, _ in net.named_parameters()])[0] == []


def test_a_train_step_through_step_is_tried_as_a_step_in_training_is() -> None:
    through, net = odd.ThroughStep(), broken.Net()
    expected = loss_of_batch(subject(through, net).copied(trains=True).step(batch()))
    assert trials.loss_of(subject(through, net), batch()) == expected.item()
    assert uneven_calls(subject(through), [batch(), batch()]) is None
    assert never_trained(subject(through, net), [batch()], [name for name, _ in net.named_parameters()])[0] == []
    assert means_in_train_step(subject(through), batch()) == (None, False)  # of a mean of losses nothing is said


def test_names_that_change_are_found() -> None:
    found = trials.changing_names(subject(broken.Renaming()), [batch(), batch(count=5)], "eval")
    assert found is not None
    assert "returns the metrics accuracy for one batch of `eval` and none for another" in found


def test_parameters_without_a_gradient_are_named_with_the_line_that_makes_them() -> None:
    names, place = trials.unused_parameters(subject(broken.Sound(), broken.Unused()), batch())
    assert names == ["head.weight", "head.bias"]
    assert place == line("self.head =")


@pytest.mark.parametrize(
    ("task", "model", "changed"),
    [
        (broken.Stateful, broken.Net, {"Stateful.calls": "self.calls += 1", "Stateful.average": "self.average = 0.9"}),
        (broken.Sound, broken.Counting, {"Counting.scale": "self.scale *= 1.5", "Sound.calls": "self.calls += 1"}),
    ],
)
def test_attributes_that_change_in_a_step_are_named_with_their_lines(
    task: Any, model: Any, changed: Mapping[str, str]
) -> None:
    objects = [model(), task()]
    before = Attributes(objects)
    assert before.changed(Attributes(objects)) == {}
    objects[1].step(objects[0], batch())
    assert before.changed(Attributes(objects)) == {name: line(text) for name, text in changed.items()}


class Inner:
    def __init__(self) -> None:
        self.count = 0


class Held:
    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.table, self.inner = np.zeros(3), Inner()


@pytest.mark.parametrize("attribute", ["python", "numpy", "torch", "table", "inner"])
def test_generators_arrays_and_objects_of_a_recipe_are_compared_by_their_state(attribute: str) -> None:
    held = Held()
    before = Attributes([held])
    assert before.changed(Attributes([held])) == {}
    changes: dict[str, Callable[[], Any]] = {
        "python": held.python.random,
        "numpy": held.numpy.random,
        "torch": lambda: torch.rand(1, generator=held.torch),
        "table": lambda: held.table.fill(1),
        "inner": lambda: setattr(held.inner, "count", 1),
    }
    changes[attribute]()
    assert list(before.changed(Attributes([held]))) == [f"Held.{attribute}"]


# The verdict.


@functools.cache
def composed(*overrides: str) -> tuple[Experiment, str]:
    found = compose(["recipe=mnist", *overrides])
    assert found is not None
    return parse(found.values), found.text


@pytest.mark.parametrize(
    ("overrides", "batch_sizes"),
    [
        (("trainer.gpus=1",), (128, 64)),
        (("trainer.gpus=8",), (32, 16)),
        (("trainer.gpus=8", "trainer.nodes=512", "trainer.global_batch_size=8192"), (4, 2)),
        (("trainer.gpus=1", "trainer.micro_batch_size=32"), (64, 32)),
        (("trainer.gpus=1", "trainer.global_batch_size=1"), (2, 1)),
    ],
)
def test_the_micro_batch_is_that_of_the_run(overrides: tuple[str, ...], batch_sizes: tuple[int, int]) -> None:
    experiment, text = composed(*overrides, "launcher=slurm", "trainer.compile=true")
    short = load(shortened(text, experiment, "/tmp/folder"))
    assert (short.trainer.global_batch_size, short.trainer.micro_batch_size) == batch_sizes
    assert (short.trainer.gpus, short.trainer.nodes, short.trainer.max_steps, short.logger) == (1, 1, 2, {})
    assert type(short.launcher).__name__ == "Spawn"


def test_callbacks_and_averages_fit_into_two_steps() -> None:
    experiment, text = composed(
        "callbacks=[histograms,early_stopping]", "trainer.swa_start=500", "trainer.average_batch_norm=100"
    )
    short = load(shortened(text, experiment, "/tmp/folder"))
    assert list(short.callbacks) == ["early_stopping"]
    trainer = short.trainer
    assert (trainer.swa_start, trainer.swa_every, trainer.average_batch_norm) == (0, 1, 1)


ONE: Mapping[str, Any] = {
    "device": "cpu", "weights": "a", "findings": [], "changed": {}, "step": "Task.step (x.py:3)", "is_manual": False,
    "eval_step": "Task.step (x.py:3)", "draws_on_host": False,
}  # fmt: skip
TWO: Mapping[str, Any] = {
    "device": "cpu", "weights": "b", "findings": [], "losses": [1.5, 1.5], "eval_losses": [1.0, 1.0], "changed": {},
    "dependent": "",
}  # fmt: skip
RECORDS: Mapping[str, Mapping[int, Mapping[str, float]]] = {
    "one": {1: {"train/loss": 1.0, "train/grad_norm": 2.0}, 2: {"train/loss": 0.9}},
    "one_resumed": {2: {"train/loss": 0.90001}},
    "two_resumed": {2: {"train/loss": 0.9}},
    "two": {1: {"train/loss": 1.0, "train/grad_norm": 2.00001}},
}  # fmt: skip


def verdict(
    one: Mapping[str, Any] = ONE,
    two: Any = TWO,
    records: Any = RECORDS,
    resumed: Any = None,
    *overrides: str,
    two_resumed: Any = None,
) -> dict[str, tuple[bool | None, str]]:
    parts: dict[Part, Any] = {
        "one": one,
        "one_resumed": {"weights": "a", "findings": []} if resumed is None else resumed,
        "two": two,
        "two_resumed": {"weights": two["weights"] if isinstance(two, dict) else "b", "findings": []}
        if two_resumed is None
        else two_resumed,
    }
    return {finding.check: (finding.ok, finding.text) for finding in judge(parts, records, composed(*overrides)[0])}


def test_all_is_well() -> None:
    assert [ok for ok, _ in verdict().values()] == [True, True, True]


@pytest.mark.parametrize(
    ("facts", "check", "sentence"),
    [
        (
            {"resumed": {"weights": "c", "findings": []}, "one": {**ONE, "changed": {"Net.calls": "net.py:7"}}},
            "resume",
            "the second step gives other weights after a resume than without one: this changed during the steps, and is "
            "not in checkpoints: Net.calls (net.py:7). Keep it in a buffer of the model (register_buffer), or in "
            "get_extra_state of a module.",
        ),
        (
            {"resumed": "rank 0: ValueError: no"},
            "resume",
            "the run cannot be resumed from its first checkpoint: rank 0: ValueError: no",
        ),
        (
            {"two": {**TWO, "dependent": "Task.step (x.py:4) calls the collective all_gather: "}},
            "workers",
            "Task.step (x.py:4) calls the collective all_gather: ",
        ),
        (
            {"two": {**TWO, "losses": [1.5, 3.0]}},
            "rank",
            "Task.step (x.py:3) depends on the rank, or its model or data do: for the same batch, weights and random seed "
            "the loss is 1.5 on rank 0 and 3 on rank 1.",
        ),
        (
            {"two": {**TWO, "eval_losses": [1.5, 3.0]}},
            "rank",
            "Task.step (x.py:3) depends on the rank in evaluation, or its model or data do: for the same batch, weights "
            "and random seed the loss is 1.5 on rank 0 and 3 on rank 1.",
        ),
        (
            {
                "one": {**ONE, "draws_on_host": True},
                "records": {**RECORDS, "two": {1: {"train/loss": 1.1, "train/grad_norm": 2.0}}},
            },
            "workers",
            "the same step has train/loss 1 at one worker and 1.1 at two: Task.step (x.py:3) draws random numbers from "
            "Python or numpy, which differ from worker to worker. Draw them from torch, whose generators are seeded for "
            "each micro-batch.",
        ),
        ({"two": "rank 1: ValueError: no"}, "two", "at two workers: rank 1: ValueError: no"),
        (
            {
                "two": {**TWO, "changed": {"Net.rows": "net.py:7"}},
                "two_resumed": {"weights": "c", "findings": []},
            },
            "resume",
            "at two workers the second step gives other weights after a resume than without one: this changed during the "
            "steps, and is not in checkpoints: Net.rows (net.py:7). Keep it in a buffer of the model (register_buffer), "
            "or in get_extra_state of a module.",
        ),
        (
            {"records": {**RECORDS, "two": {1: {"train/loss": 1.1, "train/grad_norm": 2.0}}}},
            "workers",
            "the same step has train/loss 1 at one worker and 1.1 at two: Task.step (x.py:3) depends on how the batch is "
            "divided.",
        ),
    ],
)
def test_each_problem_has_its_sentence(facts: dict[str, Any], check: str, sentence: str) -> None:
    findings = verdict(**facts)
    assert findings[check] == (False, sentence)
    assert [name for name, (ok, _) in findings.items() if ok is False] == [check]


def test_with_exact_every_bit_counts_and_of_a_train_step_only_the_gradient() -> None:
    exact = ("trainer.reduction=exact", "trainer.micro_batch_size=64")
    assert verdict(ONE, TWO, RECORDS, None, *exact)["workers"][0] is False
    assert verdict(ONE, {**TWO, "weights": "a"}, RECORDS, None, *exact)["workers"][0] is True
    other = {**RECORDS, "two": {1: {"train/loss": 9.0, "train/grad_norm": 2.0}}}
    assert verdict({**ONE, "is_manual": True}, TWO, other)["workers"][0] is True


def test_steps_are_compared_within_the_rounding_of_what_they_compute_in() -> None:
    near = {**RECORDS, "two": {1: {"train/loss": 1.005, "train/grad_norm": 2.0}}}
    assert verdict(ONE, TWO, near)["workers"][0] is False
    for key in ("precision", "param_dtype"):
        assert verdict(ONE, TWO, near, None, f"trainer.{key}=bf16")["workers"][0] is True


def test_on_a_gpu_a_resume_is_compared_within_rounding_unless_algorithms_are_deterministic() -> None:
    one, resumed = {**ONE, "device": "cuda"}, {"weights": "c", "findings": []}
    assert verdict(one, TWO, RECORDS, resumed)["resume"][0] is True
    assert verdict(one, TWO, RECORDS, resumed, "trainer.deterministic=true")["resume"][0] is False
    assert verdict(one, TWO, {**RECORDS, "one_resumed": {2: {"train/loss": 0.8}}}, resumed)["resume"][0] is False
    assert verdict(ONE, TWO, RECORDS, resumed)["resume"][0] is False


def test_what_follows_from_another_problem_is_not_reported_again() -> None:
    data = {"check": "data", "ok": False, "text": "other samples"}
    found = verdict({**ONE, "findings": [data]}, two={**TWO, "losses": [1.0, 2.0]})
    assert [name for name, (ok, _) in found.items() if ok is False] == ["data"]
    memory = {"check": "memory", "ok": False, "text": "too large"}
    failed = {"check": "steps", "ok": False, "text": "the same"}
    assert list(verdict({**ONE, "weights": None, "findings": [memory, failed]})) == ["memory"]
    skipped = {"check": "sums", "ok": None, "text": "not checked: the same"}
    assert verdict({**ONE, "weights": None, "findings": [skipped, failed]}) == {"steps": (False, "the same")}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "check what"),
        (["-m", "recipe=mnist"], "check -m: one run"),
        (["recipe=mnist", "--jsn"], "check --jsn: --json?"),
        (["what"], "what"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], expected: str) -> None:
    with refused(expected):
        check(call("check", *arguments))


@pytest.mark.parametrize("override", ["trainer.gpus=999", "trainer.nodes=0"])
def test_numbers_of_workers_that_no_run_can_have_are_refused(override: str) -> None:
    with refused(override):
        shortened(composed(override)[1], composed(override)[0], "/tmp/folder")


def test_folders_of_killed_checks_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = Owner.here()
    owners = {
        "killed": here.as_record() | {"started": "1"},
        "alive": here.as_record(),
        "elsewhere": here.as_record() | {"host": "other", "started": "1"},
        "unreadable": [],
    }
    for name, record in owners.items():
        folder = tmp_path / f"ddpexp-check-{name}"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps(record))
    (tmp_path / "ddpexp-check-empty").mkdir()
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        assert (folder / "owner.json").exists()
    left = {path.name.rpartition("-")[2] for path in tmp_path.iterdir()}
    assert left == {"alive", "elsewhere", "unreadable", "empty"}


# The command.


def checked(ddpexp: Ddpexp, tmp_path: Path, *overrides: str) -> tuple[int, dict[str, bool | None], list[str]]:
    """Run the command; return its exit code, the state of each line, and the problems."""
    done = ddpexp(
        "check", "--config-dir", str(CONF), "recipe=broken", "--json", *overrides, environ={"TMPDIR": str(tmp_path)}
    )
    assert list(tmp_path.iterdir()) == []
    findings = [json.loads(text) for text in done.out.splitlines() if text.startswith("{")]
    states = {finding["check"]: finding["ok"] for finding in findings}
    return done.code, states, [finding["text"] for finding in findings if finding["ok"] is False]


CHECKS = {"data", "forward", "sums", "metrics", "parameters", "steps", "resume", "workers"}


def test_two_networks_under_manual_optimization_pass_and_nothing_is_left(ddpexp: Ddpexp, tmp_path: Path) -> None:
    code, states, problems = checked(
        ddpexp, tmp_path, "task._target_=kinds.broken.Adversarial", "model._target_=kinds.broken.networks",
        "launcher=slurm", "trainer.nodes=3", "trainer.gpus=4",
    )  # fmt: skip
    assert (code, problems) == (0, [])
    assert states == {**dict.fromkeys(CHECKS | {"calls", "last"}, True), "launcher": None}


def test_state_that_checkpoints_lack_and_a_rank_are_found_in_real_steps(ddpexp: Ddpexp, tmp_path: Path) -> None:
    code, states, problems = checked(
        ddpexp, tmp_path, "model._target_=kinds.broken.Counting", "task._target_=kinds.broken.ByRank"
    )
    assert code == 1
    assert {name for name, ok in states.items() if ok is False} == {"resume", "rank"}
    assert f"Counting.scale ({line('self.scale *= 1.5')})" in problems[0]
    assert f"ByRank.step ({FILE}:" in problems[1]


def test_an_evaluation_that_fails_is_found(ddpexp: Ddpexp, tmp_path: Path) -> None:
    code, states, problems = checked(ddpexp, tmp_path, "task._target_=kinds.broken.Unfinished")
    place = line("def finish")
    assert (code, states["steps"]) == (1, False)
    [problem] = problems
    assert problem.startswith(f"Unfinished.finish ({place}) raised KeyError: 'hits'")


def test_a_batch_that_does_not_fit_is_found_with_what_helps(ddpexp: Ddpexp, tmp_path: Path) -> None:
    code, states, problems = checked(ddpexp, tmp_path, "task._target_=kinds.broken.TooLarge", "trainer.gpus=2")
    assert (code, states["memory"]) == (1, False)
    [problem] = set(problems)
    assert "a micro-batch of 12 samples does not fit into the memory of this machine" in problem
    assert line("1 << 44") in problem
    assert "use trainer.micro_batch_size=6" in problem


@pytest.mark.slow
def test_buffers_that_differ_by_rank_are_one_finding(ddpexp: Ddpexp, tmp_path: Path) -> None:
    _, states, problems = checked(ddpexp, tmp_path, "model._target_=kinds.faulty.Seen")
    assert [name for name, ok in states.items() if ok is False] == ["two"]
    assert "the buffer model.seen differs between rank 0 and rank 1" in problems[0]


def test_a_task_without_evaluation_is_checked(ddpexp: Ddpexp, tmp_path: Path) -> None:
    code, states, problems = checked(ddpexp, tmp_path, "task._target_=kinds.odd.OnlyTrains", "trainer.eval_every=0")
    assert (code, problems) == (0, [])
    assert states == {**dict.fromkeys(CHECKS | {"calls", "last"}, True), "metrics": None}


@pytest.mark.slow
def test_weights_of_torch_save_are_read_as_a_run_reads_them(ddpexp: Ddpexp, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": broken.Net().state_dict(), "epoch": 3}, f"{folder}/net.pth")
        code, states, problems = checked(ddpexp, tmp_path, f"run.init_from={folder}/net.pth")
    assert (code, problems, states["resume"]) == (0, [], True)


BROKEN = [
    ("sums", "broken.Mean", ""),
    ("sums", "broken.NotAdditive", ""),
    ("sums", "broken.ManualMean", ""),
    ("sums", "faulty.ManualSpread", ""),
    ("forward", "broken.ByTime", ""),
    ("metrics", "faulty.Names", ""),
    ("metrics", "broken.Renaming", ""),
    ("last", "faulty.FixedSize", ""),
    ("parameters", "broken.Sound", "model._target_=kinds.broken.Unused"),
    ("parameters", "faulty.Forgotten", "model._target_=kinds.broken.networks"),
    ("calls", "faulty.UnevenRounds", ""),
    ("data", "broken.Sound", "data._target_=kinds.broken.load_noisy"),
    ("memory", "broken.TooLarge", ""),
    ("steps", "broken.Raising", ""),
    ("steps", "faulty.CountByData", ""),
    ("steps", "faulty.Detached", ""),
    ("steps", "faulty.NoApply", ""),
    ("steps", "faulty.Finished", ""),
    ("resume", "broken.Stateful", ""),
    ("resume", "faulty.OwnGenerator", ""),
    ("resume", "faulty.ManualState", ""),
    ("resume", "broken.Sound", "model._target_=kinds.broken.Counting"),
    ("rank", "broken.EvalByRank", ""),
    ("rank", "broken.ManualByRank", ""),
    ("resume", "faulty.RankMemory", ""),
    ("two", "broken.Sound", "model._target_=kinds.faulty.Seen"),
    ("workers", "broken.PythonRandom", ""),
    ("workers", "faulty.ByWorld", ""),
    ("counts", "broken.OtherCounts", ""),
    ("sums", "broken.ByMicroBatch", ""),
    ("sums", "broken.ContrastMean", ""),
    ("sums", "broken.ContrastCentred", ""),
    ("workers", "faulty.ManualByWorld", ""),
]  # fmt: skip
ODD = [
    ("odd.OnlyTrains", "trainer.eval_every=0"),
    ("odd.Episodes", ""),
    ("odd.CountsSteps", "model._target_=kinds.odd.Steps"),
    ("odd.FillsQueue", "model._target_=kinds.odd.Queue"),
    ("odd.Padded", ""),
    ("odd.Rarely", "model._target_=kinds.odd.Headed strategy.find_unused_parameters=true"),
    ("odd.Table", ""),
    ("odd.CountsExtra", "model._target_=kinds.odd.Extra"),
    ("odd.Means", ""),
    ("odd.Noisy", ""),
    ("odd.Gathers", ""),
    ("broken.Parts", ""),
    ("broken.Contrast", "optimizer=lbfgs"),
    ("broken.Manual", "trainer.micro_batch_size=4"),
    ("broken.Sound", "strategy.broadcast_buffers=false model._target_=kinds.faulty.Seen"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "overrides"), BROKEN, ids=[f"{task} {more}" for _, task, more in BROKEN])
def test_a_recipe_with_one_mistake_has_one_finding(
    ddpexp: Ddpexp, tmp_path: Path, name: str, task: str, overrides: str
) -> None:
    code, states, problems = checked(ddpexp, tmp_path, f"task._target_=kinds.{task}", *overrides.split())
    assert [found for found, ok in states.items() if ok is False] == [name], problems
    assert (code, len(problems)) == (1, 1), problems


@pytest.mark.slow
@pytest.mark.parametrize(("task", "overrides"), ODD, ids=[f"{task} {more}" for task, more in ODD])
def test_a_recipe_that_is_odd_and_right_has_no_finding(
    ddpexp: Ddpexp, tmp_path: Path, task: str, overrides: str
) -> None:
    code, _, problems = checked(ddpexp, tmp_path, f"task._target_=kinds.{task}", *overrides.split())
    assert (code, problems) == (0, [])
