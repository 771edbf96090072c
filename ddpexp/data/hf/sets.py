"""Opening data sets with the library `datasets`."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping
from typing import Any

from ddpexp.data.named_files import files_matching
from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

_KINDS = {
    ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_EVALUATION = ("validation", "test")
_SAVED = ("dataset_dict.json", "state.json")


def open_sets(request: Mapping[str, Any]) -> dict[str, Any]:
    """Open the set to train on and, if there is one, that to evaluate on.

    Raises:
        RefusedError: they are not there, or cannot be read.
    """
    sets = _opened(request["path"], "data.path", request)
    found = {"train": _chosen(sets, request["split"], "data.split", request["path"])}
    split = request["eval_split"]
    if request["eval_path"]:
        others = _opened(request["eval_path"], "data.eval_path", request)
        name = split if split not in ("auto", None) else next(iter(others))
        found["eval"] = _chosen(others, name, "data.eval_split", request["eval_path"])
    elif split == "auto":
        name = next((name for name in _EVALUATION if name in sets and name != request["split"]), None)
        if name is not None:
            found["eval"] = sets[name]
    elif split is not None:
        found["eval"] = _chosen(sets, split, "data.eval_split", request["path"])
    return found


def columns_of(data: Any, request: Mapping[str, Any], part: str) -> None:
    """Check that a set has the columns that the options name. Raises: RefusedError."""
    features = data.features  # once: the library copies all of them for each use
    group_by = request["options"]["group_by"]
    groups = [group_by] if group_by and part == "train" else []
    for key, names in (
        ("data.inputs", request["inputs"]), ("data.targets", request["targets"] or []), ("data.group_by", groups),
    ):  # fmt: skip
        missing = next((name for name in names if name not in features), None)
        if missing is not None:
            raise RefusedError(
                f"is not a column of data.path={request['path']} (for {part}): it has {first_few(list(features), 10)}",
                key=key,
                value=missing,
            )


def _texts(request: Mapping[str, Any]) -> list[str]:
    """Return the columns of a `.csv` that are read as they stand there, and not by what the values look like."""
    named = [name for name, kind in request["options"]["columns"].items() if kind in ("category", "text")]
    return [*(request["targets"] or ()), *named]


def _chosen(sets: Mapping[str, Any], name: str, key: str, path: str) -> Any:
    if name not in sets:
        raise RefusedError(f"is not a split of {path}: it has {first_few(list(sets))}", key=key, value=name)
    return sets[name]


def _opened(path: str, key: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):  # what they log is in the sentence
        logging.getLogger(name).setLevel(logging.CRITICAL)
    full = os.path.abspath(os.path.expanduser(path))
    is_local = os.path.exists(full) or glob.has_magic(path)
    try:
        if os.path.isdir(full) and any(os.path.exists(os.path.join(full, name)) for name in _SAVED):
            sets = datasets.load_from_disk(full)
            return sets if isinstance(sets, datasets.DatasetDict) else {"train": sets}
        if os.path.isdir(full):
            return dict(datasets.load_dataset(full))
        if is_local:
            files = files_matching(path)
            ending = os.path.splitext(files[0])[1].lower()
            if ending not in _KINDS:
                raise RefusedError(
                    f"is not a folder or a file of a known type ({', '.join(_KINDS)})", key=key, value=path
                )
            more: dict[str, Any] = {"delimiter": "\t"} if ending == ".tsv" else {}
            if _KINDS[ending] == "csv":
                more["converters"] = dict.fromkeys(_texts(request), str)
            return dict(datasets.load_dataset(_KINDS[ending], data_files={"train": files}, **more))
        return dict(datasets.load_dataset(path, request["name"], revision=request["revision"]))
    except RefusedError:
        raise
    except Exception as error:  # of any of the libraries below
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if is_local:
            raise RefusedError(f"cannot be read by the library datasets: {reason}", key=key, value=path) from None
        raise RefusedError(
            f"is neither a file nor a folder here, and could not be downloaded from the hub: {reason}",
            key=key,
            value=path,
        ) from None
