"""`OpDef`: everything cheap about an operator in one declaration, and the table of all of them.

An operator is a subclass of `OpDef` (usually of a family base class, so that it takes a few lines) marked with
`@register`. It declares its inputs, its attributes with defaults, the inference of output types, a NumPy reference and,
where it applies, a scalar expression, a gradient and how rows of a batch move through it. The reference is the
oracle of every test, folds constants, and runs what has no compiled kernel.

Conventions
- Names, inputs and attributes are those of the newest ONNX opset; the importer brings older forms to it.
- `params` names inputs that hold parameters, not data (Reshape's shape, ReduceSum's axes). When their value is known
  at compile time the pipeline moves it into the attribute of that name, and the input is dropped. `Infer.param` and
  `Call.param` read either place. Only those that `symbolic` lists are ever symbolic dimensions there: another one that
  holds a symbol counts as not known, and stays an input.
- Every operator says how it is differentiated: `slopes`, `gradient` or `definition`, or why not: `zero_gradient`,
  `no_gradient`. What they return is graph, never arrays, so gradients can be differentiated again.
- `shape_arithmetic = True`: the reference also works on object arrays of dimensions, so the value of a shape
  computation is known at compile time although its symbols are not.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, TypeVar

import numpy as np

from core.errors import FeedError, ModelError, UnsupportedError
from core.ir.dim import OPEN, SymDim, evaluate, symbol
from core.ir.graph import Array, Graph, Node, Value
from core.ir.ratio import has_ratios
from core.ir.types import Dim, DType, OptionalType, SequenceType, TensorType, ValueType
from core.ops.scalar import Operand, ScalarOps

if TYPE_CHECKING:
    from core.ops.backward import Backward, Rewrite, Slope
    from core.ops.terms import Term

Runtime: TypeAlias = Any  # what the reference executor moves: an ndarray, a list (sequence) or None (empty optional)


@dataclass(frozen=True, slots=True)
class Required:
    """Marks an attribute without a default."""

    kind: str = "value"


@dataclass(frozen=True, slots=True)
class Mixes:
    """The answer of `OpDef.rows` when an output mixes rows of different callers; `reason` says how."""

    reason: str


RowAxis: TypeAlias = int | None


class NodeView:
    """What an operator may ask about the node it is applied in: attributes, defaults filled in."""

    def __init__(self, op: OpDef, node: Node) -> None:
        self.op = op
        self.node = node

    def attr(self, name: str) -> Any:
        """The attribute's value, or its declared default; ModelError when a required one is missing."""
        if name in self.node.attrs:
            return self.node.attrs[name]
        default = self.op.attrs.get(name)
        if isinstance(default, Required):
            self.fail(f"attribute '{name}' is required")
        return default

    def has_input(self, index: int) -> bool:
        return self.node.input(index) is not None

    def agree(self, one: Dim, other: Dim) -> bool:
        """Whether two extents that must be equal may be equal: numbers must be, a symbol may be any number. Type rules
        ask here, so that `core.ops.meeting` finds which extents an operator needs to be equal."""
        return one == other or not (isinstance(one, int) and isinstance(other, int))

    def broadcast(self, dims: Sequence[Dim]) -> None:
        """Note that these extents broadcast to each other: all of them are equal, or 1."""

    def fail(self, message: str) -> NoReturn:
        """Raise a ModelError that names the node."""
        raise ModelError(message, where=describe(self.node))

    def unsupported(self, message: str) -> NoReturn:
        raise UnsupportedError(message, where=describe(self.node))


