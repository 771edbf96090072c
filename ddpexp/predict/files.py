"""Predictions as the bytes of a file, which are the same for the same predictions."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.errors import DdpexpError
from ddpexp.system.secrets import masked_tree

_FILE = "file"  # the column of names
METADATA = "ddpexp"  # the entry of a .npz, and the key in a parquet file


def check_holds(out: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that a file can hold arrays with rows of these shapes.

    Raises:
        DdpexpError: its format cannot.
    """
    if out.suffix == ".npz" and METADATA in shapes:
        raise DdpexpError(
            f"predict returned an array named {METADATA!r}, the name of the metadata", suggestion="Rename it."
        )
    if out.suffix == ".npy" and len(shapes) > 1:
        raise DdpexpError(
            f"can hold one array, and predict returns {', '.join(shapes)}", place=out, suggestion="Use .npz."
        )
    deep = next((name for name, shape in shapes.items() if len(shape) > 1), None)
    if out.suffix in (".csv", ".parquet") and deep is not None:
        shape = " x ".join(map(str, shapes[deep]))
        raise DdpexpError(f"is a table, and a row of {deep} has the shape {shape}", place=out, suggestion="Use .npz.")


def contents(out: Path, arrays: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]) -> dict[Path, bytes]:
    """Return the files to write, and what is in them; `provenance` says with what they were made.

    A format without metadata has it in a JSON file beside it, which comes first. A table of what was predicted for
    files begins with a column of their names. Secrets in names are masked.
    """
    provenance, arrays = masked_tree(provenance), {masked_tree(name): array for name, array in arrays.items()}
    text = json.dumps(provenance, indent=2)
    files = provenance.get("files") if _FILE not in arrays else None
    if out.suffix == ".npz":
        return {out: _npz(arrays, text)}
    if out.suffix == ".parquet":
        return {out: _parquet(arrays, files, text)}
    whole = _csv(arrays, files) if out.suffix == ".csv" else _npy(arrays)
    return {out.with_name(f"{out.name}.json"): f"{text}\n".encode(), out: whole}


def _npz(arrays: Mapping[str, NDArray[Any]], text: str) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays, **{METADATA: np.array(text)})  # type: ignore[arg-type]
    return file.getvalue()


def _npy(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.save(file, next(iter(arrays.values())))
    return file.getvalue()


def _csv(arrays: Mapping[str, NDArray[Any]], files: Sequence[str] | None) -> bytes:
    """Return a line for each sample; an array with several numbers a sample has a column for each."""
    names: list[str] = [] if files is None else [_FILE]
    columns: list[Sequence[Any]] = [] if files is None else [files]
    for name, array in arrays.items():
        if array.ndim == 1:
            names.append(name)
            columns.append(array.tolist())
        else:
            names += [f"{name}_{column}" for column in range(array.shape[1])]
            columns += array.T.tolist()
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*columns, strict=True))
    return file.getvalue().encode("utf-8", "surrogateescape")  # the names of files as they are on the disk


def _parquet(arrays: Mapping[str, NDArray[Any]], files: Sequence[str] | None, text: str) -> bytes:
    """Return a row for each sample; an array with several numbers a sample is a column of lists."""
    import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

    columns = (
        {} if files is None else {_FILE: pyarrow.array([os.fsencode(file).decode(errors="replace") for file in files])}
    )
    for name, array in arrays.items():
        flat = pyarrow.array(array.reshape(-1))
        columns[name] = flat if array.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
    table = pyarrow.table(columns).replace_schema_metadata({METADATA: text})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
