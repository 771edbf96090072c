"""Reading arrays and tables, checking them, and storing what the workers cannot map as it is."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.encode import encode
from ddpexp.data.arrays.sources import TABLES, ColumnOptions, SplitFiles
from ddpexp.data.arrays.tables import Values, open_table
from ddpexp.data.arrays.targets import Encoded, TargetColumn, check_finite, encoded
from ddpexp.data.npy import write_npy
from ddpexp.data.schema import Field, Schema
from ddpexp.errors import RefusedError
from ddpexp.system.files import sha256_of_file
from ddpexp.system.text import first_few

MAPPED = ("|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "|b1")  # what torch maps as it is
_BLOCK = 1 << 24  # bytes that are looked at together


@dataclass
class Reading:
    """The reading of files into the folder of a cache, by a schema that the first part decides if there is none."""

    folder: Path
    options: ColumnOptions
    schema: Schema | None = None
    digests: Any = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)  # lines on what a person could doubt
    rounded: list[str] = field(default_factory=list)  # columns that float32 changes, which are stored as float64

    def store(self, parts: Sequence[SplitFiles]) -> dict[str, Any]:
        """Check and store the parts, the training part first; return the record of the cache. Raises: OSError."""
        for path in self.folder.glob("*.np[yz]"):
            path.unlink()
        stored = {part.name: self._part(part) for part in parts}
        return {"parts": stored, **self.record()}

    def record(self) -> dict[str, Any]:
        """Return what a cache records of the reading, beside its parts."""
        assert self.schema is not None, "a part was read"
        decided = {"guesses": self.guesses, "rounded": self.rounded}
        return {"digests": self.digests, "schema": self.schema.as_json(), **decided}

    def targets(self, columns: Sequence[TargetColumn], key: str) -> Encoded | None:
        """Return targets as numbers, by the fields that the training part decides; None if there are no columns.

        Raises:
            RefusedError: a value is missing, is not of the kind, or none of the classes.
        """
        if not columns:
            return None
        if self.schema is not None:
            return encoded(columns, self.schema.targets, key, self.options)
        kinds = {name: kind for name, kind in self.options.columns.items() if kind != "drop"}
        decided = [
            column.decide(self.options, kinds.get(str(column.name)), len(columns) > 1, key) for column in columns
        ]
        self.guesses += [line for _, lines in decided for line in lines]
        found = encoded(columns, [one for one, _ in decided], key, self.options)
        self.guesses += found.doubts(columns[0].where) if not decided[0][1] else []
        return found

    def decide(self, shape: Sequence[int], inputs: Sequence[Field], targets: Encoded | None, **more: Any) -> None:
        """Decide the schema, unless there is one; `more` are further values of it."""
        if self.schema is not None:
            return
        fields = tuple(targets.fields) if targets is not None else ()
        outputs = targets.num_outputs if targets is not None else None
        more = {"dtype": self.options.dtype, **more}
        self.schema = Schema(tuple(shape), tuple(inputs), targets=fields, num_outputs=outputs, **more)

    def stored(
        self, part: str, inputs: str, samples: int, targets: Encoded | None, groups: Any = None
    ) -> dict[str, Any]:
        """Store targets and groups; return the record of a part whose inputs are stored. Raises: OSError."""
        return {
            "samples": samples,
            "inputs": inputs,
            "targets": self.save(f"{part}-targets.npy", targets.values) if targets is not None else None,
            "groups": self.save("train-groups.npy", groups) if groups is not None else None,
        }

    def check_shape(self, shape: Sequence[int], where: object) -> None:
        """Check that a part has samples of the shape of the schema. Raises: RefusedError."""
        if self.schema is not None and tuple(shape) != self.schema.shape:
            raise RefusedError(
                f"a sample of {where} has the shape {list(shape)}, but a training sample has the shape "
                f"{list(self.schema.shape)}",
                suggestion="Make the shapes equal.",
            )

    def _part(self, part: SplitFiles) -> dict[str, Any]:
        found = self._table(part) if part.source.kind in TABLES else self._arrays(part)
        hashes = [one and sha256_of_file(one.path) for one in (part.source, part.labels)]
        self.digests.append([part.inputs, part.targets, *hashes])
        return found

    def _table(self, part: SplitFiles) -> dict[str, Any]:
        options, known = self.options, self.schema
        if known is not None:
            part = _with_inputs(part, known)
        group_by = options.group_by if part.name == "train" else None
        table = open_table(part, group_by, options.target_type, options.dropped, options.delimiter)
        rows = encode(part, table, options, known)
        inputs = rows.inputs
        self.digests.append([one.name for one in inputs.fields])
        if known is None:
            self.rounded = list(inputs.rounded)
            self.guesses += [*table.reader.guesses, *inputs.guesses]
        columns = [
            TargetColumn(name, values, f"{part.source}: column {name}")
            for name, values in zip(table.targets, rows.targets, strict=True)
        ]
        targets = self.targets(columns, f"{part.key}targets")
        array = inputs.inputs
        self.decide(array.shape[1:], inputs.fields, targets, stored=array.dtype.name)
        file = self.save(f"{part.name}-inputs.npy", array)
        return self.stored(part.name, file, len(array), targets, rows.groups)

    def _arrays(self, part: SplitFiles) -> dict[str, Any]:
        if part.source.kind == ".npz":
            inputs_path, targets_path = self._members(part)
        else:
            inputs_path, targets_path = Path(part.source.path), Path(part.labels.path) if part.labels else None
        where = f"{part.source}" + (f": {part.inputs[0]}" if part.inputs else "")
        inputs = _opened(inputs_path, where)
        _check_numbers(inputs, where, self.options.dtype)
        self.check_shape(inputs.shape[1:], where)
        columns = []
        if targets_path is not None:
            label = f"{part.labels}" if part.labels else f"{part.source}: {(part.targets or ('',))[0]}"
            raw = _opened(targets_path, label)
            if len(raw) != len(inputs):
                raise RefusedError(
                    f"{label} has {len(raw):,} targets, and {where} {len(inputs):,} samples",
                    suggestion="Store one target for each sample.",
                )
            columns.append(TargetColumn(None, _texts_or_numbers(raw), label))
        targets = self.targets(columns, f"{part.key}targets")
        self.decide(inputs.shape[1:], [Field(None, "number")], targets)
        path = inputs_path
        if inputs.dtype.str not in MAPPED or not inputs.flags.c_contiguous:
            wide = "float64" if inputs.dtype.kind == "f" and inputs.itemsize >= 8 else self.options.dtype
            path = self.folder / self.save(f"{part.name}-inputs.npy", inputs.astype(wide))
        name = path.name if path.parent == self.folder else str(path)
        return self.stored(part.name, name, len(inputs), targets)

    def _members(self, part: SplitFiles) -> tuple[Path, Path | None]:
        """Store the chosen arrays of an `.npz` file as `.npy` files, block by block."""
        try:
            with zipfile.ZipFile(part.source.path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                inputs, targets = self._chosen(part, names)
                paths: list[Path] = []
                for name in (inputs, targets):
                    path = self.folder / f"{part.name}-member-{len(paths)}.npy"
                    if name is not None:
                        with archive.open(f"{name}.npy") as member, open(path, "xb") as file:
                            shutil.copyfileobj(member, file, _BLOCK)
                    paths.append(path)
        except (zipfile.BadZipFile, zipfile.zlib.error, EOFError, KeyError, NotImplementedError) as error:  # type: ignore[attr-defined]
            raise RefusedError(
                f"is damaged or is not a .npz file ({error})",
                suggestion="Store it again with numpy.savez.",
                key=part.source.key,
                value=part.source.path,
            ) from None
        return paths[0], paths[1] if targets is not None else None

    def _chosen(self, part: SplitFiles, names: Sequence[str]) -> tuple[str, str | None]:
        """Return the names of the arrays with inputs and targets."""
        listed = f"it holds {first_few(names)}"
        for what, chosen in (("inputs", part.inputs), ("targets", part.targets)):
            for name in chosen or ():
                if name not in names:
                    raise RefusedError(
                        f"is not an array of {part.source}: {listed}", key=f"{part.key}{what}", value=name
                    )
            if chosen and len(chosen) > 1:
                raise RefusedError(
                    f"{part.key}{what} names {len(chosen)} arrays of {part.source}", suggestion="Name one."
                )
        if not part.targets and self.options.target_type != "none":
            raise RefusedError(
                "is not set",
                key=f"{part.key}targets",
                suggestion=f"Name the array of {part.source} with the targets ({listed}), or use "
                "data.target_type=none for data without targets.",
            )
        others = [name for name in names if name not in (part.targets or ())]
        if not part.inputs and len(others) != 1:
            raise RefusedError(
                "is not set", key=f"{part.key}inputs", suggestion=f"Name the array of {part.source} to read ({listed})."
            )
        return (part.inputs or others)[0], part.targets[0] if part.targets else None

    def save(self, name: str, values: NDArray[Any]) -> str:
        """Store an array in the cache; return the name of its file. Raises: OSError."""
        # Not by numpy.save, which does not report why a disk could not be written.
        write_npy(self.folder / name, values.shape, np.ascontiguousarray(values).data, values.dtype.str)
        return name


def _opened(path: Path, where: str) -> NDArray[Any]:
    """Map an `.npy` file of numbers or texts.

    Raises:
        RefusedError: it is something else, or it is damaged.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError, TypeError, SyntaxError) as error:
        if "Python objects" in str(error):
            problem = "holds Python objects, which could run code"
        elif "magic" in str(error) or "read array header" in str(error):
            problem = "is not a .npy file"
        else:
            problem = f"is damaged ({error})"
        raise RefusedError(problem, suggestion="Store an array of numbers with numpy.save.", place=where) from None
    if array.dtype.kind not in "biufUS":
        raise RefusedError(f"holds {array.dtype}", suggestion="Store an array of numbers.", place=where)
    if array.ndim == 0 or 0 in array.shape:
        raise RefusedError(f"holds no samples, as its shape is {list(array.shape)}", place=where)
    return array


