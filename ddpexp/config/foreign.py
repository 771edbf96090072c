"""What is typed here in place of the words of Lightning, Hugging Face, Accelerate, torchrun and Hydra's templates.

A key's own declaration has those for the key (`ddpexp.settings`), and the registry those for an option; here is the
rest. docs/migrate.md has the same words in its tables, which `tests/test_migrate.py` compares.
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
    "recipe": "experiment",
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
_CHECK = "python -m ddpexp check recipe=mnist tries two steps and an evaluation of a recipe, and looks for mistakes."
_KEEP_BEST = "The best checkpoints are kept by trainer.keep_best=min:eval/loss trainer.keep_best_k=3."
_EMA = "The average is a key of the trainer: trainer.ema_decay=0.999."
_SWA = "The average is a key of the trainer: trainer.swa_start=500, a step."
_PROGRESS = "Progress is shown on terminals by itself, and the model is counted in the first lines: leave it out."
_SEARCH = "A search is a sweep: -m recipe=mnist hydra/sweeper=optuna sweep.objective=eval/loss (docs/sweeps.md)."
_NAMED = "A run has a name and a folder: recipe.name=first, run.dir=outputs/first."
_UNUSED = "DDP looks for unused parameters with strategy=ddp strategy.find_unused_parameters=true."
_SEVERAL_LOGGERS = "Several loggers are a list: 'logger=[tensorboard,wandb]'."
_NOTHING = "There is nothing to set: "
_SENTENCES = {
    "ckpt_path resume_from_checkpoint resume_from": _RESUME,
    "checkpoint ckpt": "Of a run a checkpoint is chosen by --checkpoint best, last or a step behind it.",
    "from base_run parent_run": (
        "A run is trained again by python -m ddpexp rerun RUN_DIR, and run.init_from=RUN_DIR starts from its weights."
    ),
    "debug fast_dev_run num_sanity_val_steps": _CHECK,
    "hparams_search": _SEARCH,
    "n_trials num_trials": "hydra.sweeper.n_trials=10 is a key of a search: -m recipe=mnist hydra/sweeper=optuna.",
    "multirun": "-m makes a sweep: python -m ddpexp -m recipe=mnist optimizer.lr=0.1,0.01.",
    "dry_run": "launcher=slurm launcher.dry_run=true prints the script of a job.",
    "train do_train run_train": "A run is trained; without training it is python -m ddpexp evaluate RUN_DIR.",
    "split": "The commands evaluate and predict take --split test, and data=hf has the key data.split.",
    "print_config": "--cfg job prints the configuration, and trains nothing.",
    "log_model": "logger.wandb.checkpoint=best sends the best checkpoint, and so does logger.mlflow.checkpoint=best.",
    "check_val_every_n_epoch": "trainer.eval_every=epoch evaluates every epoch, and trainer.eval_every=500 by steps.",
    "test do_test run_test": (
        "The set `test` is evaluated at the end by itself: data.validation_fraction=0.1 data.test_set=eval makes the "
        "evaluation set of recipe=mnist such a set."
    ),
    "tags extras paths": _NAMED,
    "profiler": "trainer.profile=100:110 profiles the ten steps after step 100, on every worker (docs/profiling.md).",
    "find_unused_parameters": _UNUSED,
    "max_time": "trainer.max_seconds=43200 ends a run after 12 hours, saved.",
    "min_epochs min_steps": f"{_NOTHING}only callbacks end a run early, and it is resumed without them.",
    "limit_train_batches": "There is nothing like it: trainer.max_steps=100 ends a run earlier.",
    "overfit_batches": "trainer.limit_train_samples=64 trainer.global_batch_size=64 trains on this many samples only.",
    "gradient_clip_algorithm": "Gradients are clipped by trainer.clip_grad_norm=1 or trainer.clip_grad_value=0.5.",
    "detect_anomaly": "callbacks=find_nonfinite names the module where a number is not finite.",
    "sync_batchnorm": "It is a key of the strategy: strategy.sync_batchnorm=true.",
    "enable_progress_bar enable_model_summary barebones": _PROGRESS,
    "inference_mode": f"{_NOTHING}evaluations have no gradients.",
    "use_distributed_sampler": f"{_NOTHING}each worker gets its part of the order of samples.",
    "reload_dataloaders_every_n_epochs": "A data set with of_epoch differs from epoch to epoch (docs/data.md).",
    "enable_autolog_hparams": f"{_NOTHING}the whole configuration is recorded.",
    "model_registry": "logger.mlflow.checkpoint=best sends a checkpoint.",
    "log_with": _SEVERAL_LOGGERS,
    "project_dir project_config": _NAMED,
    "dynamo_backend dynamo_plugin": "A model is compiled by trainer.compile=true.",
    "cpu": "The device is a key: trainer.device=cpu.",
    "gradient_accumulation_plugin": "The number of accumulated passes follows from trainer.micro_batch_size=32.",
    "auto_find_batch_size auto_scale_batch_size find_executable_batch_size": (
        "trainer.micro_batch_size=fit finds the largest micro-batch that fits (docs/find.md)."
    ),
    "auto_lr_find": "python -m ddpexp find lr recipe=mnist suggests a rate (docs/find.md).",
    "step_scheduler_with_optimizer": "A schedule follows epochs with scheduler=torch scheduler.interval=epoch.",
    "device_placement split_batches rng_types dataloader_config kwargs_handlers": (
        f"{_NOTHING}batches arrive on the device, and every random number follows from trainer.seed."
    ),
    "plugins": f"{_NOTHING}launchers and precision are keys.",
    "model_checkpoint": _KEEP_BEST,
    "offline": "logger=wandb records without a network by logger.wandb.mode=offline.",
    "early_stopping patience": (
        "callbacks=early_stopping ends a run early; callbacks.early_stopping.patience counts evaluations, and "
        "callbacks.early_stopping.monitor names their metric, such as eval/loss."
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
    "zero zero_stage zero_optimization deepspeed deepspeed_config deepspeed_plugin deepspeed_plugins": _ZERO,
    "fsdp fsdp_config fsdp_plugin": "Sharded parameters are a strategy: strategy=fsdp.",
    "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree torch_tp_plugin "
    "megatron_lm_plugin parallelism_config": _TENSORS,
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
            "torch has no such optimizer. A package brings it, and it is named by its class: run.trust=[PACKAGE] "
            "optimizer._target_=PACKAGE.CLASS (docs/optimizers.md)."
        ),
    },
    "trainer": {
        "gpu|cuda": "The device is a key: trainer.device=cuda.",
        "cpu": "The device is a key: trainer.device=cpu.",
        "mps": "There is no device mps: trainer.device=cpu.",
        "ddp(_sim)?": "The workers are a key: trainer.gpus=2, on CPUs with trainer.device=cpu.",
    },
    "callbacks": {
        "(model_?)?checkpoint(s|_callback)?": _KEEP_BEST,
        "(rich_|tqdm_)?(progress_?bar|model_?summary)": _PROGRESS,
        "default": f"{_KEEP_BEST} callbacks=early_stopping ends a run early, and progress is shown by itself.",
        "(ema_?)?weight_?averaging|ema": _EMA,
        "stochastic_?weight_?averaging|swa": _SWA,
        "timer": _SENTENCES["max_time"],
    },
    "logger": {
        "many_loggers|all|multiple": _SEVERAL_LOGGERS,
        "comet|neptune|aim|clearml|trackio|swanlab": "A class of yours or of a package records there: docs/loggers.md.",
    },
    "hydra/sweeper": {
        "optuna": "Its package is not installed: pip install 'ddpexp[optuna]'.",
        "ax|nevergrad|bayes(ian)?|random": (
            "hydra/sweeper=optuna searches so, with pip install 'ddpexp[optuna]' (docs/sweeps.md)."
        ),
    },
    "strategy": {
        "ddp_find_unused_parameters_true(_.*)?": _UNUSED,
        "ddp_(spawn|fork|notebook)(_.*)?|dp": "strategy=ddp is the default, and launcher=spawn starts its workers.",
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


def advice_on_key(key: str) -> str:
    """Return a sentence that names the key here for another framework's key; empty if unknown.

    The last part of a dotted key decides, or else the first one that is known.
    """
    *sections, last = key.split(".")
    for name in (last, *sections):
        if (ours := counterpart(name)) is not None:
            remark = declared()[ours][0].remark if ours in declared() else ""
            return f"Did you mean {ours}{f', {remark}' if remark else ''}?"
        if name in _SENTENCE_OF:
            return _SENTENCE_OF[name]
    return ""


def counterpart(name: str) -> str | None:
    """Return the key, or the group, that another framework calls so; None if there is not one."""
    typed = next((typed for typed, (key, _) in declared().items() if name in key.also.split()), None)
    return typed or next((key for key, names in _UNTYPED.items() if name in names.split()), None)


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
