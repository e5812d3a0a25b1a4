"""`Module`: an object with parameters and other modules as attributes, and a method `forward` over tensors.

Nothing needs to be registered: every parameter or module that is an attribute belongs to the module. Parameters are
named by attribute paths (`features.0.weight`), as in PyTorch's state dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, overload

import numpy as np

from lathe.core.errors import FeedError, LatheError, ModelError, TraceError, UnsupportedError
from lathe.core.ir.graph import Array
from lathe.core.nn.mode import current_mode
from lathe.core.nn.parameter import Buffer, Parameter
from lathe.core.nn.tensor import Tensor, tensor


class Module:
    """The base class of layers and models. Subclasses set attributes in `__init__` and define `forward`.

    A call runs `forward`, eagerly on arrays or into the graph that is being traced. Errors name the path of the module
    that raised them. `training` switches dropout and batch normalization of eager runs to training mode.
    """

    training: bool = True
    device: str = ""  # see `to`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's computation, which subclasses define. NotImplementedError otherwise."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`. Arguments that are arrays are converted to tensors."""
        with _entered_call(self) as path:
            result = self.forward(*map(_as_tensor, args), **{name: _as_tensor(arg) for name, arg in kwargs.items()})
        for seen in _records.get():
            seen[path] = result
        return result

    # Parameters and submodules

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules among this module's attributes, as pairs of name and module."""
        return ((name, each) for name, each in vars(self).items() if isinstance(each, Module))

    def named_modules(self, prefix: str = "", seen: set[Module] | None = None) -> Iterator[tuple[str, Module]]:
        """Pairs of path and module: this module (path `prefix`) and all modules inside it, each once.

        `seen` has the modules to leave out; the call adds to it.
        """
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
        """Pairs of path and parameter, for all parameters and buffers in this module, each once."""
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
        """Copy parameters and buffers from `state`, such as the `parameters` of a training step, keeping their dtypes.

        LatheError for an array of another shape, and with `strict` for a name that only one of the two has. The module
        is unchanged then.
        """
        own = dict(self.named_state())
        unmatched = sorted(own.keys() ^ state.keys())
        if strict and unmatched:
            where = "is missing" if unmatched[0] in own else "is not in the module"
            raise LatheError(f"{_type(self)}: '{unmatched[0]}' {where} ({len(unmatched)} such names)")
        arrays = {name: np.asarray(state[name]) for name in own if name in state}
        for name, array in arrays.items():
            if array.shape != own[name].data.shape:
                expected = list(own[name].data.shape)
                raise LatheError(f"{_type(self)}: '{name}' has shape {list(array.shape)}, expected {expected}")
        for name, array in arrays.items():
            own[name].data = array.astype(own[name].data.dtype)

    # Modes and utilities

    def train(self, mode: bool = True) -> Self:
        """Set training mode (False: evaluation mode) in this module and all inside; returns this module.

        Dropout and batch normalization read it.
        """
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def to(self, device: str) -> Self:
        """Annotate all operators of this module with a device, such as "cuda:1"; "" removes the annotation.

        Modules inside with a device of their own keep it. Traced graphs contain the annotations; eager runs ignore
        them. Returns this module.
        """
        self.device = device
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Make all parameters in this module trainable, or freeze them (False); returns this module."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def apply(self, function: Callable[[Module], object]) -> Self:
        """Call `function` with each module inside, inner modules first, then with this module; returns this module."""
        for _, child in self.named_children():
            child.apply(function)
        function(self)
        return self

    def expect(self, holds: bool, expected: str, given: Tensor) -> None:
        """ModelError unless `holds`. It names this module, the `expected` type and the type of `given`."""
        if not holds:
            raise ModelError(f"expected {expected}, got {given.value.type}", where=_describe(self))

    def extra_repr(self) -> str:
        """The settings that `repr` shows in brackets."""
        return ""

    def __repr__(self) -> str:
        children = list(self.named_children())
        if not children:
            return f"{_type(self)}({self.extra_repr()})"
        lines = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in children]
        return f"{_type(self)}(\n  " + "\n  ".join(lines) + "\n)"