def _check_numbers(array: NDArray[Any], where: str, dtype: str) -> None:
    """Check that an array holds numbers that are finite in a batch of `dtype` too, block by block."""
    if array.dtype.kind in "US":
        raise RefusedError(
            f"holds texts, such as {str(array.ravel()[0])!r}", suggestion="Store an array of numbers.", place=where
        )
    if array.dtype.kind != "f":
        return
    step = max(1, _BLOCK // max(1, array[0].nbytes))
    for begin in range(0, len(array), step):
        check_finite(array[begin : begin + step], where, dtype, begin)


def _texts_or_numbers(array: NDArray[Any]) -> Values:
    if array.dtype.kind == "S":
        return [text.decode("utf-8", "replace") for text in array.ravel().tolist()]
    return array.ravel().tolist() if array.dtype.kind == "U" else np.asarray(array)


def _with_inputs(part: SplitFiles, schema: Schema) -> SplitFiles:
    """Return a part with the names of the columns of the schema, unless it has as many of its own."""
    names = tuple(str(one.name) for one in schema.inputs)
    if part.inputs is not None and len(part.inputs) != len(names):
        raise RefusedError(
            f"names {len(part.inputs)} columns of {part.source}, and the model was trained on {len(names)}, "
            f"{first_few(names, 10)}",
            key=f"{part.key}inputs",
            suggestion="Choose as many columns.",
        )
    return part if part.inputs is not None else replace(part, inputs=names)


def check_unchanged(sources: Sequence[Mapping[str, Any]]) -> None:
    """Check that all files are as they were. Raises: RefusedError."""
    for source in sources:
        path = Path(source["path"])
        try:
            status = path.stat()
        except OSError as error:
            reason = f"cannot be read any more: {error.strerror}"
            raise RefusedError(reason, key=source["key"], value=path) from None
        if (status.st_size, status.st_mtime_ns) != (source["size"], source["modified"]):
            reason = "has changed while the run was starting"
            raise RefusedError(reason, key=source["key"], value=path, suggestion="Start the command again.")
