"""How likely a failure is the original cause of a run's end."""

from __future__ import annotations

import signal
from enum import IntEnum

from ddpexp.errors import Failure, PeerError

_TORCH_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "store")


class Severity(IntEnum):
    """How likely a failure is the original cause, the most likely first."""

    DEATH = 0  # a process was killed or crashed
    ERROR = 1  # a rank's own error
    DISCONNECTION = 2  # a broken connection, usually to a rank that failed before
    ENDED = 3  # ended by the supervisor

    @classmethod
    def of(cls, failure: Failure) -> Severity:
        """Return the severity of a rank's failure."""
        if failure.kind == "Ended":
            return cls.ENDED
        if failure.signal is not None:
            return cls.ERROR if failure.signal == signal.SIGABRT else cls.DEATH  # libraries abort when they lose a peer
        if failure.kind == PeerError.__name__:
            return cls.DISCONNECTION
        text = failure.message.lower()
        if failure.kind in _TORCH_ERRORS and any(word in text for word in _CONNECTION_WORDS):
            return cls.DISCONNECTION
        return cls.ERROR
