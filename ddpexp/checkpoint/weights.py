"""Resolving a path to weights: a file, the folder of a checkpoint, or a run directory, for one of its checkpoints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from ddpexp.checkpoint.format import Checkpoint, best_first, is_checkpoint, newest_intact, open_checkpoint, scan
from ddpexp.checkpoint.headers import is_foreign_folder
from ddpexp.errors import RefusedError, subject
from ddpexp.system.files import relative, shortest
from ddpexp.system.text import first_few
from ddpexp.system.yaml_text import load_yaml

Which: TypeAlias = Literal["auto", "best", "last"] | int
"""Which checkpoint of a run: the best by its trainer.keep_best, the newest intact one, or that of a step.

auto: the best where the run keeps one, else the newest.
"""
_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
_MAGIC = (b"PK\x03\x04", b"\x80")  # a zip archive as torch.save writes it, and a bare pickle


@dataclass(frozen=True)
class Request:
    """Which weights of a path are meant, as `run.init_checkpoint` and `run.init_weights` say."""

    checkpoint: Which = "auto"
    typed: str = ""  # what names the checkpoint, as the user typed it
    averaged: bool = False
    converts: bool = False  # a file of torch.save is taken, too: the caller converts it


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory."""
    return (folder / "config.yaml").is_file() and (folder / "manifest.json").is_file()


def parse_which(typed: str | int, description: str) -> Which:
    """Return which checkpoint is meant by best, last, 1200 or step-1200; `description` is how the user typed it.

    Raises:
        RefusedError: it is none of these.
    """
    words: Sequence[Literal["auto", "best", "last"]] = ("auto", "best", "last")
    word = next((word for word in words if word == typed), None)
    if word is not None:
        return word
    step = re.fullmatch(r"(?:step-)?(\d+)", str(typed))
    if step is None:
        raise RefusedError("is neither best nor last nor a step, such as 1200 or step-1200", **subject(description))
    return int(step[1])


def meant(path: Path) -> tuple[Path, str] | None:
    """Return the run, and the checkpoint, that a path means that is not there, such as RUN/checkpoints/best.ckpt.

    The checkpoint is best, last or a step, and last where the name says none of these. None where no folder above is a
    run directory.
    """
    run = next((folder for folder in path.absolute().parents if is_run(folder)), None)
    if run is None:
        return None
    if (step := re.match(r"step[-=]?0*(\d+)", path.name)) is not None:
        return Path(shortest(run)), f"step-{step[1]}"
    return Path(shortest(run)), "best" if path.name.startswith("best") else "last"


def check_usable(path: Path, description: str, converts: bool = False) -> None:
    """Check a path without reading the weights; `description` is how the user named it.

    Raises:
        RefusedError: it does not exist or, unless the caller `converts` it, is a pickled file of other programs.
    """
    if not path.exists():
        advice = "Download it first: ddpexp reads only local files." if "://" in description else ""
        if (found := meant(path)) is not None and description.startswith("run.init_from="):
            advice = f"Did you mean {shlex.quote(f'run.init_from={found[0]}')} run.init_checkpoint={found[1]}?"
        raise RefusedError("There is no such file", suggestion=advice, **subject(description))
    _check_no_peft(path, description)
    if not converts and is_pickled(path):
        name = f"{path.stem}-converted" if path.suffix == ".safetensors" else path.stem
        target = path.with_name(f"{name}.safetensors")
        code = f"from ddpexp.checkpoint.convert import to_safetensors; to_safetensors({str(path)!r}, {str(target)!r})"
        argument = shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'
        raise RefusedError(
            "cannot be read as safetensors: it was written by torch.save, and such a file can hold any code",
            **subject(description, path.name),
            suggestion=f"Convert its tensors once with python -c {argument}, and name {target.name} instead.",
        )


def _check_no_peft(path: Path, description: str) -> None:
    folder = path if path.is_dir() else path.parent
    if (folder / "adapter_config.json").is_file() and (path.is_dir() or path.name.startswith("adapter_model.")):
        raise RefusedError(
            "holds adapters of the peft library without their base model",
            suggestion="Merge them into that model once with PeftModel.from_pretrained(MODEL, "
            f"'{folder.name}').merge_and_unload().save_pretrained('merged'), then name the folder merged.",
            **subject(description, folder.name),
        )