class _Numbered(Module):
    """The base class of containers whose modules are attributes named 0, 1, ..."""

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
        """A module by index, or a new container of the modules of a slice."""
        modules = list(self)
        return self._of(modules[index]) if isinstance(index, slice) else modules[index]

    def _of(self, modules: list[Module]) -> Self:
        raise NotImplementedError(f"{_type(self)} cannot be sliced")


class Sequential(_Numbered):
    """Runs modules one after the other, each on the result of the one before.

    They are named 0, 1, ..., or by the keys of a single dictionary of modules.
    """

    def __init__(self, *modules: Module | Mapping[str, Module]) -> None:
        named = modules[0] if len(modules) == 1 and isinstance(modules[0], Mapping) else {}
        for name, module in named.items():
            _set_child(self, name, module)
        super().__init__(module for module in modules if isinstance(module, Module))

    def _of(self, modules: list[Module]) -> Self:
        return type(self)(*modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class ModuleList(_Numbered):
    """A list of modules, which a parent's `forward` calls."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__(modules)

    def _of(self, modules: list[Module]) -> Self:
        return type(self)(modules)


class ModuleDict(Module):
    """Modules by name, which a parent's `forward` calls."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        _set_child(self, name, module)

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
    """Record the results of all modules that are called within the context, by path.

    The result of the outermost module has the empty path. Of several calls of a module the last one is recorded.
    """
    seen: dict[str, Any] = {}
    token = _records.set((*_records.get(), seen))
    try:
        yield seen
    finally:
        _records.reset(token)


_records: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("records", default=())
_stack: ContextVar[tuple[tuple[Module, str], ...]] = ContextVar(
    "stack", default=()
)  # the running calls with their paths


@contextmanager
def _entered_call(module: Module) -> Iterator[str]:
    """A context for a call of `module`: errors name the module, and nodes get its path as prefix of their names.

    Yields the path from the outermost module that is running: "" for that module itself, "?" if it has no path.
    """
    calls = _stack.get()
    path = next((name for name, each in calls[0][0].named_modules() if each is module), "?") if calls else ""
    token = _stack.set((*calls, (module, path)))
    writer = current_mode().writer
    scope, writer.scope = writer.scope, f"{path}." if path else ""
    device, writer.device = writer.device, module.device or writer.device
    try:
        yield path
    except (ModelError, FeedError) as error:
        if str(error).startswith("module "):
            raise  # it names a module inside this one already
        raise _with_module(error, module) from error
    finally:
        _stack.reset(token)
        writer.scope, writer.device = scope, device


def _with_module(error: LatheError, module: Module) -> LatheError:
    """An error of the same kind whose message begins with the name of the module."""
    kinds = (TraceError, UnsupportedError, FeedError, ModelError)
    kind = next(each for each in kinds if isinstance(error, each))
    return kind(f"{_describe(module)}: {error}")


def _describe(module: Module) -> str:
    """The name of a module in errors: `module 'features.0' (Conv2d(1, 6, kernel_size=(5, 5)))`."""
    path = next((path for each, path in _stack.get() if each is module), "")
    text = f"{_type(module)}({module.extra_repr()})" if module.extra_repr() else _type(module)
    return f"module '{path}' ({text})" if path else f"module {text}"


def _set_child(owner: Module, name: str, module: Module) -> None:
    """Make a module an attribute. ValueError for an empty name, one with a dot, or that of a class attribute."""
    if not name or "." in name or hasattr(type(owner), name):
        raise ValueError(f"{name!r} cannot name a module in a {_type(owner)}")
    setattr(owner, name, module)


def _type(module: Module) -> str:
    return type(module).__name__


def _as_tensor(argument: Any) -> Any:
    return tensor(argument) if isinstance(argument, np.ndarray) else argument
