"""torch's elastic agent in a process of its own, without torchrun's last words: the ranks have said why they failed."""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from ddpexp.errors import EXIT_FAILED
from ddpexp.launch.process import die_with_parent


def main() -> None:
    """Run the agent with torchrun's words, behind the parent's process id. Ends this process."""
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    logging.disable()
    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
        code = 0
    except ChildFailedError:
        code = EXIT_FAILED
    except SignalException as error:
        code = 128 + int(error.sigval)
    os._exit(code)


if __name__ == "__main__":
    main()
