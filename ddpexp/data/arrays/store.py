"""Reading arrays and tables, checking them, and storing what the workers cannot map as it is."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.sources import TABLES, Part, Source
from ddpexp.data.arrays.tables import Column, read_table
from ddpexp.data.npy import write_npy
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular
from ddpexp.system.text import first_few

_MAPPED = ("|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "|b1")  # what torch maps as it is
_BLOCK = 1 << 24  # bytes that are looked at together
_MOST_CLASSES = 100_000


@dataclass
class Reading:
    """The reading of files into the folder of a cache; the classes are those of the training part."""

    folder: Path
    target_type: str
    classes: Sequence[str] | None
    dtype: str
    group_by: str | None
    digests: list[Any] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # class, number or none, once it is known

    def store(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Check and store the parts, the training part first; return the record of the cache. Raises: OSError."""
        for path in self.folder.glob("*.np[yz]"):
            path.unlink()
        stored = {part.name: self._part(part) for part in parts}
        train = stored[parts[0].name]
        for part in parts[1:]:
            if stored[part.name]["shape"] != train["shape"]:
                raise RefusedError(
                    f"a sample of {part.source} has the shape {stored[part.name]['shape']}, and one of "
                    f"{parts[0].source} {train['shape']}: make them the same."
                )
        facts: dict[str, Any] = {"shape": train["shape"]}
        if len(train["shape"]) == 1:
            facts["num_features"] = train["shape"][0]
        return {"parts": stored, "digests": self.digests, "facts": {**facts, **self.facts}}

    def save_targets(self, part: str, targets: NDArray[Any]) -> str:
        """Store the targets of a part; return the name of the file. Raises: OSError."""
        self.facts["num_outputs"] = self.facts.get("num_classes") or int(targets[0].size)
        return self.save(f"{part}-targets.npy", targets)

    def _part(self, part: Part) -> dict[str, Any]:
        found = self._table(part) if part.source.kind in TABLES else self._arrays(part)
        self.digests.append([part.inputs, part.targets, _digest(part.source), part.labels and _digest(part.labels)])
        return found

    def _table(self, part: Part) -> dict[str, Any]:
        table = read_table(part, self.group_by if part.name == "train" else None, self.target_type)
        inputs = np.empty((table.num_rows, len(table.inputs)), self.dtype)
        for place, column in enumerate(table.inputs):
            numbers = column.numbers(part.source)
            if self.dtype == "int64" and (numbers != np.floor(numbers)).any():
                row = int(np.flatnonzero(numbers != np.floor(numbers))[0])
                raise RefusedError(
                    f"{part.source}: column {column.name} holds {numbers[row]:g} in row {row + 1}, which "
                    "data.dtype=int64 would cut off: use data.dtype=float32."
                )
            inputs[:, place] = numbers
        names = [column.name for column in table.inputs]
        self.facts.setdefault("columns", names)
        self.digests.append(names)
        targets = self._table_targets(part, table.targets)
        groups = None
        if table.groups is not None:
            groups = self.save("train-groups.npy", np.unique(np.array(table.groups.values), return_inverse=True)[1])
        return {
            "samples": table.num_rows,
            "shape": [len(names)],
            "inputs": self.save(f"{part.name}-inputs.npy", inputs),
            "targets": self.save_targets(part.name, targets) if targets is not None else None,
            "groups": groups,
        }

    def _table_targets(self, part: Part, columns: Sequence[Column]) -> NDArray[Any] | None:
        if not columns:
            self.kind = self.kind or "none"
            return None
        if len(columns) == 1:
            return self.targets(columns[0].best(), f"{part.source}: column {columns[0].name}")
        if self.target_type == "class":
            raise RefusedError(
                f"{part.key}targets names {len(columns)} columns, and data.target_type=class needs one: choose one."
            )
        self.kind = "number"
        return np.stack([column.numbers(part.source) for column in columns], 1).astype(np.float32)

    def _arrays(self, part: Part) -> dict[str, Any]:
        if part.source.kind == ".npz":
            inputs_path, targets_path = self._members(part)
        else:
            inputs_path, targets_path = Path(part.source.path), Path(part.labels.path) if part.labels else None
        where = f"{part.source}" + (f": {part.inputs[0]}" if part.inputs else "")
        inputs = _opened(inputs_path, where)
        _check_finite(inputs, where)
        targets = None
        if targets_path is not None:
            label = f"{part.labels}" if part.labels else f"{part.source}: {(part.targets or ('',))[0]}"
            raw = _opened(targets_path, label)
            if len(raw) != len(inputs):
                raise RefusedError(
                    f"{label} has {len(raw):,} targets, and {where} {len(inputs):,} samples: store one target for each."
                )
            targets = self.targets(np.asarray(raw), label)
        else:
            self.kind = self.kind or "none"
        path = inputs_path
        if inputs.dtype.str not in _MAPPED or not inputs.flags.c_contiguous:
            path = self.folder / self.save(f"{part.name}-inputs.npy", inputs.astype(self.dtype))
        return {
            "samples": len(inputs),
            "shape": list(inputs.shape[1:]),
            "inputs": path.name if path.parent == self.folder else str(path),
            "targets": self.save_targets(part.name, targets) if targets is not None else None,
            "groups": None,
        }

    def _members(self, part: Part) -> tuple[Path, Path | None]:
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
                f"{part.source} is damaged or no .npz file ({error}): store it again with numpy.savez."
            ) from None
        return paths[0], paths[1] if targets is not None else None

    def _chosen(self, part: Part, names: Sequence[str]) -> tuple[str, str | None]:
        """Return the names of the arrays with inputs and targets."""
        listed = f"it holds {first_few(names)}"
        for what, chosen in (("inputs", part.inputs), ("targets", part.targets)):
            for name in chosen or ():
                if name not in names:
                    raise RefusedError(f"{part.key}{what}={name} is no array of {part.source}: {listed}.")
            if chosen and len(chosen) > 1:
                raise RefusedError(f"{part.key}{what} names {len(chosen)} arrays of {part.source}: name one.")
        if not part.targets and self.target_type != "none":
            raise RefusedError(
                f"{part.key}targets is not set: name the array of {part.source} with the targets ({listed}), or use "
                "data.target_type=none if there are none."
            )
        others = [name for name in names if name not in (part.targets or ())]
        if not part.inputs and len(others) != 1:
            raise RefusedError(f"{part.key}inputs is not set: name the array of {part.source} to read ({listed}).")
        return (part.inputs or others)[0], part.targets[0] if part.targets else None

    def targets(self, values: NDArray[Any], where: str) -> NDArray[Any]:
        """Return the numbers of classes, or numbers, of values as they were read."""
        kind = self.target_type
        if kind == "auto":
            kind = self.kind or ("number" if values.dtype.kind == "f" or values.ndim > 1 else "class")
        self.kind = kind
        if kind == "number":
            if values.dtype.kind not in "biuf":
                text = first_few(sorted(set(map(str, values.ravel()[:1000].tolist()))))
                raise RefusedError(f"{where} holds {text}, which are no numbers: use data.target_type=class.")
            _check_finite(values, where)
            return values.astype(np.float32)
        if values.ndim != 1:
            raise RefusedError(
                f"{where} has the shape {list(values.shape)}, and classes are one number or name for each sample."
            )
        return self._class_numbers(values, where)

    def _class_numbers(self, values: NDArray[Any], where: str) -> NDArray[np.int64]:
        if values.dtype.kind == "f":
            _check_finite(values, where)
            wrong = np.flatnonzero(values != np.floor(values))
            if len(wrong):
                raise RefusedError(
                    f"{where} holds {values[wrong[0]]:g} in row {wrong[0] + 1}, which is no class: use "
                    "data.target_type=number."
                )
            values = values.astype(np.int64)
        names = self.classes if self.classes is not None else self.facts.get("classes")
        if values.dtype.kind in "iu":
            numbers = values.astype(np.int64)
            most = len(names) if names is not None else _MOST_CLASSES
            wrong = np.flatnonzero((numbers < 0) | (numbers >= most))
            if len(wrong):
                raise RefusedError(_out_of_range(where, int(numbers[wrong[0]]), int(wrong[0]), names))
            if names is None:
                names = [str(number) for number in range(int(numbers.max()) + 1)]
        else:
            texts = values.astype(str)
            unique, inverse = np.unique(texts, return_inverse=True)
            names = list(map(str, unique)) if names is None else list(names)
            place = {name: number for number, name in enumerate(names)}
            unknown = [str(name) for name in unique if str(name) not in place]
            if unknown:
                listed = "data.classes" if self.classes is not None else "the training part"
                raise RefusedError(
                    f"{where} holds the class{'es' if len(unknown) > 1 else ''} {first_few(unknown)}, which {listed} "
                    f"does not have (it has {first_few(names)}): make the classes the same."
                )
            numbers = np.array([place[str(name)] for name in unique], np.int64)[inverse]
        if len(names) < 2:
            raise RefusedError(
                f"{where} holds one class, {names[0]}, so there is nothing to tell apart: add samples of another, or "
                "use data.target_type=number."
            )
        self.facts["classes"], self.facts["num_classes"] = list(names), len(names)
        return numbers

    def save(self, name: str, values: NDArray[Any]) -> str:
        """Store an array in the cache; return the name of its file. Raises: OSError."""
        # Not by numpy.save, which does not report why a disk could not be written.
        write_npy(self.folder / name, values.shape, np.ascontiguousarray(values).data, values.dtype.str)
        return name


