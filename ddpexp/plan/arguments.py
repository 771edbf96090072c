"""The arguments of `ddpexp plan`: the overrides of a run, and the plan's options."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ddpexp.config.build import did_you_mean
from ddpexp.config.declared import section_with
from ddpexp.config.foreign import advice_on_key
from ddpexp.errors import RefusedError

NUMBERS = ("--alpha_us", "--bandwidth_gbps", "--compute_ms", "--num_samples", "--cores", "--memory_gb")
SWITCHES = ("--json", "--calibrate", "--strategies")
PLOT = "--plot-schedule"  # with a file, or without
_OF_RUNS = ("--config-dir", "-cd")  # each takes a value


@dataclass(frozen=True)
class PlanArguments:
    """The parsed arguments."""

    run: tuple[str, ...]  # its arguments, as for a training
    json: bool = False
    calibrate: bool = False
    alpha_us: float | None = None
    bandwidth_gbps: float | None = None
    compute_ms: float | None = None
    num_samples: int | None = None
    cores: int | None = None
    strategies: bool = False
    memory_gb: float | None = None
    plot: str | None = None  # the file for the picture of the schedule; empty: only the terminal

    @classmethod
    def of(cls, argv: Sequence[str]) -> PlanArguments:
        """Parse a command line.

        Raises:
            RefusedError: an unknown option, or an invalid value.
        """
        run: list[str] = []
        switches: set[str] = set()
        numbers: dict[str, float] = {}
        argv, plot = _take_plot(argv)
        remaining = iter(argv)
        for argument in remaining:
            key, equals, value = argument.partition("=")
            if key in NUMBERS:
                numbers[key] = _number(key, value if equals else next(remaining, ""))
            elif argument in SWITCHES:
                switches.add(argument)
            elif argument in _OF_RUNS:
                run += [argument, next(remaining, "")]
            elif argument.startswith("--") and key not in _OF_RUNS:
                raise RefusedError(
                    f"plan {argument}: no such option.{_meant(key, value if equals else next(remaining, ''))}"
                )
            elif argument in ("-m", "-cn", "-cp"):
                raise RefusedError(
                    f"plan {argument}: it looks at one run, as python -m ddpexp would start it: leave that out."
                )
            elif "=" not in argument and os.path.isdir(argument):
                raise RefusedError(
                    f"plan {argument}: it takes key=value, as a training does, and no directory: type the overrides of "
                    "the run, which its overrides.yaml lists."
                )
            else:
                run.append(argument)
        whole: dict[str, int] = {}
        for key in ("--num_samples", "--cores"):
            if key in numbers:
                if not numbers[key].is_integer():
                    raise RefusedError(f"plan {key}={numbers[key]:g}: use a whole number.")
                whole[key] = int(numbers[key])
        return cls(
            tuple(run),
            "--json" in switches,
            "--calibrate" in switches,
            numbers.get("--alpha_us"),
            numbers.get("--bandwidth_gbps"),
            numbers.get("--compute_ms"),
            whole.get("--num_samples"),
            whole.get("--cores"),
            "--strategies" in switches,
            numbers.get("--memory_gb"),
            plot,
        )


def _take_plot(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Take out --plot-schedule with its file; return the other arguments and the file.

    Raises:
        RefusedError: the file is no PNG.
    """
    rest = list(argv)
    place = next((place for place, word in enumerate(rest) if word.partition("=")[0] == PLOT), None)
    if place is None:
        return rest, None
    word = rest.pop(place)
    _, equals, file = word.partition("=")
    if not equals and place < len(rest) and not rest[place].startswith("-") and "=" not in rest[place]:
        file = rest.pop(place)
    if file and not file.endswith(".png"):
        raise RefusedError(f"plan {PLOT} {file}: it draws a PNG: name a file that ends with .png, or none.")
    return rest, file


def _meant(option: str, value: str) -> str:
    """Return what may be meant by an option that there is not: one of the plan's, or a key of the configuration."""
    name = option.removeprefix("--").replace("-", "_")
    if advice := advice_on_key(name):
        return advice
    section = section_with(name)
    if section is not None:
        return f" Did you mean {section}.{name}={value or '...'}?"
    return did_you_mean(option, (*NUMBERS, *SWITCHES, PLOT, *_OF_RUNS))


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RefusedError(f"plan {key}={text}: use a number above 0.")
    return value
