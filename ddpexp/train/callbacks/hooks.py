"""Calls the callbacks of a run, and makes all ranks agree on what they request and on their errors."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from ddpexp.checkpoint.codec import encode
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, PeerError, RefusedError
from ddpexp.system.text import message_of, one_line
from ddpexp.train.callbacks.base import Callback, Requests, RunView
from ddpexp.train.collectives import CollectiveGuard, refuse_in_callback
from ddpexp.train.metrics import NonFiniteError
from ddpexp.train.task_checks import named

_KEY = re.compile(r"\w+=")  # how the message of a callback begins that refuses one of its own keys

Hook = tuple[str, Callable[..., Any]]  # the callback's key, and its method


@dataclass
class Callbacks:
    """The callbacks of one rank, in order. Of a method that none overrides, the tuple is empty.

    An error of a callback does not end this rank at once: the others would wait for it, and their steps be lost. It is
    kept, the callback is not called again, and all ranks save and end at their next common step.
    """

    members: Mapping[str, Callback] = field(default_factory=dict)  # by their keys
    world: World | None = None
    identity: str = ""  # of their configuration and the length of the run
    requests: Requests = field(default_factory=Requests)  # of this rank, not acted upon yet
    stopped: str | None = None  # the reason for which they have ended the run
    view: RunView | None = None  # from `start` on
    on_gradients: tuple[Hook, ...] = field(init=False, default=())
    on_step: tuple[Hook, ...] = field(init=False, default=())
    on_evaluated: tuple[Hook, ...] = field(init=False, default=())
    _guard: CollectiveGuard | None = field(init=False, default=None)
    _error_rank: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Find the methods that are overridden."""
        self.on_gradients = self._overridden("on_gradients")
        self.on_step = self._overridden("on_step")
        self.on_evaluated = self._overridden("on_evaluated")

    def _overridden(self, hook: str) -> tuple[Hook, ...]:
        is_zero = self.world is None or self.world.is_rank_zero
        return tuple(
            (name, getattr(callback, hook))
            for name, callback in self.members.items()
            if getattr(type(callback), hook) is not getattr(Callback, hook)
            and (is_zero or not callback.rank_zero_only or hook == "load_state_dict")
        )

    @property
    def failed(self) -> bool:
        """Return whether a callback has failed: of this rank or, once all have agreed, of any."""
        return self.requests.error is not None

    @property
    def pending(self) -> bool:
        """Return whether there are requests or an error of this rank."""
        return bool(self.requests)

    def start(self, view: RunView) -> None:
        """Call `on_start`; an error ends the rank at once.

        Raises:
            RefusedError: a callback refuses its keys or the run. DdpexpError: it failed.
        """
        self.view = view
        if self.world is not None and self.world.world_size > 1 and self.members:
            self._guard = CollectiveGuard.installed()
        for name, method in self._overridden("on_start"):
            try:
                self._call(name, method, view)
            except RefusedError as error:
                if error.key is not None and not error.key.startswith("callbacks."):
                    error.key = f"callbacks.{name}.{error.key}"
                raise
            except Exception as error:
                raise DdpexpError(f"{_described(name, 'on_start', method, error)}.") from error
        self._check_states()

    def _check_states(self) -> None:
        """Check at the start that a checkpoint can hold the states, not when the first one is saved.

        Raises:
            RefusedError: one cannot be stored.
        """
        for name, method in self._overridden("state_dict") if self.world is None or self.world.is_rank_zero else ():
            state = self._own("state_dict", name, method)
            try:
                encode(state, {}, "state")
            except DdpexpError as error:
                raise RefusedError(
                    f"The state that {named(method)} returns cannot be saved: {error}", key=f"callbacks.{name}"
                ) from None

    def call(self, hook: str, methods: Sequence[Hook], *arguments: Any) -> None:
        """Call a method of each callback in order; keep the first error.

        Raises:
            NonFiniteError: a callback has found a number that is not finite, after which nothing must be saved.
        """
        for name, method in methods:
            try:
                self._call(name, method, self.view, *arguments)
            except NonFiniteError:
                raise
            except Exception as error:
                self._leave_out(name)
                if self.requests.error is None:
                    self.requests.error = _described(name, hook, method, error)

    def call_on_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Call `on_gradients` before these optimizers use the gradients."""
        if self.view is not None:
            self.view._stepping = optimizers
        self.call("on_gradients", self.on_gradients)

    def end(self) -> None:
        """Call `on_end`."""
        self.call("on_end", self._overridden("on_end"))

    def state(self) -> dict[str, Any]:
        """Return the callbacks' states for a checkpoint, with pending requests. Ranks: rank zero's is stored.

        Raises:
            DdpexpError: a callback failed.
        """
        if not self.members:
            return {}
        return {
            "states": {name: self._own("state_dict", name, method) for name, method in self._overridden("state_dict")},
            "requests": {"save": self.requests.save, "stop": self.requests.stop},
            "stopped": self.stopped,
            "identity": self.identity,
        }

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore what `state` returned; return the callbacks with a state for which nothing is there.

        A run that they have ended stays so, unless it is resumed with other callbacks or made longer. Ranks: all.

        Raises:
            DdpexpError: a callback failed.
        """
        requests, states = saved.get("requests") or {}, saved.get("states") or {}
        if self.members:
            self.requests.save, self.requests.stop = bool(requests.get("save")), requests.get("stop")
            self.stopped = saved.get("stopped") if saved.get("identity") == self.identity else None
        for name, method in self._overridden("load_state_dict"):
            if name in states:
                self._own("load_state_dict", name, method, states[name])
        return [name for name, _ in self._overridden("state_dict") if name not in states]

    def _own(self, hook: str, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._call(name, method, *arguments)
        except Exception as error:
            raise DdpexpError(f"{_described(name, hook, method, error)}.") from error

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        communicates = self.members[name].communicates
        if self.view is not None:
            self.view.caller, self.view.communicates = name, communicates
        if self._guard is None or communicates:
            return method(*arguments)
        before, self._guard.on_call = self._guard.on_call, refuse_in_callback
        try:
            return method(*arguments)
        finally:
            self._guard.on_call = before

    def _leave_out(self, name: str) -> None:
        self.on_gradients = tuple(hook for hook in self.on_gradients if hook[0] != name)
        self.on_step = tuple(hook for hook in self.on_step if hook[0] != name)
        self.on_evaluated = tuple(hook for hook in self.on_evaluated if hook[0] != name)

    def any_pending(self) -> bool:
        """Return whether any rank has requests or an error. Ranks: all; communicates if there are callbacks."""
        if self.world is None or not self.members:
            return bool(self.requests)
        return bool(self.world.sum(torch.tensor([float(bool(self.requests))], device=self.world.device)).item())

    def agree(self) -> None:
        """Make those of all ranks those of each; of several reasons and errors the first rank's count.

        Ranks: all, where `any_pending` is true; communicates.
        """
        self._error_rank = 0
        if self.world is None or self.world.world_size == 1:
            return
        every = [Requests(**values) for values in self.world.gather_values(asdict(self.requests))]
        self.requests.save = any(requests.save for requests in every)
        self.requests.stop = next((requests.stop for requests in every if requests.stop is not None), None)
        failed = next((rank for rank, requests in enumerate(every) if requests.error is not None), None)
        if failed is not None:
            self.requests.error, self._error_rank = every[failed].error, failed

    def taken(self) -> Requests:
        """Return the requests that all ranks have agreed on, which are acted upon now."""
        requests = replace(self.requests)
        self.requests.clear()
        return requests

    def raise_error(self, saved: str) -> None:
        """Raise the error on which the ranks have agreed, if there is one; `saved` is a sentence.

        Raises:
            DdpexpError: on the rank whose callback failed. PeerError: on the others.
        """
        error = self.requests.error
        if error is None:
            return
        if self.world is not None and self.world.rank != self._error_rank:
            raise PeerError(f"a callback of rank {self._error_rank} failed: {error}")
        raise DdpexpError(f"{error}. {saved}".rstrip())


def _described(name: str, hook: str, method: Callable[..., Any], error: Exception) -> str:
    """Return which callback failed where, and how, without a full stop."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(method, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (own or frames)[-1]
    kind = "" if isinstance(error, DdpexpError) else f"{type(error).__name__}: "
    message = one_line(message_of(error)).rstrip(".") or type(error).__name__
    return f"callbacks.{name} failed in {hook} ({frame.filename}:{frame.lineno}): {kind}{message}"
