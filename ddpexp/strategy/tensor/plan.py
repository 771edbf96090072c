"""The plan of tensor parallelism: which layers the ranks of a group divide, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ddpexp.errors import RefusedError
from ddpexp.strategy.tensor.cut import Cut
from ddpexp.strategy.tensor.options import (
    COLWISE,
    EMBEDDING,
    GATHERED,
    ROWWISE,
    SEQUENCE,
    SEQUENCE_BEGIN,
    SEQUENCE_END,
    DividedLayers,
)
from ddpexp.system.text import first_few

_EXAMPLE = '\'strategy.tp_plan=[{match:["*.up"],style:colwise},{match:["*.down"],style:rowwise}]\''

# The layers of most decoders of the library transformers: Llama, Mistral, Qwen, Gemma, Phi and others.
_USUAL = (
    DividedLayers(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), COLWISE),
    DividedLayers(("*.o_proj", "*.down_proj"), ROWWISE),
    DividedLayers("*embed_tokens", EMBEDDING),
    DividedLayers("lm_head", GATHERED),
)


@runtime_checkable
class NamesTensorPlan(Protocol):
    """A model that says how its layers are divided, which `strategy.tp_plan` overrides."""

    @property
    def tensor_plan(self) -> Sequence[Mapping[str, Any]]:
        """Return the plan: mappings with the fields of `DividedLayers`."""
        ...


@dataclass(frozen=True)
class Layer:
    """A module that is divided."""

    name: str
    module: nn.Module
    style: str
    cuts: Mapping[str, Cut]  # of its parameters, by their names; what is not here every rank holds whole

    @property
    def transposed(self) -> bool:
        """Return whether the weight is (inputs, outputs), as in the Conv1D of GPT-2."""
        return not isinstance(self.module, nn.Linear | nn.Embedding)

    @property
    def is_between(self) -> bool:
        """Return whether it lies between divided layers: each rank computes it for some of the tokens."""
        return self.style.startswith(SEQUENCE)


def layers_of(
    models: Mapping[str, nn.Module], plan: Sequence[DividedLayers] | None, size: int, by_tokens: bool = False
) -> list[Layer]:
    """Return the layers that `size` ranks divide; `plan` is strategy.tp_plan, None: that of each model.

    With `by_tokens`, strategy.sequence_parallel, those between them are there, too.

    Raises:
        RefusedError: there is no plan, it means nothing, matches nothing, or a layer does not divide.
    """
    layers: dict[int, Layer] = {}
    used: set[str] = set()
    for model, root in models.items():
        entries, where = (plan, "strategy.tp_plan") if plan is not None else _own_plan(root, size)
        if by_tokens:
            _check_sequence(entries, type(root).__name__)
        for path, module in root.named_modules():
            name = path if len(models) == 1 else f"{model}.{path}"
            for entry in entries:
                if matched := [pattern for pattern in entry.patterns if fnmatchcase(name, pattern)]:
                    used.update(matched)
                    if entry.is_between and not by_tokens:
                        continue
                    layers[id(module)] = _layer(name, module, entry, root.get_submodule(path.rpartition(".")[0]), size)
        if plan is None and entries is not _USUAL:
            _check_used(entries, used, where, models)
    if plan is not None:
        _check_used(plan, used, "strategy.tp_plan", models)
    return list(layers.values())


def _check_sequence(plan: Sequence[DividedLayers], kind: str) -> None:
    """Check that a plan says where the tokens of a batch are divided."""
    styles = {entry.style for entry in plan}
    if SEQUENCE_BEGIN not in styles or SEQUENCE_END not in styles:
        raise RefusedError(
            "needs a plan that says between which modules the tokens of a batch are divided, with the styles "
            f"{SEQUENCE_BEGIN} and {SEQUENCE_END}, and that of {kind} does not",
            key="strategy.sequence_parallel",
            value=True,
            suggestion="Add them to strategy.tp_plan, or use strategy.sequence_parallel=false.",
        )


def _own_plan(root: nn.Module, size: int) -> tuple[Sequence[DividedLayers], str]:
    """Return the plan of a model, and what it is called in errors."""
    kind = type(root).__name__
    if isinstance(root, NamesTensorPlan):
        where = f"{kind}.tensor_plan"
        entries = [DividedLayers(**entry) for entry in root.tensor_plan]
        for number, entry in enumerate(entries):
            entry.check(f"{where}[{number}]")
        return entries, where
    names = [name for name, _ in root.named_modules()]
    if all(any(fnmatchcase(name, f"*.{last}") for name in names) for last in ("q_proj", "o_proj", "down_proj")):
        return _USUAL, ""
    raise RefusedError(
        f"divides the layers that a plan names, and {kind} has none",
        key="strategy.tp_size",
        value=size,
        suggestion=f"Give it an attribute tensor_plan, or use {_EXAMPLE}.",
    )


def _check_used(plan: Sequence[DividedLayers], used: set[str], where: str, models: Mapping[str, nn.Module]) -> None:
    """Check that each pattern has matched a module."""
    for number, entry in enumerate(plan):
        for pattern in entry.patterns:
            if pattern not in used:
                raise RefusedError(
                    f"matches no module. The linear layers and embeddings are {first_few(list(_linears(models)), 8)}",
                    key=f"{where}[{number}]",
                    place=pattern,
                )


def _layer(name: str, module: nn.Module, entry: DividedLayers, around: nn.Module, size: int) -> Layer:
    """Return a layer with the cuts of its parameters."""
    if entry.is_between:
        return Layer(name, module, entry.style, {})
    weight = getattr(module, "weight", None)
    transposed = type(module).__name__ == "Conv1D"
    wanted = "an nn.Embedding" if entry.style == EMBEDDING else "an nn.Linear"
    right = (
        isinstance(module, nn.Embedding) if entry.style == EMBEDDING else isinstance(module, nn.Linear) or transposed
    )
    if not right or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        raise RefusedError(
            f"is a {type(module).__name__}, and {entry.style} is for {wanted}",
            key="strategy.tp_size",
            value=size,
            place=name,
        )
    if type(module).forward not in (nn.Linear.forward, nn.Embedding.forward) and not transposed:
        raise RefusedError(
            f"is a {type(module).__name__}, whose own forward method tensor parallelism cannot divide",
            key="strategy.tp_size",
            value=size,
            suggestion="Leave it out of the plan.",
            place=name,
        )
    if isinstance(module, nn.Embedding) and _has_options(module):
        raise RefusedError(
            "has max_norm, scale_grad_by_freq or sparse gradients, with which an embedding cannot be divided",
            key="strategy.tp_size",
            value=size,
            suggestion="Leave it out of the plan.",
            place=name,
        )
    dim = 1 if (entry.style == ROWWISE) != transposed else 0
    length = weight.shape[dim]
    parts = entry.parts or (length,)
    if sum(parts) != length:
        raise RefusedError(
            f"has {length} {_rows(entry)}, and its parts in the plan {' + '.join(map(str, parts))}", place=name
        )
    multiple = entry.multiple_of or _head_width(around, length) or 1
    for part in parts:
        if part % (size * multiple):
            raise _does_not_divide(name, entry, part, multiple, size)
    cuts = {"weight": Cut(tuple(weight.shape), dim, parts, size)}
    bias = getattr(module, "bias", None)
    if bias is not None and entry.style != ROWWISE:
        cuts["bias"] = Cut(tuple(bias.shape), 0, parts, size)
    return Layer(name, module, entry.style, cuts)


def _does_not_divide(name: str, entry: DividedLayers, length: int, multiple: int, size: int) -> RefusedError:
    """Return the error for a layer that does not divide, with the numbers of ranks that do."""
    heads = length // multiple
    what = f"{heads} heads of {multiple}" if multiple > 1 else f"{length} {_rows(entry)}"
    sizes = [str(number) for number in range(2, min(heads, 64) + 1) if not length % (number * multiple)]
    instead = f"Use strategy.tp_size={' or '.join(sizes[:6])}." if sizes else "Leave it out of the plan."
    return RefusedError(
        f"does not divide {name}, which has {what}", key="strategy.tp_size", value=size, suggestion=instead
    )


def _has_options(module: nn.Embedding) -> bool:
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


def _rows(entry: DividedLayers) -> str:
    return {ROWWISE: "inputs", EMBEDDING: "rows"}.get(entry.style, "outputs")


def _head_width(around: nn.Module, length: int) -> int | None:
    """Return the width of the heads of the attention that a layer belongs to, as transformers' models call it."""
    width = getattr(around, "head_dim", None)
    return width if isinstance(width, int) and 0 < width < length and not length % width else None


def _linears(models: Mapping[str, nn.Module]) -> Iterator[str]:
    for model, root in models.items():
        for path, module in root.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
                yield path if len(models) == 1 else f"{model}.{path}"
