"""Where ddpexp keeps files of a user that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from ddpexp.errors import RefusedError


def user_cache() -> Path:
    """Return ddpexp's cache folder of this user; it may not exist.

    Source: XDG Base Directory Specification; it says to ignore a relative XDG_CACHE_HOME.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        raise RefusedError(
            "the user's cache folder is unknown, as HOME is not set", suggestion="Set XDG_CACHE_HOME to a folder."
        )
    return Path(home, "ddpexp")
