"""The command `ddpexp trust`: what an installed package may be named for in every command."""

from __future__ import annotations

from collections.abc import Sequence

from ddpexp.cli.verb import Call
from ddpexp.config import trusted
from ddpexp.config.restated import checked_setting
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system import files
from ddpexp.system.text import sanitize


def trust(call: Call) -> int:
    """Add names to what is trusted, remove them, or list them; return the exit code.

    Raises:
        RefusedError: a name is not of an installed package.
    """
    names = call.operands
    for word in names:
        if "=" in word:
            raise RefusedError(
                "The command takes names, such as package.Class, and no key=value", place=f"trust {word}"
            )
    entries = trusted.read()
    if "--remove" in call.options:
        return _remove(names, entries)
    for name in names:
        entry = trusted.Trusted(checked_setting(name, "trust"), "", "", "") if ":" in name else trusted.find(name)
        entries = [*(other for other in entries if other.name != name), entry]
        of = f" of {entry.distribution} {entry.version} ({entry.place})" if entry.distribution else ""
        print(sanitize(f"{entry.name}{of} is trusted."))
    if names:
        trusted.write(entries)
        return EXIT_DONE
    for entry in entries:
        print(sanitize(f"{entry.name}  {entry.distribution} {entry.version}  {entry.place}".rstrip()))
    if not entries:
        print("Nothing is trusted beside ddpexp and what installed packages offer to it by their entry points.")
    return EXIT_DONE


def _remove(names: Sequence[str], entries: list[trusted.Trusted]) -> int:
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known:
            raise RefusedError(
                f"The name is not trusted; {', '.join(known) or 'nothing'} is", place=f"trust --remove {name}"
            )
    if not names:
        raise RefusedError(
            place="trust --remove", suggestion="Name what is no longer to be trusted, as ddpexp trust lists it."
        )
    trusted.write(entry for entry in entries if entry.name not in names)
    print(sanitize(f"{', '.join(names)}: no longer trusted ({files.shortest(trusted.list_file())})."))
    return EXIT_DONE
