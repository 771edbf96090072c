"""Building a model without the memory for it: its construction is recorded, then replayed one tensor at a time.

The factory runs with tensors that have no memory. Every operation on them is recorded with its arguments. The replay
does the operations in the same order, so random numbers are those of an ordinary construction, and drops each tensor
once its values are final: what a rank keeps of it is the caller's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import init

from ddpexp.compat.dispatch import (
    TorchDispatchMode,
    arguments_of,
    memory_of,
    name_of,
    no_dispatch,
    seeming,
    tree_map_only,
)
from ddpexp.compat.modules import buffers_of, parameters_of
from ddpexp.errors import RefusedError
from ddpexp.strategy.norm import has_contiguous_rows

Name = TypeVar("Name")
Model = TypeVar("Model", bound="nn.Module | Mapping[str, nn.Module]")

# Operations that give every element of their first argument a new value, whatever it was before.
_OVERWRITES = frozenset(
    {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_",
     "cauchy_", "geometric_"}
)  # fmt: skip
_READS_VALUES = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "resize_", "set_"})
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_META = torch.device("meta")


@dataclass(frozen=True)
class _Ref:
    """A tensor of the recording."""

    number: int


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its memory."""

    memory: int
    num_bytes: int  # of the memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of its memory."""
        return memory.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass
class _Operation:
    """One recorded call."""

    function: Any
    arguments: Sequence[Any]
    named: Mapping[str, Any]
    reads: frozenset[int]  # memories
    writes: frozenset[int]
    makes: frozenset[int]
    outputs: Sequence[int]  # numbers of the tensors that it returns
    overwrites: bool  # all of what it writes
    draws: bool  # random numbers
    random_state: tuple[torch.Generator, Tensor] | None = None  # before the call, where something has set it


@dataclass
class Recording:
    """The construction of a model."""

    tensors: list[Tensor] = field(default_factory=list)  # kept, so that no memory gets the number of another one
    places: dict[int, _Place] = field(default_factory=dict)  # of every tensor, by its position
    operations: list[_Operation] = field(default_factory=list)

    def replay(
        self, tensors: Mapping[Name, Tensor], device: torch.device, take: Callable[[Name, Tensor], None]
    ) -> None:
        """Give the values of tensors of the recorded model to `take`, one after the other; each is then dropped."""
        names: dict[int, list[tuple[Name, _Place]]] = {}
        for name, tensor in tensors.items():
            place = _place(tensor)
            names.setdefault(place.memory, []).append((name, place))
        needed = self._needed(names)
        last = self._last_uses(needed)
        memories: dict[int, Tensor] = {}
        for number, operation in enumerate(self.operations):
            if operation.random_state is not None:
                generator, state = operation.random_state
                generator.set_state(state)
            if number not in needed:
                if operation.draws:
                    self._draw(operation, device)
                continue
            self._do(operation, memories, device)
            for memory in {*operation.reads, *operation.writes, *operation.makes}:
                if last.get(memory) == number and memory in memories:
                    _give(names.get(memory, ()), memories.pop(memory), take)

    def _needed(self, final: Iterable[int]) -> set[int]:
        """Return which operations the final values of these memories depend on, by their numbers."""
        live, needed = set(final), set()
        for number in reversed(range(len(self.operations))):
            operation = self.operations[number]
            depends_on_values = operation.draws and bool(operation.reads)  # how much it draws, perhaps
            if not (live & (operation.writes | operation.makes) or depends_on_values):
                continue
            needed.add(number)
            live -= operation.makes
            if operation.overwrites:
                live -= operation.writes
            live |= operation.reads
        return needed

    def _last_uses(self, needed: set[int]) -> dict[int, int]:
        last: dict[int, int] = {}
        for number in sorted(needed):
            operation = self.operations[number]
            last |= dict.fromkeys(operation.reads | operation.writes | operation.makes, number)
        return last

    def _do(self, operation: _Operation, memories: dict[int, Tensor], device: torch.device) -> None:
        """Do an operation with real tensors."""

        def real(reference: _Ref) -> Tensor:
            place = self.places[reference.number]
            if place.memory not in memories:  # overwritten before anything was there that counts
                memories[place.memory] = torch.empty(place.num_bytes, dtype=torch.uint8, device=device)
            return place.of(memories[place.memory])

        arguments, named = tree_map_only(_Ref, real, (list(operation.arguments), dict(operation.named)))
        if "device" in named:
            named["device"] = device
        with torch.no_grad():
            returned = operation.function(*arguments, **named)
        for number, value in zip(operation.outputs, _tensors_in(returned), strict=False):
            if self.places[number].memory in operation.makes:
                memories[self.places[number].memory] = _bytes_of(value)

    def _draw(self, operation: _Operation, device: torch.device) -> None:
        """Draw the random numbers of an operation whose result is overwritten later."""

        def stand_in(reference: _Ref) -> Tensor:
            place = self.places[reference.number]
            return torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=device)

        arguments, named = tree_map_only(_Ref, stand_in, (list(operation.arguments), dict(operation.named)))
        if "device" in named:
            named["device"] = device
        operation.function(*arguments, **named)