class Infer(NodeView):
    """The view given to `OpDef.infer` and `OpDef.rows`: types of the inputs, and values as far as they are known.

    `row_symbol` is the dimension that counts the rows callers bring together.
    """

    def __init__(self, op: OpDef, node: Node, known: Mapping[Value, Array], row_symbol: str = "n") -> None:
        super().__init__(op, node)
        self.known = known
        self.row_symbol = row_symbol

    def tensor(self, index: int) -> TensorType:
        """The type of an input that must be present and a tensor."""
        value = self.node.input(index)
        if value is None:
            return self.fail(f"input {index} ({self.op.input_name(index)}) is missing")
        if not isinstance(value.type, TensorType):
            return self.fail(f"input {index} ({self.op.input_name(index)}) is {value.type}, expected a tensor")
        return value.type

    def dtype(self, index: int) -> DType:
        return self.tensor(index).dtype

    def shape(self, index: int) -> tuple[Dim, ...] | None:
        """The shape, or None when the rank is not known."""
        return self.tensor(index).shape

    def value(self, index: int) -> Array | None:
        """The input's elements if known: a constant, or an object array of dimensions; else None."""
        array = self.ratios(index)
        return None if array is None or has_ratios(array) else array

    def ratios(self, index: int) -> Array | None:
        """As `value`; of an input in float32 perhaps an object array of ratios."""
        value = self.node.input(index)
        return None if value is None else self.known.get(value)

    def param(self, name: str) -> tuple[Any, ...] | None:
        """A parameter (see module docstring) as a flat tuple; None when absent or not known."""
        if self.node.attrs.get(name) is not None:
            return _flat(self.node.attrs[name])
        value = self.value(self.op.params[name])
        return None if value is None else self.op.param_of(name, value)

    def has_param(self, name: str) -> bool:
        """Whether the parameter was given at all, known or not."""
        return self.node.attrs.get(name) is not None or self.has_input(self.op.params[name])

    def fresh_dim(self, label: str) -> Dim:
        """A new symbol for a dimension that depends on data; the same one each time this node is inferred."""
        return symbol(f"{OPEN}{_identifier(self.node.outputs[0].name)}_{label}")


class _Shown(Infer):
    """The view of `infer` while a model runs: the shapes of tensors, and the values of parameters, are known. What does
    not fit then is what was fed."""

    def __init__(self, op: OpDef, node: Node, inputs: Sequence[Runtime]) -> None:
        values = zip(node.inputs, inputs, strict=False)
        self._arrays = {v: array for v, array in values if v is not None and isinstance(array, np.ndarray)}
        parameters = (node.input(index) for index in op.params.values())
        super().__init__(op, node, {v: self._arrays[v] for v in parameters if v in self._arrays})

    def tensor(self, index: int) -> TensorType:
        type_, value = super().tensor(index), self.node.input(index)
        return TensorType(type_.dtype, self._arrays[value].shape) if value in self._arrays else type_

    def fail(self, message: str) -> NoReturn:
        raise FeedError(f"{describe(self.node)}: {message}")


def check_shown(op: OpDef, node: Node, inputs: Sequence[Runtime]) -> None:
    """Have `infer` check these inputs where it could not do so before: extents that the types of the node left open,
    and parameters that are no constants.

    A symbol in a type may turn out to be any number, and NumPy would broadcast some of the wrong ones. FeedError when
    the inputs do not fit the operator.
    """
    if not op.params and not op.agreeing:
        return
    given = any(node.attrs.get(name) is None and node.input(index) for name, index in op.params.items())
    if given or (op.agreeing and any(map(_is_open, node.inputs, inputs))):
        op.infer(_Shown(op, node, inputs))


def _is_open(value: Value | None, array: Runtime) -> bool:
    """Whether the type of a value says less, or other, than the shape of the array."""
    return value is not None and isinstance(value.type, TensorType) and value.type.shape != np.shape(array)


