"""The verbs beside training: one table, which dispatch, help, refusals, completion and the fork server share."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

from ddpexp.cli.verb import Option, Verb
from ddpexp.errors import RefusedError

_WORD = re.compile(r"[A-Za-z][\w-]*")  # neither key=value nor an option
_ALIKE = 0.76  # of a mistyped verb; `run`, with which other programs train, is not rerun
_EXAMPLE = "python -m ddpexp recipe=mnist trainer.gpus=2"
_SWEEP = "python -m ddpexp -m recipe=mnist optimizer.lr=0.1,0.01"
_JSON = Option("--json", "for programs")
_FOLDER = "paths"
_LIVE = "Under any launcher, from any host that sees the directory. docs/profiling.md."
_CHECKPOINT = Option(
    "--checkpoint",
    "of a run: best (by its trainer.keep_best), last, or a step\nsuch as 1200; default: best where there is one, else "
    "last",
    "C",
    "best",
)
_OTHER_CHECKPOINT = {
    **dict.fromkeys(("checkpoint_path", "ckpt", "ckpt_path"), "Type --checkpoint best, last or a step."),
    **{which: f"Type --checkpoint {which}." for which in ("best", "last")},
    "run": "The run stands first, behind the command.",
    "opset": "ONNX files have the opset that torch chooses: leave it out.",
}
_SORTED = "The rows are sorted by sweep.objective=METRIC, in the order of sweep.mode=min or max."

VERBS = (
    Verb(
        "resume",
        "RUN_DIR [key=value ...]",
        "continue an interrupted run or sweep",
        about="""\