def _give(tensors: Iterable[tuple[Name, _Place]], memory: Tensor, take: Callable[[Name, Tensor], None]) -> None:
    """Give the values of the tensors that lie in a memory, which is dropped afterwards."""
    for name, place in tensors:
        take(name, place.of(memory))


class _Hollow(Tensor):
    """A tensor on the CPU, as it seems to a factory, without memory: `torch.nn.init` leaves those on `meta` alone."""

    meta: Tensor

    @staticmethod
    def __new__(cls: type[_Hollow], meta: Tensor) -> _Hollow:
        """Seem to be a tensor with the shape and dtype of `meta`."""
        hollow = seeming(cls, meta, torch.device("cpu"))
        hollow.meta = meta
        return hollow

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow an assignment to `data`, as `Module.to` does it, which is no operation that could be recorded."""
        if function == _SET_DATA:
            tensor, value = args
            if not isinstance(value, _Hollow):
                raise _ValueRead("an assignment to data of values from elsewhere")
            tensor.meta = value.meta
        returned: Any = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return returned

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what happens outside of a recording."""
        raise _ValueRead(f"{name_of(function)} after its construction")


class _Recorder(TorchDispatchMode):
    """Have tensors made without memory, and record what is done with them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        self._random_states: dict[int, Tensor] = {}  # by generator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation on memory that is not there, and record it."""
        kwargs = dict(kwargs or {})
        name = name_of(function)
        tensors = _tensors_in((args, kwargs))
        if not tensors and any(argument.name == "device" for argument in arguments_of(function)):
            kwargs["device"] = _META
        elif not any(isinstance(tensor, _Hollow) for tensor in tensors):
            return function(*args, **kwargs)  # of values that the factory has from elsewhere
        elif kwargs.get("device") is not None:
            kwargs["device"] = _META
        if name in _READS_VALUES:
            raise _ValueRead(f"{name.strip('_')} of a tensor")
        arguments, named = tree_map_only(Tensor, self._reference, (list(args), dict(kwargs)))
        draws = torch.Tag.nondeterministic_seeded in function.tags
        state = self._new_random_state(kwargs.get("generator")) if draws else None
        before = {_memory_of(tensor.meta) for tensor in tensors if isinstance(tensor, _Hollow)}
        hollow = {id(tensor.meta): tensor for tensor in tensors if isinstance(tensor, _Hollow)}
        meta_args, meta_named = tree_map_only(Tensor, _without_memory, (args, kwargs))
        written = {_memory_of(tensor) for tensor in _written(function, meta_args, meta_named)}
        overwrites = name in _OVERWRITES and _is_whole_memory(meta_args[0])
        reads = {_memory_of(tensor) for tensor in _tensors_in((meta_args[1:], meta_named))} if overwrites else before
        returned = function(*meta_args, **meta_named)
        if torch.Tag.inplace_view in function.tags:
            self._change_shape(function, args, kwargs, meta_args[0])
        outputs = _tensors_in(returned)
        made = {_memory_of(output) for output in outputs} - before - written
        if written or made:  # a view has no values of its own
            numbers = [self._number(output) for output in outputs]
            self.recording.operations.append(
                _Operation(
                    function=function,
                    arguments=arguments,
                    named=named,
                    reads=frozenset(reads & before),
                    writes=frozenset(written),
                    makes=frozenset(made),
                    outputs=numbers,
                    overwrites=overwrites,
                    draws=draws,
                    random_state=state,
                )
            )
        return tree_map_only(Tensor, lambda meta: self._hollow(meta, hollow), returned)

    def initialize(self, function: Callable[..., Tensor], tensor: _Hollow, args: Any, kwargs: Any) -> Tensor:
        """Record a function of torch.nn.init, which gives every element a value; some look at values on the way."""
        memory = frozenset({_memory_of(tensor.meta)})
        overwrites = _is_whole_memory(tensor.meta)
        self.recording.operations.append(
            _Operation(
                function=function,
                arguments=[_Ref(self._number(tensor.meta)), *args],
                named=kwargs,
                reads=frozenset() if overwrites else memory,
                writes=memory,
                makes=frozenset(),
                outputs=[],
                overwrites=overwrites,
                draws=True,
                random_state=self._new_random_state(kwargs.get("generator")),
            )
        )
        return tensor

    def _hollow(self, meta: Tensor, known: Mapping[int, _Hollow]) -> _Hollow:
        self._number(meta)
        return known[id(meta)] if id(meta) in known else _Hollow(meta)

    def _reference(self, tensor: Tensor) -> Any:
        return _Ref(self._number(tensor.meta)) if isinstance(tensor, _Hollow) else tensor.clone()

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.recording.tensors)
            self.recording.tensors.append(tensor)
            self.recording.places[number] = _place(tensor)
        return number

    def _change_shape(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Tensor) -> None:
        """Change the shape of a tensor in place, as `t_` does: from here on it lies otherwise in its memory."""
        del self._numbers[id(meta)]
        with no_dispatch():
            function(*args, **kwargs)

    def _new_random_state(self, generator: torch.Generator | None) -> tuple[torch.Generator, Tensor] | None:
        """Return the state of a generator if something has set it since the last draw: recording draws nothing."""
        generator = torch.default_generator if generator is None else generator
        state = generator.get_state()
        before = self._random_states.get(id(generator))
        if before is not None and torch.equal(state, before):
            return None
        self._random_states[id(generator)] = state
        return generator, state


