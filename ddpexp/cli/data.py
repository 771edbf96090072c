"""The command `ddpexp data`: prepare the data of an experiment, print what it is, and draw what the model will see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.cli.start import compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Experiment
from ddpexp.data.hashes import reading_again
from ddpexp.data.schema import Schema, guesses_about
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run.prepare import prepare
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.text import first_few, size_text

_SHOWN = 10  # classes and the like


def data(call: Call) -> int:
    """Print what the data of a command line is, and return the exit code.

    Raises:
        RefusedError: a run would be refused, or the picture cannot be drawn.
    """
    file = call.options.get("--preview")
    if file is not None and not file.endswith(".png"):
        raise RefusedError(
            "is not a PNG file", place=f"--preview {file}", suggestion="Use --preview photos.png, for example."
        )
    experiment, _ = compose_experiment(call.operands)
    with reading_again("--verify" in call.options) as verified:
        prepared = prepare(experiment.data, experiment.trust)
    if call.as_json:
        print(json.dumps(prepared, indent=1))
    else:
        print("\n".join(described(experiment, prepared)))
        for folder, num_bytes in verified:
            print(f"verified: {size_text(num_bytes)} in {folder}")
    if file is not None:
        _draw(experiment, prepared, Path(file))
        if not call.as_json:
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
        facts["files"] = f"{size_text(size)} in {folder}"
    lines = [*facts.items(), *(("guess", guess) for guess in guesses_about(prepared))]
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {value}" for name, value in lines]


def _draw(experiment: Experiment, prepared: Mapping[str, Any] | None, file: Path) -> None:
    from ddpexp.cli.preview import draw  # late: it imports torch

    try:
        draw(experiment, prepared, file)
    except OSError as error:
        raise RefusedError(f"cannot be written: {reason_with_limit(error, file)}", place=f"--preview {file}") from None