Resume the run in a directory from its newest checkpoint, as its config.yaml
says. Another launcher is typed as launcher=..., its settings as
launcher.key=..., and what is to change in the training itself as
trainer.epochs=4 or optimizer.lr=0.01. A run with code of your own needs
--config-dir DIR or run.trust=[...] again. A sweep's directory resumes it.""",
        operands="run",
        missing_prompt="resume what?",
        forks="stored launcher",
        also=("continue", "restart", "restore"),
    ),
    Verb(
        "rerun",
        "RUN_DIR [key=value ...] [--exact]",
        "train the experiment of a run again, with changes",
        about="""\
Train the experiment of a run again in a new directory (run.dir=...), with the
overrides that are typed: keys and options, such as optimizer=adamw. What is
not typed is as in the run. Before it trains, the command says what differs
from the run in configuration, code, versions, data and machine. A run with
code of your own needs --config-dir DIR or run.trust=[...] again.""",
        operands="run",
        options=(
            Option(
                "--exact",
                "refuse what can change the numbers, and compare the\nweights and metrics at the end: the exit code is "
                "1 if\nthey are not equal",
            ),
            Option("--best", "of a sweep's directory: its best job"),
        ),
        notes="docs/resume.md.",
        missing_prompt="rerun what?",
        forks="stored launcher",
        foreign_options={
            "checkpoint": "To start from its weights, add run.init_from=RUN_DIR run.init_checkpoint=best."
        },
        also=("repeat", "reproduce", "retrain", "again", "fork", "clone"),
    ),
    Verb(
        "evaluate",
        "RUN_DIR_OR_WEIGHTS [key=value ...] [options]",
        "evaluate the weights of a run, or of a file",
        about="""\
Evaluate weights of a run directory, or a safetensors file, on the run's
evaluation data. Weights that lie in no run directory need a recipe:

    ddpexp evaluate weights.safetensors recipe=mnist""",
        operands="weights",
        options=(
            Option("--split", "evaluate these sets; default: all but the one named test", "NAME,NAME", "test"),
            _CHECKPOINT,
            Option("--json", "print the metrics for programs, and everything else\non standard error"),
        ),
        foreign_options=_OTHER_CHECKPOINT,
        missing_prompt="evaluate what?",
        forks="launcher",
        also=("eval", "test", "valid", "validate"),
    ),
    Verb(
        "predict",
        "RUN_DIR_OR_WEIGHTS [--input FILE] [--out FILE] [options]",
        "predict for a data set, or for a picture, a text or rows",
        about="""\
Write what the task's method predict returns for each sample of a data set, in
their order, with weights of a run directory, of the folder of a checkpoint or
of a safetensors file. With --input it predicts for what that names, read as an
evaluation of the run reads its data, and prints that without --out.""",
        operands="weights",
        options=(
            Option(
                "--input",
                "a picture, a text, a table, an array, or a folder of such\nfiles, in place of a data set",
                "FILE",
                "photo.jpg",
                values=_FOLDER,
            ),
            Option(
                "--out",
                ".npz, .npy, .csv or .parquet, replaced once it is complete",
                "FILE",
                "predictions.npz",
                values=_FOLDER,
            ),
            Option("--split", "an evaluation set, or train; default: the evaluation set", "NAME", "test"),
            _CHECKPOINT,
            Option("--json", "print the predictions for programs"),
        ),
        notes="Other data is named by overrides, such as data.root=OTHER. docs/predict.md.",
        foreign_options=_OTHER_CHECKPOINT,
        missing_prompt="predict with what?",
        forks="launcher",
        also=("infer", "inference", "forward"),
    ),
    Verb(
        "export",
        "RUN_DIR --out FOLDER [--format NAME] [key=value ...]",
        "write a trained model for other programs",
        about="""\
Write the model of a run directory, or of the folder of a checkpoint, into a
new folder, and compare it with the model on a batch of the data.""",
        is_interruptible=True,
        operands="run",
        options=(
            Option("--out", "new or empty", "FOLDER", "exported", values=_FOLDER),
            Option(
                "--format",
                "safetensors (the default), hf (safetensors in parts, as\nHugging Face's libraries write it), pt (a "
                "state_dict of\ntorch.save), pt2 (torch.export), onnx",
                "NAME",
                "safetensors",
            ),
            _CHECKPOINT,
        ),
        notes="docs/export.md.",
        foreign_options=_OTHER_CHECKPOINT,
        missing_prompt="export what?",
        also=("convert", "onnx"),
    ),
    Verb(
        "generate",
        "RUN_DIR [--prompt TEXT] [--tokens N] [options]",
        "print what a language model of a run writes",
        about="Print what the model of a run with data=text writes, on a GPU if there is one.",
        operands="run",
        options=(
            Option("--prompt", "what it continues; default: a new line", "TEXT", "'To be'", may_be_empty=True),
            Option("--tokens", "how many tokens it adds; default: 200", "N", "200"),
            Option("--temperature", "divides the scores, 0 takes the most likely; default: 0.8", "T", "0.8"),
            Option("--top_k", "draw from the K most likely tokens; default: 200", "K", "200"),
            Option("--seed", "of the random numbers; default: 0", "S", "0"),
            _CHECKPOINT,
            Option("--device", "auto (default), cpu or cuda", "D", "cpu"),
        ),
        missing_prompt="generate with what?",
        also=("sample", "complete", "chat"),
    ),
    Verb(
        "status",
        "DIR [--json]",
        "how far a run or a sweep is, and what to type next",
        about="Show how far a run or the jobs of a sweep are, where they run, and what to type\nto resume them.",
        is_interruptible=True,
        operands="directory",
        options=(_JSON,),
        list_more="ddpexp.sweep.job_status:explained",
        also=("info", "show", "state", "ps"),
    ),
    Verb(
        "profile",
        "RUN_DIR [--steps N] [--json]",
        "profile the next steps of a running run",
        about="""\
Have every worker of a running run write a trace of its next steps, and wait for
it. The run continues with the same bits. trainer.profile=100:110 does so from
the start.""",
        function="ddpexp.cli.running:profile",
        is_interruptible=True,
        operands="directory",
        options=(Option("--steps", "how many; default: 10", "N", "10"), _JSON),
        notes=_LIVE,
        missing_prompt="profile what?",
        also=("trace", "profiler"),
    ),
    Verb(
        "stacks",
        "RUN_DIR [--json]",
        "where every rank of a running run is, also one that hangs",
        about="""\
Show the stack of each rank of a running run, which continues. Ranks with the
same stack are shown together.""",
        function="ddpexp.cli.running:stacks",
        is_interruptible=True,
        operands="directory",
        options=(_JSON,),
        notes=_LIVE,
        missing_prompt="stacks of what?",
        also=("stack", "dump", "py-spy", "where", "traceback"),
    ),
    Verb(
        "save",
        "RUN_DIR [--json]",
        "have a running run save a checkpoint now",
        about="Have a running run save a checkpoint after its current step, and continue.",
        function="ddpexp.cli.running:save",
        is_interruptible=True,
        operands="directory",
        options=(_JSON,),
        notes=_LIVE,
        missing_prompt="save what?",
        also=("checkpoint",),
    ),
    Verb(
        "stop",
        "RUN_DIR [--json]",
        "have a running run save and end",
        about="""\
Have a running run save after its current step and end, as on SIGTERM: its exit
code is 143, and the same command resumes it.""",
        function="ddpexp.cli.running:stop",
        is_interruptible=True,
        operands="directory",
        options=(_JSON,),
        notes=_LIVE,
        missing_prompt="stop what?",
        also=("cancel", "kill", "end", "abort", "halt"),
    ),
    Verb(
        "sync",
        "RUN_DIR [key=value ...] [--json]",
        "send what the remote loggers of a run have not got",
        about="""\
Send what the remote loggers of a run (logger=wandb, logger=mlflow) have not
got: after an outage, a killed run, or a run without a network. What is sent is
marked in the run directory: nothing is sent twice. Refused while the run runs,
which sends by itself. Keys of the loggers may change: logger.wandb.mode=online.
A run with a logger of your own needs --config-dir DIR or run.trust=[...] again.""",
        is_interruptible=True,
        operands="run",
        options=(Option("--json", "print the numbers of steps for programs"),),
        missing_prompt="sync what?",
        also=("upload", "push", "wandb"),
    ),
    Verb(
        "table",
        "DIR... [sweep.objective=METRIC] [options]",
        "compare sweeps and runs in a table",
        about="""\
Show what is in directories as a table, the best first: a sweep, runs, or a
folder that holds some, such as outputs/mnist. Columns are the values that
differ, then the metric (sweep.mode=max: more is better). With seeds among them
a second table has means, std and 95 % intervals. A terminal gets as many
columns as fit, those that distinguish most runs; a file or a pipe gets all.
Of one sweep it also writes sweep.csv, sweep.md, sweep_seeds.csv and sweep.png
into its directory, of anything into the FOLDER behind --out.""",
        is_interruptible=True,
        operands="directories",
        foreign_options={
            **dict.fromkeys(("sort", "sort_by", "order_by", "best", "metric", "objective", "mode"), _SORTED),
            **{kind: f"Type --format {kind}." for kind in ("csv", "latex", "markdown")},
        },
        missing_prompt="table of what? Name a sweep, a run, or a folder that holds some, such as outputs/mnist.",
        options=(
            Option("--out", "where to write the files", "FOLDER", "tables", values=_FOLDER),
            Option(
                "--columns",
                "these columns: keys of the configuration, metrics (the\n"
                "best value where all keep it; or 'last eval/loss'),\n"
                "times/data and the like, status, step, time, directory,\ntags, note",
                "A,B,...",
                "optimizer.lr,eval/loss",
            ),
            Option("--all", "all keys that differ and all metrics, on a terminal too"),
            Option(
                "--format",
                "print the tables as csv, latex or markdown, and write no\nfile; csv: one line a run, as plain numbers",
                "FORMAT",
                "latex",
                values="ddpexp.sweep.arguments:formats",
            ),
            Option("--seeds", "the means over seeds or folds alone"),
            Option("--json", "everything for programs, with the means over seeds"),
        ),
        also=("results", "leaderboard"),
    ),
    Verb(
        "list",
        "[FOLDER] [--where CONDITION] [--sort NAME] [--json]",
        "find runs again: what, when, with what result",
        about="""\
List the runs and the jobs of sweeps below a folder (default: outputs), the
newest first: status, step, metrics, directory and what was typed. A condition
compares metrics, keys, and status, step, seconds, tags or directory by
< <= > >= == !=, with and, or, not and parentheses between:

    ddpexp list --where "eval/accuracy>0.9 and optimizer.lr<0.1"
    ddpexp list outputs/mnist --where "status==failed or step<100"

A value that a run lacks fulfills no comparison. The values are kept in the
user's cache, and read again when their files have changed.""",
        function="ddpexp.cli.listing:list_runs",
        is_interruptible=True,
        operands="directory",
        options=(
            Option("--where", "only runs that fulfill it", "CONDITION", "'eval/loss<0.5'"),
            Option("--sort", "by a metric, a key or a fact; -NAME: the largest first", "NAME", "-eval/accuracy"),
            _JSON,
        ),
        foreign_options={
            **dict.fromkeys(("filter", "query", "q"), "Type --where CONDITION."),
            **dict.fromkeys(("sort_by", "order_by", "order"), "Type --sort NAME, or --sort -NAME."),
            **dict.fromkeys(("status", "state"), "Type --where status==done."),
            **dict.fromkeys(("reverse", "desc", "descending"), "Type --sort -NAME."),
        },
        notes="docs/runs.md.",
        also=("ls", "runs", "history", "search_runs"),
    ),
    Verb(
        "tag",
        "RUN_DIR [NAME ...] [--remove NAME,NAME] [--note TEXT] [--json]",
        "give a run names to find it by, and a note",
        about="""\
Give a run tags, take some from it, or write a note; without any of these, show
them. run.tags=[paper] gives a run tags from its start. `ddpexp list` shows them
and finds them:

    ddpexp list --where tags==paper""",
        is_interruptible=True,
        operands="directory",
        missing_prompt="tag what? Name a run.",
        options=(
            Option("--remove", "tags that it is to have no longer", "NAME,NAME", "draft"),
            Option(
                "--note", "a text in place of its note; empty: none", "TEXT", "'with the old data'", may_be_empty=True
            ),
            _JSON,
        ),
        foreign_options={
            **dict.fromkeys(("add", "tag", "tags"), "Type the names behind the run."),
            **dict.fromkeys(("delete", "rm", "untag"), "Type --remove NAME."),
            **dict.fromkeys(("comment", "notes", "message", "description"), "Type --note TEXT."),
        },
        notes="docs/runs.md.",
        also=("label", "note", "annotate"),
    ),
    Verb(
        "prune",
        "[FOLDER] RULE... [--checkpoints] [--yes] [--json]",
        "remove old runs, or their checkpoints, by rules",
        about="""\
Say which runs below a folder (default: outputs) every rule chooses, and how
many bytes they have; with --yes, remove them. Live and waiting runs always
stay, so do tagged runs, the last and the best of each recipe, jobs of sweeps,
and what another run of the folder began from.""",
        is_interruptible=True,
        operands="directory",
        options=(
            Option("--older-than", "rule: ended before, in hours, days or weeks", "N[hdw]", "30d"),
            Option("--metric", "rule: not among the best by min:METRIC or max:METRIC", "M", "max:eval/accuracy"),
            Option("--keep", "how many are the best by it; default: 1", "N", "5"),
            Option("--where", "rule: fulfills it, as for ddpexp list", "CONDITION", "status==failed"),
            Option("--checkpoints", "only checkpoints, but for the best and the last of a run;\nof jobs of sweeps too"),
            Option("--yes", "remove them"),
            _JSON,
        ),
        foreign_options={
            **dict.fromkeys(("force", "f", "y", "delete", "no_dry_run"), "Type --yes."),
            **dict.fromkeys(("dry_run", "n"), "Leave it out: nothing is removed without --yes."),
            **dict.fromkeys(("before", "age"), "Type --older-than 30d."),
        },
        notes="docs/runs.md.",
        also=("clean", "gc", "delete", "remove", "rm"),
    ),
    Verb(
        "diff",
        "RUN_DIR RUN_DIR... [--json]",
        "what runs differ in: values, code, versions, data, machine",
        about="""\
Show what runs differ in, in groups: the values of the configuration, code,
versions, data, machine and starts, with their results below. A value that has
changed when a run was resumed is shown with its steps, such as
0.1 -> 0.01 at 300. Runs may be running, failed or killed. A sweep, or a
folder of runs, stands for the runs in it.""",
        is_interruptible=True,
        operands="directories",
        missing_prompt="diff of what? Name two runs or more.",
        options=(_JSON,),
        notes="docs/resume.md.",
        also=("compare", "difference", "differences", "cmp"),
    ),
    Verb(
        "report",
        "DIR... [sweep.objective=METRIC] [--out FILE]",
        "one HTML page about runs and sweeps, to look at and to send",
        about="""\
Write one HTML file about sweeps, runs, or folders that hold some: the table,
curves, means over seeds, parallel coordinates, the times of the steps, pictures
of evaluations, what the runs differ in and what they share. The file needs no
network and no other file. Runs may be running.""",
        is_interruptible=True,
        operands="directories",
        missing_prompt="report on what? Name a sweep, a run, or a folder that holds some, such as outputs/mnist.",
        options=(
            Option(
                "--out",
                "the file, default: report.html; only a report is replaced",
                "FILE",
                "report.html",
                values=_FOLDER,
            ),
        ),
        notes="docs/report.md.",
        foreign_options={
            "output": "Type --out FILE.",
            **dict.fromkeys(("open", "browser"), "Open the file that it writes with a browser."),
        },
        also=("html", "dashboard", "plot", "visualize"),
    ),
    Verb(
        "plan",
        "[key=value ...] [--config-dir DIR] [options]",
        "what a run would take, in memory and in time, on any machines",
        about="""\
Report what a run with these overrides would be: its workers and batches, the
memory of a rank, the size of a checkpoint, the time of a step. Nothing is
trained and no machine is needed: trainer.device=cuda trainer.gpus=8
trainer.nodes=512 plans for 4,096 GPUs.""",
        is_interruptible=True,
        options=(
            Option("--strategies", "compare the strategies: what a rank holds, what fits"),
            Option("--memory_gb", "memory of a GPU, or of a CPU worker, in gigabytes (1e9)", "X", "80"),
            _JSON,
            Option("--cores", "CPU cores of a machine; else as many as this one has", "N", "16"),
            Option("--num_samples", "plan for so many training samples, without the data", "N", "60000"),
            Option("--compute_ms", "time of a pass: forward and backward of a micro-batch", "X", "12"),
            Option("--alpha_us", "latency of a message between two workers", "X", "20"),
            Option("--bandwidth_gbps", "what a worker sends and receives, in gigabits a second", "X", "100"),
            Option("--calibrate", "measure these three on this machine, in short runs"),
            Option(
                "--plot-schedule",
                "draw the learning rate over the steps",
                "[FILE.png]",
                "lr.png",
                needs_value=False,
            ),
        ),
        notes="docs/plan.md says what each number is.",
        also=("estimate", "dry-run"),
    ),
    Verb(
        "summary",
        "[key=value ...] [--config-dir DIR] [--depth N] [--json]",
        "the modules of a model, with shapes, parameters and FLOPs",
        about="""\
Show the model of a run with these overrides as a tree: what each module returns
for samples of the run's data, its parameters (frozen and shared ones too) and
FLOPs; then the totals, and the memory of the activations. Nothing is trained,
and the model takes no memory where its code works on torch's meta device.""",
        is_interruptible=True,
        options=(Option("--depth", "levels of modules below the model; default: 3", "N", "2"), _JSON),
        notes="docs/summary.md.",
        also=("summarize", "torchinfo", "torchsummary", "model", "modules", "layers", "parameters", "flops"),
    ),
    Verb(
        "find",
        "batch_size|lr [key=value ...] [--config-dir DIR] [options]",
        "the micro-batch that fits, the fastest one, a learning rate",
        about="""\
batch_size: find the largest micro-batch that fits into the memory of the
workers, and the fastest one, by short real runs on this machine.
trainer.global_batch_size, and so the samples of each step, stays.
lr: train with rates that grow from step to step, and suggest one where the
loss falls fastest. Both print what to type, and leave nothing behind.""",
        missing_prompt="find what?",
        is_interruptible=True,
        options=(
            Option("--steps", "of lr: the number of steps; default: 100", "N", "200"),
            Option("--low", "of lr: the first rate; default: 1e-6", "X", "1e-5"),
            Option("--high", "of lr: the last rate; default: 10", "X", "1"),
            Option("--output", "of lr: draw the losses", "FILE.png", "lr.png", values=_FOLDER),
            _JSON,
        ),
        notes="docs/find.md.",
        forks="always",
        also=(
            "tune",
            "tuner",
            "scale_batch_size",
            "auto_scale_batch_size",
            "autobatch",
            "lr_find",
            "lr_finder",
            "range_test",
        ),
    ),
    Verb(
        "doctor",
        "[key=value ...] [--config-dir DIR] [--json]",
        "what a run would meet on these machines",
        about="""\
Report what a run with these overrides would meet on this machine: GPUs,
driver, links and a measured all-reduce, memory, limits, file systems, clock,
network, scheduler, versions. Each line is good, doubtful or bad, with what to
do. Nothing is trained, and no data is needed.""",
        options=(Option("--json", "for programs: an object per line"),),
        notes="""\
Several hosts are examined together where the launcher's own program starts the
command on each:

    srun python -m ddpexp doctor launcher=slurm
    torchrun --nproc-per-node 2 -m ddpexp doctor launcher=torchrun-env

The exit code is 1 if a line is bad. docs/doctor.md explains the lines.""",
        forks="launcher",
        also=("diagnose", "env", "preflight"),
    ),
    Verb(
        "check",
        "[key=value ...] [--config-dir DIR] [--json]",
        "try a recipe in two steps and report its mistakes",
        about="""\
Train two steps of the experiment in a temporary folder, which is removed:
with an evaluation, a checkpoint, a resume from it, and at one and two workers.
Each line is ok, a problem with the line of the recipe, or not checked.""",
        missing_prompt="check what? Name the experiment as for a training, for example ddpexp check recipe=mnist.",
        options=(Option("--json", "for programs: an object per line"),),
        notes="The exit code is 1 if there is a problem. docs/check.md explains the lines.",
        forks="always",
        also=("lint", "verify", "dry_run", "debug"),
    ),
    Verb(
        "data",
        "[key=value ...] [--config-dir DIR] [options]",
        "prepare the data, and show what the model will see",
        about="""\
Prepare the data of an experiment as a run would, without starting workers,
and print what it is: samples, classes, cache and bytes.""",
        is_interruptible=True,
        options=(
            Option(
                "--preview",
                "draw the first training images of epoch 0 with their\nlabels, cropped and changed as the model will "
                "see them",
                "FILE.png",
                "photos.png",
            ),
            Option(
                "--verify",
                "read the whole cache again, and prepare the data anew\nif the cache is damaged; without it only "
                "files that\nchanged, or that this machine has not read since its\nstart, are read",
            ),
            _JSON,
        ),
        also=("dataset", "prepare", "preview"),
    ),
    Verb(
        "trust",
        "[--remove] [PACKAGE | PACKAGE.CLASS | ADDRESS ...]",
        "let configurations name code and addresses",
        about="""\
Trust a class or function of an installed package, or all of the package, so
that configurations may name it without run.trust=[...] in each command:

    ddpexp trust schedulefree.AdamWScheduleFree

Without a name it lists what is trusted. The list is yours, not a run's; a
module of the same name in another place, such as the current folder, is not
trusted by it. What you trust whole, every configuration can call with any
arguments, so name the class where you can.

An address (with all below it), a name on a hub or a variable of the
environment counts in a run directory without being restated, whoever made it:

    ddpexp trust https://data.example.org hub:stanfordnlp/imdb oc.env:TOKEN""",
        operands="names",
        options=(Option("--remove", "trust these names no longer"),),
        also=("allow", "untrust"),
    ),
    Verb(
        "new",
        "NAME [--like PROJECT]",
        "make a folder with a project of your own",
        about="""\
Make a folder NAME with a project of your own: a package with a recipe and its
YAML file, a test, a README and a pyproject.toml. After `pip install -e NAME`
every command knows recipe=NAME, without --config-dir and run.trust.""",
        operands="names",
        missing_prompt="new what? Name the folder, as in ddpexp new mine.",
        options=(Option("--like", "what it begins with:", "PROJECT", "table", values="ddpexp.cli.new:kinds"),),
        foreign_options=dict.fromkeys(("template", "kind", "type", "from"), "Type --like PROJECT behind the name."),
        list_more="ddpexp.cli.new:explained",
        also=("init", "create", "startproject", "scaffold", "template"),
    ),
    Verb(
        "schema",
        "[GROUP]",
        "print a JSON schema, with which editors complete YAML files",
        about="""\
Print the JSON schema of a recipe's file, or of a file of the group GROUP: every
key with its type, its range and its explanation. An editor with a plugin for
YAML completes and checks the files that name it in their first line:

    ddpexp schema > recipe.schema.json
    # yaml-language-server: $schema=recipe.schema.json""",
        operands="names",
        also=("json-schema", "jsonschema"),
    ),
    Verb(
        "help",
        "[COMMAND | GROUP | GROUP=OPTION | KEY | times ...]",
        "explain one command, group, option or key",
        about="""\
Explain a command, a group with its options, an option, a key, or where the time
of the steps goes, such as

    ddpexp help evaluate
    ddpexp help trainer
    ddpexp help trainer.reduction
    ddpexp help launcher=slurm
    ddpexp help times
    ddpexp help --config-dir mine/conf model=mynet

Without a PART: what to type first, and every group and key.""",
        function="ddpexp.cli.help:answer_topics",
        operands="topics",
        also=("man", "doc"),
    ),
    Verb(
        "completion",
        "bash | zsh | fish",
        "print the script that lets a shell complete ddpexp",
        about="""\
Print what a shell evaluates to complete commands, groups, options, keys, values
and folders, for ddpexp and for python -m ddpexp. To have it in every shell:

    bash  echo 'eval "$(ddpexp completion bash)"' >> ~/.bashrc
    zsh   echo 'eval "$(ddpexp completion zsh)"' >> ~/.zshrc
    fish  echo 'ddpexp completion fish | source' >> ~/.config/fish/config.fish""",
        operands="shell",
    ),
)
MEMBER = Verb(
    "member",
    "RUN_DIR_OR_FILE",
    "run a share of a job",
    about="What the launcher of another command starts, and no person types.",
    function="ddpexp.cli.resume:member",
    operands="names",
    forks="always",
)
NAMES = tuple(verb.name for verb in VERBS)
BY_NAME = {verb.name: verb for verb in (*VERBS, MEMBER)}


