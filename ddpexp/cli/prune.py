"""The command `ddpexp prune`: remove runs, or checkpoints, by rules; without --yes it only says what would go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddpexp.cli.listing import folder_of
from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, RefusedError
from ddpexp.settings.key import Key
from ddpexp.sweep import listing, pruning
from ddpexp.sweep.condition import parse_condition
from ddpexp.sweep.pruning import Removal
from ddpexp.sweep.rows import Row
from ddpexp.system.files import relative
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.terminal import print_json, print_message, show
from ddpexp.system.text import counted, size_text

_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class PruneArguments:
    """What was typed."""

    older_than: Annotated[str | None, Key(pattern=r"\d+[hdw]", use="hours, days or weeks, such as 30d")] = None
    metric: Annotated[str | None, Key(pattern=r"(min|max):.+", use="min:METRIC or max:METRIC")] = None
    keep: Annotated[int, Key(at_least=1)] = 1
    where: str | None = None
    checkpoints: bool = False
    yes: bool = False
    json: bool = False

    @classmethod
    def of(cls, call: Call) -> PruneArguments:
        """Read the options.

        Raises:
            RefusedError: no rule is among them, or --keep without a metric.
        """
        arguments = call.typed(cls())
        if arguments.older_than is None and arguments.metric is None and arguments.where is None:
            raise RefusedError(
                "needs a rule, for nothing is removed without one",
                place="prune",
                suggestion="Type --older-than 30d, --metric max:eval/accuracy --keep 5, or --where status==failed.",
            )
        if "--keep" in call.options and arguments.metric is None:
            raise RefusedError(
                "needs a metric, by which runs are the best",
                place="prune --keep",
                suggestion="Add --metric max:eval/accuracy, for example.",
            )
        return arguments


def prune(call: Call) -> int:
    """Print what the rules choose, and remove it with --yes; return 0 if all of it went, else 1.

    Raises:
        RefusedError: invalid arguments, or no runs.
    """
    arguments, folder = PruneArguments.of(call), folder_of(call)
    condition = None if arguments.where is None else parse_condition(arguments.where)
    every = listing.runs_below(folder, lambda _: None)
    rows = _by_rules(every, listing.chosen(every, condition), arguments)
    reasons = pruning.protected(every, whole=not arguments.checkpoints)
    stay = {row.path: reasons[row.path] for row in rows if row.path in reasons}
    removals = [pruning.removal(row, not arguments.checkpoints) for row in rows if row.path not in reasons]
    removals = [removal for removal in removals if removal.paths]
    failed = _remove(removals) if arguments.yes else []
    if arguments.json:
        print_json(
            {
                "removed": arguments.yes,
                "runs": [
                    {
                        "directory": str(one.row.path.absolute()),
                        "paths": list(map(str, one.paths)),
                        "bytes": one.num_bytes,
                    }
                    for one in removals
                    if one not in failed
                ],
                "kept": {str(path.absolute()): reason for path, reason in stay.items()},
            }
        )
    else:
        lines = [_line(one) for one in removals if one not in failed]
        lines += [f"stays  {relative(path)}: {reason}" for path, reason in stay.items()]
        show("\n".join([*lines, _total([one for one in removals if one not in failed], arguments)]))
    return EXIT_FAILED if failed else EXIT_DONE


def _by_rules(every: Sequence[Row], rows: Sequence[Row], arguments: PruneArguments) -> list[Row]:
    """Return the runs that every rule chooses."""
    chosen = [row for row in rows if row.path.is_dir()]
    if arguments.older_than is not None:
        seconds = int(arguments.older_than[:-1]) * _SECONDS[arguments.older_than[-1]]
        chosen = pruning.older(chosen, time.time() - seconds)
    if arguments.metric is not None:
        listing.check_name(every, arguments.metric.partition(":")[2], "--metric")
        best = {row.path for row in pruning.best_rows(every, arguments.metric, arguments.keep)}
        chosen = [row for row in chosen if row.path not in best]
    return chosen


def _remove(removals: Sequence[Removal]) -> list[Removal]:
    """Remove them one by one, and return those that could not be."""
    failed = []
    for removal in removals:
        try:
            pruning.remove(removal)
        except RefusedError as error:
            print_message(f"ddpexp: {error}")
            failed.append(removal)
        except OSError as error:
            print_message(f"ddpexp: {relative(removal.row.path)} cannot be removed: {reason_with_limit(error)}")
            failed.append(removal)
    return failed


def _line(removal: Removal) -> str:
    path = relative(removal.row.path)
    count = "" if removal.paths == [removal.row.path] else f" ({counted(len(removal.paths), 'checkpoint')})"
    return f"{size_text(removal.num_bytes):>8}  {path}{count}"


def _total(removals: Sequence[Removal], arguments: PruneArguments) -> str:
    if not removals:
        return "nothing to remove"
    size = size_text(sum(removal.num_bytes for removal in removals))
    what = f"{'checkpoints of ' if arguments.checkpoints else ''}{counted(len(removals), 'run')}, {size}"
    return (
        f"removed: {what}" if arguments.yes else f"would go: {what}. To remove them, type the same command with --yes."
    )
