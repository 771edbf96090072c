"""Predictions as the bytes of a file, which are the same for the same predictions."""

from __future__ import annotations

import csv
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddpexp.errors import DdpexpError
from ddpexp.predict.names import Predictions
from ddpexp.system.secrets import masked_tree

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


def contents(out: Path, predictions: Predictions, provenance: Mapping[str, Any]) -> dict[Path, bytes]:
    """Return the files to write, and what is in them; `provenance` says with what they were made.

    A format without metadata has it in a JSON file beside it, which comes first. Each row of a table begins with its
    name. Secrets in names are masked.
    """
    predictions, text = predictions.masked(), json.dumps(masked_tree(provenance), indent=2)
    if out.suffix == ".npz":
        return {out: _npz(predictions, text)}
    if out.suffix == ".parquet":
        return {out: _parquet(predictions, text)}
    if out.suffix == ".csv":
        whole = _csv(predictions)
    else:
        whole, names = _npy(predictions), predictions.samples
        if names is not None:
            text = json.dumps({**json.loads(text), f"{names.column}s": list(names.values)}, indent=2)
    return {out.with_name(f"{out.name}.json"): f"{text}\n".encode(), out: whole}


def _npz(predictions: Predictions, text: str) -> bytes:
    names = predictions.samples
    rows = {} if names is None else {names.column: np.asarray(names.values)}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:  # numpy.savez takes no array named `file`
        for name, array in {**rows, **predictions.named(), METADATA: np.array(text)}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def _npy(predictions: Predictions) -> bytes:
    file = io.BytesIO()
    np.save(file, next(iter(predictions.arrays.values())))
    return file.getvalue()


def _csv(predictions: Predictions) -> bytes:
    """Return a line for each sample; an array with several numbers a sample has a column for each."""
    columns: dict[str, Sequence[Any]] = {}
    for name, array in predictions.named().items():
        if array.ndim == 1:
            columns[name] = array.tolist()
        else:
            suffixes = predictions.columns_of(name) or range(array.shape[1])
            columns |= {f"{name}_{suffix}": column for suffix, column in zip(suffixes, array.T.tolist(), strict=True)}
    rows = predictions.rows
    columns = columns if rows.column in columns else {rows.column: rows.values, **columns}
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue().encode("utf-8", "surrogateescape")  # the names of files as they are on the disk


def _parquet(predictions: Predictions, text: str) -> bytes:
    """Return a row for each sample; an array with several numbers a sample is a column of lists."""
    import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

    rows = predictions.rows
    columns = {rows.column: pyarrow.array([_text(value) for value in rows.values])}
    for name, array in predictions.named().items():
        flat = pyarrow.array(array.reshape(-1))
        columns[name] = flat if array.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
    table = pyarrow.table(columns).replace_schema_metadata({METADATA: text})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _text(value: str | int) -> str | int:
    """Return a name that UTF-8 can hold; a number as it is."""
    return os.fsencode(value).decode(errors="replace") if isinstance(value, str) else value
