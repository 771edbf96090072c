"""Words of Lightning, Hugging Face, Accelerate, torchrun and of templates for Hydra.

What is typed here in their place.
"""

from __future__ import annotations

import re

_KEYS = {
    "trainer.epochs": "max_epochs num_epochs num_train_epochs n_epochs",
    "trainer.max_steps": "max_train_steps num_training_steps num_train_steps total_steps max_iters",
    "trainer.global_batch_size": "batch_size train_batch_size",
    "trainer.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size accumulate_grad_batches "
    "gradient_accumulation_steps accum_iter accumulation_steps",
    "trainer.gpus": "devices num_gpus n_gpu n_gpus nproc_per_node num_processes",
    "trainer.nodes": "num_nodes nnodes num_machines",
    "trainer.device": "accelerator",
    "trainer.precision": "mixed_precision amp",
    "trainer.clip_grad_norm": "gradient_clip_val max_grad_norm clip_grad grad_clip",
    "trainer.clip_grad_value": "clip_value clip_grad_by_value max_grad_value",
    "trainer.eval_at_start": "eval_on_start",
    "trainer.limit_eval_batches": "limit_val_batches limit_test_batches limit_predict_batches eval_iters",
    "trainer.log_every": "log_every_n_steps logging_steps log_interval",
    "trainer.eval_every": (
        "val_check_interval check_val_every_n_epoch eval_steps eval_interval eval_strategy evaluation_strategy"
    ),
    "trainer.checkpoint_every": "save_steps save_interval save_strategy",
    "trainer.keep_last": "save_total_limit",
    "trainer.keep_best_k": "save_top_k",
    "trainer.seed": "random_seed seed_everything manual_seed",
    "trainer.compile": "torch_compile",
    "trainer.activation_checkpointing": "gradient_checkpointing activation_checkpoint use_gradient_checkpointing",
    "trainer.compile_blocks": "compile_repeated_blocks use_regional_compilation",
    "trainer.matmul_precision": "float32_matmul_precision allow_tf32 tf32",
    "trainer.cudnn_benchmark": "benchmark",
    "optimizer.lr": "lr learning_rate base_lr max_lr peak_lr initial_lr",
    "optimizer.weight_decay": "wd weight_decay_rate",
    "scheduler": "lr_scheduler lr_scheduler_type lr_schedule",
    "optimizer.eps": "epsilon adam_epsilon",
    "data.root": "data_dir data_path dataset_path dataset_dir",
    "data.validation_fraction": "val_split validation_split val_size",
    "data.num_workers": "dataloader_num_workers n_workers",
    "strategy.dp_replicate_size": "data_parallel_replicate_degree",
    "run.dir": "output_dir out_dir save_dir log_dir logging_dir default_root_dir run_name exp_name experiment_name",
    "sweep.objective": "optimized_metric",
}
_REMARKS = {
    "batch_size": "the samples of a step over all workers",
    "train_batch_size": "the samples of a step over all workers",
    "accumulate_grad_batches": "from which the number of accumulated passes follows",
    "gradient_accumulation_steps": "from which the number of accumulated passes follows",
}
_ZERO = (
    "strategy.shard_optimizer=true divides the optimizer's state among the workers (ZeRO stage 1), and strategy=fsdp "
    "everything (stage 3)."
)
_HYBRID = "strategy=fsdp strategy.dp_replicate_size=2 keeps two replicas, each of them sharded."
_TENSORS = "Tensor parallelism is a key of sharding: strategy=fsdp strategy.tp_size=2."
_PIPELINE = "Stages of a pipeline are a strategy: strategy=pipeline strategy.pp_size=2."
_INTERLEAVED = (
    "Several stages on a worker are a schedule: strategy=pipeline strategy.schedule=interleaved "
    "strategy.stages_per_worker=2."
)
_TOKENS = (
    "Sequence parallelism belongs to tensor parallelism: strategy=fsdp strategy.tp_size=2 "
    "strategy.sequence_parallel=true."
)
_NO_CONTEXT = (
    "There is no context parallelism: trainer.activation_checkpointing reduces the memory that long sequences take, "
    "and so does strategy.sequence_parallel."
)
_NO_EXPERTS = "There is no expert parallelism: strategy=fsdp shards the parameters of all experts."
_RESUME = "A run is resumed with python -m ddpexp resume RUN_DIR, and run.init_from=FILE starts a new one from weights."
_SENTENCES = {
    "ckpt_path resume_from_checkpoint resume_from": _RESUME,
    "max_time": "trainer.max_seconds=43200 ends a run after 12 hours, saved.",
    "num_sanity_val_steps": "ddpexp check with the same overrides tries training and evaluation.",
    "limit_train_batches": "There is nothing like it: trainer.max_steps=N ends a run after N steps.",
    "fast_dev_run": "ddpexp check with the same overrides tries two steps and an evaluation.",
    "overfit_batches": "trainer.limit_train_samples=64 trains on this many samples only.",
    "early_stopping patience": (
        "callbacks=early_stopping ends a run early; callbacks.early_stopping.patience counts evaluations."
    ),
    "shuffle": "Training data is always shuffled, by trainer.seed, and evaluations keep the order of their set.",
    "drop_last": (
        "Samples of an epoch that fill no global batch are left out, and evaluations take every sample: nothing is to "
        "be set."
    ),
    "pin_memory persistent_workers prefetch_factor": "The loader sets it: data.num_workers is all that is to be set.",
    "enable_checkpointing": "trainer.checkpoint_every=0 saves only at the end.",
    "warmup_steps warmup_ratio num_warmup_steps": (
        "Schedules have one: scheduler=cosine scheduler.warmup=0.05 (of all steps), or scheduler.warmup_steps=500."
    ),
    "zero zero_stage zero_optimization deepspeed deepspeed_config": _ZERO,
    "fsdp fsdp_config": "Sharded parameters are a strategy: strategy=fsdp.",
    "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree": _TENSORS,
    "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree": (
        _PIPELINE
    ),
    "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages": _INTERLEAVED,
    "sequence_parallel sequence_parallel_size sp_size": _TOKENS,
    "cp cp_size context_parallel context_parallel_size context_parallel_degree": _NO_CONTEXT,
    "ep_size expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree": _NO_EXPERTS,
}
_VALUES = {
    "trainer.precision": {
        "fp32": "32 32-true float32 no full",
        "bf16": "bf16-mixed bf16-true bfloat16",
        "fp16": "16 16-mixed 16-true float16 half",
    },
    "trainer.matmul_precision": {"highest": "fp32 float32 false", "high": "tf32 true", "medium": "bf16 bfloat16"},
    "trainer.device": {"cuda": "gpu", "auto": "any"},
    "trainer.gpus": {"auto": "-1 all"},
    "run.resume": {"auto": "true yes latest last newest", "require": "must always force", "never": "false no none off"},
    "scheduler": {
        "constant": "none false no off",
        "constant_with_warmup": "warmup warmup_constant warmuplr",
        "cosine": "cosineannealing cosineannealinglr cosine_annealing cosine_with_restarts",
        "exponential": "exp exponentiallr",
        "linear": "linearlr",
        "multi_step": "step steplr multisteplr",
        "onecycle": "one_cycle onecyclelr",
        "plateau": "reducelronplateau reduce_lr_on_plateau reduce_on_plateau",
        "polynomial": "poly polynomiallr",
        "wsd": "warmup_stable_decay trapezoidal",
    },
    "launcher": {
        "spawn": "local ddp ddp_spawn mp process single none accelerate deepspeed fabric lightning",
        "torchrun-env": "env",
        "slurm": "srun sbatch salloc submitit submitit_slurm",
        "mpi": "mpirun mpiexec horovod",
    },
    "strategy": {
        "ddp": "dp dataparallel data_parallel distributeddataparallel ddp_find_unused_parameters_true ddp_notebook "
        "no_shard",
        "fsdp": "fsdp2 fsdp1 fully_sharded fully_shard zero3 zero_3 deepspeed_stage_3 sharded full_shard",
        "local_sgd": "localsgd local post_local_sgd postlocalsgd",
    },
    "logger": {
        "tensorboard": "tb",
        "wandb": "weights_and_biases WandbLogger",
        "csv": "CSVLogger",
        "none": "false no disabled",
    },
    "callbacks": {
        "none": "null false no disabled",
        "early_stopping": "earlystopping early_stop EarlyStopping",
        "lr_monitor": "learning_rate_monitor LearningRateMonitor",
        "find_nonfinite": "detect_anomaly anomaly",
    },
    "sweep.mode": {"max": "maximize maximise", "min": "minimize minimise"},
    "trainer.eval_every": {"0": "no never"},
    "trainer.checkpoint_every": {"0": "no never"},
    "trainer.keep_last": {"null": "all"},
    "trainer.clip_grad_norm": {"null": "off no never false disabled"},
    "trainer.ema_decay": {"null": "off no never false disabled"},
    "trainer.checkpoint_every_seconds": {"null": "off no never false disabled"},
    "trainer.keep_best": {"null": "off no never false disabled"},
}