class Call(NodeView):
    """The view given to `OpDef.reference`: attributes, parameters as arrays, and nested graphs to run."""

    def __init__(
        self,
        op: OpDef,
        node: Node,
        inputs: Sequence[Runtime],
        run_graph: Callable[..., list[Runtime]] | None = None,
        symbols: Mapping[str, int] | None = None,
        check: Callable[[], object] = bool,
        fed: bool = False,
    ) -> None:
        """`check` raises once the run is to end: what is open-ended calls it again and again. `fed`: some inputs depend
        on what a caller feeds."""
        super().__init__(op, node)
        self._fed = fed
        self.inputs = inputs
        self.check = check
        self._run_graph = run_graph
        self._symbols = symbols or {}

    def fail(self, message: str) -> NoReturn:
        """Inference has accepted the node, so what does not fit is what was fed: FeedError. ModelError where nothing
        was: then no run can succeed."""
        if self._fed:
            raise FeedError(f"{describe(self.node)}: {message}")
        super().fail(message)

    def shown(self) -> Infer:
        """The view that type inference has, to ask for the shapes that the inputs of this run lead to."""
        return _InCall(self)

    def param(self, name: str) -> tuple[int, ...] | None:
        """A parameter as a flat tuple of numbers; None when it was not given."""
        if self.node.attrs.get(name) is not None:
            flat = _flat(self.node.attrs[name])
            try:
                return tuple(evaluate(v, self._symbols) if isinstance(v, SymDim) and self._symbols else v for v in flat)
            except KeyError as error:
                self.fail(f"'{name}' is [{', '.join(map(str, flat))}]: {error.args[0]}")
        index = self.op.params[name]
        array = self.inputs[index] if index < len(self.inputs) else None
        return None if array is None else _flat(array)

    def declared_shape(self, index: int = 0) -> tuple[int, ...] | None:
        """The inferred shape of an output in numbers; None when it depends on symbols that nothing has shown yet."""
        type_ = self.node.outputs[index].type
        try:
            return type_.evaluate(self._symbols) if isinstance(type_, TensorType) and type_.shape is not None else None
        except KeyError:
            return None

    def run_graph(self, body: Graph, inputs: Sequence[Runtime]) -> list[Runtime]:
        """Execute a nested graph with the given inputs; captured values are bound already."""
        if self._run_graph is None:
            return self.fail("this operator cannot run here: it has a nested graph")
        return self._run_graph(body, inputs)