def _out_of_range(where: str, label: int, row: int, names: Sequence[str] | None) -> str:
    holds = f"{where} holds the class {label} in row {row + 1}"
    if names is None:
        return f"{holds}: classes are numbers from 0 to {_MOST_CLASSES - 1:,}. Use data.target_type=number for others."
    return f"{holds}, and the {len(names)} classes are 0 to {len(names) - 1}: correct it, or list data.classes."


def _opened(path: Path, where: str) -> NDArray[Any]:
    """Map an `.npy` file of numbers or texts.

    Raises:
        RefusedError: it is something else, or it is damaged.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError, TypeError, SyntaxError) as error:
        if "Python objects" in str(error):
            problem = "holds Python objects, which could run code: store an array of numbers with numpy.save."
        elif "magic" in str(error) or "read array header" in str(error):
            problem = "is no .npy file: store it with numpy.save."
        else:
            problem = f"is damaged ({error}): store it again with numpy.save."
        raise RefusedError(f"{where} {problem}") from None
    if array.dtype.kind not in "biufUS":
        raise RefusedError(f"{where} holds {array.dtype}: store an array of numbers.")
    if array.ndim == 0 or 0 in array.shape:
        raise RefusedError(f"{where} holds no samples, as its shape is {list(array.shape)}.")
    return array


def _check_finite(array: NDArray[Any], where: str) -> None:
    """Check that an array holds numbers, and neither NaN nor infinity, block by block."""
    if array.dtype.kind in "US":
        raise RefusedError(f"{where} holds texts, such as {str(array.ravel()[0])!r}: store an array of numbers.")
    if array.dtype.kind != "f":
        return
    step = max(1, _BLOCK // max(1, array[0].nbytes))
    for begin in range(0, len(array), step):
        wrong = np.argwhere(~np.isfinite(array[begin : begin + step]))
        if len(wrong):
            value = array[begin : begin + step][tuple(wrong[0])]
            raise RefusedError(
                f"{where} holds {value} in row {begin + wrong[0][0] + 1:,}: a model cannot learn from that, so leave "
                "the sample out or put a number there."
            )


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    with open_regular(source.path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def changed(sources: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first file that is not as it was, as a message."""
    for source in sources:
        path = Path(source["path"])
        try:
            status = path.stat()
        except OSError as error:
            return f"{source['key']}={path} cannot be read any more: {error.strerror}."
        if (status.st_size, status.st_mtime_ns) != (source["size"], source["modified"]):
            return f"{source['key']}={path} has changed while the run was starting: start again."
    return None
