"""`Module`: parameters and other modules as attributes, and `forward`, plain Python over tensors.

There is nothing to register: what is an attribute belongs to the module, and attribute paths name parameters
(`features.0.weight`), as in PyTorch's state dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, overload

import numpy as np

from core.errors import FeedError, LatheError, ModelError, TraceError, UnsupportedError
from core.ir.graph import Array
from core.nn.mode import current
from core.nn.parameter import Buffer, Parameter
from core.nn.tensor import Tensor, tensor


class Module:
    """A layer, or a whole model. Subclasses set attributes in `__init__` and define `forward`.

    A call runs `forward`: at once on arrays, or into the graph that is being traced. Errors name the path of the module
    they come from. `training` concerns dropout and batch normalization when run eagerly.
    """

    training: bool = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`; arrays among the arguments become tensors."""
        with _inside(self) as path:
            result = self.forward(*map(_as_tensor, args), **{name: _as_tensor(arg) for name, arg in kwargs.items()})
        for seen in _records.get():
            seen[path] = result
        return result

    # What belongs to it

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules among its attributes."""
        return ((name, each) for name, each in vars(self).items() if isinstance(each, Module))

    def named_modules(self, prefix: str = "", seen: set[Module] | None = None) -> Iterator[tuple[str, Module]]:
        """Itself and all modules inside it by path, each once."""
        seen = set() if seen is None else seen
        if self in seen:
            return
        seen.add(self)
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name, seen)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_state(self) -> Iterator[tuple[str, Parameter]]:
        """Parameters and buffers by path, each once."""
        seen: set[Parameter] = set()
        for prefix, module in self.named_modules():
            for name, each in vars(module).items():
                if isinstance(each, Parameter) and each not in seen:
                    seen.add(each)
                    yield f"{prefix}.{name}" if prefix else name, each

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, each) for name, each in self.named_state() if not isinstance(each, Buffer))

    def parameters(self) -> Iterator[Parameter]:
        return (each for _, each in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        return ((name, each) for name, each in self.named_state() if isinstance(each, Buffer))

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters and buffers, by path."""
        return {name: each.data.copy() for name, each in self.named_state()}

    def load_state_dict(self, state: Mapping[str, Array], strict: bool = True) -> None:
        """Take over parameters and buffers, from a trained step's `parameters`, say.

        LatheError, before anything has changed, for an array of another shape, and with `strict` for a name that only
        one side has.
        """
        own = dict(self.named_state())
        lonely = sorted(own.keys() ^ state.keys())
        if strict and lonely:
            where = "is missing" if lonely[0] in own else "is not in the module"
            raise LatheError(f"{_type(self)}: '{lonely[0]}' {where} ({len(lonely)} such names)")
        given = {name: np.asarray(state[name]) for name in own if name in state}
        for name, array in given.items():
            if array.shape != own[name].data.shape:
                expected = list(own[name].data.shape)
                raise LatheError(f"{_type(self)}: '{name}' has shape {list(array.shape)}, expected {expected}")
        for name, array in given.items():
            own[name].data = array.astype(own[name].data.dtype)

    # What it does

    def train(self, mode: bool = True) -> Self:
        """Let dropout drop and batch normalization look at the batch, when run eagerly."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze (False) or free all parameters."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def apply(self, function: Callable[[Module], object]) -> Self:
        """Call a function for all modules inside, then for this one."""
        for _, child in self.named_children():
            child.apply(function)
        function(self)
        return self

    def expect(self, holds: bool, expected: str, given: Tensor) -> None:
        """ModelError, naming this module, unless `holds`."""
        if not holds:
            raise ModelError(f"expected {expected}, got {given.value.type}", where=_describe(self))

    def extra_repr(self) -> str:
        """Its settings, as they stand in the brackets of `repr`."""
        return ""

    def __repr__(self) -> str:
        children = list(self.named_children())
        if not children:
            return f"{_type(self)}({self.extra_repr()})"
        lines = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in children]
        return f"{_type(self)}(\n  " + "\n  ".join(lines) + "\n)"


class _Numbered(Module):
    """Modules under the names 0, 1, ..."""

    def __init__(self, modules: Iterable[Module]) -> None:
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> Self:
        setattr(self, str(sum(1 for _ in self.named_children())), module)
        return self

    def __len__(self) -> int:
        return sum(1 for _ in self.named_children())

    def __iter__(self) -> Iterator[Module]:
        return (module for _, module in self.named_children())

    @overload
    def __getitem__(self, index: int) -> Module: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Module | Self:
        """A module, or some of them in a container of their own."""
        modules = list(self)
        return self._of(modules[index]) if isinstance(index, slice) else modules[index]

    def _of(self, modules: list[Module]) -> Self:
        raise NotImplementedError(f"{_type(self)} cannot be sliced")


class Sequential(_Numbered):
    """One module after the other; each takes what the one before gives. A dictionary gives them names."""

    def __init__(self, *modules: Module | Mapping[str, Module]) -> None:
        named = modules[0] if len(modules) == 1 and isinstance(modules[0], Mapping) else {}
        for name, module in named.items():
            _own(self, name, module)
        super().__init__(module for module in modules if isinstance(module, Module))

    def _of(self, modules: list[Module]) -> Self:
        return type(self)(*modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class ModuleList(_Numbered):
    """Modules for `forward` to go through as it likes."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__(modules)

    def _of(self, modules: list[Module]) -> Self:
        return type(self)(modules)


