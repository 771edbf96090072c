"""The one place where a name in the configuration becomes an object, behind an allowlist."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ddpexp
from ddpexp.config import trusted
from ddpexp.config.build import did_you_mean
from ddpexp.config.foreign import NO_LBFGS, advice_on_value
from ddpexp.config.plugins import GROUPS, full_name, hidden, installed
from ddpexp.config.registry import key_of, keys_of, path_of, section_of
from ddpexp.errors import RefusedError
from ddpexp.settings.node import Node

RECIPES = "ddpexp.recipes."  # all other parts of ddpexp go by a key

_OPTIMIZERS = (
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"
).split()
_SCHEDULES = (
    "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LambdaLR "
    "LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR"
).split()
_MODULES = (
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AvgPool1d AvgPool2d BCEWithLogitsLoss BatchNorm1d BatchNorm2d Conv1d Conv2d "
    "Conv3d "
    "ConvTranspose2d CrossEntropyLoss Dropout Dropout2d ELU Embedding Flatten GELU GroupNorm GRU HuberLoss Identity "
    "L1Loss LayerNorm LeakyReLU Linear LSTM MSELoss MaxPool1d MaxPool2d ModuleDict ModuleList MultiheadAttention "
    "RMSNorm RNN ReLU Sequential SiLU Sigmoid SmoothL1Loss Softmax Softplus SyncBatchNorm Tanh TransformerEncoder "
    "TransformerEncoderLayer Upsample"
).split()
TORCH = frozenset(
    [f"torch.optim.{name}" for name in _OPTIMIZERS]
    + [f"torch.optim.lr_scheduler.{name}" for name in _SCHEDULES]
    + [f"torch.nn.{name}" for name in _MODULES]
)

_PLACES = {"prepare": "data.prepare", "load": "data", "draw": None}
"""The only section in which a function of recipes that reads or writes files may be named; None: there is none."""
_SPECIAL = ("_target_", "_partial_", "_args_")
_DEFINED = re.compile(r"^(?:class|def) ([A-Za-z]\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Trust:
    """Whose code a configuration may name, beside ours and torch's closed set."""

    prefixes: tuple[str, ...] = ()  # what the user typed as run.trust=[...], and names that an installed package offers
    code: Path | None = None  # the folder that holds the typed --config-dir

    def allows(self, target: str, where: str) -> bool:
        """Decide by the name alone, for the section at the key `where`; imports nothing."""
        if key_of(where, target) is not None or _is_offered(target, where):
            return True
        parts = target.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            return False
        if target in TORCH:
            return True
        if target.startswith(RECIPES):
            return parts[-1] not in _PLACES or section_of(where) == _PLACES[parts[-1]]
        if target in self.prefixes or any(target.startswith(prefix.rstrip(".") + ".") for prefix in self.prefixes):
            return True
        return self.code is not None and _lies_in(self.code, parts[0])

    def make_importable(self) -> None:
        """Have Python find the modules.

        Beside the configs first, and last in the current folder, for a prefix's module there.
        """
        if self.code is not None and str(self.code) not in sys.path:
            sys.path.insert(0, str(self.code))
        here, roots = Path.cwd(), [prefix.partition(".")[0] for prefix in self.prefixes if ":" not in prefix]
        if str(here) not in sys.path and any(_lies_in(here, root) for root in roots):
            sys.path.append(str(here))


def _is_offered(target: str, where: str) -> bool:
    """Return whether a package that the user has installed offers this part.

    Under the name of its entry point, or of the class or function that this names.
    """
    offered = installed(section_of(where))
    return target in offered or target in offered.values()


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


def check_trusted(values: Any, trust: Trust, where: str = "") -> None:
    """Check every `_target_` of a tree by its name, before anything is imported.

    Raises:
        RefusedError: the first name outside the allowlist, or of ours that does not exist, with its key.
    """
    for key, target in targets(values, where):
        check_target(target, trust, key)


