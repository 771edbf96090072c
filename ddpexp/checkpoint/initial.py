"""The weights that `run.init_from` and the keys beside it name; free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ddpexp.checkpoint import weights
from ddpexp.checkpoint.convert import check_archive, convert
from ddpexp.checkpoint.format import is_checkpoint
from ddpexp.checkpoint.headers import read_header, read_source
from ddpexp.checkpoint.matching import Selection, check_rename, check_selection
from ddpexp.errors import RefusedError
from ddpexp.settings.run import RunSettings

CONVERTED = "init_from.safetensors"
"""The copy of a file of torch.save, in the run directory."""


def override(run: RunSettings) -> str:
    """Return the key with its value, as it is typed."""
    return f"run.init_from={run.init_from}"


def selection(run: RunSettings) -> Selection:
    """Return what run.init_rename and run.init_skip say."""
    return Selection(run.init_rename or {}, run.init_skip)


def check_exists(run: RunSettings) -> None:
    """Check that what run.init_from names is there, and the keys beside it. Raises RefusedError."""
    if run.init_from is not None:
        check_selection(selection(run))
        weights.check_usable(Path(run.init_from), override(run), converts=True)


def find(
    run: RunSettings,
    warn: Callable[[str], None],
    source: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the file of weights, or the folder, that run.init_from names; or that of `source`, which was found before.

    `warn` and `say` as for `weights.find`.

    Raises:
        RefusedError: there is none, its header is damaged, or run.init_rename has a name that it lacks.
    """
    check_selection(selection(run))
    averaged = run.init_weights == "ema"
    if source is not None:
        return weights.find(source, override(run), warn, weights.Request(converts=True))
    typed = f"run.init_checkpoint={run.init_checkpoint}"
    which = weights.parse_which(run.init_checkpoint, typed)
    request = weights.Request(which, typed, averaged, converts=True)
    path = weights.find(Path(run.init_from or ""), override(run), warn, request, say)
    try:
        if weights.is_pickled(path):
            check_archive(path, override(run))
        elif not is_checkpoint(path):
            names = read_source(path)
            check_rename(names, run.init_rename or {})
        elif run.init_rename:
            check_rename(
                [name for file in path.glob("*.safetensors") if not file.name.startswith(("state.", "rank-"))
                 for name in read_header(file)],
                run.init_rename,
            )  # fmt: skip
    except RefusedError as error:
        if error.key is None:
            error.key, error.value = "run.init_from", run.init_from
        raise
    return path


def located(run: RunSettings, say: Callable[[str], None]) -> Mapping[str, str]:
    """Return the resolved path of run.init_from, the same for all workers; nothing where it is null.

    `say` as for `weights.find`; it gets warnings, too.

    Raises:
        RefusedError: there are no such weights.
    """
    if run.init_from is None:
        return {}
    return {"init_from": str(find(run, lambda text: say(f"warning: {text}"), say=say).resolve())}


def converted(run: RunSettings, path: Path, folder: Path) -> tuple[Path, str | None]:
    """Return the weights as safetensors, and the part of a file of torch.save that they were.

    Such a file is converted to one in `folder`, which is of no use once the weights are loaded. Raises RefusedError.
    """
    if not weights.is_pickled(path):
        return path, None
    target = folder.resolve() / CONVERTED
    part = convert(path, target, override(run), run.init_weights == "ema")
    return target, part


def as_safetensors(run: RunSettings, found: Mapping[str, str], folder: Path, notes: list[str]) -> Mapping[str, str]:
    """Return what workers are passed of `found`, the weights that the command has found: `converted` ones.

    Adds a note on the part of the file that is taken. Without weights it removes the copy of a start that was killed.
    """
    if not found:
        remove_converted(folder)
        return found
    path, part = converted(run, Path(found["init_from"]), folder)
    if part is not None:
        notes.append(f"{override(run)}: the part {part} of the file is taken")
    return {"init_from": str(path)}


def remove_converted(folder: Path) -> None:
    """Remove what `converted` has written."""
    (folder / CONVERTED).unlink(missing_ok=True)
    (folder / f".{CONVERTED}.partial").unlink(missing_ok=True)