class _InCall(Infer):
    """The view of `infer` for a reference: what fails there fails as the reference does."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.op, call.node, {})
        self._call = call

    def fail(self, message: str) -> NoReturn:
        self._call.fail(message)


class OpDef:
    """One operator. Subclass, fill in, and mark with `@register`; instances hold no state."""

    name: ClassVar[str] = ""
    inputs: ClassVar[str] = "x"  # names; "?" marks optional, a leading "*" the variadic rest
    outputs: ClassVar[str] = "y"
    attrs: ClassVar[Mapping[str, Any]] = {}  # attribute -> default, or Required()
    params: ClassVar[Mapping[str, int]] = {}  # parameter inputs: attribute name -> input index
    symbolic: ClassVar[Collection[str]] = ()  # those of `params` that are extents, or places along an axis
    domain: ClassVar[str] = ""  # ONNX domain; "lathe" for operators that only passes make
    shape_arithmetic: ClassVar[bool] = False
    pure: ClassVar[bool] = True  # False: not to be folded, merged or reordered (random numbers)
    commutative: ClassVar[bool] = False
    shaped_by: ClassVar[int | None] = None  # of an elementwise operator: the input that no other may be larger than
    open_ended: ClassVar[bool] = False  # data, and not their shapes, decide how long it takes; see `may_not_end`
    kernel_dtypes: ClassVar[Collection[DType]] = (DType.FLOAT32,)  # element types that `write_kernel` knows
    agreeing: ClassVar[bool] = False  # `infer` checks extents that its reference relies on; see `check_shown`
    rounds_freely: ClassVar[bool] = (
        False  # ONNX leaves last bits open: sums in any order, functions nobody rounds exactly
    )
    jumps: ClassVar[bool] = False  # it has slopes or a gradient, and yet places where a small change changes much
    zero_gradient: ClassVar[str] = ""  # why small changes of the inputs do not change the outputs
    no_gradient: ClassVar[str] = ""  # why there is no gradient although there could be one

    def infer(self, c: Infer) -> Sequence[ValueType]:
        """Types of the outputs. ModelError (through `c.fail`) when inputs do not fit."""
        raise NotImplementedError(f"{self.name} has no type inference")

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """Dimensions that must not be negative for the types of `infer` to be right, besides those in the types."""
        return ()

    def known(self, c: Infer) -> Array | Sequence[Array] | None:
        """The elements of the output, or of all outputs, where more than the values of the inputs gives them: the types
        of the inputs, as for Shape, or a body."""
        return None

    def reference(self, c: Call, *inputs: Runtime) -> Runtime:
        """The outputs for NumPy inputs (None where absent): one array, or a tuple for several outputs."""
        raise NotImplementedError(f"{self.name} has no reference")

    def quickly(self, c: NodeView) -> Callable[..., Runtime] | None:
        """A function of the inputs, for runs that take microseconds: the reference's result for what its checks let
        pass, in new memory and of the declared type, computed without floating-point warnings. It may raise anything
        for other inputs: then the reference runs, and says what is wrong. None where nothing is gained."""
        return None

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        """One element of the output from one element of each input. Only for elementwise operators."""
        raise NotImplementedError(f"{self.name} is not elementwise")

    def write_kernel(self, k: Any, spec: Any) -> None:
        """Write native code in the vector language; for operators from outside this package (docs/custom-operators.md).

        `k` is a core.codegen.lang.Kernel whose operands are the inputs that are present, then the outputs; `spec` a
        core.kernels.catalog.custom.CustomSpec, which knows their types and the node's attributes.
        """
        raise NotImplementedError(f"{self.name} has no kernel of its own")

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | Mixes:
        """How rows of independent callers move through the operator.

        `axes[i]` is the axis of input i along which callers' rows lie, None where the input is the same for all.
        Answers the axis per output, or `Mixes`. The default is safe: nothing row-wise may enter. Parameters that are
        computed from the number of rows, sizes and ranks need no thought: `core.passes.rows` looks at those itself.
        """
        if all(axis is None for axis in axes):
            return [None] * len(c.node.outputs)
        return Mixes(f"{self.name} has no rule that keeps rows apart")

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        """The derivative of an elementwise output with respect to each input, at every element."""
        raise NotImplementedError(f"{self.name} has no slopes")

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """The gradients with respect to the inputs (None: zero; missing at the end: zero), given those with respect to
        the outputs. They are summed to the inputs' shapes where those were broadcast."""
        raise NotImplementedError(f"{self.name} has no gradient")

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """The outputs in terms of other operators, whose gradients then make this one's where it has no `gradient`.
        `core.passes.definitions` says of which operators it takes the node's place in compiled models."""
        raise NotImplementedError(f"{self.name} has no definition")

    def param_of(self, name: str, value: Array) -> tuple[Any, ...] | None:
        """The known value of an input as the parameter `name`; None where symbols make it one that only a run shows."""
        flat = _flat(value)
        return flat if name in self.symbolic or not any(isinstance(item, SymDim) for item in flat) else None

    @property
    def differentiation(self) -> str:
        """How this operator is differentiated: "slopes", "gradient", "definition", "zero" or "none"; "" where it does
        not say. The most derived class that does so decides; nothing of ONNX's ml domain is trained by gradients."""
        for cls in type(self).__mro__:
            found = [way for member, way in _DIFFERENTIATION.items() if member in cls.__dict__]
            if found and cls is not OpDef:
                return found[0]
        return "none" if self.domain == ML else ""

    @property
    def is_elementwise(self) -> bool:
        return type(self).scalar is not OpDef.scalar

    @property
    def has_kernel(self) -> bool:
        return type(self).write_kernel is not OpDef.write_kernel

    def input_name(self, index: int) -> str:
        names = [name.strip(" ?*") for name in self.inputs.split(",")]
        return names[min(index, len(names) - 1)]

    @property
    def arity(self) -> tuple[int, int | None]:
        """Least and greatest number of inputs; None for no upper limit."""
        return _arity(self.inputs)


@cache
def _arity(inputs: str) -> tuple[int, int | None]:
    names = [name.strip() for name in inputs.split(",") if name.strip()]
    variadic = bool(names) and names[-1].startswith("*")
    fixed = names[:-1] if variadic else names
    required = sum(not name.endswith("?") for name in fixed)
    return required, None if variadic else len(names)


