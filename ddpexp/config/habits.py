"""Overrides in the words of other frameworks, with what is typed here in their place: keys and values at once."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from ddpexp.config.declared import declared
from ddpexp.config.folders import our_options
from ddpexp.config.foreign import advice_on_key, advice_on_value, counterpart, value_here
from ddpexp.config.suggestions import refusals

_OPTIONS = {  # for which a key stands here
    **dict.fromkeys(("trainer=gpu", "trainer=cuda"), "trainer.device=cuda"),
    "trainer=cpu": "trainer.device=cpu",
    "logger.wandb.offline=true": "logger.wandb.mode=offline",
    **dict.fromkeys(("logger.wandb.log_model=true", "logger.wandb.log_model=all"), "logger.wandb.checkpoint=best"),
}
_CHECKPOINT = re.compile(r"\+*callbacks(\.model_checkpoint\.|=(model_)?checkpoint$)")
_PER_WORKER = ("batch_size", "per_device_train_batch_size", "per_gpu_train_batch_size")

_Answer: TypeAlias = tuple[Sequence[str], str]  # the overrides that are typed here, and a sentence


def answer(overrides: Iterable[str]) -> str:
    """Return a sentence with what is typed here in place of all overrides of other frameworks; empty if unknown."""
    overrides = list(overrides)
    together = _batch(overrides) | _best(overrides)
    answers = [together.get(override) or _alone(override) for override in overrides]
    answers = [*_loggers([here for typed, _ in answers for here in typed], overrides), *answers]
    words = " ".join(dict.fromkeys(shlex.quote(here) for typed, _ in answers for here in typed))
    advice = dict.fromkeys(sentence for _, sentence in answers)
    return " ".join(filter(None, [f"Did you mean {words}?" if words else "", *advice]))


def answer_to(first: str, overrides: Sequence[str]) -> str:
    """Return the answer to an override, and to the others that are answered with it; empty if unknown."""
    if first not in (at_once := answered_at_once([first, *overrides])):
        return answer([first])
    return answer([first, *(override for override in overrides if override in at_once or not _alone(override)[1])])


def answered_at_once(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of other frameworks that are answered all at once: those for which others are typed here.

    What has only a sentence is answered by itself.
    """
    together = _batch(overrides) | _best(overrides)
    return [override for override in overrides if override in together or any(_typed(override))]


def _batch(overrides: Sequence[str]) -> dict[str, _Answer]:
    """Return the answers to a batch per worker and accumulated passes, which are one batch here if all is known."""
    found = dict[str, tuple[str, int]]()
    for override in overrides:
        key, value = _split(override)
        ours, name = _key(key), key.rpartition(".")[2]
        parts = {"trainer.gpus": "workers", "trainer.nodes": "nodes"}
        if ours != key:
            parts |= {"trainer.micro_batch_size": "passes"}
        part = "samples" if ours != key and name in _PER_WORKER else parts.get(ours or "")
        if part is not None and re.fullmatch(r"[1-9]\d*", value):
            found[part] = (override, int(value))
    if not {"samples", "passes", "workers"} <= set(found):
        return {}
    numbers = {part: number for part, (_, number) in found.items()}
    workers = numbers["workers"] * numbers.get("nodes", 1)
    samples = numbers["samples"] * workers * numbers["passes"]
    typed = [f"trainer.global_batch_size={samples}", f"trainer.micro_batch_size={numbers['samples']}"]
    remark = (
        f"The first counts a step over all workers and passes: {numbers['samples']} x {workers} x {numbers['passes']}."
    )
    return {found["passes"][0]: ([], ""), found["samples"][0]: (typed, remark)}


def _best(overrides: Sequence[str]) -> dict[str, _Answer]:
    """Return the answers to the overrides of Lightning's ModelCheckpoint, if they name a metric."""
    of_checkpoints = [override for override in overrides if _CHECKPOINT.match(override)]
    values = {key.rpartition(".")[2]: value for key, value in map(_split, of_checkpoints)}
    mode, count = values.get("mode", "min"), values.get("save_top_k", "1")
    if "monitor" not in values or mode not in ("min", "max"):
        return {}
    metric = re.sub(r"^((eval|val|valid|test)[/_])?", "eval/", values["monitor"], count=1)
    typed = [f"trainer.keep_best={mode}:{re.sub('/acc$', '/accuracy', metric)}"]
    typed += [f"trainer.keep_best_k={count}"] if re.fullmatch(r"[2-9]|[1-9]\d+", count) else []
    return {override: ([], "") for override in of_checkpoints} | {of_checkpoints[0]: (typed, "")}


def _loggers(typed: Sequence[str], overrides: Sequence[str]) -> Iterator[_Answer]:
    """Yield what a key of a logger needs besides: that it is chosen, and its package."""
    for name in ("wandb", "mlflow"):
        if any(here.startswith(f"logger.{name}.") for here in typed):
            is_chosen = any(re.match(rf"logger=.*\b{name}\b", override) for override in overrides)
            is_here = importlib.util.find_spec(name) is not None
            yield (
                [] if is_chosen else [f"logger=[tensorboard,{name}]"],
                "" if is_here else f"Its package is missing: pip install 'ddpexp[{name}]'.",
            )


def _alone(override: str) -> _Answer:
    typed = list(_typed(override))
    return typed, "" if typed else _advice(override)


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def _typed(override: str) -> Iterator[str]:
    """Yield the overrides that replace one of another framework. Keys of ddpexp itself are left out."""
    if override.lower() in _OPTIONS:
        yield _OPTIONS[override.lower()]
        return
    key, value = _split(override)
    ours = _key(key)
    if ours is None or (ours in declared() and declared()[ours][0].remark):
        return
    here = value_here(ours, value.lower())
    if key == ours and here is None:
        return
    known = our_options().get(ours, ())
    here = here or value
    if (here in known or not known or ours == "recipe") and not any(refusals(f"{ours}={here}")):
        yield f"{ours}={here}"


def _key(typed: str) -> str | None:
    """Return the key or group that is meant: itself, one of another name, or a group that is typed as a key."""
    last = typed.rpartition(".")[2]
    if typed in declared() or typed in our_options():
        return typed
    return counterpart(last) or (last if last in our_options() else None)


def _advice(override: str) -> str:
    key, value = _split(override)
    ours = _key(key)
    is_renamed = ours in declared() and ours != key
    if is_renamed or (ours is None and key.rpartition(".")[0] in ("", "trainer")):
        return advice_on_key(key)
    return advice_on_value(ours or key, value.lower())
