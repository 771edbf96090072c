"""The command `ddpexp report`: one HTML page about sweeps and runs; it starts nothing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.report.contents import contents
from ddpexp.report.page import is_report, page_of
from ddpexp.sweep.arguments import TableArguments
from ddpexp.system import files
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted, first_few, size_text

_NAME = "report.html"
_NAMED = 3  # directories in the title


def report(call: Call) -> int:
    """Write the page.

    Raises:
        RefusedError: nothing there, an objective that nothing has recorded, or a file that cannot be written.
    """
    file = Path(call.options.get("--out", _NAME))
    _check_file(file)
    arguments = TableArguments.of(call.operands, call.name)
    rows, goal = arguments.compared()
    sources = [
        files.relative(Path(operand)) for operand in call.operands if "=" not in operand or Path(operand).exists()
    ]
    command = f"python -m ddpexp {shlex.join(call.command[1:])}"
    text = page_of(contents(rows, goal, first_few(sources, _NAMED), command))
    try:
        files.write(file, text)
    except OSError as error:
        raise RefusedError(
            f"cannot be written: {reason_with_limit(error, file.parent)}",
            place=f"--out {file}",
            suggestion="Name another file: --out report.html.",
        ) from None
    print_message(f"written: {files.typed(file)} ({counted(len(rows), 'run')}, {size_text(len(text))})", sys.stdout)
    return EXIT_DONE


def _check_file(file: Path) -> None:
    """Check what would be replaced, before anything is read.

    Raises:
        RefusedError: it is a folder, another file, or in a folder that is not there.
    """
    place = f"--out {file}"
    if file.is_dir():
        raise RefusedError(
            "is a folder", place=place, suggestion=f"Name a file in it: --out {files.typed(file / _NAME)}."
        )
    if file.suffix not in (".html", ".htm"):
        html = files.typed(file.with_suffix(".html")) if file.name else _NAME
        raise RefusedError("does not end in .html, and a report is HTML", place=place, suggestion=f"Type --out {html}.")
    if not file.parent.is_dir():
        raise RefusedError(
            f"There is no folder {file.parent}", place=place, suggestion="Make it first, or name another."
        )
    if (file.exists() or file.is_symlink()) and not is_report(file):
        other = files.typed(files.first_free_name(file))
        raise RefusedError(
            "is another file, and no report that could be replaced", place=place, suggestion=f"Type --out {other}."
        )
