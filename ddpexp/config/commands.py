"""The commands beside training: one table, which the help, the refusals, the completion and the dispatch share."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: `ddpexp NAME ARGUMENTS`."""

    name: str
    arguments: str  # as its usage shows them
    summary: str  # one line
    also: tuple[str, ...] = ()  # what other programs call it

    @property
    def usage(self) -> str:
        """Return the first line of what the command says of itself."""
        return f"usage: ddpexp {self.name} {self.arguments}"


COMMANDS = (
    Command("resume", "RUN_DIR [key=value ...]", "continue an interrupted run or sweep", ("continue", "restart",
        "restore")),
    Command(
        "evaluate", "RUN_DIR_OR_WEIGHTS [key=value ...] [options]",
        "evaluate the weights of a run, or of a file",
        ("eval", "test", "valid", "validate"),
    ),
    Command(
        "predict", "RUN_DIR_OR_WEIGHTS --out FILE [key=value ...] [options]",
        "write what a model predicts for each sample", ("infer", "inference", "forward"),
    ),
    Command(
        "export", "RUN_DIR --out FOLDER [--format NAME] [key=value ...]",
        "write a trained model for other programs", ("save", "convert", "onnx"),
    ),
    Command(
        "generate", "RUN_DIR [--prompt TEXT] [--tokens N] [options]", "print what a language model of a run writes",
        ("sample", "complete", "chat"),
    ),
    Command(
        "status", "DIR [--json]", "how far a run or a sweep is, and what to type next", ("info", "show", "state", "ps"),
    ),
    Command(
        "sync", "RUN_DIR [key=value ...] [--json]", "send what the remote loggers of a run have not got",
        ("upload", "push", "wandb"),
    ),
    Command(
        "table", "DIR... [sweep.objective=METRIC] [options]", "compare sweeps and runs in a table",
        ("compare", "list", "ls", "runs", "results"),
    ),
    Command(
        "plan", "[key=value ...] [--config-dir DIR] [options]", (
            "what a run would take, in memory and in time, on any "
            "machines"
        ),
        ("estimate", "profile", "dry-run"),
    ),
    Command(
        "doctor", "[key=value ...] [--config-dir DIR] [--json]", "what a run would meet on these machines",
        ("diagnose", "env", "preflight"),
    ),
    Command(
        "check", "[key=value ...] [--config-dir DIR] [--json]", "try a recipe in two steps and report its mistakes",
        ("lint", "verify", "dry_run", "debug"),
    ),
    Command(
        "data", "[key=value ...] [--config-dir DIR] [options]",
        "prepare the data, and show what the model will see", ("dataset", "prepare", "preview"),
    ),
    Command(
        "trust", "[--remove] [PACKAGE | PACKAGE.CLASS | ADDRESS ...]", "let configurations name code and addresses",
        ("allow", "untrust"),
    ),
    Command(
        "new", "NAME [--like PROJECT]", "make a folder with a project of your own",
        ("init", "create", "startproject", "scaffold", "template"),
    ),
    Command("help", "[COMMAND | GROUP | GROUP=OPTION | KEY ...]", "explain one command, group, option or key", ("man",
        "doc")),
    Command("completion", "bash | zsh | fish", "print the script that lets a shell complete ddpexp", ("complete",)),
)  # fmt: skip
NAMES = tuple(command.name for command in COMMANDS)
_WORD = re.compile(r"[A-Za-z][\w-]*")  # neither key=value nor an option
_EXAMPLE = "python -m ddpexp recipe=mnist trainer.gpus=2"


def of(name: str) -> Command:
    """Return the command of that name."""
    return next(command for command in COMMANDS if command.name == name)


def listed() -> list[str]:
    """Return the table: a line for each command."""
    width = max(map(len, NAMES))
    return [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]


def unknown(argument: str) -> str | None:
    """Say that a first word is no command, and which there are; None where it is not written like one."""
    named = shlex.quote(argument)
    directory = (
        f"{argument} is a directory: say first what to do with it, such as ddpexp status {named} or ddpexp resume "
        f"{named}."
    )
    if "/" in argument and os.path.isdir(argument):
        return directory
    if not _WORD.fullmatch(argument) or argument in NAMES:
        return None
    if argument.lower() == "train":
        return f"{argument} is not a command, for ddpexp trains when it gets none: leave it out, as in {_EXAMPLE}."
    suggestion = next((command.name for command in COMMANDS if argument.lower() in command.also), None)
    near = [suggestion] if suggestion else difflib.get_close_matches(argument.lower(), NAMES, n=1, cutoff=0.7)
    if near:
        return f"{argument} is not a command. Did you mean ddpexp {near[0]}?"
    if os.path.isdir(argument):
        return directory
    lines = "\n".join(listed())
    return f"{argument} is not a command. To train, write key=value, as in {_EXAMPLE}. The commands are:\n{lines}"
