"""NCCL's flight recorder, read when the supervisor wants to know which collectives this rank has called."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from ddpexp.compat.process_groups import flight_records
from ddpexp.launch.workers.collectives import Record, summarize
from ddpexp.launch.workers.control import Control

_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZE = 2000  # torch's own default in 2.13; in 2.10 the recorder is off unless it gets a size


def enable(environ: MutableMapping[str, str]) -> None:
    """Turn the recorder on, unless the user has chosen its size (0 turns it off); before the process group is made.

    It costs microseconds a collective. torch itself would also write it to a file in the user's cache when a rank is
    gone; this is turned off, unless the user has chosen a size or a file.
    """
    if not any(name in environ for name in _SIZE_VARIABLES):
        environ[_SIZE_VARIABLES[0]] = str(_SIZE)
        if not any(name in environ for name in _FILE_VARIABLES):
            environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def read() -> Record | None:
    """Return what this rank has called; None where this torch has no recorder.

    It asks CUDA which calls have completed, which can block while the driver does: call it in a thread of its own.
    """
    records = [summarize(json.loads(text)) for text in flight_records()]
    return next((record for record in records if record.groups), records[0] if records else None)


def answer_inquiries(control: Control, environ: Mapping[str, str]) -> None:
    """Start the thread that answers the supervisor's inquiries; it sleeps until there is one, and costs a step nothing.

    Without a recorder there is no thread, and no answer.
    """
    if next((environ[name] for name in _SIZE_VARIABLES if name in environ), "0") == "0":
        return
    threading.Thread(target=_answer, args=(control,), name="ddpexp-flight-recorder", daemon=True).start()


def _answer(control: Control) -> None:
    while (number := control.wait_for_inquiry()) is not None:
        with suppress(Exception):  # no answer: the supervisor decides without it
            record = read()
            if record is not None:
                control.publish_record(number, record)
