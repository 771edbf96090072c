"""The command `ddpexp list`: the runs below a folder; it starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run.directory import OUTPUTS
from ddpexp.sweep import listing
from ddpexp.sweep.as_json import listed_as_dict
from ddpexp.sweep.condition import Condition, names_in, parse_condition
from ddpexp.sweep.grid import Fitted, as_text, limit, show
from ddpexp.sweep.rows import Row
from ddpexp.system.files import relative
from ddpexp.system.terminal import print_json, print_message
from ddpexp.system.terminal import show as show_text


@dataclass(frozen=True)
class ListArguments:
    """The typed words."""

    where: str | None = None
    sort: str | None = None
    json: bool = False
    condition: Condition | None = None

    @classmethod
    def of(cls, call: Call) -> ListArguments:
        """Read the options.

        Raises:
            RefusedError: the condition is none.
        """
        arguments = call.typed(cls())
        return arguments if arguments.where is None else replace(arguments, condition=parse_condition(arguments.where))


def list_runs(call: Call) -> int:
    """Print the runs below a folder.

    Raises:
        RefusedError: invalid arguments, or no runs.
    """
    arguments, folder = ListArguments.of(call), folder_of(call)
    every = listing.runs_below(folder, lambda number: _report(number, folder))
    rows = listing.chosen(every, arguments.condition)
    if arguments.sort is not None:
        rows = listing.by_name(rows, arguments.sort)
    named = [] if arguments.condition is None else list(names_in(arguments.condition))
    named += [] if arguments.sort is None else [arguments.sort.removeprefix("-")]
    if arguments.json:
        print_json({"runs": [listed_as_dict(row) for row in rows]})
    elif rows:
        _show(rows, named)
    if not rows:
        print_message(f"ddpexp: none of the {len(every):,} runs in {relative(folder)} fulfills the condition")
    return EXIT_DONE


def folder_of(call: Call) -> Path:
    """Return the folder that was typed, or the one where runs lie by default.

    Raises:
        RefusedError: there are several, or no run is there yet.
    """
    if len(call.operands) > 1:
        reason = "takes one folder, and lists all runs below it"
        raise RefusedError(reason, place=f"{call.name} {' '.join(call.operands)}")
    if not call.operands and not OUTPUTS.is_dir():
        raise RefusedError(
            f"There is no folder {OUTPUTS} here, where runs lie unless run.dir says otherwise",
            place=call.name,
            suggestion=f"Type ddpexp {call.name} FOLDER.",
        )
    return Path(call.operands[0]) if call.operands else OUTPUTS


def _report(number: int, folder: Path) -> None:
    print_message(f"ddpexp: reading {number:,} directories in {relative(folder)} for the first time")


def _show(rows: Sequence[Row], named: Sequence[str]) -> None:
    if not sys.stdout.isatty():
        show_text(as_text(listing.grid(rows, rows, named)))
        return
    first = rows[: limit()]
    show(Fitted(listing.grid(first, rows, named)))
    if len(first) < len(rows):
        print_message(f"... and {len(rows) - len(first):,} more", sys.stdout)
