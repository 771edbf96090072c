"""Fork this process, and set up the output of a fork.

A fork inherits what libraries have left in the process, and they change it there: since Python 3.12 asyncio, which
torch imports, turns off the wakeup descriptor of signals. So a fork gets its values as arguments and trusts none of
the inherited state.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable

from ddpexp.system.process import die_with_parent


def fork(work: Callable[[], int]) -> int:
    """Start a fork of this process that calls `work` and ends with the exit code that it returns; return its id.

    The fork has one thread, no wakeup descriptor for signals, and dies with this process. The rest is as it is here:
    open descriptors, handlers, blocked signals, variables, and the state of random generators except Python's own. If
    torch has computed on several threads here, the fork must compute on one: it would wait for OpenMP's other threads.

    Raises:
        OSError: the system has no room for another process.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork, whatever they do. Those of ddpexp hold no lock that a fork needs, nor
        # do those that libraries for linear algebra start when they are imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # before any other signal is written to the parent's
        die_with_parent(parent)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # if it returned, it would do its parent's work a second time


def redirect_output(descriptor: int) -> None:
    """Make a file standard output and standard error, in place of its descriptor, and let standard input be empty."""
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    for number in {empty, descriptor} - {0, 1, 2}:
        os.close(number)