ML = "ai.onnx.ml"

# What a class declares -> how its operator is differentiated.
_DIFFERENTIATION = {
    "slopes": "slopes", "gradient": "gradient", "zero_gradient": "zero", "no_gradient": "none",
    "definition": "definition",
}  # fmt: skip

_REGISTRY: dict[str, OpDef] = {}
_REVISIONS: dict[str, str] = {}  # operators from outside this package -> a digest of their source
_EVERYWHERE: set[str] = set()  # of those, the ones that child processes register themselves
_OpClass = TypeVar("_OpClass", bound=type[OpDef])


def register(cls: _OpClass) -> _OpClass:
    """Class decorator: add the operator to the table. The name defaults to the class's; duplicates are refused."""
    if "name" not in cls.__dict__:
        cls.name = cls.__name__
    if cls.name in _REGISTRY:
        raise ValueError(f"operator {cls.name} is registered twice")
    cls.attrs = {name: _as_in_a_file(default) for name, default in cls.attrs.items()}
    _REGISTRY[cls.name] = cls()
    return cls


def _as_in_a_file(default: Any) -> Any:
    """ONNX keeps attributes as float32, those that it leaves out as well: 0.2 is 0.20000000298."""
    return float(np.float32(default)) if isinstance(default, float) else default


def extend(cls: type[OpDef], revision: str) -> None:
    """Add an operator from outside this package. Defining the same class again, as in a notebook, replaces it."""
    known = _REGISTRY.get(cls.name)
    if known is not None and (type(known).__module__, type(known).__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"operator {cls.name} is registered twice: {type(known).__qualname__} has the name already")
    _REGISTRY[cls.name] = cls()
    _REVISIONS[cls.name] = revision


def found_everywhere(names: Iterable[str]) -> None:
    """Note that child processes know these operators from outside the package, too."""
    _EVERYWHERE.update(names)


def are_everywhere() -> bool:
    """Whether child processes know all operators that this process knows."""
    return _REVISIONS.keys() <= _EVERYWHERE


def revisions(names: Iterable[str] | None = None) -> str:
    """The digests of all operators from outside this package, or of those among `names`: compiled code depends on
    them. Empty when there are none."""
    chosen = _REVISIONS if names is None else _REVISIONS.keys() & set(names)
    return " ".join(f"{name}@{_REVISIONS[name]}" for name in sorted(chosen))


def get(name: str) -> OpDef:
    """The operator of this name; UnsupportedError when Lathe has none."""
    if name not in _REGISTRY:
        raise UnsupportedError(f"operator {name} is not implemented")
    return _REGISTRY[name]


def find(name: str) -> OpDef | None:
    return _REGISTRY.get(name)


def names() -> list[str]:
    """All registered operators, sorted."""
    return sorted(_REGISTRY)


def describe(node: Node) -> str:
    """How errors name a node: `node 'conv1' (Conv)`."""
    label = node.name or (node.outputs[0].name if node.outputs else "?")
    return f"node '{label}' ({node.op})"


def may_not_end(nodes: Iterable[Node]) -> bool:
    """Whether data can make one of the nodes, or of those in their bodies, go on for ever, or as good as: a branch may
    only where one of its bodies may, and a scan, too, since it ends with what it reads."""
    return any(get(node.op).open_ended or may_not_end(n for b in node.subgraphs for n in b.nodes) for node in nodes)


def _flat(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return tuple(value.ravel().tolist())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _identifier(name: str) -> str:
    """The name as a symbol can begin; where characters have to be replaced, a checksum keeps different names apart."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    if plain != name:
        plain = f"{plain}_{zlib.crc32(name.encode(errors='surrogatepass')):x}"
    return plain if plain.isidentifier() else f"v{plain}"


__all__ = [
    "Call", "Infer", "Mixes", "NodeView", "OpDef", "OptionalType", "Required", "RowAxis", "Runtime", "SequenceType",
    "are_everywhere", "describe", "extend", "find", "found_everywhere", "get", "names", "register", "revisions",
]  # fmt: skip