def check_target(target: Any, trust: Trust, key: str) -> None:
    """Check the name `target` that stands at `key`, before anything is imported.

    Raises:
        RefusedError: it is outside the allowlist, or it is one of ours that does not exist.
    """
    if target == "torch.optim.LBFGS":
        raise RefusedError("is not supported", key=key, value=target, suggestion=NO_LBFGS)
    if not isinstance(target, str) or not trust.allows(target, key.removesuffix("._target_")):
        raise RefusedError(
            "is not allowed: a configuration may name ddpexp's recipes, a closed set of torch classes, "
            "modules beside a typed --config-dir and prefixes typed as run.trust=[...]",
            key=key,
            value=target,
            suggestion=_advice(str(target), trust, key),
        )
    module, _, name = target.rpartition(".")
    if target.startswith(RECIPES):
        names = _public_names(module)
        if names is None:
            raise RefusedError(f"There is no module {module}", key=key, value=target)
        if name not in names:
            raise RefusedError(
                f"The module {module} defines no {name}",
                key=key,
                value=target,
                suggestion=did_you_mean(name, names, f"{module}."),
            )


def _advice(target: str, trust: Trust, key: str) -> str:
    """Say what the user may have meant, or how to trust the module; silent where trusting it would be unsafe."""
    if advice := hidden(target):
        return advice
    head, _, name = target.rpartition(".")
    root, _, rest = target.partition(".")
    where = key.removesuffix("._target_")
    near = difflib.get_close_matches(name or root, keys_of(where), n=1, cutoff=0.6)
    if near and (root == "ddpexp" or not head):
        return f"Did you mean {near[0]}?"
    if where == "launcher" and root not in ("ddpexp", "torch"):
        return f"A package offers a launcher by an entry point in the group {GROUPS[where]} that names just this class."
    if root == "ddpexp":
        return f"ddpexp's own parts go by a key: {', '.join(keys_of(where))}." if keys_of(where) else ""
    if re.search(r"[:/]|\.py\b", target):
        return f"Did you mean {re.sub(r'[.]py(?=[.:]|$)', '', target).replace(':', '.').replace('/', '.').strip('.')}?"
    if not head or root in ("torch", "nn", "optim"):
        return _in_torch(head, name, where)
    if (inside := _inside_config_folder(root, trust)) is not None:
        return f"{inside} lies inside --config-dir: move it beside it."
    if "-" in head:
        renamed = head.replace("-", "_")
        return f"The name of a module has no dash: rename its file, and write {renamed}.{name}."
    beside = (
        [path.stem for path in trust.code.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
        if trust.code
        else []
    )
    near = difflib.get_close_matches(root, beside, n=1, cutoff=0.6)
    if near and _may_define(near[0], rest, trust):
        return f"Did you mean {near[0]}.{rest}?"
    if root in sys.stdlib_module_names or not root.isidentifier():
        return ""
    return f"If this code is yours, add run.trust=[{root}].{trusted.advice(target)}"


def _in_torch(head: str, name: str, where: str) -> str:
    """Return the class of torch that may be meant, or why there is none."""
    kind = f"{head}." if head.startswith("torch.") else ""
    if where == "optimizer":
        kind = "torch.optim."
    classes = {
        known.rpartition(".")[2].lower(): known
        for known in sorted(TORCH)
        if known.startswith(kind) and (not kind or "." not in known.removeprefix(kind))
    }
    near = difflib.get_close_matches(name.lower(), classes, n=1, cutoff=0.7)
    if near:
        return f"Did you mean {classes[near[0]]}?"
    if advice := advice_on_value(where, name.lower()):
        return advice
    if where == "optimizer" and head:
        return f"Available: {', '.join(classes.values())}."
    return "" if head else "A name stands behind its module, as in mine.Net."


def _inside_config_folder(module: str, trust: Trust) -> Path | None:
    """Return where a module lies in the folder of configs itself, such as conf/mine.py, whose place is beside it."""
    folders = sorted(path for path in trust.code.glob("*/") if any(path.glob("*/*.yaml"))) if trust.code else []
    found = next((path for path in folders if _lies_in(path, module)), None)
    return Path(found.name, f"{module}.py" if (found / f"{module}.py").is_file() else module) if found else None


def _may_define(module: str, name: str, trust: Trust) -> bool:
    """Return whether a module beside --config-dir may be meant: it is no file that defines other names only."""
    file = trust.code / f"{module}.py" if trust.code else None
    defined = _DEFINED.findall(file.read_text(errors="replace")) if file and file.is_file() else []
    return not defined or bool(difflib.get_close_matches(name, defined))


def _public_names(module: str) -> list[str] | None:
    """Read which classes and functions a module of ours defines, without importing it.

    None when there is no such module.
    """
    parts = module.split(".")[1:]
    for place in ddpexp.__path__:
        for path in (Path(place, *parts[:-1], f"{parts[-1]}.py"), Path(place, *parts, "__init__.py")):
            if path.is_file():
                return _DEFINED.findall(path.read_text())
    return None


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
    _bind(function, node, where, (*args, *listed), arguments)
    return function(*args, *listed, **arguments)


def check_arguments(node: Node, trust: Trust, where: str, *args: Any) -> None:
    """Check that what `node` names takes its arguments after `args`, of which only the number counts.

    Raises:
        RefusedError: it does not, or it cannot be imported.
    """
    arguments = {key: value for key, value in node.kwargs.items() if key not in _SPECIAL}
    _bind(locate(node.target, trust, where), node, where, (*args, *node.kwargs.get("_args_", ())), arguments)


def _bind(function: Any, node: Node, where: str, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a call. Raises RefusedError."""
    try:
        inspect.signature(function).bind(*args, **arguments)
    except TypeError as error:
        advice = _on_other_keys(str(error), function, node, where, len(args))
        raise RefusedError(
            f"cannot be called with these keys: {error}", key=where, suggestion=advice, place=node.target
        ) from None
    except ValueError:
        pass  # a builtin without a signature: the call itself will tell


def _on_other_keys(problem: str, function: Any, node: Node, where: str, num_given: int) -> str:
    """Return what to do about a key that a class or function does not take, or that it lacks."""
    lacks = re.search(r"missing a required argument: '(\w+)'", problem)
    if lacks is not None and "[" not in where:
        return (
            f"Add +{where}.{lacks[1]}=..., or give it a default: the configuration of a run that was started before it "
            "needed the key has none."
        )
    found = re.search(r"unexpected keyword argument '(\w+)'", problem)
    if found is None or found[1] not in node.kwargs or "[" in where:
        return ""
    if found[1].strip("_") == "target":
        return f" Did you mean {where}._target_?"
    known = [name for name in list(inspect.signature(function).parameters)[num_given:] if name[0] != "_"]
    takes = f" It takes {', '.join(known)}." if known else " It takes no keys."
    return f"{takes} If a file sets it, ~{where}.{found[1]} leaves it out."


def locate(target: str, trust: Trust, where: str) -> Any:
    """Import the class or function that `target` names.

    An object that merely shows up in an allowed module (`mine.os.system`) is not allowed by that.

    Raises:
        RefusedError: not allowed, or not there.
    """
    key = f"{where}._target_"
    check_target(target, trust, key)
    own = key_of(where, target)
    target = path_of(where, own) if own is not None else full_name(where, target)
    module, names = _import_longest(target, where)
    if target not in TORCH and own is None:
        _check_no_namesake(module, target, trust, where)
    found: Any = module
    for name in names:
        known = [known for known, value in vars(found).items() if callable(value)]
        try:
            found = getattr(found, name)
        except AttributeError:
            raise RefusedError(
                f"The module {module.__name__} has no {name}",
                key=key,
                value=target,
                suggestion=hidden(target) or did_you_mean(name, known),
            ) from None
        if isinstance(found, types.ModuleType):
            raise RefusedError(f"reaches the module {found.__name__} through another one", key=key, value=target)
    home = f"{getattr(found, '__module__', '')}.{getattr(found, '__name__', 'x')}"
    is_named = (
        own is not None or target in TORCH or target in trust.prefixes or _is_offered(target, where)
    )  # itself, wherever it is defined
    if not callable(found) or not (is_named or trust.allows(home, where)):
        raise RefusedError("is not a class or function of an allowed module", key=key, value=target)
    return found


def _check_no_namesake(module: types.ModuleType, target: str, trust: Trust, where: str) -> None:
    """Refuse a module of another place that has the name of one beside --config-dir, such as one of Python's own."""
    if trust.code is None or replace(trust, code=None).allows(target, where):
        return
    file = Path(module.__file__ or "")
    if not (file.is_relative_to(trust.code) or file.resolve().is_relative_to(trust.code)):
        raise RefusedError(
            f"The module {module.__name__} is {module.__file__ or 'built in'}, not the one in {trust.code}",
            key=f"{where}._target_",
            suggestion="Give yours another name.",
        )


def _import_longest(target: str, where: str) -> tuple[types.ModuleType, Sequence[str]]:
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            return importlib.import_module(name), parts[end:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise  # the module is there, something that it imports is not
    raise RefusedError(f"There is no module {parts[0]}", key=f"{where}._target_", value=target)


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
