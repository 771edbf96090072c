"""The sections of an experiment: their types, and what they may not say together."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpexp.config.compose import compose
from ddpexp.config.parse import load, parse
from ddpexp.config.schema import Experiment
from ddpexp.config.validate import check_layout
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.rendezvous.layout import resolve
from tests.conftest import PATIENCE


@functools.cache
def shipped() -> str:
    found = compose(["recipe=mnist"])
    assert found is not None
    return found.text


def tree(**changed: Any) -> dict[str, Any]:
    """A composed tree with dotted keys changed: `trainer__gpus=2`."""
    values: dict[str, Any] = yaml.safe_load(shipped())
    for key, value in changed.items():
        *path, last = key.split("__")
        section = values
        for name in path:
            section = section[name]
        section[last] = value
    return values


def refuse_or_resolve(experiment: Experiment) -> Layout:
    trainer = experiment.trainer
    found = resolve(trainer.gpus, trainer.device, trainer.backend, trainer.threads)
    check_layout(experiment, found)
    return found


def refusal(**changed: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        refuse_or_resolve(parse(tree(**changed)))
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_the_shipped_values_parse_into_an_experiment() -> None:
    made = parse(tree())
    assert isinstance(made, Experiment)
    assert made.recipe.name == "mnist"
    assert (made.trainer.gpus, made.trainer.micro_batch_size) == ("auto", "auto")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"trainer__gpus": "two"}, "trainer.gpus=two is not auto or a whole number."),
        ({"trainer__gpus": 1.5}, "trainer.gpus=1.5 is not auto or a whole number."),
        ({"trainer__gpus": True}, "trainer.gpus=true is not auto or a whole number."),
        ({"trainer__gpus": None}, "trainer.gpus=null is not auto or a whole number."),
        ({"trainer__gpus": 0}, "trainer.gpus=0: use a number of workers from 1, or auto for all GPUs."),
        ({"trainer__device": "gpu"}, (
            "trainer.device=gpu is not one of auto, cpu, cuda. Did you mean "
            "trainer.device=cuda?"
        )),
        ({"trainer__device": "cuda"}, "trainer.device=cuda needs a GPU, but this machine shows none"),
        ({"trainer__backend": "nccl"}, "trainer.backend=nccl needs GPUs, but the workers are on CPU."),
        ({"trainer__precision": "bf61"}, "trainer.precision=bf61 is not one of fp32, bf16, fp16. Did you mean"),
        ({"trainer__compile": "yes"}, "trainer.compile=yes is not true or false or one of default, "),
        ({"trainer__compile": "reduce_overhead"}, (
            "trainer.compile=reduce_overhead is not true or false or one of default, reduce-overhead, max-autotune, "
            "max-autotune-no-cudagraphs. Did you mean trainer.compile=reduce-overhead?"
        )),
        ({"trainer__compile": "reduce-overhead"}, (
            "trainer.compile=reduce-overhead records CUDA graphs, and the workers have no GPU."
        )),
        ({"trainer__compile_blocks": "Block"}, (
            "trainer.compile_blocks=Block names what is compiled, and trainer.compile=false compiles nothing. Type "
            "trainer.compile=true"
        )),
        ({"trainer__compile": True, "trainer__compile_blocks": "zoo.Block"}, (
            "trainer.compile_blocks=zoo.Block: use the name of a class without its module"
        )),
        ({"trainer__compile": "max-autotune", "trainer__deterministic": True}, (
            "trainer.compile=max-autotune is incompatible with trainer.deterministic=true: kernels are chosen"
        )),
        ({"trainer__compile": True, "trainer__gpus": 2, "strategy__bucket_cap_mb": 0.5}, (
            "strategy.bucket_cap_mb=0.5 is incompatible with trainer.compile=true, which cuts the graph"
        )),
        ({"trainer__compile_step": True, "trainer__compile": True}, (
            "trainer.compile_step=true compiles the model too, so trainer.compile=true would add nothing"
        )),
        ({"trainer__compile_step": True, "trainer__reduction": "exact", "trainer__micro_batch_size": 8}, (
            "trainer.compile_step=true is incompatible with trainer.reduction=exact, which keeps the gradients"
        )),
        ({"trainer__compile_step": True, "trainer__precision": "fp16"}, (
            "trainer.compile_step=true is incompatible with trainer.precision=fp16, whose scale changes"
        )),
        ({"trainer__compile_step": True, "trainer__param_dtype": "bf16"}, (
            "trainer.compile_step=true is incompatible with trainer.param_dtype=bf16, whose copies of the weights"
        )),
        ({"trainer__compile_step": True, "trainer__activation_checkpointing": ["Block"]}, (
            "trainer.compile_step=true is incompatible with trainer.activation_checkpointing: torch does not"
        )),
        ({"trainer__compile_step": True, "strategy__find_unused_parameters": True}, (
            "trainer.compile_step=true is incompatible with strategy.find_unused_parameters=true, by which DDP"
        )),
        ({"trainer__compile_step": True, "strategy__static_graph": True}, (
            "trainer.compile_step=true is incompatible with strategy.static_graph=true, by which DDP"
        )),
        ({"trainer__cudnn_benchmark": True, "trainer__reduction": "exact", "trainer__micro_batch_size": 8}, (
            "trainer.cudnn_benchmark=true is incompatible with trainer.reduction=exact: cuDNN chooses"
        )),
        ({"trainer__matmul_precision": "tf32"}, (
            "trainer.matmul_precision=tf32 is not one of highest, high, medium. Did you mean "
            "trainer.matmul_precision=high?"
        )),
        ({"trainer__seed": -1}, "trainer.seed=-1: use a whole number from 0 to 2**63 - 1."),
        ({"trainer__seed": 2**63}, f"trainer.seed={2**63}: use a whole number from 0 to 2**63 - 1."),
        ({"trainer__seed": 1.0}, "trainer.seed=1.0 is not a whole number."),
        ({"trainer__epochs": 0}, "trainer.epochs=0: use a whole number from 1 or null."),
        ({"trainer__epochs": None}, "trainer.epochs=null and trainer.max_steps=null make a run that never ends."),
        ({"trainer__eval_every": -1}, "trainer.eval_every=-1: use epoch, a number of steps, or 0 for never."),
        ({"trainer__eval_every": "epochs"}, "trainer.eval_every=epochs is not epoch or a whole number. Did you mean"),
        ({"trainer__clip_grad_norm": 0}, "trainer.clip_grad_norm=0: use a number above 0 or null."),
        ({"trainer__keep_best_k": 2}, (
            "trainer.keep_best_k=2 needs a metric. Type it as well, for example trainer.keep_best=max:eval/accuracy."
        )),
        ({"trainer__test_weights": "best"}, (
            "trainer.test_weights=best needs a metric to keep the best weights by. Type it as well, for example "
            "trainer.keep_best=max:eval/accuracy."
        )),
        ({"trainer__limit_train_samples": 64, "trainer__global_batch_size": 128}, (
            "trainer.limit_train_samples=64 is fewer than trainer.global_batch_size=128, the samples of a step. Use "
            "trainer.limit_train_samples=128, or trainer.global_batch_size=64."
        )),
        ({"trainer__clip_grad_norm": float("nan")}, "trainer.clip_grad_norm=nan: use a number above 0 or null."),
        ({"trainer__nonfinite": "ignore"}, "trainer.nonfinite=ignore is not one of stop, skip."),
        ({"trainer__extra": 1}, "trainer.extra is not a known key."),
        ({"trainer": 3}, "trainer=3 is not a section with keys."),
        ({"trainer": None}, "trainer is missing. A recipe gives it, for example recipe=mnist."),
        ({"trainr": {}}, "trainr is not a known section. Did you mean trainer?"),
        ({"optimizer__lr": None}, "optimizer.lr is missing: schedules multiply it, so every optimizer needs one."),
        ({"optimizer__lr": "fast"}, "optimizer.lr=fast: use a number from 0, such as 0.05."),
        ({"optimizer__lr": True}, "optimizer.lr=true: use a number from 0, such as 0.05."),
        ({"optimizer__lr": -0.1}, "optimizer.lr=-0.1: use a number from 0, such as 0.05."),
        ({"optimizer__lr": float("nan")}, "optimizer.lr=nan: use a number from 0, such as 0.05."),
        ({"optimizer__betas": [0.5, 0.9]}, (
            "optimizer.betas is not an argument of torch.optim.SGD. If the recipe sets it for another "
            "optimizer, remove it with ~optimizer.betas. Arguments: dampening, differentiable, foreach, fused, lr, "
        )),
        ({"optimizer": {"lr": 0.1}}, "optimizer._target_ is missing: it names the class or function to call."),
        ({"scheduler__peak_at": 2}, "scheduler.peak_at=2: use a number from 0 to 1."),
        ({"scheduler__warmup": 0.1}, "scheduler.warmup is not a known key. The rise of scheduler=onecycle is"),
        ({"scheduler__start": "a"}, "scheduler.start=a is not a number."),
        ({"launcher__start_method": "fork"}, "launcher.start_method=fork is not one of forkserver, spawn."),
        ({"launcher__start": "fork"}, "launcher.start is not a known key. Did you mean launcher.start_method?"),
        ({"logger__kind": "tensorbord"}, (
            "logger.kind=tensorbord is not a logger, which is a section with a _target_. Did you mean "
            "logger=tensorboard?")),
        ({"logger__table": {"path": "a"}}, "logger.table._target_ is missing: it names the class or function to call."),
        ({"strategy__sync_batchnorm": True}, "strategy.sync_batchnorm=true needs GPUs: torch has no synchronised"),
        ({"strategy__comm_hook": "fp61"}, (
            "strategy.comm_hook=fp61 is not one of none, fp16, bf16, powersgd. Did you "
            "mean"
        )),
        ({"strategy__reduce_through": "shared"}, (
            "strategy.reduce_through=shared is not one of auto, shared_memory, "
            "backend."
        )),
        (
            {"strategy__reduce_through": "shared_memory", "strategy__comm_hook": "fp16"},
            "strategy.reduce_through=shared_memory leaves nothing to compress, so it is incompatible with "
            "strategy.comm_hook=fp16. Use",
        ),
        (
            {"strategy__static_graph": True, "strategy__find_unused_parameters": True},
            "strategy.static_graph=true finds unused parameters by itself in the first step",
        ),
        ({"data__validation_fraction": 1}, "data.validation_fraction=1: use a share from 0 to below 1, such as 0.1."),
        ({"data__num_workers": "many"}, "data.num_workers=many is not a whole number."),
        ({"data__embedded_train": "many"}, "data.embedded_train=many is not a whole number."),
        ({"data__embedded_test": 0}, "data.embedded_test=0: use a whole number from 1 to 1000000."),
        ({"data__source": "web"}, "data.source=web is not one of auto, files, download, embedded."),
        ({"data__prepare": 3}, "data.prepare=3 is not a text or null."),
        ({"data__prepare": "ddpexp.data.mnist_files.prepar"}, (
            "data.prepare=ddpexp.data.mnist_files.prepar is not "
            "allowed"
        )),
        ({"data__patience": 3}, "data.patience is not a known key."),
        ({"recipe__name": "../elsewhere"}, (
            "recipe.name=../elsewhere: use a plain name, for it names the folder of the "
            "runs."
        )),
        ({"recipe__name": 5}, "recipe.name=5 is not a text."),
        ({"run__dir": 5}, "run.dir=5 is not a text or null."),
        ({"run__dir": ""}, "run.dir= is empty. Give it a folder, or null for one under outputs."),
        ({"run__trust": "os"}, "run.trust=os is not a list, each item a text."),
        ({"task__inner": {"_target_": "os.system"}}, "task.inner._target_=os.system is not allowed"),
    ],
)  # fmt: skip
def test_for_a_wrong_value_the_error_is_a_sentence_with_its_key(changed: Mapping[str, Any], sentence: str) -> None:
    assert refusal(**changed).startswith(sentence)


def test_a_batch_that_does_not_split_is_refused_with_a_size_that_does() -> None:
    assert refusal(trainer__global_batch_size=100, trainer__micro_batch_size=16, trainer__gpus=8) == (
        "trainer.global_batch_size=100 does not split over 8 workers with trainer.micro_batch_size=16 (128 a pass). "
        "Use a multiple of 128, for example trainer.global_batch_size=128."
    )
    assert refusal(trainer__gpus=3) == (
        "trainer.global_batch_size=128 does not split over 3 workers. "
        "Use a multiple of 3, for example trainer.global_batch_size=129."
    )
    assert refusal(trainer__global_batch_size=96, trainer__micro_batch_size=16, trainer__gpus=4).endswith(
        "for example trainer.global_batch_size=128. Or use 1, 2, 3 or 6 workers."
    )


@pytest.mark.parametrize(
    ("found", "where"),
    [
        (Layout(1, 2, "cuda", "nccl", 1), "these workers have GPUs"),
        (Layout(2, 4, "cpu", "gloo", 1), "these workers are on 2 nodes"),
    ],
)
def test_memory_is_shared_by_cpu_workers_of_one_host_alone(found: Layout, where: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_layout(parse(tree(strategy__reduce_through="shared_memory")), found)
    assert str(caught.value) == (
        f"strategy.reduce_through=shared_memory is for CPU workers of one host, and {where}. Use "
        "strategy.reduce_through=auto."
    )
    check_layout(parse(tree(strategy__reduce_through="auto")), found)


def test_one_worker_may_share_memory_with_nobody() -> None:
    assert refuse_or_resolve(parse(tree(strategy__reduce_through="shared_memory", trainer__gpus=1))).world_size == 1


def test_the_layout_is_decided_once_for_all_workers() -> None:
    found = refuse_or_resolve(parse(tree(trainer__gpus=4, trainer__threads=3)))
    assert (found.world_size, found.device, found.backend, found.threads) == (4, "cpu", "gloo", 3)


def test_reading_a_configuration_needs_no_hydra_and_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree()))
    program = (
        "import sys; from pathlib import Path; from ddpexp.config.parse import load; "
        "load(Path(sys.argv[1]).read_text());"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "config.yaml")], check=True, timeout=PATIENCE)


def test_a_written_configuration_loads_as_the_same_experiment(tmp_path: Path) -> None:
    values = tree(trainer__clip_grad_norm=1e-05, model__width=[4, 8], run__dir="1e3")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert load((tmp_path / "config.yaml").read_text()) == parse(values)
