"""The images below `data.root`: their classes, names, sizes and modification times.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpexp.data.batch_plan import counted
from ddpexp.errors import RefusedError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_TRAIN = "train"
_EVALUATION = ("val", "valid", "validation")
_TEST = "test"
_LISTED = 3


@dataclass(frozen=True)
class ImageFile:
    """One image: its path below `data.root`, its class, and what changes when its content does."""

    path: str
    label: int
    num_bytes: int
    modified: int  # nanoseconds


@dataclass(frozen=True)
class Folder:
    """The images of a folder, by part (`train`, `eval`, `test`), in the order of classes and names."""

    root: Path
    classes: tuple[str, ...]
    loose: int  # images beside the folders of the classes, which are left out
    parts: dict[str, list[ImageFile]]


def scan(root: str | None) -> Folder:
    """Find the images below a folder: `train/CLASS` and `val/CLASS`, or `CLASS` alone.

    Hidden files and folders, and files that are no JPEG, PNG or WebP by their names, are left out.

    Raises:
        RefusedError: there is no such folder, or it is not laid out like that.
    """
    if not root:
        raise RefusedError(
            "data.root is not set: name the folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with CLASS/*.jpg."
        )
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    try:
        parts = _parts(folder)
        classes = sorted({name for place in parts.values() for name in _folders(place)})
        _check_classes(folder, parts, classes)
        labels = {name: label for label, name in enumerate(classes)}
        files = {
            part: [file for name in _folders(place) for file in _images(folder, place / name, labels[name])]
            for part, place in parts.items()
        }
    except OSError as error:
        raise RefusedError(_unreadable(folder, error)) from None
    for part, place in parts.items():
        _check_images(place, files[part], classes)
    return Folder(folder, tuple(classes), sum(map(_loose, parts.values())), files)


def scan_unlabelled(root: str | None, classes: Sequence[str]) -> Folder | None:
    """Find all images below a folder, in the order of their paths; their label is -1.

    None if there are folders of parts or of the classes in it.

    Raises:
        RefusedError: there is no such folder, or no image.
    """
    folder = Path(os.path.abspath(os.path.expanduser(root or "")))
    if not root or not folder.is_dir() or {_TRAIN, *_EVALUATION, _TEST, *classes} & set(_folders(folder)):
        return None
    try:
        files = list(_images(folder, folder, -1))
    except OSError as error:
        raise RefusedError(_unreadable(folder, error)) from None
    if not files:
        raise RefusedError(f"data.root={folder} holds no JPEG, PNG or WebP images: name a folder with some.")
    return Folder(folder, tuple(classes), 0, {"eval": files})


def _parts(folder: Path) -> dict[str, Path]:
    """Return the folder of each part. Raises: OSError."""
    names = _folders(folder)
    if _TRAIN not in names:
        lone = next((name for name in (*_EVALUATION, _TEST) if name in names), None)
        if lone is not None and any(_folders(folder / lone)):
            raise RefusedError(
                f"data.root={folder} holds {lone}/ but no train/: name the folder that holds both, or put the images "
                "to train on into train/CLASS/."
            )
        return {_TRAIN: folder}
    parts = {_TRAIN: folder / _TRAIN}
    evaluation = [name for name in _EVALUATION if name in names]
    if len(evaluation) > 1:
        raise RefusedError(
            f"data.root={folder} holds {' and '.join(f'{name}/' for name in evaluation)}: keep the one to evaluate on."
        )
    if evaluation:
        parts["eval"] = folder / evaluation[0]
    if _TEST in names:
        parts["test" if evaluation else "eval"] = folder / _TEST
    return parts


def _check_classes(folder: Path, parts: dict[str, Path], classes: Sequence[str]) -> None:
    place = parts[_TRAIN]
    train = _folders(place)
    if not train:
        raise RefusedError(
            f"{_named(folder, place)} {_content(place)}, and data=image_folder reads one folder of images for each "
            "class: put them into folders named after their classes."
        )
    if len(classes) == 1:
        loose = _loose(place)
        beside = f" (and {counted(loose, 'image')} beside it, in no class)" if loose else ""
        raise RefusedError(
            f"{_named(folder, place)} holds one class, {classes[0]}{beside}, so there is nothing to tell apart: add a "
            "folder for each further class."
        )
    unseen = sorted(set(classes) - set(train))
    if unseen:
        other = next(place for place in parts.values() if unseen[0] in _folders(place))
        raise RefusedError(
            f"{other} holds classes that {place} does not ({_listed(unseen)}), and a model cannot learn those: make "
            "the folders of classes the same."
        )


def _check_images(place: Path, files: Sequence[ImageFile], classes: Sequence[str]) -> None:
    seen = {file.label for file in files}
    empty = [name for label, name in enumerate(classes) if label not in seen and (place / name).is_dir()]
    if not files or empty:
        raise RefusedError(
            f"{place} holds no JPEG, PNG or WebP images{f' of {_listed(empty)}' if files else ''} (names ending in "
            f"{', '.join(SUFFIXES)}): add some, or remove the folder{'s' if len(empty) > 1 else ''}."
        )


def _unreadable(folder: Path, error: OSError) -> str:
    if os.path.exists(folder) and error.filename and Path(error.filename) != folder:
        return (
            f"data.root={folder}: {error.filename} cannot be read ({error.strerror}): remove it, or make it readable "
            "for you."
        )
    return (
        f"data.root={folder} cannot be read ({error.strerror}): set data.root to a folder of images, one folder for "
        "each class."
    )


def _named(folder: Path, place: Path) -> str:
    return f"data.root={folder}" if place == folder else str(place)


def _content(place: Path) -> str:
    names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    return f"holds no folders, only {_listed(names)}" if names else "is empty"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")


def _folders(place: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones. Raises: OSError."""
    with os.scandir(place) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _loose(place: Path) -> int:
    """Return how many images lie beside the folders of the classes. Raises: OSError."""
    with os.scandir(place) as entries:
        return sum(entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".") for entry in entries)


def _images(root: Path, place: Path, label: int) -> Iterator[ImageFile]:
    """Yield the images in the folder of a class and in the folders below it, sorted by name. Raises: OSError."""
    with os.scandir(place) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _images(root, Path(entry.path), label)
        elif entry.name.lower().endswith(SUFFIXES):
            found_stat = entry.stat()
            yield ImageFile(os.path.relpath(entry.path, root), label, found_stat.st_size, found_stat.st_mtime_ns)
