"""The images below `data.root`: their classes, names, sizes and modification times.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from ddpexp.data.image_folder.layout import Parts, check_depth, find_parts
from ddpexp.data.image_folder.walk import SUFFIXES, ImageFile, Walk, folders, is_image
from ddpexp.data.part_names import part_of
from ddpexp.errors import RefusedError
from ddpexp.system.text import counted, first_few

_LISTED = 3


@dataclass(frozen=True)
class Folder:
    """The images of a folder, by part (`train`, `eval`, `test`), in the order of classes and names."""

    root: Path
    classes: tuple[str, ...]
    parts: dict[str, list[ImageFile]]
    left_out: str  # which files were, for the first lines of a run; empty: none

    @property
    def without_images(self) -> list[str]:
        """Return the classes of which there is no image to train on."""
        seen = {file.label for file in self.parts.get("train", ())}
        return [name for label, name in enumerate(self.classes) if label not in seen] if "train" in self.parts else []


def scan(root: str | None, classes: Sequence[str] | None = None, nested: bool = False) -> Folder:
    """Find the images below a folder: `train/CLASS` and `val/CLASS`, or `CLASS` alone.

    Parts have their usual names in any case. Classes are those of the folders of the training part, sorted, unless
    `classes` decides them; a name is the same class however Unicode composes its letters (NFC or NFD). Linked folders
    are followed. Hidden files and folders, and files that are no images by their names, are left out.
    With `nested` folders inside those of the classes belong to them, whatever their names.

    Raises:
        RefusedError: there is no such folder, or it is not laid out like that.
    """
    if not root:
        raise RefusedError(
            "is not set",
            key="data.root",
            suggestion="Name the folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or with CLASS/*.jpg.",
        )
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    walk = Walk(folder)
    try:
        parts = find_parts(folder)
        by_class = {part: _class_folders(place) for part, place in parts.items()}
        names = _classes(folder, parts, by_class, classes)
        labels = {name: label for label, name in enumerate(names)}
        files = {part: list(_labelled(walk, place, by_class[part], labels)) for part, place in parts.items()}
    except OSError as error:
        raise _unreadable(folder, error) from None
    for part, place in parts.items():
        _check_images(place, files[part], by_class[part], labels)
    if not nested:
        check_depth(folder, parts["train"], files["train"])
    beside = [name for name in folders(folder) if part_of(name) is None] if parts["train"] != folder else []
    left_out = _left_out(walk.left_out, sum(map(_loose, parts.values())), beside)
    return Folder(folder, tuple(names), files, left_out)


def scan_unlabelled(root: str | None, classes: Sequence[str]) -> Folder | None:
    """Find all images below a folder, in the order of their paths; their label is -1.

    None if there are folders of classes in it, or of parts with folders.

    Raises:
        RefusedError: there is no such folder, or no image.
    """
    folder = Path(os.path.abspath(os.path.expanduser(root or "")))
    if not root or not folder.is_dir():
        return None
    walk = Walk(folder)
    try:
        parts = [name for name in folders(folder) if part_of(name) is not None and folders(folder / name)]
        if parts or set(_class_folders(folder)) & set(classes):
            return None
        walk.begin_part(folder.parent)
        files = list(walk.images(folder, -1))
    except OSError as error:
        raise _unreadable(folder, error) from None
    if not files:
        raise RefusedError(
            f"holds no images (names ending in {', '.join(SUFFIXES)})",
            key="data.root",
            value=folder,
            suggestion="Name a folder with some.",
        )
    return Folder(folder, tuple(classes), {"eval": files}, _left_out(walk.left_out))


def _class_folders(place: Path) -> dict[str, list[Path]]:
    """Return the folders of each class, by its name in NFC. Raises: OSError."""
    found: dict[str, list[Path]] = {}
    for name in folders(place):
        found.setdefault(normalize("NFC", name), []).append(place / name)
    return found


def _labelled(
    walk: Walk, part: Path, by_class: Mapping[str, Sequence[Path]], labels: Mapping[str, int]
) -> Iterator[ImageFile]:
    walk.begin_part(part)
    for name in sorted(by_class):
        for place in by_class[name]:
            yield from walk.images(place, labels[name])


def _classes(
    folder: Path, parts: Parts, by_class: Mapping[str, Mapping[str, Sequence[Path]]], given: Sequence[str] | None
) -> list[str]:
    """Return the names of the classes, after checks of the folders. Raises: RefusedError, OSError."""
    place, train = parts["train"], by_class["train"]
    if not train:
        raise RefusedError(
            f"{_content(place)}, and data=image_folder reads one folder of images for each class",
            suggestion="Put them into folders named after their classes.",
            place=_named(folder, place),
        )
    classes = sorted(train) if given is None else [normalize("NFC", name) for name in given]
    if len(classes) == 1 or len(set(classes)) < len(classes):
        loose = _loose(place)
        beside = f" (and {counted(loose, 'image')} beside it, in no class)" if loose else ""
        if given is not None:
            raise RefusedError(
                key="data.classes",
                value=f"[{', '.join(given)}]",
                suggestion="Name two classes or more, each of them once.",
            )
        raise RefusedError(
            f"holds one class, {classes[0]}{beside}, but a classifier needs at least two",
            suggestion="Add a folder for each further class.",
            place=_named(folder, place),
        )
    for part, own in by_class.items():
        unseen = sorted(set(own) - set(classes))
        if unseen and given is None:
            raise RefusedError(
                f"{parts[part]} holds classes that {place} does not ({first_few(unseen, _LISTED)}), which a model "
                "cannot learn",
                suggestion="Make the folders of classes the same.",
            )
        if unseen:
            raise RefusedError(
                f"{parts[part]} holds folders that are not classes ({first_few(unseen, _LISTED)}): "
                f"the classes are {first_few(classes, 10)}",
                suggestion="Rename or remove the folders.",
            )
    return classes


def _check_images(
    place: Path, files: Sequence[ImageFile], by_class: Mapping[str, Sequence[Path]], labels: Mapping[str, int]
) -> None:
    seen = {file.label for file in files}
    empty = [name for name in sorted(by_class) if labels[name] not in seen]
    if not files or empty:
        raise RefusedError(
            f"holds no images{f' of {first_few(empty, _LISTED)}' if files else ''} (names ending in "
            f"{', '.join(SUFFIXES)})",
            suggestion=f"Add some, or remove the folder{'s' if len(empty) > 1 else ''}.",
            place=place,
        )


def _left_out(suffixes: Mapping[str, int], loose: int = 0, beside: Sequence[str] = ()) -> str:
    """Return what was left out: images and folders beside those that are read, and what is no image by its name."""
    counts = [f"{count:,} {suffix}" for suffix, count in Counter(suffixes).most_common()]
    texts = [
        f"{loose:,} beside the folders of classes left out" if loose else "",
        f"folders left out: {first_few(beside, _LISTED)}" if beside else "",
        f"files left out: {first_few(counts, 8)}" if counts else "",
    ]
    return "; ".join(filter(None, texts))


def _unreadable(folder: Path, error: OSError) -> RefusedError:
    is_inside = os.path.exists(folder) and bool(error.filename) and Path(error.filename) != folder
    return RefusedError(
        f"cannot be read ({error.strerror})",
        key="data.root",
        value=folder,
        suggestion="Remove it, or make it readable for you."
        if is_inside
        else "Set data.root to a folder of images, one folder for each class.",
        place=error.filename if is_inside else None,
    )


def _named(folder: Path, place: Path) -> str:
    return f"data.root={folder}" if place == folder else str(place)


def _content(place: Path) -> str:
    names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    return f"holds no folders, only {first_few(names, _LISTED)}" if names else "is empty"


def _loose(place: Path) -> int:
    """Return how many images lie beside the folders of the classes. Raises: OSError."""
    with os.scandir(place) as entries:
        return sum(is_image(entry.name) and not entry.name.startswith(".") for entry in entries)
