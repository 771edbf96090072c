"""Names of Hydra that are private, or that differ between its releases 1.3 and 1.4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import hydra
from hydra._internal import defaults_list
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import InputDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from hydra.version import VersionBase
from omegaconf import DictConfig

VERSION_BASE: dict[str, Any] = (
    {} if tuple(map(int, hydra.__version__.split(".")[:2])) >= (1, 4) else {"version_base": "1.3"}
)
"""What Hydra's entry points are called with.

Private: none; `version_base` is an argument of 1.3.
Why: 1.3 warns without it, and 1.4 with it.
When it goes: leave it out with the support of 1.3.
"""


@contextmanager
def quick_defaults() -> Iterator[None]:
    """Have Hydra prepare the references of a defaults list only where there are some.

    Private: `hydra._internal.defaults_list._create_interpolation_map` of 1.3, which is replaced; 1.4 has none.
    Why: it is called for each file of the defaults list, which takes a fifth of the time of composing: 11 to 16 ms.
    When it goes: delete this function with the support of 1.3.
    """
    plain: Any = getattr(defaults_list, "_create_interpolation_map", None)
    if plain is None:
        yield
        return

    def quick(overrides: Any, defaults: Sequence[InputDefault], self_added: bool) -> Any:
        is_needed = any(default.is_interpolation() for default in defaults)
        return plain(overrides, defaults, self_added) if is_needed else None

    defaults_list._create_interpolation_map = quick  # type: ignore[assignment]
    try:
        yield
    finally:
        defaults_list._create_interpolation_map = plain


def apply_overrides(overrides: Sequence[Override], cfg: DictConfig) -> None:
    """Apply parsed overrides to a tree, with Hydra's rules and errors.

    Private: `ConfigLoaderImpl._apply_overrides_to_config` of 1.3 and 1.4.
    Why: the public way reads all files again, for every job of a sweep.
    When it goes: `ConfigLoader.load_configuration` with all overrides of the job.
    """
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), cfg)


def sweeper_context(loader: ConfigLoader) -> HydraContext:
    """Return what a sweeper is set up with: a loader, and no callbacks.

    Private: `hydra._internal.callbacks.Callbacks` of 1.3 and 1.4.
    Why: the type of the context is public, and the class of its field is not.
    When it goes: whatever the context takes then for no callbacks.
    """
    return HydraContext(config_loader=loader, callbacks=Callbacks())


@contextmanager
def own_globals() -> Iterator[None]:
    """Set aside what a program that uses Hydra itself has initialized, inside the block.

    Private: `Singleton._instances` of 1.3 and 1.4.
    Why: `Singleton.get_state` copies all resolvers of OmegaConf, too, with the objects that they hold.
    When it goes: `Singleton.get_state` and `set_state`.
    """
    instances: dict[Any, Singleton] = Singleton._instances
    outer = {kind: instances.pop(kind) for kind in (GlobalHydra, HydraConfig, VersionBase) if kind in instances}
    try:
        yield
    finally:
        instances.update(outer)


class FailedJob(JobReturn):
    """A job that has failed, of which a sweeper reads the exception.

    Private: `JobReturn._return_value` of 1.3 and 1.4.
    Why: Hydra's own class writes the failure to stderr at each reading, and the sweep has printed it already.
    When it goes: `JobReturn` itself, once it only raises.
    """

    @property
    def return_value(self) -> NoReturn:
        """Raise what the job has failed with."""
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value
