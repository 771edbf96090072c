"""torch's elastic agent in a process of its own, without torchrun's last words: the ranks have said why they failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from ddpexp.errors import EXIT_FAILED
from ddpexp.launch.process import children, die_with_parent


def main() -> None:
    """Run the agent with torchrun's words, behind the parent's process id. Ends this process."""
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    logging.disable()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP"  # to end; the others are for the ranks
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, _pass_on)
    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
        code = 0
    except ChildFailedError:
        code = EXIT_FAILED
    except SignalException as error:
        code = 128 + int(error.sigval)
    os._exit(code)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
