"""The options of our groups as texts list them, so that a new one needs no change where others are tested."""

from __future__ import annotations

from ddpexp.config.folders import conf_folder


def options(group: str) -> list[str]:
    """Return the names of our options."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def listed(group: str, *others: str, chosen: str | None = None) -> str:
    """Return the line of the group in the help, with those of the user and a mark at what is chosen, unwrapped."""
    names = sorted({*options(group), *others})
    return f"{group} {', '.join(f'{name}*' if name == chosen else name for name in names)}"


def unwrapped(text: str) -> str:
    """Return a text on one line."""
    return " ".join(text.split())