class ModuleDict(Module):
    """Modules by name, for `forward` to choose from."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        _own(self, name, module)

    def __getitem__(self, name: str) -> Module:
        return dict(self.named_children())[name]

    def __len__(self) -> int:
        return sum(1 for _ in self.named_children())

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.named_children())

    def items(self) -> Iterator[tuple[str, Module]]:
        return self.named_children()


@contextmanager
def recorded() -> Iterator[dict[str, Any]]:
    """What every module inside a call returns, by path (its last call where there are several); the model's own result
    is under the empty path."""
    seen: dict[str, Any] = {}
    token = _records.set((*_records.get(), seen))
    try:
        yield seen
    finally:
        _records.reset(token)


_records: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("records", default=())
_stack: ContextVar[tuple[tuple[Module, str], ...]] = ContextVar("stack", default=())  # the calls, with their paths


@contextmanager
def _inside(module: Module) -> Iterator[str]:
    """Note the call for errors and for the names of nodes; gives the module's path from the outermost one."""
    calls = _stack.get()
    path = next((name for name, each in calls[0][0].named_modules() if each is module), "?") if calls else ""
    token = _stack.set((*calls, (module, path)))
    writer = current().writer
    scope, writer.scope = writer.scope, f"{path}." if path else ""
    try:
        yield path
    except (ModelError, FeedError) as error:
        if str(error).startswith("module "):
            raise  # a module inside this one has said where
        raise _located(error, module) from error
    finally:
        _stack.reset(token)
        writer.scope = scope


def _located(error: LatheError, module: Module) -> LatheError:
    """The error with the place of the innermost module around it."""
    kinds = (TraceError, UnsupportedError, FeedError, ModelError)
    kind = next(each for each in kinds if isinstance(error, each))
    return kind(f"{_describe(module)}: {error}")


def _describe(module: Module) -> str:
    """How errors name a module: `module 'features.0' (Conv2d(1, 6, kernel_size=(5, 5)))`."""
    path = next((path for each, path in _stack.get() if each is module), "")
    text = f"{_type(module)}({module.extra_repr()})" if module.extra_repr() else _type(module)
    return f"module '{path}' ({text})" if path else f"module {text}"


def _own(owner: Module, name: str, module: Module) -> None:
    """Make a module an attribute. ValueError for a name that would break paths, or hide what all modules have."""
    if not name or "." in name or hasattr(type(owner), name):
        raise ValueError(f"{name!r} cannot name a module in a {_type(owner)}")
    setattr(owner, name, module)


def _type(module: Module) -> str:
    return type(module).__name__


def _as_tensor(argument: Any) -> Any:
    return tensor(argument) if isinstance(argument, np.ndarray) else argument
