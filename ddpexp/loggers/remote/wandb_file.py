"""Reading which steps are in the files of wandb's offline runs, as they are after a process was killed.

Source: wandb's leveldb log, core/internal/transactionlog: a header of 7 bytes, then blocks of 32 KiB with records of a
checksum, a length, and a type (1 whole, 2 first, 3 middle, 4 last part).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_HEADER, _BLOCK = struct.Struct("<IHB"), 32 << 10
_WHOLE = 1
_FIRST = 2
_LAST = 4


def last_steps(paths: Iterable[Path]) -> dict[str, int]:
    """Return the last step of each name in the history of the files."""
    from wandb.proto import wandb_internal_pb2

    last: dict[str, int] = {}
    for path in sorted(paths):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            try:
                record.ParseFromString(data)
            except Exception:  # protobuf's DecodeError: the file ends here
                break
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            for name in values:  # of an image, which has several keys inside one
                last[name] = max(last.get(name, -1), int(values["_step"]) if "_step" in values else -1)
    return last


def records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file; one that was being written is left out."""
    position, parts = _HEADER.size, b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        begin = position + _HEADER.size
        position = begin + length
        if kind == 0 or position > len(data):
            return
        chunk = data[begin:position]
        if kind in (_WHOLE, _LAST):
            yield chunk if kind == _WHOLE else parts + chunk
        parts = chunk if kind == _FIRST else parts + chunk
