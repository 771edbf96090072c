"""Trees of plain values and tensors as JSON and named tensors, and back; reading never runs code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.strategy.base import Shard

_KIND = "$"  # the key that marks values without a JSON representation


def encode(value: Any, tensors: dict[str, Any], where: str = "") -> Any:
    """Return `value` as JSON; its tensors and shards are added to `tensors`, named by their paths, such as `a/b/0`.

    Decoding restores numbers to the bit, tuples as tuples, and keys of any type.

    Raises:
        DdpexpError: a value has an unsupported type.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, Tensor | Shard):
        name = where or "tensor"
        while name in tensors:  # keys may contain a /
            name += "'"
        tensors[name] = value
        return {_KIND: "tensor", "value": name}
    if isinstance(value, Mapping):
        inner = [(key, encode(item, tensors, f"{where}/{key}" if where else str(key))) for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return dict(inner)
        return {_KIND: "mapping", "value": [[encode(key, tensors, where), item] for key, item in inner]}
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{where}/{index}" if where else str(index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "value": items}
    if hasattr(value, "item") and callable(value.item):  # a scalar of numpy
        return encode(value.item(), tensors, where)
    raise DdpexpError(
        f"is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it stores "
        "tensors, numbers, texts, lists and mappings, because any other object could run code when it is loaded",
        place=where,
    )


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Invert `encode`; `tensor` returns a tensor, or what stands for it, by its name.

    Raises:
        RefusedError: it was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    inner = value.get("value")
    if kind == "float" and isinstance(inner, str):
        return float(inner)
    if kind == "tensor" and isinstance(inner, str):
        return tensor(inner)
    if kind == "tuple" and isinstance(inner, list):
        return tuple(decode(item, tensor) for item in inner)
    if kind == "mapping" and isinstance(inner, list):
        return {decode(key, tensor): decode(item, tensor) for key, item in inner}
    raise RefusedError(f"state.json holds a {kind!r}, which this version of ddpexp does not know.")


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
"""Dtypes by their names in the safetensors format."""
