"""Where in the user's own code an error was raised."""

from __future__ import annotations

import sys

_OTHERS = {"", "__main__", "ddpexp", "torch", *sys.stdlib_module_names}


def place_in_code(error: BaseException) -> str | None:
    """Return file:line of the innermost call outside of ddpexp, torch and the standard library.

    Calls in other installed packages count only if there are no others; without any, return None.
    """
    trace = error.__traceback__
    place = None
    installed = None
    while trace is not None:
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OTHERS:
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
            if "/site-packages/" in line or "/dist-packages/" in line:
                installed = line
            else:
                place = line
        trace = trace.tb_next
    return place or installed