def listed() -> list[str]:
    """Return the table: a line for each verb."""
    width = max(map(len, NAMES))
    return [f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS]


def check_lines_end_plainly(argv: Sequence[str]) -> None:
    """Check for what the lines of a script with the line ends of Windows leave in their last argument.

    Raises:
        RefusedError: an argument ends with a carriage return.
    """
    ended = next((argument for argument in argv if argument.endswith("\r")), None)
    if ended is not None:
        raise RefusedError(
            "ends with a carriage return, as lines of Windows do",
            place=ended.rstrip("\r"),
            suggestion="Remove them from the script: sed -i 's/\\r$//' FILE.",
        )


def check_is_no_verb(argument: str, rest: Sequence[str] = ()) -> None:
    """Check the first word of a training, which others follow.

    Raises:
        RefusedError: it is a directory, or written like a verb.
    """
    is_word = _WORD.fullmatch(argument) is not None
    near = _near(argument.lower()) if is_word and not os.path.isdir(argument) else None
    trains = argument in ("train", "fit", "run") and not os.path.isdir(argument)
    if trains and rest and "=" not in rest[0] and os.path.isdir(rest[0]):
        again = f"Did you mean ddpexp {shlex.join(['rerun', *rest])}?"
        raise RefusedError("is not a command", place=argument, suggestion=again)
    if trains and all("=" in word for word in rest):
        reason = "is not a command, for ddpexp trains when it gets none"
        typed = f"python -m ddpexp {shlex.join(rest)}" if rest else _EXAMPLE
        raise RefusedError(reason, place=argument, suggestion=f"Leave it out: {typed}.")
    if argument in ("sweep", "multirun", "tune", "search") and not os.path.isdir(argument):
        typed = f"python -m ddpexp -m {shlex.join(rest)}" if rest else _SWEEP
        reason = "is not a command, for -m makes a sweep"
        raise RefusedError(reason, place=argument, suggestion=f"Did you mean {typed}?")
    if near is not None:
        options = ["--split", "test"] if argument.lower() == "test" else []
        typed = shlex.join([near, *rest, *options]) if not any(word.startswith("-") for word in rest) else near
        raise RefusedError("is not a command", place=argument, suggestion=f"Did you mean ddpexp {typed}?")
    if (is_word or "/" in argument) and os.path.isdir(argument):
        typed = shlex.quote(argument)
        raise RefusedError(
            "is a directory",
            place=argument,
            suggestion=f"Say first what to do with it, such as ddpexp status {typed}, ddpexp resume {typed} or ddpexp "
            f"rerun {typed}.",
        )
    if is_word:
        lines = "\n".join(listed())
        raise RefusedError(
            "is not a command",
            place=argument,
            suggestion=f"To train, write key=value, as in {_EXAMPLE}. The commands are:\n{lines}",
        )


def _near(word: str) -> str | None:
    """Return the verb that another program calls so, or that is written nearly so."""
    counterpart = next((verb.name for verb in VERBS if word in verb.also), None)
    return counterpart or next(iter(difflib.get_close_matches(word, NAMES, n=1, cutoff=_ALIKE)), None)


def check_stands_first(argv: Sequence[str]) -> None:
    """Check that no argument of a training is a verb.

    Raises:
        RefusedError: one is.
    """
    for before, word in pairwise(argv):
        if word in NAMES and not before.startswith("-"):
            reason = "is a command and stands first"
            raise RefusedError(reason, place=word, suggestion=f"Type python -m ddpexp {word} ... .")
