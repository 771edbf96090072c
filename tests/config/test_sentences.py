"""Wrong commands, as people type them: each is answered in one sentence with what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.config import plugins
from ddpexp.config.build import unknown_key
from ddpexp.config.compose import compose_command
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.sweeps import Swept
from ddpexp.errors import RefusedError


def refusal(*words: str) -> str:
    try:
        made = compose_command(list(words))
        assert isinstance(made, ResolvedConfig)
        parse(made.values)
    except RefusedError as error:
        said, mistakes = str(error), 1 + len(error.further)
    else:
        raise AssertionError(f"{words} is accepted")
    assert len(said.splitlines()) == mistakes
    return said


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project in the current folder."""
    (tmp_path / "mine/conf/recipe").mkdir(parents=True)
    (tmp_path / "mine/conf/model").mkdir()
    (tmp_path / "mine/conf/experiment").mkdir()
    (tmp_path / "mine/mine.py").write_text("from os import path\nclass Task: ...\nclass Net: ...\n")
    (tmp_path / "mine/extra.py").write_text("class Task: ...\n")
    (tmp_path / "mine/conf/model/net.yaml").write_text("_target_: mine.Net\nhidden: 8\n")
    (tmp_path / "mine/conf/recipe/mine.yaml").write_text("# @package _global_\ntask: {_target_: mine.Task}\n")
    (tmp_path / "mine/conf/experiment/big.yaml").write_text("# @package _global_\ntrainer: {epochs: 9}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The arguments after >, and in the next line how the error begins.
BARE = """\
> tune x
tune is neither an override (key=value, for example trainer.gpus=2) nor a command.
> evalute x
evalute is neither an override (key=value, for example trainer.gpus=2) nor a command.
> fit recipe=mnist
fit is not an override. A training needs no command, as in python -m ddpexp recipe=mnist trainer.gpus=2.
> mnist
mnist is not an override. Write recipe=mnist.
> adamw
adamw is not an override. Write optimizer=adamw.
> optimizer adamw
optimizer has no value. Write optimizer=adamw. Available: adadelta, adafactor, adagrad, adam, adamax, adamw, asgd
> trainer.gpus 2
trainer.gpus has no value. Write trainer.gpus=2.
> trainer.gpus = 2
trainer.gpus is not an override. Write trainer.gpus=2, without spaces.
> trainer.gpus =2
trainer.gpus is not an override. Write trainer.gpus=2, without spaces.
> trainer.gpus= 2
trainer.gpus= is not an override. Write trainer.gpus=2, without spaces.
> trainer.gpus: 2
trainer.gpus: is not an override. Write trainer.gpus=2, without spaces.
> recipe:mnist
recipe:mnist is not an override. Write recipe=mnist, without spaces.
> optimizer.betas=[0.9, 0.99]
optimizer.betas=[0.9, 0.99] has spaces, at which the shell splits it. Write 'optimizer.betas=[0.9,0
> train.py recipe=mnist
train.py is not an override: ddpexp takes no files. A recipe is chosen by name: --config-dir DIR recipe=NAME.
> –config-dir mine/conf
–config-dir begins with a dash from a formatted text. Type --config-dir.
> @args.txt
@args.txt is neither an override
"""
SEVERAL = """\
> logger=tensorboard,none
logger=tensorboard,none gives several values. Add -m for a run with each, or write a list as logger=[tensorboard,none].
> callbacks=early_stopping,none
callbacks=early_stopping,none gives several values. Add -m for a run with each.
> -m optimizer.lr=0.1 0.2 1e-3 trainer.seed=1
optimizer.lr=0.1 0.2 has a space, at which the shell splits it. With -m, several values are written optimizer.lr=0.1,0.2
> -m optimizer.lr=[0.1,0.01]
optimizer.lr=[0.1,0.01] is one value, and optimizer.lr takes a number. Did you mean optimizer.lr=0.1,0.01?
> -m optimizer.lr={0.1,0.01}
optimizer.lr={0.1,0.01} is one value, and optimizer.lr takes a number. Did you mean optimizer.lr=0.1,0.01?
> -m optimizer.lr=0.1:0.01
optimizer.lr=0.1:0.01 is one value, and optimizer.lr takes a number. Did you mean optimizer.lr=0.1,0.01?
> -m trainer.seed=0..3
trainer.seed=0..3 is one value, and trainer.seed takes a number. Did you mean 'trainer.seed=range(0,4)'?
> -m trainer.seed=1-3
trainer.seed=1-3 is one value, and trainer.seed takes a number. Did you mean 'trainer.seed=range(1,4)'?
> -m optimizer.lr=0.1, 0.01, 0.001 trainer.seed=1
optimizer.lr=0.1, 0.01, has a space, at which the shell splits it. Leave out the space: optimizer.lr=0.1,0.01,0.00
> launcher=slurm launcher.mem=64 gb
launcher.mem=64 gb has a space, at which the shell splits it. Leave out the space: launcher.mem=64gb.
> optimizer.lr=0,1
optimizer.lr=0,1 gives several values. Add -m for a run with each, or optimizer.lr=0.1.
> trainer.max_steps=10,000
trainer.max_steps=10,000 gives several values. Add -m for a run with each, or trainer.max_steps=10000.
> run.trust=a,b
run.trust=a,b gives several values. Add -m for a run with each, or write a list as run.trust=[a,b].
> run.dir=a,b
run.dir=a,b gives several values. Add -m for a run with each.
> launcher=slurm launcher.nodes=2
launcher.nodes is not a known key. Did you mean trainer.nodes?
> sweep.dir=sw
sweep.dir is not a known key. Did you mean hydra.sweep.dir=sw (with -m) or, for one run, run.dir=sw?
> -m sweep.dir=sw trainer.seed=1,2
sweep.dir is not a known key. Did you mean hydra.sweep.dir=sw (with -m)?
> -m trainer.seed=1,2 sweep.objective=eval/loss trainer.eval_every=0
sweep.objective=eval/loss needs evaluations, and trainer.eval_every=0 makes none.
> optimizer.lr=logspace(-3,-1,3)
optimizer.lr=logspace(-3,-1,3) is not read: there is no function logspace. With -m there are choice(1,2,3), range(0,1
> optimizer.lr=choice[0.1,0.2]
optimizer.lr=choice[0.1,0.2] is not read. The function choice is written as in 'optimizer.lr=choice(0.1,0.2)'.
> optimizer.lr={0.1,0.01}
optimizer.lr={0.1,0.01} is not read. Several values are written optimizer.lr=0.1,0.01, with -m.
"""
UNREAD = """\
> strategy=ddp.bucket_cap_mb=5
strategy=ddp.bucket_cap_mb=5 is not read: an option and its key are two overrides. Write strategy=ddp strategy.bucket_ca
> -m trainer.seed=1 trainer.seed=2
trainer.seed is typed twice. Write trainer.seed=1,2.
> -m trainer.seed=1,2 trainer.seed=3
trainer.seed is typed twice. Leave trainer.seed=1,2 or trainer.seed=3 out.
> trainer.gpus=１
trainer.gpus=１ has the character １, which only looks like a plain one. Write trainer.gpus=1.
> optimizer.lr=1e−3
optimizer.lr=1e−3 has the character −, which only looks like a plain one. Write optimizer.lr=1e-3.
> -m optimizer.lr=0.1，0.2
optimizer.lr=0.1，0.2 has the character ，, which only looks like a plain one. Write optimizer.lr=0.1,0.2.
> trainer.epochs=3；
trainer.epochs=3； has the character ；, which only looks like a plain one. Write trainer.epochs=3.
> trainer.gpus==2
trainer.gpus==2 has = twice. Write trainer.gpus=2.
> optimizer.lr=1e-3, trainer.gpus=2
optimizer.lr=1e-3, ends with a comma: overrides are separated by spaces. Write optimizer.lr=1e-3.
> recipe=mnist;trainer.gpus=2
recipe=mnist;trainer.gpus=2 is not read. Overrides are separated by spaces, not by ;.
> optimizer.lr=“0.1”
optimizer.lr=“0.1” has the quote “ of a formatted text. Write ' or ", or leave the quotes out.
> run.dir=~/x
run.dir=~/x is not read: neither the shell nor Hydra makes a folder of ~ there. Write run.dir=$HOME/x.
> optimizer.betas=(0.9,0.99)
optimizer.betas=(0.9,0.99) is not read. A list is written in brackets, 'optimizer.betas=[0.9,0.99]'.
> model.width=[16,32
model.width=[16,32 has a bracket without its other half.
> run.dir=a=b
run.dir=a=b is not read: its value has characters that mean something to Hydra. Quote it twice: 'run.dir="a=b"'.
> launcher=slurm launcher.sbatch_args=[--mail-type=END]
launcher.sbatch_args=[--mail-type=END] is not read: an item has characters that mean something to Hydra. Quote it twice:
> launcher=elastic launcher.rdzv_conf=last_call_timeout=5
launcher.rdzv_conf=last_call_timeout=5 is not read: its value has characters that mean something to Hydra. Quote it tw
> -m trainer.seed=range(1,)
trainer.seed=range(1,) is not read. The function range is written as in 'trainer.seed=range(0,10,2)'.
> trainer..gpus=2
trainer..gpus=2 is not an override. Write key=value, for example trainer.gpus=2.
"""
KEYS = """\
> TRAINER.GPUS=2
TRAINER.GPUS is not a known key. Did you mean trainer.gpus?
> trainer/gpus=2
trainer/gpus is not a known key. Did you mean trainer.gpus?
> epochs=3
epochs is not a known key. Did you mean trainer.epochs?
> trainer.timeout.step=5
trainer.timeout.step is not a known key. Did you mean trainer.timeout.step_seconds?
> launcher.partition=gpu
launcher.partition is not a known key: it is a key of launcher=slurm.
> optimizer=adamw optimizer.momentum=0.9
optimizer.momentum is not a known key: it is a key of optimizer=cifar10_sg
> trainer.foo=3
trainer.foo is not a known key. Available: nodes, gpus, device, backend, threads,
> +trainer.epochs=3
trainer.epochs is a key already. Leave the + out.
> +strategy=ddp
strategy is chosen already. Leave the + out.
> +model=linear
model is chosen already. Leave the + out, model=linear; in a config's defaults write override /model.
> ~trainer.clip_grad_norm
~trainer.clip_grad_norm: Every run has this key, so it cannot be removed. Type trainer.clip_grad_norm=null to switch i
> ~trainer.seed
~trainer.seed: Every run has this key, so it cannot be removed. Type trainer.seed=... to change it.
> ~data.root
~data.root: Its value is null, and there is nothing to remove. Leave ~data.root out.
> ~data.rot
data.rot is not a known key. Did you mean data.root?
> model=[lenet,linear]
model=[lenet,linear] chooses several options, and a run has one. For a run with each, type -m model=lenet,lin
> logger=[tensorboard,neptune]
logger=neptune is not a known option. A class of yours or of a package records there: docs/loggers.md.
> logger=[tensorboard,3]
logger=3 is not a known option. Available: csv, mlflow, none, tensorboard, wandb.
> logger=null
logger=null: to record nothing beside metrics.jsonl, write logger=none.
> ~logger
~logger: to record nothing beside metrics.jsonl, write logger=none.
> callbacks=null
callbacks=null: for a run without callbacks, write callbacks=none.
> callbacks=early_stoping
callbacks=early_stoping is not a known option. Did you mean callbacks=early_stopping?
> callbacks=[early_stopping,detect_anomaly]
callbacks=detect_anomaly is not a known option. Did you mean callbacks=find_nonfinite?
> callbacks=[none,histograms]
callbacks=[none,histograms] chooses none and others. Write callbacks=histograms.
> callbacks=[early_stopping,lr_monitor,early_stopping]
callbacks=[early_stopping,lr_monitor,early_stopping] chooses the same twice. Write callbacks=[early_stopping,lr_monitor]
> trainer.swa_every=3
trainer.swa_every=3 is for the mean of the weights (SWA), and there is none. Set trainer.swa_start, too.
> callbacks._target_=mine.Ends
callbacks._target_ is not a known key. Each callback has a name, as in +callbacks.mine._target_=mine.Mine: see docs/call
> recipe=mine
recipe=mine is not a known option. Available: autoencoder, cifar10, distill, finetune, gan, gpt, imagenet, imagenet_16,
> recipe=a,b
recipe=a,b gives several values. Add -m for a run with each.
> trainer.seed=range(3)
trainer.seed=range(3) gives several values. Add -m for a run with each.
> recipe=conf/recipe/mnist.yaml
recipe=conf/recipe/mnist.yaml is a path, and options are named. Type recipe=mnist.
> recipe=mine/conf/recipe/mine
recipe=mine/conf/recipe/mine is a path, and options are named. Type --config-dir mine/conf recipe=mine.
> --config-dir mine/conf experiment=big
experiment: No option of this group is chosen by default. Add one: +experiment=big.
> hydra.sweep.dir=x
hydra.sweep.dir=x is for sweeps. Add -m, or leave it out.
> hydra/launcher=joblib
hydra/launcher=joblib: Hydra's own settings have no effect here. ddpexp starts the jobs of a sweep itself.
> -m hydra.mode=RUN
hydra.mode=RUN is one run, and -m a sweep. Leave one of them out.
> CUDA_VISIBLE_DEVICES=0 trainer.gpus=1
CUDA_VISIBLE_DEVICES is a variable of the environment, not a key. Type it before the command, as in CUDA_VISIBLE_DEVICE
> scheduler.max_lr=0.1
scheduler.max_lr is not a known key. Did you mean optimizer.lr=0.1?
> trainer.lr_scheduler=cosine
trainer.lr_scheduler is not a known key. Did you mean scheduler=cosine?
> data.shuffle=false
data.shuffle is not a known key. Training data is always shuffled, by trainer.seed, and evaluations keep the order of t
> data.drop_last=true
data.drop_last is not a known key. Samples of an epoch that fill no global batch are left out, and evaluations take eve
> data.pin_memory=true
data.pin_memory is not a known key. The loader sets it: data.num_workers is all that is to be set.
> data.val_split=0.1
data.val_split is not a known key. Did you mean data.validation_fraction=0.1?
> trainer.enable_checkpointing=false
trainer.enable_checkpointing is not a known key. trainer.checkpoint_every=0 saves only at the end.
> model.name=resnet18
model.name is not a known key. An option is chosen as model=NAME, with the names that ddpexp help model lists.
> run_name=first
run_name is not a known key. Did you mean run.dir=first?
> trainer.max_time=00:12:00:00
trainer.max_time is not a known key. trainer.max_seconds=43200 ends a run after 12 hours, saved.
> trainer.num_sanity_val_steps=0
trainer.num_sanity_val_steps is not a known key. python -m ddpexp check recipe=mnist tries two steps and an evaluat
> scheduler=none
scheduler=none is not a known option. Did you mean scheduler=constant?
> strategy=dp
strategy=dp is not a known option. Did you mean strategy=ddp?
> strategy=deepspeed_stage_2
strategy=deepspeed_stage_2 is not a known option. strategy.shard_optimizer=true divides the optimizer's state among the
> strategy=mp
strategy=mp is not a known option. strategy=pipeline gives each worker some layers, and strategy=fsdp a share of every
> strategy=tp
strategy=tp is not a known option. Tensor parallelism is a key of sharding: strategy=fsdp strategy.tp_size=2.
> strategy=gpipe
strategy=gpipe is not a known option. Stages of a pipeline are a strategy: strategy=pipeline strategy.pp_size=2.
> strategy=context_parallel
strategy=context_parallel is not a known option. There is no context parallelism: trainer.activation_checkpo
> strategy=sequence_parallel
strategy=sequence_parallel is not a known option. Sequence parallelism belongs to tensor parallelism: strategy=fsdp
> strategy=moe
strategy=moe is not a known option. There is no expert parallelism: strategy=fsdp shards the parameters of all experts.
> strategy=zero-3
strategy=zero-3 is not a known option. Did you mean strategy=fsdp?
> strategy=hybrid
strategy=hybrid is not a known option. strategy=fsdp strategy.dp_replicate_size=2 keeps two replicas, each of them shard
> strategy=fsdp strategy.zero_stage=3
strategy.zero_stage is not a known key. strategy.shard_optimizer=true divides the optimizer's state among the workers (Z
> strategy.tensor_parallel_size=2
strategy.tensor_parallel_size is not a known key. Tensor parallelism is a key of sharding: strategy=fsdp strategy.tp_s
> trainer.context_parallel_size=2
trainer.context_parallel_size is not a known key. There is no context parallelism: trainer.activation_checkp
> strategy.num_virtual_stages=2
strategy.num_virtual_stages is not a known key. Several stages on a worker are a schedule: strategy=pipeline strategy.s
> trainer.expert_parallel_size=2
trainer.expert_parallel_size is not a known key. There is no expert parallelism: strategy=fsdp shards the parameters of
> launcher=accelerate
launcher=accelerate is not a known option. Did you mean launcher=spawn?
> trainer.seed=${SEED}
trainer.seed is invalid: Interpolation key 'SEED' not found. A variable of the environment is written ${oc
> model.hidden=${model.hiden}
model.hidden is invalid: Interpolation key 'model.hiden' not found. Did you mean ${model.hidden}?
> trainer.seed=${oc.enf:SEED}
trainer.seed is invalid: Unsupported interpolation type oc.enf. Did you mean ${oc.env:...}?
"""
VALUES = """\
> strategy.kind=zero
strategy.kind=zero names no strategy. Available: ddp, fsdp, local_sgd, diloco, pipeline. A strategy of your own is an
> --config-dir mine/conf task._target_=mine.extra.Task
task._target_=mine.extra.Task: The module {project}/mine/extra.py is beside {project}/mine/mine.py, not
> --config-dir mine/conf task._target_=mine.Regress
task._target_=mine.Regress: The file {project}/mine/mine.py defines no Regress. Available: Task, Net.
> trainer.checkpoint_every_seconds=10min
trainer.checkpoint_every_seconds=10min is not a number or null. Did you mean trainer.checkpoint_every_seconds=600?
> strategy.bucket_cap_mb=25MB
strategy.bucket_cap_mb=25MB is not a whole number or a number. Did you mean strategy.bucket_cap_mb=25?
> trainer.global_batch_size=64k
trainer.global_batch_size=64k is not a whole number. Did you mean trainer.global_batch_size=64000?
> trainer.global_batch_size=2.5
trainer.global_batch_size=2.5 is not a whole number.
> launcher=slurm launcher.time=1h
launcher.time=1h is not a time that Slurm accepts. Write minutes, hours:minutes:seconds, or days-hours.
> launcher=slurm launcher.time=tomorrow
launcher.time=tomorrow is not a time that Slurm accepts. Write minutes, hours:minutes:seconds, or days-hours.
> trainer.nodes=2 launcher.master_addr=localhost:29500
launcher.master_addr=localhost:29500 has a port. Write launcher.master_addr=localhost launcher.master_port=29500.
> optimizer=adamw +optimizer.learning_rate=0.1
optimizer.learning_rate is not a known key. Did you mean optimizer.lr?
> optimizer=adamw +optimizer.beta1=0.9
optimizer.beta1 is not a known key. Did you mean optimizer.betas=[0.9,0.999]?
> optimizer=adamw +optimizer.amsgard=true
optimizer.amsgard is not a known key. Did you mean optimizer.amsgrad?
> --config-dir mine/conf data._target_=train-net.load
data._target_=train-net.load is not allowed: a configuration may name ddpexp's recipes, a closed set of torch classes, m
> trainer.gpus=2.0
trainer.gpus=2.0 is not auto or a whole number. Did you mean trainer.gpus=2?
> trainer.gpus='2'
trainer.gpus='2' is a text, and the key takes auto or a whole number. Leave out the quotes: trainer.gpus=2.
> trainer.gpus=[0,1]
trainer.gpus=[0, 1] is not auto or a whole number. It is a number of GPUs: CUDA_VISIBLE_DEVICES=0,1 before the com
> trainer.gpus=cpu
trainer.gpus=cpu is not auto or a whole number. It is a number of workers: trainer.device=cpu trainer.gpus=2 runs two on
> trainer.device=mps
trainer.device=mps is not one of auto, cpu, cuda. The workers run on GPUs of CUDA or on CPUs.
> trainer.device=tpu
trainer.device=tpu is not one of auto, cpu, cuda. The workers run on GPUs of CUDA or on CPUs.
> trainer.device=cuda:0
trainer.device=cuda:0 is not one of auto, cpu, cuda. Did you mean trainer.device=cuda? CUDA_VISIBLE_DEVICES=0 before the
> trainer.precision=tf32
trainer.precision=tf32 is not one of fp32, bf16, fp16. trainer.matmul_precision=high lets matrix products in fp32 use TF
> trainer.eval_every=0.25
trainer.eval_every=0.25 is not epoch or a whole number. It takes steps, as in trainer.eval_every=500, or epoch.
> trainer.eval_every=2epochs
trainer.eval_every=2epochs is not epoch or a whole number. It takes steps, as in trainer.eval_every=500, or epoch.
> trainer.checkpoint_every=best
trainer.checkpoint_every=best is not epoch or a whole number. trainer.keep_best=max:eval/accuracy keeps the best one, to
> trainer.keep_last=all
trainer.keep_last=all is not a whole number or null. Did you mean trainer.keep_last=null?
> trainer.clip_grad_norm=off
trainer.clip_grad_norm=off is not a number or null. Did you mean trainer.clip_grad_norm=null?
> trainer.timeout=60
trainer.timeout=60 is not a section: it has the keys init_seconds, step_seconds, save_seconds, data_seconds. Type one of
> run.resume=latest
run.resume=latest is not one of auto, never, require. Did you mean run.resume=auto?
> trainer.epochs=1e1
trainer.epochs=10.0 is not a whole number or null. Did you mean trainer.epochs=10?
> trainer.epochs=None
trainer.epochs=None is not a whole number or null. Did you mean trainer.epochs=null?
> trainer.deterministic=yes
trainer.deterministic=yes is not true or false. Did you mean trainer.deterministic=true?
> trainer.timeout.step_seconds=10m
trainer.timeout.step_seconds=10m is not a number. Did you mean trainer.timeout.step_seconds=600?
> data.validation_fraction=20%
data.validation_fraction=20% is not a number. Did you mean data.validation_fraction=0.2?
> run.trust=mine
run.trust=mine is not a list, each item a text. Did you mean run.trust=[mine]?
> run.resume=true
run.resume=true is not one of auto, never, require. Did you mean run.resume=auto?
> model._target_=nn.Linear
model._target_=nn.Linear is not allowed: a configuration may name ddpexp's recipes, a closed set of torch classes, mod
> model._target_=mine:Net
model._target_=mine:Net is not allowed: a configuration may name ddpexp's recipes, a closed set of torch classes, modu
> model._target_=resnet18
model._target_=resnet18 is not allowed: a configuration may name ddpexp's recipes, a closed set of torch classes, modu
> optimizer._target_=torch.optim.Lion
optimizer._target_=torch.optim.Lion is not allowed: a configuration may name ddpexp's recipes, a closed set of torch c
> --config-dir mine/conf model=net model._target_=mine.py.Net
model._target_=mine.py.Net: A module is named without .py. Did you
"""
OPTION_WORDS = """\
> --nproc_per_node 8 --nnodes=2
--nproc_per_node is not an option. Write key=value, for example trainer.gpus=2. Did you mean trainer.gpus=8 traine
> trainer.devices=8 trainer.accelerator=gpu trainer.max_epochs=10
trainer.devices is not a known key. Did you mean trainer.gpus=8 trainer.device=cuda trainer.epochs=10?
> -m trainer.max_epochs=3 optimizer.lr=0.1,0.2
trainer.max_epochs is not a known key. Did you mean trainer.epochs=3?
> trainer=gpu experiment=mnist trainer.max_epochs=3
trainer=gpu is not a known option. Did you mean trainer.device=cuda recipe=mnist trainer.epochs=3?
> data.batch_size=64 trainer.gpus=4 trainer.accumulate_grad_batches=4
data.batch_size is not a known key. Did you mean trainer.global_batch_size=1024 trainer.micro_batch_size=64? The first
> data.batch_size=64 trainer.devices=4 trainer.num_nodes=2 trainer.accumulate_grad_batches=2
data.batch_size is not a known key. Did you mean trainer.global_batch_size=1024 trainer.micro_batch_size=64 trainer.gpus
> data.batch_size=64 trainer.accumulate_grad_batches=4
data.batch_size is not a known key. Did you mean trainer.global_batch_size, the samples of a step over all workers?
> logger=many_loggers callbacks=model_checkpoint callbacks.model_checkpoint.monitor=val/acc \
callbacks.model_checkpoint.mode=max callbacks.model_checkpoint.save_top_k=3
callbacks=model_checkpoint is not a known option. Did you mean trainer.keep_best=max:eval/accuracy trainer.keep_best_k=3
> logger.wandb.project=digits logger.wandb.offline=True
logger.wandb.project is not a known key: it is a key of logger=wandb. Add 'logger=[tensorboard,wandb]'.
> logger.wandb.offline=True logger=wandb
logger.wandb.offline is not a known key. Did you mean logger.wandb.mode=offline?
> logger.wandb.project=digits trainer.max_epochs=2
logger.wandb.project is not a known key: it is a key of logger=wandb. Add 'logger=[tensorboard,wandb]'.
> trainer.keep_best="max:eval/accuracy,min:eval/loss"
trainer.keep_best=max:eval/accuracy,min:eval/loss names several metrics, and a run keeps the best weights by one. Did yo
> trainer.keep_best=max:eval/accuracy,min:eval/loss
trainer.keep_best=max:eval/accuracy,min:eval/loss gives several values. Add -m for a run with each, or name one metric,
> experiment=mnist debug=fdr
experiment is not a known key. Did you mean recipe=mnist?
> experiment=mnist
experiment is not a known key. Did you mean recipe=mnist?
> trainer.strategy=ddp_spawn
trainer.strategy is not a known key. strategy=ddp is the default, and launcher=spawn starts its workers.
> launcher=slurm launcher.nodes=2
launcher.nodes is not a known key. Did you mean trainer.nodes?
> logger.wandb.project=digits
logger.wandb.project is not a known key: it is a key of logger=wandb. Add 'logger=[tensorboard,wandb]'.
> optimizer.lr='0.05'
optimizer.lr='0.05' is a text, and the key takes a number. Leave out the quotes: optimizer.lr=0.05.
> trainer.keep_best=true
trainer.keep_best=true is not a text or null. Use max: or min: and a metric of the evaluation, such as max:eval/acc
> launcher=slurm launcher.sbatch_args=[--mail-type=END]
launcher.sbatch_args=[--mail-type=END] is not read: an item has characters that mean something to Hydra. Quote it t
> run.init_from=sw/optimizer.lr=0.1,model=linear
run.init_from=sw/optimizer.lr=0.1,model=linear is not read: its value has characters that mean something to Hydra.
> --epochs 3
--epochs is not an option. Write key=value, for example trainer.gpus=2. Did you mean trainer.epochs=3?
> --checkpoint best
--checkpoint is not an option. Of a run a checkpoint is chosen behind its folder, as in ddpexp evaluate RUN_DIR --ch
> strategy._target_=mine.Sharded
strategy._target_ is not a known key. An installed package brings your own strategy, as strategy=NAME: see docs/st
> logger._target_=mine.Rows
logger._target_ is not a known key. Each logger has a name, as in +logger.mine._target_=mine.Logger: see docs/loggers.md
> --lr=0.1
--lr=0.1 is not an option. Write key=value, for example trainer.gpus=2. Did you mean optimizer.lr=0.1?
> --resume=outputs/first
--resume=outputs/first is not an option. A run is resumed with python -m ddpexp resume outputs/first.
> --standalone recipe=mnist
--standalone is an option of torchrun, which stands before -m. Type torchrun --standalone --nproc-per-node 2 -m ddpexp .
> --multi-run
--multi-run is not an option. Did you mean --multirun?
> --resolve
--resolve goes with a question, such as --cfg job --resolve.
> --config-dir recipe=mine mine/conf
--config-dir takes a folder, and recipe=mine is an override. Write --config-dir DIR recipe=mine, for example --config-d
> --config-dir mine/conf --config-dir conf
--config-dir is typed twice: it takes one folder.
> --config-dir mine/conf/recipe/mine.yaml
--config-dir mine/conf/recipe/mine.yaml is not a directory. Type the folder of its group's folder: --config-dir mine/c
> --config-dir=~/conf
--config-dir ~/conf is not a directory. The shell makes a folder of ~ only where it begins a word: --config-dir ~/...
"""


def pairs(*tables: str) -> list[tuple[str, str]]:
    lines = [line for table in tables for line in table.splitlines()]
    return [(typed.removeprefix("> "), said) for typed, said in zip(lines[::2], lines[1::2], strict=True)]


@pytest.mark.parametrize(("typed", "sentence"), pairs(BARE, SEVERAL, UNREAD, KEYS, VALUES, OPTION_WORDS))
def test_for_a_wrong_override_the_error_says_what_to_type(project: Path, typed: str, sentence: str) -> None:
    words = [typed] if "(" in typed and " " not in typed else typed.split(" ")
    assert refusal(*words).startswith(sentence.replace("{project}", str(project)))


ALL = """\
> recipe=mnist trainer.gpu=2 optimizer.lrr=3 trainer.max_step=4
trainer.gpu is not a known key. Did you mean trainer.gpus?
optimizer.lrr is not a known key. Did you mean optimizer.lr?
trainer.max_step is not a known key. Did you mean trainer.max_steps?
> trainer.gpu=2 trainer.max_epochs=3 trainer.devices=4
trainer.gpu is not a known key. Did you mean trainer.gpus?
trainer.max_epochs is not a known key. Did you mean trainer.epochs=3 trainer.gpus=4?
> data.batch_size=64 trainer.accumulate_grad_batches=4
data.batch_size is not a known key. Did you mean trainer.global_batch_size, the samples of a step over all workers?
trainer.accumulate_grad_batches is not a known key. Did you mean trainer.micro_batch_size, from which the number of \
accumulated passes follows?
> optimizer=adamm optimizer.betas=[0.9,0.99] trainer.seeed=1
optimizer=adamm is not a known option. Did you mean optimizer=adam?
trainer.seeed is not a known key. Did you mean trainer.seed?
> recipe=mnst model=lenett
recipe=mnst is not a known option. Did you mean recipe=mnist?
> -m trainer.seed=1,2 trainer.gpu=2 optimizer.lrr=3
trainer.gpu is not a known key. Did you mean trainer.gpus?
optimizer.lrr is not a known key. Did you mean optimizer.lr?
"""


@pytest.mark.parametrize("typed_and_said", ALL.removeprefix("> ").split("\n> "))
def test_all_mistakes_of_a_command_are_said_at_once_each_in_a_line(typed_and_said: str) -> None:
    typed, _, said = typed_and_said.rstrip("\n").partition("\n")
    assert refusal(*typed.split(" ")) == said


def test_a_sweep_may_override_the_single_value_of_a_script_and_repeat_one() -> None:
    made = compose_command(["-m", "trainer.epochs=9", "optimizer.lr=0.1", "optimizer.lr=0.1", "trainer.epochs=1,2"])
    assert isinstance(made, Swept)
    assert made.keys == {"trainer.epochs"}


def test_several_overrides_inside_one_pair_of_quotes_are_recognized() -> None:
    assert refusal("optimizer.lr=0.1 trainer.seed=3") == (
        "optimizer.lr=0.1 trainer.seed=3 has two overrides inside one pair of quotes. Write optimizer.lr=0.1 "
        "trainer.seed=3, each on its own."
    )
    assert refusal("run.dir=a b c=d").endswith("each on its own, or a text that holds both: 'run.dir=\"a b c=d\"'.")
    assert refusal("+task.note=a b c=d").endswith("or a text that holds both: '+task.note=\"a b c=d\"'.")
    assert refusal("-m", "optimizer.lr=0.1 0.01").endswith(" Did you mean optimizer.lr=0.1,0.01?")


def test_a_space_behind_the_config_folder_is_reported(project: Path) -> None:
    assert refusal("--config-dir", "mine/conf ", "recipe=mine") == (
        "--config-dir mine/conf  is not a directory. It has a space at its end: type --config-dir mine/conf."
    )


def test_what_is_suggested_for_a_sweep_is_one() -> None:
    suggested = [["optimizer.lr=0.1,0.01", "hydra.sweep.dir=sw"], ["trainer.seed=range(0,4)"], ["run.trust=[a,b]"]]
    for words in [*suggested, ["trainer.seed=1,2", "trainer.eval_every=1", "sweep.objective=eval/loss"]]:
        assert isinstance(compose_command(["-m", *words]), Swept)


def test_a_quoted_text_is_a_text_also_for_the_grammar_of_hydra(project: Path) -> None:
    """What the answers suggest is accepted."""
    for word in ('run.dir="a=b"', "run.dir=a", "optimizer.lr=0.1", "trainer.clip_grad_norm=null", "~model.hidden"):
        assert isinstance(compose_command([word]), ResolvedConfig)
    made = compose_command(["launcher=elastic", 'launcher.rdzv_conf="last_call_timeout=5"'])
    assert isinstance(made, ResolvedConfig)
    assert made.values["launcher"]["rdzv_conf"] == "last_call_timeout=5"


# Words of other frameworks

FOREIGN = [
    ("trainer.max_epochs=3", "Did you mean trainer.epochs?"),
    ("trainer.devices=2", "Did you mean trainer.gpus?"),
    ("trainer.num_nodes=2", "Did you mean trainer.nodes?"),
    ("trainer.accelerator=gpu", "Did you mean trainer.device?"),
    ("trainer.lr=0.1", "Did you mean optimizer.lr?"),
    ("lr=0.1", "Did you mean optimizer.lr?"),
    ("batch_size=8", "Did you mean trainer.global_batch_size, the samples of a step over all workers?"),
    ("data.batch_size=8", "Did you mean trainer.global_batch_size, the samples of a step over all workers?"),
    ("trainer.accumulate_grad_batches=2", (
        "Did you mean trainer.micro_batch_size, from which the number of accumulated "
        "passes"
    )),
    ("trainer.gradient_clip_val=1", "Did you mean trainer.clip_grad_norm?"),
    ("seed=3", "Did you mean trainer.seed?"),
    ("seed_everything=3", "Did you mean trainer.seed?"),
    ("ckpt_path=x", (
        "A run is resumed with python -m ddpexp resume RUN_DIR, and run.init_from=FILE starts a new one "
        "from weights."
    )),
    ("trainer.limit_train_batches=3", "There is nothing like it: trainer.max_steps=100 ends a run earlier."),
    ("limit_val_batches=3", "Did you mean trainer.limit_eval_batches?"),
    ("trainer.overfit_batches=3", "trainer.limit_train_samples=64 trainer.global_batch_size=64 trains on "
     "this many samples only."),
    ("trainer.save_top_k=3", "Did you mean trainer.keep_best_k?"),
    ("trainer.fast_dev_run=true", "python -m ddpexp check recipe=mnist tries two steps"),
    ("trainer.patience=3", "callbacks=early_stopping ends a run early; callbacks.early_stopping.patience "
     "counts evaluations"),
    ("debug=default", "python -m ddpexp check recipe=mnist tries two steps"),
    ("hparams_search=x", "A search is a sweep: -m recipe=mnist hydra/sweeper=optuna sweep.objective=eval/loss"),
    ("tags=[a]", "A run has a name and a folder: recipe.name=first, run.dir=outputs/first."),
    ("trainer.profiler=simple", "trainer.profile=100:110 profiles the ten steps after step 100"),
    ("callbacks.model_checkpoint.monitor=x", "The best checkpoints are kept by trainer.keep_best=min:eval/loss"),
    ("checkpoint=best", "Of a run a checkpoint is chosen by --checkpoint best, last or a step behind it."),
    ("output_dir=x", "Did you mean run.dir?"),
    ("data.data_dir=x", "Did you mean data.root?"),
]  # fmt: skip
FOREIGN_VALUES = [
    ("trainer.precision=16-mixed", "Did you mean trainer.precision=fp16?"),
    ("trainer.precision=bf16-mixed", "Did you mean trainer.precision=bf16?"),
    ("trainer.precision=32", "Did you mean trainer.precision=fp32?"),
    ("trainer.device=gpu", "Did you mean trainer.device=cuda?"),
    ("launcher=ddp", "Did you mean launcher=spawn?"),
    ("launcher=sbatch", "Did you mean launcher=slurm?"),
    ("logger=tb", "Did you mean logger=tensorboard?"),
    ("trainer.precision=bf16-true", "Parameters in bf16 are trainer.param_dtype=bf16."),
    ("trainer=gpu", "Did you mean trainer.device=cuda?"),
    ("callbacks=model_checkpoint", "trainer.keep_best=min:eval/loss trainer.keep_best_k=3."),
    ("callbacks=rich_progress_bar", "Progress is shown on terminals by itself, and the model is counted in the first "
     "lines: leave it out."),
    ("logger=many_loggers", "Several loggers are a list: 'logger=[tensorboard,wandb]'."),
    ("strategy=ddp_find_unused_parameters_true", "strategy=ddp strategy.find_unused_parameters=true."),
    ("strategy=ddp_spawn", "strategy=ddp is the default, and launcher=spawn starts its workers."),
    ("optimizer=lion", "run.trust=[PACKAGE] optimizer._target_=PACKAGE.CLASS (docs/optimizers.md)."),
    ("optimizer._target_=torch.optim.Lion", "optimizer._target_=PACKAGE.CLASS (docs/optimizers.md)."),
]  # fmt: skip


@pytest.mark.parametrize(("word", "advice"), FOREIGN)
def test_for_another_frameworks_key_ours_is_suggested(word: str, advice: str) -> None:
    where, _, key = word.partition("=")[0].rpartition(".")
    assert str(
        unknown_key(key, ["epochs", "global_batch_size", "micro_batch_size"], where, ["trainer.seed"])
    ).startswith(f"{word.partition('=')[0]} is not a known key. {advice}")


def test_the_error_is_the_same_wherever_the_key_stands(project: Path) -> None:
    advice = "is not a known key. There is nothing like it: trainer.max_steps=100 ends a run earlier."
    for key in ("limit_train_batches", "trainer.limit_train_batches"):
        assert refusal(f"{key}=3").startswith(f"{key} {advice}")
    assert refusal("+trainer.limit_train_batches=3").startswith(f"trainer.limit_train_batches {advice}")


@pytest.mark.parametrize(("word", "advice"), FOREIGN_VALUES)
def test_for_another_frameworks_value_ours_is_suggested(word: str, advice: str) -> None:
    said = refusal(word)
    assert said.startswith(f"{word} is not ")
    assert said.endswith(advice)


@pytest.mark.parametrize(
    "word", ["model=vgg16", "strategy=quantum", "scheduler=quick", "logger=papertrail", "data=celeba"]
)
def test_where_nothing_is_near_nothing_is_suggested(word: str) -> None:
    said = refusal(word)
    assert "Did you mean" not in said
    assert ". Available: " in said


# What is wrong in a user's own file

FILES = [
    (
        "defaults:\n  - override /model: net\ntask: {_target_: mine.Task}\n",
        "does not begin with the line # @package _global_, by which",
    ),
    (
        "\ufeff# @package _global_\ntask: {_target_: mine.Task}\n",
        "begins with a byte order mark, which Hydra does not read. Save it as",
    ),
    ("# @package _globals_\n", "begins with # @package _globals_. Write # @package _global_, by which its keys"),
    ("# @package recipe\n", "begins with # @package recipe. Write # @package _global_, by which its keys"),
]
TEXTS = [
    ('task:\n\t_target_: mine.Task\n',
     "bad.yaml, line 3 is not valid YAML: found character '\\t' that cannot start any token (a tab: indent with "
     'spaces).'),
    ('task: {_target_: "mine.Task}\n',
     'bad.yaml, line 3 is not valid YAML: found unexpected end of stream (a quote is not closed).'),
    ('task: {_target_: mine.Task, path: ???}\n',
     "bad.yaml, line 2 is not valid YAML: expected the node content, but found '?' (inside braces a required "
     'value has quotes: "???").'),
    ('task:\n  _target_: mine.Task\n   weight: 3\n',
     'bad.yaml, line 4 is not valid YAML: mapping values are not allowed here (a line is indented too far,'),
    ('- task\n',
     'recipe/bad.yaml is a list, and a config holds keys. A line that begins with - stands below a key.'),
    ('defaults:\n  - model: net\n',
     "model=net in a recipe's defaults is looked for in the folder recipe. Write - override /model: net."),
    ('defaults:\n  - override model: net\n',
     'recipe/bad.yaml overrides model, which is not chosen before it under that name. Write - override /model: '),
    ('defaults:\n  - override /backbone: net\n',
     'recipe/bad.yaml overrides backbone, which is not chosen before it under that name. Write - /backbone'),
    ('trainer: {epochs: 1}\n',
     'task is missing. A recipe gives it, as task: {_target_: mine.Name}, or recipe=mnist.'),
    ('task: mine.Task\n',
     'task=mine.Task is not a section with keys. Write task: {_target_: mine.Task}.'),
    ('task:\n  _target_ mine.Task\n',
     'task=_target_ mine.Task is not a section with keys. Write task: {_target_: mine.Task}.'),
    ('task: {_target_: mine.Task}\nepochs: 3\n',
     'epochs is not a known section. Did you mean trainer.epochs?'),
    ('task: {_target_: mine.Task}\ntrainer: {max_epochs: 3}\n',
     'trainer.max_epochs is not a known key. Did you mean trainer.epochs?'),
    ('defaults:\n  - override /model: [net, lenet]\n',
     'bad.yaml: The entry - override /model: [net, lenet] chooses several options, and a run has one. Write one'),
    ('defaults:\n  - override /optimiser: adamw\n',
     'bad.yaml: There is no group optimiser. Did you mean - override /optimizer: adamw?'),
    ('defaults:\n  - override /model:net\n',
     'bad.yaml: The entry - override /model:net needs a space after the colon. Write - override /model: net.'),
    ('defaults:\n  - override /model = net\n',
     'bad.yaml: The entry - override /model = net needs a colon in place of =. Write - override /model: net.'),
    ('defaults:\n  override /model: net\n',
     'bad.yaml has no list under defaults. Write each entry after a dash, as in - override /model: net.'),
    ('default:\n  - override /model: net\ntask: {_target_: mine.Task}\n',
     'bad.yaml has the unknown key default. Did you mean defaults?'),
    ('optimizer: adamw\ntask: {_target_: mine.Task}\n',
     'bad.yaml has optimizer: adamw in place of the section optimizer. Choose an option under defaults, as '
     '- override /optimizer: adamw.'),
    ('trainer:\ntask: {_target_: mine.Task}\n',
     'bad.yaml sets trainer to nothing. Write its keys below it, indented, or leave the line trainer: out.'),
    ('model: {hidden:16}\ntask: {_target_: mine.Task}\n',
     'bad.yaml: The line hidden:16 needs a space after the colon. Write hidden: 16.'),
    ('trainer:\n  epochs:3\ntask: {_target_: mine.Task}\n',
     'bad.yaml: The line epochs:3 needs a space after the colon. Write epochs: 3.'),
    ('trainer:\n  epochs: 3\n  seed:3\ntask: {_target_: mine.Task}\n',
     'bad.yaml, line 4: The line seed:3 needs a space after the colon. Write seed: 3.'),
    ('task: {_target_: mine.Tusk}\n',
     'task._target_=mine.Tusk: '),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_a_recipe_without_its_first_line_is_refused(project: Path, text: str, sentence: str) -> None:
    path = project / "mine/conf/recipe/bad.yaml"
    path.write_text(text)
    assert refusal("--config-dir", "mine/conf", "recipe=bad").startswith(f"{path} {sentence}")


@pytest.mark.parametrize(("text", "sentence"), TEXTS)
def test_for_a_wrong_recipe_the_error_says_what_to_write(project: Path, text: str, sentence: str) -> None:
    (project / "mine/conf/recipe/bad.yaml").write_text(f"# @package _global_\n{text}")
    assert (
        refusal("--config-dir", "mine/conf", "recipe=bad")
        .removeprefix(f"{project}/mine/conf/recipe/")
        .startswith(sentence)
    )


def test_a_mistake_in_a_file_that_a_recipe_chooses_is_found_too(project: Path) -> None:
    (project / "mine/conf/recipe/bad.yaml").write_text("# @package _global_\ndefaults:\n  - override /model: big\n")
    (project / "mine/conf/model/big.yaml").write_text("_target_: mine.Net\ninner: {hidden:16}\n")
    said = f"{project}/mine/conf/model/big.yaml: The line hidden:16 needs a space after the colon. Write hidden: 16."
    assert refusal("--config-dir", "mine/conf", "recipe=bad") == said
    assert refusal("--config-dir", "mine/conf", "-m", "recipe=mine,bad") == said


def test_code_inside_the_folder_of_configs_is_to_be_moved_beside_it(project: Path) -> None:
    (project / "mine/mine.py").rename(project / "mine/conf/mine.py")
    said = refusal("--config-dir", "mine/conf", "recipe=mine")
    assert said.endswith(" conf/mine.py lies inside --config-dir: move it beside it.")


def test_a_module_with_a_dash_is_to_be_renamed(project: Path) -> None:
    (project / "mine/train-net.py").write_text("def load(): ...\n")
    said = refusal("--config-dir", "mine/conf", "data._target_=train-net.load")
    assert said.endswith(" The name of a module has no dash: rename its file, and write train_net.load.")


@pytest.mark.parametrize("time", ["60", "1:25", "1:00:00", "2-0", "2-12:30:00", "unlimited"])
def test_every_form_of_time_that_slurm_reads_is_accepted(time: str) -> None:
    made = compose_command(["launcher=slurm", f"launcher.time={time}"])
    assert isinstance(made, ResolvedConfig)
    parse(made.values)


def test_a_folder_named_almost_like_a_group_is_named(project: Path) -> None:
    (project / "mine/conf/models").mkdir()
    (project / "mine/conf/model/net.yaml").rename(project / "mine/conf/models/net.yaml")
    folder = project / "mine/conf"
    assert refusal("--config-dir", "mine/conf", "model=net") == (
        f"{folder}/models is not the folder of model=net. Rename it to {folder}/model."
    )


def test_windows_line_ends_and_comments_before_the_package_are_no_mistake(project: Path) -> None:
    text = "# What this is.\r\n\r\n# @package _global_\r\ntask:\r\n  _target_: mine.Task\r\n"
    (project / "mine/conf/recipe/windows.yaml").write_bytes(text.encode())
    for recipe in ("windows", "windows.yaml", "mine"):
        made = compose_command(["--config-dir", "mine/conf", f"recipe={recipe}"])
        assert isinstance(made, ResolvedConfig)
        assert made.values["recipe"]["name"] == recipe.removesuffix(".yaml")


def test_a_project_whose_entry_points_are_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    section = '[project.entry-points."ddpexp.recipes"]\nmine = "mine"\n\n[tool.other]\nname = "x"\n'
    (tmp_path / "mine/pyproject.toml").write_text(section)
    monkeypatch.chdir(tmp_path)
    said = "mine/pyproject.toml declares mine for ddpexp.recipes, and that is not installed: type pip install -e ./mine"
    assert refusal("recipe=mine").startswith(f"recipe=mine is not a known option. {said}")
    monkeypatch.chdir(tmp_path / "mine")
    assert "pip install -e . and" in plugins.uninstalled("other")
    monkeypatch.setattr(plugins, "_entry_points", lambda: {"ddpexp.recipes": {"mine": "mine"}})
    assert plugins.uninstalled("mine") == ""
