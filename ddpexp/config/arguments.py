"""Parse the arguments of a command: its options, its overrides, and whether they make a sweep. Pure text."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ddpexp.config.build import nearest
from ddpexp.config.declared import section_with
from ddpexp.config.foreign import advice_on_key
from ddpexp.config.habits import answer
from ddpexp.config.override_syntax import rerun
from ddpexp.errors import RefusedError

ONE_RUN = re.compile(r"\+*hydra\.mode=run$", re.IGNORECASE)
_MULTIRUN = re.compile(r"\+*hydra\.mode=multirun$", re.IGNORECASE)
_RERUN = "The experiment of a run is trained again with python -m ddpexp rerun RUN_DIR."
_TORCHRUN = ("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts")
_OPTIONS = (
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--multirun",
    "--config-dir",
    "--info",
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command."""

    overrides: tuple[str, ...] = ()  # as typed
    options: tuple[str, ...] = ()  # the other arguments
    config_dir: str | None = None
    is_sweep: bool = False
    cfg: str | None = None  # which configuration Hydra prints
    only_prints: bool = False  # whether Hydra only prints something, as with --cfg or --info
    version: bool = False

    @classmethod
    def of(cls, argv: Sequence[str]) -> Arguments:
        """Parse a command line.

        Raises:
            RefusedError: an option that is unknown, does not apply or is given twice, or one without the option that it
                belongs to.
        """
        if "--version" in argv:
            return cls(version=True)
        abbreviated = next((argument for argument in argv if re.match("--config(=|$)", argument)), None)
        if abbreviated is not None:
            again = rerun(argv) or f"Did you mean --config-dir? {_RERUN}"
            raise RefusedError("is not an option", suggestion=again, place=abbreviated)
        parser = _Parser(add_help=False)  # some options only get a better error than Hydra's
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
        parser.add_argument("--package", "-p")
        parser.add_argument("--config-path", "-cp")
        parser.add_argument("--config-name", "-cn")
        parser.add_argument("--config-dir", "-cd")
        parser.add_argument("--experimental-rerun")
        about = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
        parser.add_argument("--info", "-i", const="all", nargs="?", choices=about)
        for names in (
            ("--help", "-h"), ("--hydra-help",), ("--resolve",), ("--run", "-r"), ("--multirun", "-m"),
            ("--shell-completion", "-sc"),
        ):  # fmt: skip
            parser.add_argument(*names, action="store_true")
        typed, unknown = parser.parse_known_intermixed_args(argv)  # options may stand anywhere
        if unknown:
            raise _no_option(unknown[0], argv)
        _check(argv, typed)
        only_prints = bool(typed.hydra_help or typed.cfg or typed.info)
        return cls(
            overrides=tuple(typed.overrides),
            options=tuple(argument for argument in argv if argument not in typed.overrides),
            config_dir=typed.config_dir,
            is_sweep=(typed.multirun or any(map(_MULTIRUN.match, typed.overrides))) and not (only_prints or typed.help),
            cfg=typed.cfg,
            only_prints=only_prints,
        )

    @property
    def overrides_without_mode(self) -> list[str]:
        """The overrides except for hydra.mode=MULTIRUN, which is -m in other words."""
        return [override for override in self.overrides if not _MULTIRUN.match(override)]


class _Parser(ArgumentParser):
    """A parser that raises its errors: argparse would print the usage of all options, and exit."""

    def error(self, message: str) -> NoReturn:
        raise RefusedError(message, suggestion="--help shows what can be typed.")


def _check(argv: Sequence[str], typed: Namespace) -> None:
    """Check the options.

    Raises:
        RefusedError: one does not apply or is given twice, or lacks the option that it belongs to.
    """
    if sum(argument.partition("=")[0] in ("--config-dir", "-cd") for argument in argv) > 1:
        raise RefusedError("is typed twice: it takes one folder", key="--config-dir")
    folder = typed.config_dir
    if folder is not None and re.match(r"[\w./]+=", folder) and not os.path.isdir(folder):
        raise RefusedError(
            f"takes a folder, and {folder} is an override",
            key="--config-dir",
            suggestion=f"Write --config-dir DIR {folder}, for example --config-dir mine/conf {folder}.",
        )
    if (typed.package or typed.resolve) and not typed.cfg:
        option = "--package" if typed.package else "--resolve"
        raise RefusedError(f"goes with a question, such as --cfg job {option}", key=option)
    if typed.multirun and typed.cfg:
        raise RefusedError(
            "shows one run", suggestion="Leave -m out, and give each key one value.", place=f"--cfg {typed.cfg}"
        )
    if typed.config_path or typed.config_name or typed.experimental_rerun:
        raise RefusedError(
            "--config-path, --config-name and --experimental-rerun do not apply",
            suggestion=rerun(argv) or f"Use --config-dir DIR recipe=NAME. {_RERUN}",
        )
    if typed.shell_completion:
        raise RefusedError(
            "is Hydra's own",
            key="--shell-completion",
            suggestion='Type eval "$(ddpexp completion bash)" (ddpexp help completion).',
        )


def _no_option(argument: str, argv: Sequence[str]) -> RefusedError:
    """Return the error for an unknown option: the nearest option, or the key that it may stand for."""
    name, _, value = argument.lstrip("-").partition("=")
    option = nearest(f"--{name}", _OPTIONS, 0.8) if argument.startswith("--") else None
    if option is not None:
        return RefusedError("is not an option", suggestion=f"Did you mean {option}?", place=argument)
    key = name.replace("-", "_")
    if key.startswith(("checkpoint", "ckpt")):
        return RefusedError(
            "is not an option",
            suggestion="Of a run a checkpoint is chosen behind its folder, as in ddpexp evaluate RUN_DIR --checkpoint "
            "best, and weights to start from as run.init_from=RUN_DIR run.init_checkpoint=best.",
            place=argument,
        )
    if key == "resume":
        return RefusedError(
            "is not an option",
            suggestion=f"A run is resumed with python -m ddpexp resume {value or 'RUN_DIR'}.",
            place=argument,
        )
    if key in _TORCHRUN:
        return RefusedError(
            "is an option of torchrun, which stands before -m",
            suggestion=f"Type torchrun {argument} --nproc-per-node 2 -m ddpexp ... launcher=torchrun-env. Without "
            "torchrun, trainer.gpus=2 starts the workers.",
            place=argument,
        )
    typed = [override for word, override in as_overrides(argv) if word == argument]
    advice = answer([*typed, *(override for _, override in as_overrides(argv))]) if answer(typed) else ""
    advice = advice or advice_on_key(key)
    section = section_with(key)
    if not advice and section is not None:
        value = value or typed[0].partition("=")[2] if typed else value
        advice = f"Did you mean {section}.{key}={value or '...'}?"
    return RefusedError(
        "is not an option", suggestion=f"Write key=value, for example trainer.gpus=2. {advice}", place=argument
    )


def as_overrides(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with the override that it may stand for, as `--lr 0.1` for `lr=0.1`."""
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        if match := re.fullmatch(r"--?([A-Za-z][\w-]*)(?:=(.*))?", word):
            value = match[2] or ("" if after.startswith("-") or "=" in after else after)
            yield word, f"{match[1].replace('-', '_')}={value}"
