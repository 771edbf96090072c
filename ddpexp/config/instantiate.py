"""The one place where a name in the configuration becomes an object, behind an allowlist."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpexp.errors import RefusedError

OURS = ("ddpexp.recipes.", "ddpexp.data.", "ddpexp.schedule.", "ddpexp.launch.")

_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
_MODULES = (
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AvgPool1d AvgPool2d BCEWithLogitsLoss BatchNorm1d BatchNorm2d Conv1d Conv2d Conv3d "
    "ConvTranspose2d CrossEntropyLoss Dropout Dropout2d ELU Embedding Flatten GELU GroupNorm GRU HuberLoss Identity "
    "L1Loss LayerNorm LeakyReLU Linear LSTM MSELoss MaxPool1d MaxPool2d ModuleDict ModuleList MultiheadAttention "
    "RMSNorm RNN ReLU Sequential SiLU Sigmoid SmoothL1Loss Softmax Softplus SyncBatchNorm Tanh TransformerEncoder "
    "TransformerEncoderLayer Upsample"
).split()
TORCH = frozenset([f"torch.optim.{name}" for name in _OPTIMIZERS] + [f"torch.nn.{name}" for name in _MODULES])

_SPECIAL = ("_target_", "_partial_", "_args_")


@dataclass(frozen=True)
class Trust:
    """Whose code a configuration may name, beside ours and torch's closed set."""

    prefixes: tuple[str, ...] = ()  # what the user typed as run.trust=[...]
    code: Path | None = None  # the folder that holds the typed --config-dir

    def allows(self, target: str) -> bool:
        """Decide by the name alone; imports nothing."""
        parts = target.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            return False
        if target in TORCH or target.startswith(OURS):
            return True
        if any(target.startswith(prefix.rstrip(".") + ".") for prefix in self.prefixes):
            return True
        return self.code is not None and _lies_in(self.code, parts[0])


@dataclass(frozen=True)
class Node:
    """A section that names its object: `_target_` and the arguments of the call."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def targets(values: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield every `_target_` in a tree with the key where it stands."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            here = f"{where}.{key}" if where else str(key)
            if key == "_target_":
                yield here, value
            else:
                yield from targets(value, here)
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            yield from targets(value, f"{where}[{index}]")


def refuse_untrusted(values: Any, trust: Trust, where: str = "") -> None:
    """Check every `_target_` of a tree by its name, before anything is imported.

    Raises:
        RefusedError: the first name outside the allowlist, with its key.
    """
    for key, target in targets(values, where):
        if not isinstance(target, str) or not trust.allows(target):
            raise RefusedError(
                f"{key}={target} is not allowed: a configuration may name ddpexp's recipes, a closed set of torch classes, "
                f"modules beside a typed --config-dir and prefixes typed as run.trust=[...]. "
                f"If this code is yours, add run.trust=[{str(target).split('.')[0]}]."
            )


def instantiate(node: Node, trust: Trust, where: str, *args: Any, **extra: Any) -> Any:
    """Call what `node` names with its arguments, `args` first and `extra` last.

    Nested mappings with a `_target_` are instantiated too; `_partial_: true` gives a function instead of calling.

    Raises:
        RefusedError: a name outside the allowlist or unknown in its module, or arguments that do not fit.
    """
    made = {key: _resolve(value, trust, f"{where}.{key}") for key, value in node.kwargs.items() if key not in _SPECIAL}
    listed = [_resolve(value, trust, f"{where}._args_") for value in node.kwargs.get("_args_", ())]
    function = locate(node.target, trust, where)
    arguments = {**made, **extra}
    if node.kwargs.get("_partial_", False):
        return lambda *more, **later: function(*args, *listed, *more, **{**arguments, **later})
    try:
        inspect.signature(function).bind(*args, *listed, **arguments)
    except TypeError as error:
        raise RefusedError(f"{where}: {node.target} cannot be called with these keys: {error}.") from None
    except ValueError:
        pass  # a builtin without a signature: the call itself will tell
    return function(*args, *listed, **arguments)


def locate(target: str, trust: Trust, where: str) -> Any:
    """Import the class or function that `target` names.

    An object that merely shows up in an allowed module (`ddpexp.data.order.os.system`) is not allowed by that.

    Raises:
        RefusedError: not allowed, or not there.
    """
    refuse_untrusted({"_target_": target}, trust, where)
    module, names = _import_longest(target, where)
    found: Any = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            raise RefusedError(f"{where}._target_={target}: {module.__name__} has no {name}.") from None
        if isinstance(found, types.ModuleType):
            raise RefusedError(f"{where}._target_={target} reaches the module {found.__name__} through another one.")
    home = f"{getattr(found, '__module__', '')}.x"
    if not callable(found) or not (target in TORCH or trust.allows(home)):
        raise RefusedError(f"{where}._target_={target} is not a class or function of an allowed module.")
    return found


def _import_longest(target: str, where: str) -> tuple[types.ModuleType, Sequence[str]]:
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            return importlib.import_module(name), parts[end:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise  # the module is there, something that it imports is not
    raise RefusedError(f"{where}._target_={target}: there is no module {parts[0]}.")


def _resolve(value: Any, trust: Trust, where: str) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            kwargs = {key: inner for key, inner in value.items() if key != "_target_"}
            return instantiate(Node(value["_target_"], kwargs), trust, where)
        return {key: _resolve(inner, trust, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolve(inner, trust, f"{where}[{index}]") for index, inner in enumerate(value)]
    return value


def _lies_in(folder: Path, module: str) -> bool:
    return (folder / f"{module}.py").is_file() or (folder / module).is_dir()
