"""recipe=distill: the loss of its source, a teacher that stays as it is, under every strategy, and refusals."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from recipes.distill import Distill, Distilled
from recipes.mnist import LeNet
from tests.conftest import Ddpexp
from tests.refusals import command_refused

SHORT = (
    "recipe=distill", "data.source=embedded", "data.embedded_train=160", "data.embedded_test=32", "logger=none",
    "run.init_from=teacher.safetensors", "trainer.gpus=2", "trainer.threads=1", "trainer.global_batch_size=8",
    "trainer.max_steps=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What the recipe does is tested, not how fork servers start."""
    return warm_environ


def pair() -> Distilled:
    torch.manual_seed(0)
    return Distilled(nn.Linear(4, 3), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))


def test_the_loss_is_a_mean_of_both_divergences() -> None:
    model, inputs, labels = pair(), torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    student, teacher = model.student(inputs), model.teacher(inputs)
    soft = nn.functional.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="sum") * 4
    hard = nn.functional.cross_entropy(student, labels, reduction="sum")
    task = Distill(temperature=2, alpha=0.25)
    loss, count, metrics = task.step(model, (inputs, labels))
    torch.testing.assert_close(loss, 0.75 * hard + 0.25 * soft)
    assert (count, set(metrics)) == (5, {"accuracy", "agreement"})
    torch.testing.assert_close(task.step(model.eval(), (inputs, labels))[0], hard)


def test_the_teacher_computes_as_in_evaluation_and_has_no_gradient() -> None:
    model = pair().train()
    assert model.student.training
    assert not any(module.training for module in model.teacher.modules())
    assert {name.partition(".")[0] for name, one in model.named_parameters() if one.requires_grad} == {"student"}


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"task.temperature=0 divides the scores"):
        Distill(temperature=0)
    with pytest.raises(ValueError, match=r"task.alpha=2 is the teacher's share"):
        Distill(alpha=2)
    model = Distilled(nn.Linear(4, 3), nn.Linear(4, 5))
    with pytest.raises(ValueError, match="the teacher has scores for 5 classes and the student for 3"):
        Distill().step(model, (torch.randn(2, 4), torch.tensor([0, 1])))


@pytest.mark.variants(1)
@pytest.mark.parametrize("words", [("strategy=fsdp",), (), ("strategy.shard_optimizer=true",)])
def test_the_teacher_stays_as_it_is_under_every_strategy(ddpexp: Ddpexp, words: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    teacher = LeNet().state_dict()
    save_file(teacher, ddpexp.folder / "teacher.safetensors")
    done = ddpexp(*SHORT, *words)
    assert done.code == 0, done.err
    [path] = (done.run / "checkpoints").glob("step-00000003/model.safetensors")
    saved = load_file(path)
    assert {name: one for name, one in saved.items() if name.startswith("teacher.")}.keys() == {
        f"teacher.{name}" for name in teacher
    }
    assert all(torch.equal(saved[f"teacher.{name}"], one) for name, one in teacher.items())


def test_a_run_without_a_teacher_is_refused_in_a_sentence(ddpexp: Ddpexp) -> None:
    done = ddpexp(*(word for word in SHORT if not word.startswith("run.init_from")))
    command_refused(done, "run.init_rename: run.init_from")