NO_LBFGS = (
    "L-BFGS evaluates the loss several times in a step, and a step here has one gradient, that of its global batch. "
    "Use another optimizer."
)
_NO_DEVICE = "The workers run on GPUs of CUDA or on CPUs."
_ADVICE_ON_VALUES = {  # patterns of values for which no single value stands
    "trainer.device": {
        r"cuda:\d+": "Did you mean trainer.device=cuda? CUDA_VISIBLE_DEVICES=0 before the command chooses GPUs.",
        "mps|tpu|xla|xpu|hpu|npu": _NO_DEVICE,
    },
    "optimizer": {
        "lbfgs|l_bfgs": NO_LBFGS,
        "lion|lamb|lars|sophia|prodigy|soap|schedule_?free|adamw?_?8bit|adamw_bnb_8bit|paged_adamw(_8bit|_32bit)?": (
            "A package brings it, and it is named by its class: docs/optimizers.md."
        ),
    },
    "strategy": {
        "zero_?[12]?|deepspeed(_stage_[12])?|ddp_sharded|fairscale": _ZERO,
        "shard_grad_op": "strategy=fsdp strategy.reshard_after_forward=false keeps parameters gathered until backward.",
        "hsdp|hybrid(_shard)?": _HYBRID,
        "mp|model_parallel|naive|device_map": (
            "strategy=pipeline gives each worker some layers, and strategy=fsdp a share of every layer."
        ),
        "tp|tensor(_parallel(ism)?)?|megatron|[234]d|nd_parallel": _TENSORS,
        "pp|pipeline_parallel(ism)?|gpipe|1f1b": _PIPELINE,
        "cp|context(_parallel(ism)?)?|ring_attention|ulysses": _NO_CONTEXT,
        "sp|sequence_parallel(ism)?": _TOKENS,
        "ep|experts?(_parallel(ism)?)?|moe": _NO_EXPERTS,
    },
    "trainer.gpus": {"cpu|cpus": "It is a number of workers: trainer.device=cpu trainer.gpus=2 runs two on the CPU."},
    "trainer.precision": {
        "tf32|high|medium": "trainer.matmul_precision=high lets matrix products in fp32 use TF32.",
    },
    "data.validation_fraction": {"null|none|false": "0 holds nothing out."},
    "trainer.checkpoint_every": {"best": "trainer.keep_best=max:eval/accuracy keeps the best one, too."},
    "trainer.eval_every": {r"[\d.]+|\d+ ?epochs?": "It is a number of optimizer steps, or epoch."},
}

_KEY_OF = {name: key for key, names in _KEYS.items() for name in names.split()}
_SENTENCE_OF = {name: sentence for names, sentence in _SENTENCES.items() for name in names.split()}


def advice_on_key(name: str) -> str:
    """Say what is typed here for another framework's `word`, with a space in front.

    Empty where it is none that we know.
    """
    if (key := _KEY_OF.get(name)) is not None:
        remark = f", {_REMARKS[name]}" if name in _REMARKS else ""
        return f" Did you mean {key}{remark}?"
    return f" {_SENTENCE_OF[name]}" if name in _SENTENCE_OF else ""


def value_here(key: str, value: str) -> str | None:
    """Return the value that means here what `value` of the key means in another framework.

    None where we know of none.
    """
    return next((here for here, names in _VALUES.get(key, {}).items() if value in names.split()), None)


def advice_on_value(key: str, value: str) -> str:
    """Say what to do instead of a value that has no counterpart, with a space in front.

    Empty where nothing is known.
    """
    advice = _ADVICE_ON_VALUES.get(key, {}).items()
    return next((f" {sentence}" for pattern, sentence in advice if re.fullmatch(pattern, value)), "")
