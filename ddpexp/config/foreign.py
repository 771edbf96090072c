"""What is typed here in place of the words of Lightning, Hugging Face, Accelerate, torchrun and Hydra's templates.

A key's own declaration has those for the key (`ddpexp.settings`), and the registry those for an option; here is the
rest.
"""

from __future__ import annotations

import re

from ddpexp.config import registry
from ddpexp.config.declared import declared

_UNTYPED = {  # keys of sections with a `_target_`, and groups
    "optimizer.lr": "lr learning_rate base_lr max_lr peak_lr initial_lr",
    "optimizer.weight_decay": "wd weight_decay_rate",
    "optimizer.eps": "epsilon adam_epsilon",
    "scheduler": "lr_scheduler lr_scheduler_type lr_schedule",
    "data.root": "data_dir data_path dataset_path dataset_dir",
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
NO_LBFGS = (
    "It evaluates the loss several times in a step, and a step here has one gradient, that of its global batch. "
    "optimizer=lbfgs is L-BFGS without a line search."
)
_NONE = {  # of groups of which a run may have no option
    "logger": ("false", "no", "disabled"),
    "callbacks": ("null", "false", "no", "disabled"),
}
_ADVICE_ON_OPTIONS = {  # patterns of options of a group for which no single option stands
    "optimizer": {
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
}

_SENTENCE_OF = {name: sentence for names, sentence in _SENTENCES.items() for name in names.split()}


def advice_on_key(name: str) -> str:
    """Return a sentence that names the key here for another framework's key; empty if unknown."""
    for typed, (key, _) in declared().items():
        if name in key.also.split():
            remark = f", {key.remark}" if key.remark else ""
            return f"Did you mean {typed}{remark}?"
    untyped = next((key for key, names in _UNTYPED.items() if name in names.split()), None)
    if untyped is not None:
        return f"Did you mean {untyped}?"
    return _SENTENCE_OF.get(name, "")


def value_here(key: str, value: str) -> str | None:
    """Return the value that means here what `value` of the key means in another framework; None if unknown."""
    if value in _NONE.get(key, ()):
        return "none"
    synonyms = declared()[key][0].synonyms if key in declared() else registry.synonyms_of(key)
    return next((here for here, names in synonyms.items() if value in names.split()), None)


def advice_on_value(key: str, value: str) -> str:
    """Return a sentence on what to do instead of a value that has no counterpart; empty if there is none."""
    advice = declared()[key][0].advice if key in declared() else _ADVICE_ON_OPTIONS.get(key, {})
    return next((sentence for pattern, sentence in advice.items() if re.fullmatch(pattern, value)), "")