def find(
    path: Path,
    description: str,
    warn: Callable[[str], None],
    request: Request = Request(),
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the file, or the folder of a checkpoint.

    `warn` is called for damaged checkpoints of a run, `say` with the step of the best one, if that is taken.

    Raises:
        RefusedError: as `check_usable`, or there are no such weights.
    """
    check_usable(path, description, request.converts)
    if is_run(path):
        path = path / "checkpoints"
    if path.name != "checkpoints" or not is_run(path.resolve().parent):
        _check_single(path, description, request)
        return path
    chosen = choose(path, request.checkpoint, description, request.typed, warn)
    if request.averaged and not chosen.has_average:
        raise RefusedError(
            f"needs an average of the weights, but the checkpoint of step {chosen.step} of {description} holds none",
            key="run.init_weights",
            value="ema",
            suggestion="Use run.init_weights=raw.",
        )
    text = best_text(relative(path.resolve().parent), chosen, request.checkpoint)
    if text is not None:
        say(text)
    return chosen.folder


def best_text(run: str, chosen: Checkpoint, which: Which) -> str | None:
    """Return a sentence on the best checkpoint of a run; None if another one is meant."""
    best = _rating(chosen) if which in ("auto", "best") else None
    if best is None:
        return None
    named = f"trainer.keep_best={best.mode}:{best.metric}"
    return f"the weights of {run} are those of step {best.step}, the best by {named} ({best.value:.6g})"


def is_pickled(path: Path) -> bool:
    """Return whether a file is one of torch.save."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            begin = file.read(9)
    except OSError:
        return False  # reading it will report why
    return begin[8:] != b"{" and (
        path.suffix in _PICKLED or begin.startswith(_MAGIC)
    )  # safetensors: a length, then JSON


def choose(folder: Path, which: Which, run: str, description: str, warn: Callable[[str], None]) -> Checkpoint:
    """Return a checkpoint of a run's folder of them.

    `run` names the run in messages, `description` what was typed for `which`.

    Raises:
        RefusedError: there is none, or it is damaged.
    """
    if which == "last":
        return _newest(folder, run, warn)
    complete = scan(folder).complete
    if which == "auto":
        return _best_intact(complete, warn) or _newest(folder, run, warn)
    if which == "best":
        chosen = best_of(complete)
        if chosen is None:
            raise RefusedError(
                "keeps no best checkpoint: that needs trainer.keep_best, such as trainer.keep_best=max:eval/accuracy",
                **subject(description, run),
                suggestion="Use last, or the number of a step.",
            )
    else:
        at = [checkpoint for checkpoint in complete if checkpoint.step == which]
        if not at:
            steps = first_few([str(checkpoint.step) for checkpoint in complete]) or "none"
            reason = f"has no intact checkpoint of that step, but intact ones of {steps}"
            raise RefusedError(reason, **subject(description, run))
        chosen = at[0]
    problem = chosen.problem(files=chosen.weights)
    if problem is not None:
        raise RefusedError(f"is damaged: {problem}", **subject(description, relative(chosen.folder)))
    return chosen


@dataclass(frozen=True)
class Best:
    """The best step of a run, by its trainer.keep_best."""

    step: int
    mode: str  # min or max
    metric: str
    value: float


def best_step(folder: Path) -> Best | None:
    """Return the best step among a run's folder of checkpoints; None if the run keeps none.

    Raises:
        RefusedError: another version of ddpexp has written them.
    """
    best = best_of(scan(folder).complete)
    return None if best is None else _rating(best)


def best_of(complete: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the best of a run's checkpoints by its trainer.keep_best; None if it keeps none."""
    return next(iter(_rated(complete)), None)


def _rated(complete: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """Return the checkpoints that have the metric of the run's trainer.keep_best, the best first."""
    keep_best = _keep_best(complete)
    return [] if keep_best is None else best_first(complete, keep_best)


def _rating(checkpoint: Checkpoint) -> Best | None:
    """Return the value of a checkpoint by trainer.keep_best; None if it has none."""
    mode, _, metric = (_keep_best([checkpoint]) or "").partition(":")
    value = checkpoint.metrics.get(metric)
    return None if value is None else Best(checkpoint.step, mode, metric, float(value))


def _best_intact(complete: Sequence[Checkpoint], warn: Callable[[str], None]) -> Checkpoint | None:
    for checkpoint in _rated(complete):
        problem = checkpoint.problem(files=checkpoint.weights)
        if problem is None:
            return checkpoint
        warn(f"{relative(checkpoint.folder)}, the best one, is damaged and not used: {problem}")
    return None


def _newest(folder: Path, description: str, warn: Callable[[str], None]) -> Checkpoint:
    chosen, damaged = newest_intact(folder, weights_only=True)
    problems = [f"{relative(entry.folder)} is damaged and not used: {entry.problem}" for entry in damaged]
    if chosen is None:
        raise RefusedError("; ".join(["holds no complete checkpoint", *problems]), **subject(description, folder))
    if problems:
        used = f"the weights are of step {chosen.step}; resume the run to train the steps after it again"
        warn("; ".join([*problems, used]))
    return chosen


def _keep_best(complete: Sequence[Checkpoint]) -> str | None:
    """Return trainer.keep_best of the run that wrote the checkpoints."""
    try:
        text = complete[0].config if complete else None
        trainer = load_yaml(text)["trainer"] if text is not None else {}
        value = trainer.get("keep_best")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return None
    return value if isinstance(value, str) else None


def _check_single(path: Path, description: str, request: Request) -> None:
    """Check a request for a path that is no run directory."""
    if request.checkpoint != "auto":
        raise RefusedError(
            f"chooses among the checkpoints of a run, but {description} is "
            f"{'a single checkpoint' if is_checkpoint(path) else 'not a run directory'}",
            suggestion="Leave it out.",
            **subject(request.typed),
        )
    if not request.averaged or is_pickled(path):
        return
    if is_foreign_folder(path) or not path.is_dir():
        raise RefusedError(
            f"is for a run or a checkpoint, which holds weights and their average, but {description} is neither",
            key="run.init_weights",
            value="ema",
            suggestion="Leave it out, and name the file to read.",
        )
    try:
        has_average = open_checkpoint(path).has_average
    except (OSError, ValueError) as error:
        raise RefusedError(f"is damaged: {error}", **subject(description, path.name)) from None
    if not has_average:
        raise RefusedError(
            f"needs an average of the weights, but the checkpoint of {description} holds none",
            key="run.init_weights",
            value="ema",
            suggestion="Use run.init_weights=raw.",
        )
