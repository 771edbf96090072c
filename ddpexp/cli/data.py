"""The command `ddpexp data`: prepare the data of an experiment, print what it is, and draw what the model will see."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpexp.config import commands
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Experiment
from ddpexp.data.hashes import reading_again
from ddpexp.data.schema import Schema, guesses_about
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run.prepare import prepare
from ddpexp.system.limits import human, reason_with_limit
from ddpexp.system.text import first_few

_USAGE = f"""{commands.of("data").usage}

Prepare the data of an experiment as a run would, without starting workers,
and print what it is: samples, classes, cache and bytes.

  --preview FILE.png   draw the first training images of epoch 0 with their
                       labels, cropped and changed as the model will see them
  --verify             read the whole cache again, and prepare the data anew
                       if the cache is damaged; without it only files that
                       changed, or that this machine has not read since its
                       start, are read
  --json               for programs"""

_PREVIEW, _VERIFY = "--preview", "--verify"
_SHOWN = 10  # classes and the like


def arguments_of(argv: Sequence[str]) -> tuple[list[str], Path | None, bool]:
    """Return the arguments of the run, the file of `--preview`, and whether there is `--json`.

    Raises:
        RefusedError: `--preview` has no file, or one that cannot be a picture.
    """
    arguments = [argument for argument in argv if argument not in ("--json", _VERIFY)]
    file: str | None = None
    for place, argument in enumerate(arguments):
        if argument.partition("=")[0] != _PREVIEW:
            continue
        _, equals, file = argument.partition("=")
        end = place + (1 if equals else 2)
        file = file if equals else "".join(arguments[place + 1 : end])
        if not file.endswith(".png"):
            raise RefusedError(f"--preview {file}: name a file for the picture, such as --preview photos.png.")
        arguments = arguments[:place] + arguments[end:]
        break
    return arguments, Path(file) if file is not None else None, "--json" in argv


def data(argv: Sequence[str]) -> int:
    """Print what the data of a command line is, and return the exit code.

    Raises:
        RefusedError: a run would be refused, or the picture cannot be drawn.
    """
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return EXIT_DONE
    arguments, file, for_programs = arguments_of(argv)
    composed = compose(arguments)
    if composed is None:
        return EXIT_DONE
    experiment = parse(composed.values)
    with reading_again(_VERIFY in argv) as verified:
        prepared = prepare(experiment.data, experiment.trust)
    if for_programs:
        print(json.dumps(prepared, indent=1))
    else:
        print("\n".join(described(experiment, prepared)))
        for folder, num_bytes in verified:
            print(f"verified: {human(num_bytes)} in {folder}")
    if file is not None:
        _draw(experiment, prepared, file)
        if not for_programs:
            print(f"preview: {file}")
    return EXIT_DONE


def described(experiment: Experiment, prepared: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each thing that is known about the data."""
    if prepared is None:
        return [f"data  {experiment.data.target}, which prepares nothing: only a run reads it"]
    facts = {"data": str(prepared.get("note", prepared["name"]))}
    for name, key in (("train", "num_train"), ("eval", "num_test")):
        if key in prepared:
            facts[name] = f"{prepared[key]:,} {prepared.get('unit', 'samples')}"
    for name, value in (prepared.get("facts") or {}).items():
        few = first_few(value, _SHOWN) if isinstance(value, list) else str(value)
        facts[name] = " x ".join(map(str, value)) if name == "shape" else few
    if key_of("data.prepare", experiment.data.prepare) is not None and "schema" in prepared:
        facts |= Schema.read(prepared["schema"]).described()
    folder = prepared.get("folder")
    if isinstance(folder, str) and Path(folder).is_dir():
        size = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
        facts["files"] = f"{human(size)} in {folder}"
    lines = [*facts.items(), *(("guess", guess) for guess in guesses_about(prepared))]
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {value}" for name, value in lines]


def _draw(experiment: Experiment, prepared: Mapping[str, Any] | None, file: Path) -> None:
    from ddpexp.cli.preview import draw  # late: it imports torch

    try:
        draw(experiment, prepared, file)
    except OSError as error:
        raise RefusedError(f"--preview {file} cannot be written: {reason_with_limit(error, file)}.") from None
