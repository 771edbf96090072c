"""Which folders below `data.root` are parts and which are classes; what may be either is refused.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpexp.data.image_folder.walk import ImageFile, folders
from ddpexp.data.part_names import named_like_parts, part_of
from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

_LISTED = 3

Parts = Mapping[str, Path]
"""The folder of each part: `train`, and perhaps `eval` and `test`."""


def find_parts(folder: Path) -> Parts:
    """Return the folder of each part.

    Raises:
        RefusedError: parts are there twice or without one to train on, or folders of classes are named like parts.
            OSError: the folder cannot be read.
    """
    names = folders(folder)
    usual: dict[str, list[str]] = {}
    for name in names:
        if (part := part_of(name)) is not None:
            usual.setdefault(part, []).append(name)
    for same in usual.values():
        if len(same) > 1:
            listed = " and ".join(f"{name}/" for name in same)
            raise RefusedError(f"holds {listed}", key="data.root", value=folder, suggestion="Keep one of them.")
    if "train" not in usual:
        _check_classes(folder, names, [name for same in usual.values() for name in same])
        return {"train": folder}
    found = {part: folder / same[0] for part, same in usual.items()}
    parts = {"train": found["train"]}
    if "eval" in found:
        parts["eval"] = found["eval"]
    if "test" in found:
        parts["test" if "eval" in found else "eval"] = found["test"]
    return parts


def _check_classes(folder: Path, names: Sequence[str], lone: Sequence[str]) -> None:
    """Check that folders that would be those of classes are not named like parts."""
    if any(folders(folder / name) for name in lone):
        raise RefusedError(
            f"holds {lone[0]}/ but no train/",
            key="data.root",
            value=folder,
            suggestion="Name the folder that holds both, or put the images to train on into train/CLASS/.",
        )
    if like := named_like_parts(names):
        raise RefusedError(
            f"holds folders that are named like parts and not like classes ({first_few(list(like), _LISTED)})",
            key="data.root",
            value=folder,
            suggestion="Name them train, val and test, or put the folders of classes that are called so into train/.",
        )


def check_depth(folder: Path, train: Path, files: Sequence[ImageFile]) -> None:
    """Check that the folders of the classes hold images, and no folders that are named like parts.

    Raises:
        RefusedError: the classes, or the parts, may be one folder further down.
    """
    depth = len(train.relative_to(folder).parts)
    inside = [file.path.split("/")[depth:-1] for file in files]  # of each image the folders from that of its class on
    below = sorted({f"{levels[0]}/{levels[1]}" for levels in inside if len(levels) > 1})
    parts = [name for name in below if named_like_parts([name.split("/")[1]])]
    if parts:
        problem = f"holds folders named like parts inside those of classes ({first_few(parts, _LISTED)})"
    elif all(len(levels) > 1 for levels in inside):
        problem = f"holds folders that hold only folders ({first_few(below, _LISTED)})"
    else:
        return
    raise RefusedError(
        f"{problem}, and its folders count as classes",
        key="data.root",
        value=folder,
        suggestion="Set data.root to the folder with train/CLASS/ and val/CLASS/, or to the one with the folders of "
        "classes, or set data.nested=true if all images below a folder are of its class.",
        place=None if train == folder else train,
    )
