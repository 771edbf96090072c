"""The section `trainer`: how a model is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ddpexp.settings.key import Key
from ddpexp.settings.parameters import FreezeUntil, LayerDecay, LoRA, ParamGroup, Patterns

Auto = Literal["auto"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

_OFF = "off no never false disabled"


@dataclass(frozen=True)
class Timeout:
    """How long a phase may take without progress."""

    init_seconds: Annotated[float, Key(above=0, below=math.inf)] = 300.0
    step_seconds: Annotated[float, Key(above=0, below=math.inf)] = 600.0
    save_seconds: Annotated[float, Key(above=0, below=math.inf)] = 1800.0
    data_seconds: Annotated[float, Key(above=0, below=math.inf)] = 300.0


@dataclass(frozen=True)
class Trainer:
    """How a model is trained; conf/trainer/default.yaml has the default of every key and explains it."""

    nodes: Annotated[
        Auto | int | str,
        Key(
            at_least=1,
            pattern=r"auto|[1-9]\d*:[1-9]\d*",
            use="auto, a number of machines from 1, or a range such as 1:4",
            on_resume="free",
            short_run=1,
            also="num_nodes nnodes num_machines",
        ),
    ]
    gpus: Annotated[
        Auto | int,
        Key(
            at_least=1,
            use="a number of workers from 1, or auto for all GPUs",
            on_resume="free",
            short_run=1,
            also="devices num_gpus n_gpu n_gpus nproc_per_node num_processes",
            synonyms={"auto": "-1 all"},
            advice={"cpu|cpus": "It is a number of workers: trainer.device=cpu trainer.gpus=2 runs two on the CPU."},
        ),
    ]
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Key(
            on_resume="free",
            also="accelerator",
            synonyms={"cuda": "gpu", "auto": "any"},
            advice={
                r"cuda:\d+": "Did you mean trainer.device=cuda? CUDA_VISIBLE_DEVICES=0 before the command chooses one.",
                "mps|tpu|xla|xpu|hpu|npu": "The workers run on GPUs of CUDA or on CPUs.",
            },
        ),
    ]
    backend: Annotated[Literal["auto", "gloo", "nccl", "mpi"], Key(on_resume="free", short_run="auto")]
    threads: Annotated[Auto | int, Key(at_least=1, on_resume="free")]
    seed: Annotated[
        int,
        Key(
            at_least=0,
            below=2**63,
            use="a whole number from 0 to 2**63 - 1",
            fixed_because="the order of the samples and every random number follow from it",
            also="random_seed seed_everything manual_seed",
        ),
    ]
    epochs: Annotated[
        int | None, Key(at_least=1, short_run=None, also="max_epochs num_epochs num_train_epochs n_epochs")
    ]
    max_steps: Annotated[
        int | None, Key(at_least=1, also="max_train_steps num_training_steps num_train_steps total_steps max_iters")
    ]
    global_batch_size: Annotated[
        int,
        Key(
            at_least=1,
            fixed_because="the steps so far are counted in such batches",
            also="batch_size train_batch_size",
            remark="the samples of a step over all workers",
        ),
    ]
    micro_batch_size: Annotated[
        Auto | Literal["fit"] | int,
        Key(
            at_least=1,
            also="per_device_train_batch_size per_gpu_train_batch_size accumulate_grad_batches "
            "gradient_accumulation_steps accum_iter accumulation_steps",
            remark="from which the number of accumulated passes follows",
            synonyms={"fit": "true power binsearch max largest"},
        ),
    ]
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Key(
            also="mixed_precision amp",
            synonyms={
                "fp32": "32 32-true float32 no full",
                "bf16": "bf16-mixed bfloat16",
                "fp16": "16 16-mixed float16 half",
            },
            advice={
                "bf16-true": "Parameters in bf16 are trainer.param_dtype=bf16.",
                "16-true|64|64-true|float64|double": "Parameters are fp32, or with trainer.param_dtype=bf16 bf16.",
                "tf32|high|medium": "trainer.matmul_precision=high lets matrix products in fp32 use TF32.",
            },
        ),
    ]
    compile: Annotated[bool | CompileMode, Key(short_run=False, also="torch_compile")]
    channels_last: bool
    clip_grad_norm: Annotated[
        float | None, Key(above=0, also="gradient_clip_val max_grad_norm clip_grad grad_clip", synonyms={"null": _OFF})
    ]
    ema_decay: Annotated[
        float | None,
        Key(above=0, below=1, use="a number between 0 and 1, such as 0.999, or null", synonyms={"null": _OFF}),
    ]
    nonfinite: Literal["stop", "skip"]
    log_every: Annotated[
        int, Key(at_least=1, on_resume="free", short_run=1, also="log_every_n_steps logging_steps log_interval")
    ]
    eval_every: Annotated[
        Literal["epoch"] | int,
        Key(
            at_least=0,
            use="epoch, a number of steps, or 0 for never",
            on_resume="free",
            also="val_check_interval eval_steps eval_interval eval_strategy evaluation_strategy",
            synonyms={"0": "no never"},
            advice={r"[\d.]+|\d+ ?epochs?": "It takes steps, as in trainer.eval_every=500, or epoch."},
        ),
    ]
    checkpoint_every: Annotated[
        Literal["epoch"] | int,
        Key(
            at_least=0,
            use="epoch, a number of steps, or 0 for never",
            on_resume="free",
            short_run=1,
            also="save_steps save_interval save_strategy",
            synonyms={"0": "no never"},
            advice={"best": "trainer.keep_best=max:eval/accuracy keeps the best one, too."},
        ),
    ]
    checkpoint_every_seconds: Annotated[
        float | None, Key(above=0, on_resume="free", short_run=None, synonyms={"null": _OFF})
    ]
    keep_last: Annotated[
        int | None,
        Key(
            at_least=1,
            use="1 or more, or null for all",
            on_resume="free",
            short_run=None,
            also="save_total_limit",
            synonyms={"null": "all"},
        ),
    ]
    keep_best: Annotated[
        str | None,
        Key(
            pattern=r"(max|min):[^/\s]+/\S+",
            use="max: or min: and a metric of the evaluation, such as max:eval/accuracy",
            on_resume="free",
            synonyms={"null": _OFF},
        ),
    ]
    on_save_error: Annotated[Literal["stop", "continue"], Key(on_resume="free", short_run="stop")]
    reduction: Literal["fast", "exact"]
    deterministic: bool
    grace_seconds: Annotated[float, Key(above=0, below=math.inf, on_resume="free")]
    timeout: Annotated[Timeout, Key(on_resume="free")]
    param_dtype: Literal["fp32", "bf16"]
    master_weights: bool
    compile_blocks: Annotated[
        str | None,
        Key(
            pattern=r"[^\W\d]\w*",
            use="the name of a class without its module, such as TransformerEncoderLayer, or null",
            short_run=None,
            also="compile_repeated_blocks use_regional_compilation",
        ),
    ]
    compile_step: Annotated[bool, Key(short_run=False)]
    activation_checkpointing: Annotated[
        tuple[str, ...] | None,
        Key(on_resume="free", also="gradient_checkpointing activation_checkpoint use_gradient_checkpointing"),
    ]
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"],
        Key(
            also="float32_matmul_precision allow_tf32 tf32",
            synonyms={"highest": "fp32 float32 false", "high": "tf32 true", "medium": "bf16 bfloat16"},
        ),
    ]
    conv_precision: Annotated[
        Literal["fp32", "tf32"],
        Key(also="cudnn_allow_tf32 allow_tf32_conv", synonyms={"fp32": "false highest", "tf32": "true high"}),
    ]
    cudnn_benchmark: Annotated[bool, Key(also="benchmark")]
    max_seconds: Annotated[float | None, Key(above=0, below=math.inf, short_run=None)]
    swa_start: Annotated[int | None, Key(at_least=0, short_run=0)]
    swa_every: Annotated[Literal["epoch"] | int, Key(at_least=1)]
    average_batch_norm: Annotated[int | None, Key(at_least=1, short_run=1)]
    limit_train_samples: Annotated[
        int | None,
        Key(
            at_least=1,
            fixed_because="the steps to come would see other samples than the order of this run says",
        ),
    ]
    limit_eval_batches: Annotated[
        int | None,
        Key(at_least=1, on_resume="free", also="limit_val_batches limit_test_batches limit_predict_batches eval_iters"),
    ]
    clip_grad_value: Annotated[float | None, Key(above=0, also="clip_value clip_grad_by_value max_grad_value")]
    eval_at_start: Annotated[bool, Key(on_resume="free", short_run=False, also="eval_on_start")]
    keep_best_k: Annotated[int, Key(at_least=1, on_resume="free", also="save_top_k")]
    test_weights: Annotated[Auto | Literal["best", "last"], Key(on_resume="free")]
    keep_every: Annotated[int | None, Key(at_least=1, on_resume="free", short_run=None)]
    compare_replicas: Annotated[int | None, Key(at_least=1, on_resume="free")]
    param_groups: tuple[ParamGroup, ...] | None
    layer_decay: LayerDecay | None
    freeze: Patterns | None
    freeze_until: FreezeUntil | tuple[FreezeUntil, ...] | None
    lora: Annotated[LoRA | None, Key(fixed_because="the adapters in the checkpoint belong to the old one")]
    numa_binding: Annotated[bool, Key(on_resume="free")]
    peak_tflops: Annotated[
        float | None, Key(above=0, below=math.inf, on_resume="free", also="peak_flops gpu_peak_flops")
    ]
    profile: Annotated[
        str | None,
        Key(
            pattern=r"\d{1,15}:\d{1,15}",
            use="a range of steps, such as 100:110, or null",
            on_resume="free",
            short_run=None,
            synonyms={"null": _OFF},
            advice={
                r"\d+": "Ten steps after step 100 are trainer.profile=100:110, in a YAML file '100:110'.",
                "true|simple|advanced|pytorch": "trainer.profile=100:110 profiles the ten steps after step 100.",
            },
        ),
    ]
    memory_snapshot: Annotated[
        Literal["oom"] | int | None,
        Key(at_least=1, use="oom, a step from 1, or null", on_resume="free", short_run=None, synonyms={"null": _OFF}),
    ]

    @property
    def computes_in(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the numbers in which a forward pass computes what can be computed in fewer bits."""
        return self.precision if self.param_dtype == "fp32" else self.param_dtype

    @property
    def compiles(self) -> bool:
        """Return whether anything is compiled."""
        return bool(self.compile) or self.compile_step

    @property
    def tests_best(self) -> bool:
        """Return whether the evaluation set `test` is evaluated with the best weights."""
        return self.test_weights == "best" or (self.test_weights == "auto" and self.keep_best is not None)

    @property
    def averages(self) -> bool:
        """Return whether an average of the weights is evaluated in their place."""
        return self.ema_decay is not None or self.swa_start is not None