class _ValueRead(Exception):
    """The construction looks at a value, which a tensor without memory does not have."""


def record(factory: Callable[[], Model]) -> tuple[Model, Recording]:
    """Run a factory with tensors that have no memory; return what it builds, and how.

    Raises:
        RefusedError: the construction depends on values of tensors.
    """
    recorder = _Recorder()
    try:
        with _whole_initializers(recorder), recorder:
            built = factory()
    except (_ValueRead, RuntimeError, NotImplementedError, TypeError) as error:
        if not isinstance(error, _ValueRead) and not re.search("[Mm]eta|subclass|storage|data pointer", str(error)):
            raise
        first_line = str(error).partition("\n")[0]
        raise RefusedError(
            f"The construction of the model depends on values of tensors ({first_line}), and nothing has "
            "values before the replay",
            key="strategy.init",
            value="replay",
            suggestion="Use strategy.init=whole or strategy.init=reset_parameters, or start from weights "
            "with run.init_from.",
        ) from None
    for module in [built] if isinstance(built, nn.Module) else built.values():
        _put_on_meta(module)
    return built, recorder.recording


@contextmanager
def _whole_initializers(recorder: _Recorder) -> Iterator[None]:
    """Record the functions of torch.nn.init as one operation each inside the block."""
    plain = {
        name: function
        for name, function in vars(init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }

    def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def initialize(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(tensor, _Hollow):
                return recorder.initialize(function, tensor, args, kwargs)
            return function(tensor, *args, **kwargs)

        return initialize

    for name, function in plain.items():
        setattr(init, name, recorded(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(init, name, function)


def _put_on_meta(model: nn.Module) -> None:
    """Replace the tensors of a model that have no memory by ordinary ones on `meta`; tied ones stay tied."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if isinstance(parameter, _Hollow):
                on_meta = parameters.setdefault(id(parameter), nn.Parameter(parameter.meta, parameter.requires_grad))
                parameters_of(module)[name] = on_meta
        for name, buffer in buffers_of(module).items():
            if isinstance(buffer, _Hollow):
                buffers_of(module)[name] = buffer.meta


def _tensors_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, values)
    return found


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    changed = []
    for number, argument in enumerate(arguments_of(function)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors_in(args[number] if number < len(args) else kwargs.get(argument.name))
    return changed


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, _Hollow) else torch.empty_like(tensor, device=_META)


def _memory_of(tensor: Tensor) -> int:
    return memory_of(tensor.untyped_storage())


def _is_whole_memory(tensor: Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return size == tensor.untyped_storage().nbytes() and (tensor.is_contiguous() or has_contiguous_rows(tensor))


def _place(tensor: Tensor) -> _Place:
    return _Place(
        _memory_of(tensor), tensor.untyped_storage().nbytes(), tuple(tensor.shape), tensor.stride(),
        int(tensor.storage_offset()), tensor.dtype,
    )  # fmt: skip


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor. Shapes: (num_bytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
