"""The command `ddpexp tag`: the tags and the note of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpexp.cli.verb import Call
from ddpexp.config.build import did_you_mean
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run.labels import Labels
from ddpexp.run.stored_run import find_run
from ddpexp.sweep.rows import rows_of
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.secrets import held_in
from ddpexp.system.terminal import print_json, print_message, show


def tag(call: Call) -> int:
    """Change the tags and the note of a run, and print what they are now.

    Raises:
        RefusedError: it is no run, a name is none of a tag, or the run does not have the tag that is to be removed.
    """
    source, *names = call.operands
    run = find_run(source, "tag")
    added = _checked([name.removeprefix("+") for name in names])
    removed = _checked(call.options["--remove"].split(",")) if "--remove" in call.options else []
    note = call.options.get("--note")
    if note is not None and (what := held_in(note)) is not None:
        raise RefusedError(f"would hold {what}", place="tag --note")
    [row] = rows_of(run.path)
    missing = next((name for name in removed if name not in row.tags), None)
    if missing is not None:
        suggestion = did_you_mean(missing, row.tags) if row.tags else "It has none."
        raise RefusedError("is no tag of this run", place=f"tag --remove {missing}", suggestion=suggestion)
    if added or removed or note is not None:
        labels = Labels.of(run.read_if_present(run.labels) or {})
        try:
            labels.changed(added, removed, note).write(run)
        except OSError as error:
            raise RefusedError(f"cannot be written: {reason_with_limit(error)}", place=run.labels) from None
        [row] = rows_of(run.path)
    if call.as_json:
        print_json({"run": str(run.path.resolve()), "tags": list(row.tags), "note": row.note})
    elif row.tags or row.note:
        show(
            "\n".join(
                [*([f"tags  {' '.join(row.tags)}"] if row.tags else []), *([f"note  {row.note}"] if row.note else [])]
            )
        )
    else:
        print_message("ddpexp: the run has no tags and no note")
    return EXIT_DONE


def _checked(names: Sequence[str]) -> Sequence[str]:
    """Check that names can be typed as tags, with commas between them, and compared in conditions.

    Raises:
        RefusedError: one cannot.
    """
    for name in names:
        if not re.fullmatch(r"\w[\w.:/@-]*", name):
            raise RefusedError(
                "is not the name of a tag, which has letters, digits and . _ - : / @",
                place=f"tag {name}",
                suggestion="Type a text with blanks as --note TEXT.",
            )
        if (what := held_in(name)) is not None:
            raise RefusedError(f"would hold {what}", place="tag")
    return names
