"""The command `ddpexp trust`: what an installed package may be named for in every command."""

from __future__ import annotations

from ddpexp.config import commands, trusted
from ddpexp.config.restated import checked_setting
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system import files
from ddpexp.system.text import sanitize

_USAGE = f"""{commands.of("trust").usage}

Trust a class or function of an installed package, or all of the package, so
that configurations may name it without run.trust=[...] in each command:

    ddpexp trust schedulefree.AdamWScheduleFree

Without a name it lists what is trusted; --remove NAME takes it back. The list
is yours, not a run's; a module of the same name in another place, such as the
current folder, is not trusted by it. What you trust whole, every configuration
can call with any arguments, so name the class where you can.

An address (with all below it), a name on a hub or a variable of the
environment counts in a run directory without being restated, whoever made it:

    ddpexp trust https://data.example.org hub:stanfordnlp/imdb oc.env:TOKEN"""


def trust(argv: list[str]) -> int:
    """Add names to what is trusted, remove them, or list them; return the exit code.

    Raises:
        RefusedError: a name is not of an installed package.
    """
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return EXIT_DONE
    names = [word for word in argv if word != "--remove"]
    for word in names:
        if word.startswith("-"):
            raise RefusedError(f"trust {word}: no such option. There is --remove.")
        if "=" in word:
            raise RefusedError(f"trust {word}: it takes names, such as package.Class, and no key=value.")
    entries = trusted.read()
    if "--remove" in argv:
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


def _remove(names: list[str], entries: list[trusted.Trusted]) -> int:
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known:
            available = f" There is {', '.join(known)}." if known else " Nothing is."
            raise RefusedError(f"trust --remove {name}: it is not trusted.{available}")
    if not names:
        raise RefusedError("trust --remove: name what is no longer to be trusted, as ddpexp trust lists it.")
    trusted.write(entry for entry in entries if entry.name not in names)
    print(sanitize(f"{', '.join(names)}: no longer trusted ({files.shortest(trusted.list_file())})."))
    return EXIT_DONE
