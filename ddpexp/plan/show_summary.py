"""Printing the summary of a model in human-readable form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpexp.plan.model_tree import Module, Summary
from ddpexp.sweep import grid
from ddpexp.system.text import counted, first_few, flops_text, one_line, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHAPES = 3  # of a module that returns several tensors


def show(summary: Summary, depth: int) -> None:
    """Print the tree down to a depth, and the totals."""
    grid.show(render(summary, depth))


def render(summary: Summary, depth: int) -> RenderableType:
    """Return the tree and the totals as a table and lines."""
    from rich.console import Group as Lines
    from rich.text import Text

    lines = [Text(f"{name:<12}{one_line(text)}") for name, text in _totals(summary).items()]
    is_shown = summary.activations_bytes is not None  # in the line of the activations
    texts = [f"{name} {text}" for name, text in summary.notes.items() if name != "activations" or not is_shown]
    if depth < summary.depth:
        deeper = len(summary.modules) - len(summary.down_to(depth).modules)
        texts.insert(0, f"{counted(deeper, 'module')} further below: --depth {summary.depth} shows all")
    return Lines(_tree(summary, depth), "", *lines, *(Text(f"note: {one_line(text)}", style="dim") for text in texts))


def _tree(summary: Summary, depth: int) -> RenderableType:
    from rich.table import Table

    modules = summary.down_to(depth).modules
    columns: dict[str, list[str]] = {
        "module": ["  " * module.depth + one_line(module.name) for module in modules],
        "class": [one_line(module.kind) for module in modules],
    }
    if summary.samples is not None:
        columns[f"output of {counted(summary.samples, 'sample')}"] = list(map(_output, modules))
    columns["parameters"] = [_number(module.trainable + module.frozen) for module in modules]
    if summary.frozen:
        columns["frozen"] = [_number(module.frozen) for module in modules]
    if summary.forward_flops is not None:
        columns["forward FLOPs"] = [flops_text(module.flops) if module.flops else "" for module in modules]
    notes = list(map(_note, modules))
    if any(notes):
        columns[""] = notes
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_number = name in ("parameters", "frozen", "forward FLOPs")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _number(number: int) -> str:
    return f"{number:,}" if number else ""


def _output(module: Module) -> str:
    if module.calls == 0:
        return "not called"
    shapes: Sequence[Sequence[int]] = module.shapes or []
    return first_few([list(shape) for shape in shapes], _SHAPES)


def _note(module: Module) -> str:
    if module.same_as is not None:
        return f"the module {one_line(module.same_as)}"
    parts = []
    if module.shared:
        parts.append(f"{module.shared:,} shared with {one_line(first_few(module.shared_with, 2))}")
    if module.calls is not None and module.calls > 1:
        parts.append(f"{module.calls:,} calls")
    return "; ".join(parts)


def _totals(summary: Summary) -> dict[str, str]:
    frozen = f": {summary.trainable:,} trainable, {summary.frozen:,} frozen" if summary.frozen else ""
    shared = f"; {summary.shared:,} shared ones are counted once" if summary.shared else ""
    total = summary.trainable + summary.frozen
    lines = {"parameters": f"{total:,}{frozen}{shared}, {size_text(summary.parameters_bytes)}"}
    if summary.buffers_bytes:
        lines["buffers"] = size_text(summary.buffers_bytes)
    if summary.forward_flops is not None and summary.backward_flops is not None:
        both = flops_text(summary.forward_flops + summary.backward_flops)
        forward, backward = flops_text(summary.forward_flops), flops_text(summary.backward_flops)
        lines["FLOPs"] = f"{both} a sample: {forward} forward, {backward} backward"
    if summary.activations_bytes is not None:
        lines["activations"] = f"{size_text(summary.activations_bytes)} a sample, {summary.notes['activations']}"
    return lines
