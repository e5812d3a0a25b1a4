"""`OpDef`: the declaration of an operator, and the registry of all operators.

An operator is a subclass of `OpDef` (usually of a family base class, so that it takes a few lines) marked with
`@register`. It declares its inputs, its attributes with defaults, the inference of output types and a NumPy reference.
Where they apply, it also declares a scalar expression, a gradient, and how the rows of a batch move through it. The
reference is the oracle of every test, folds constants, and runs nodes without a compiled kernel.

Conventions
- Names, inputs and attributes are those of the newest ONNX opset; the importer converts older forms.
- `params` names inputs that hold parameters, not data (Reshape's shape, ReduceSum's axes). If their value is known at
  compile time, the pipeline moves it into the attribute of that name and drops the input. `Infer.param` and
  `Call.param` read either place. Only parameters listed in `symbolic` may hold symbolic dimensions in an attribute. Any
  other parameter with a symbol counts as unknown and stays an input.
- Every operator outside ai.onnx.ml declares how it is differentiated (`slopes`, `gradient` or `definition`), or why it
  is not (`zero_gradient`, `no_gradient`). These functions add nodes to a graph and never compute with arrays, so that
  gradients can be differentiated again.
- `shape_arithmetic = True`: the reference also computes on object arrays of dimensions. So the result of a shape
  computation is known at compile time as an expression of symbols.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, TypeVar

import numpy as np

from lathe.core.errors import FeedError, ModelError, UnsupportedError
from lathe.core.ir.dim import DATA_DEPENDENT_PREFIX, SymDim, evaluate, symbol
from lathe.core.ir.graph import Array, Graph, Node, Value
from lathe.core.ir.ratio import has_ratios
from lathe.core.ir.types import Dim, DType, OptionalType, SequenceType, TensorType, ValueType
from lathe.core.ops.opdef.scalar import Operand, ScalarOps

if TYPE_CHECKING:
    from lathe.core.ops.opdef.backward import Backward, Rewrite, Slope
    from lathe.core.ops.opdef.terms import Term

RuntimeValue: TypeAlias = Any  # a value of the reference runner: an ndarray, a list (sequence) or None (empty optional)


@dataclass(frozen=True, slots=True)
class Required:
    """Stands in `OpDef.attrs` for the default of an attribute that must be given; `kind` describes its values."""

    kind: str = "value"


@dataclass(frozen=True, slots=True)
class MixesRows:
    """The result of `OpDef.rows` if an output may mix rows of different callers; `reason` says how."""

    reason: str


RowAxis: TypeAlias = int | None


class NodeView:
    """An operator's view of a node that uses it: the attributes, with defaults for absent ones."""

    def __init__(self, op: OpDef, node: Node) -> None:
        self.op = op
        self.node = node

    def attr(self, name: str) -> Any:
        """The node's value of attribute `name`, otherwise the operator's default; None if neither exists.

        ModelError (`fail`) if a required attribute is missing.
        """
        if name in self.node.attrs:
            return self.node.attrs[name]
        default = self.op.attrs.get(name)
        if isinstance(default, Required):
            self.fail(f"attribute '{name}' is required")
        return default

    def has_input(self, index: int) -> bool:
        return self.node.input(index) is not None

    def agree(self, one: Dim, other: Dim) -> bool:
        """Whether two extents that must be equal can be equal: two numbers if they are equal, otherwise always.

        Type rules compare extents by this method, so that `lathe.core.ops.opdef.equal_extents` can record which extents
        an operator needs to be equal.
        """
        return one == other or not (isinstance(one, int) and isinstance(other, int))

    def broadcast(self, dims: Sequence[Dim]) -> None:
        """A hook of subclasses that type rules call for extents that must broadcast (be equal, or 1): does nothing."""

    def fail(self, message: str) -> NoReturn:
        """Raises a ModelError that names the node. Views of a run raise FeedError instead (`Call`, `_RunInfer`)."""
        raise ModelError(message, where=describe(self.node))

    def unsupported(self, message: str) -> NoReturn:
        raise UnsupportedError(message, where=describe(self.node))


class Infer(NodeView):
    """The view of a node for `OpDef.infer` and `OpDef.rows`: the types of the inputs, and elements that are known.

    `known` maps values to their elements (`infer_graph`). `row_symbol` is the symbol of the number of rows in a batch.
    """

    def __init__(self, op: OpDef, node: Node, known: Mapping[Value, Array], row_symbol: str = "n") -> None:
        super().__init__(op, node)
        self.known = known
        self.row_symbol = row_symbol

    def tensor(self, index: int) -> TensorType:
        """The type of input `index`; ModelError unless it is present and a tensor."""
        value = self.node.input(index)
        if value is None:
            return self.fail(f"input {index} ({self.op.input_name(index)}) is missing")
        if not isinstance(value.type, TensorType):
            return self.fail(f"input {index} ({self.op.input_name(index)}) is {value.type}, expected a tensor")
        return value.type

    def dtype(self, index: int) -> DType:
        return self.tensor(index).dtype

    def shape(self, index: int) -> tuple[Dim, ...] | None:
        """The shape of input `index`, None if its rank is not known. ModelError unless it is present and a tensor."""
        return self.tensor(index).shape

    def value(self, index: int) -> Array | None:
        """The elements of input `index`, as numbers or an object array with dimensions.

        None if the input is absent, its elements are not known, or one of them is a ratio.
        """
        array = self.ratios(index)
        return None if array is None or has_ratios(array) else array

    def ratios(self, index: int) -> Array | None:
        """Like `value`, but for a float32 input it may be an object array with ratios of dimensions (`Ratio`)."""
        value = self.node.input(index)
        return None if value is None else self.known.get(value)

    def param(self, name: str) -> tuple[Any, ...] | None:
        """The operator's parameter `name`, from the attribute or a known input, as a flat tuple.

        None if it is absent or not known, or if a known input contains symbols that the operator does not accept
        (`OpDef.param_of`).
        """
        if self.node.attrs.get(name) is not None:
            return _flat(self.node.attrs[name])
        value = self.value(self.op.params[name])
        return None if value is None else self.op.param_of(name, value)

    def has_param(self, name: str) -> bool:
        """Whether the parameter is present, known or not."""
        return self.node.attrs.get(name) is not None or self.has_input(self.op.params[name])

    def fresh_dim(self, label: str) -> Dim:
        """A symbol for a data-dependent dimension: the same at every inference.

        It is named after the node's first output and `label`.
        """
        return symbol(f"{DATA_DEPENDENT_PREFIX}{_identifier(self.node.outputs[0].name)}_{label}")


class _RunInfer(Infer):
    """The view for `infer` during a run: all shapes and parameters are known, and errors are errors of the feeds."""

    def __init__(self, op: OpDef, node: Node, inputs: Sequence[RuntimeValue]) -> None:
        values = zip(node.inputs, inputs, strict=False)
        self._arrays = {v: array for v, array in values if v is not None and isinstance(array, np.ndarray)}
        parameters = (node.input(index) for index in op.params.values())
        super().__init__(op, node, {v: self._arrays[v] for v in parameters if v in self._arrays})

    def tensor(self, index: int) -> TensorType:
        type_, value = super().tensor(index), self.node.input(index)
        return TensorType(type_.dtype, self._arrays[value].shape) if value in self._arrays else type_

    def fail(self, message: str) -> NoReturn:
        raise FeedError(f"{describe(self.node)}: {message}")


def check_run_inputs(op: OpDef, node: Node, inputs: Sequence[RuntimeValue]) -> None:
    """Runs `infer` on the inputs of a run, to check extents that the types leave open, and computed parameters.

    A symbol in a type may be any number in a run, and NumPy would silently broadcast some wrong ones. FeedError if the
    inputs do not fit the operator. `infer` runs only if an input holds a parameter, or if the operator is `agreeing`
    and the shape of an input is not exactly its type's.
    """
    if not op.params and not op.agreeing:
        return
    computed = any(node.attrs.get(name) is None and node.input(index) for name, index in op.params.items())
    if computed or (op.agreeing and any(map(_differs_from_type, node.inputs, inputs))):
        op.infer(_RunInfer(op, node, inputs))


def _differs_from_type(value: Value | None, array: RuntimeValue) -> bool:
    """Whether the declared shape of a value is not exactly the shape of the array, such as one with symbols."""
    return value is not None and isinstance(value.type, TensorType) and value.type.shape != np.shape(array)


class Call(NodeView):
    """The view of a node for `OpDef.reference`: attributes, parameters as numbers, and nested graphs to run."""

    def __init__(
        self,
        op: OpDef,
        node: Node,
        inputs: Sequence[RuntimeValue],
        run_graph: Callable[..., list[RuntimeValue]] | None = None,
        symbols: Mapping[str, int] | None = None,
        check: Callable[[], object] = bool,
        is_fed: Callable[[], bool] = bool,
    ) -> None:
        """`check` raises when the run must stop; open-ended operators call it repeatedly.

        `run_graph` returns the outputs of a nested graph for its inputs; None where no graph can run. `symbols` has the
        values of symbols, empty in inference. `is_fed` says whether some inputs depend on the feeds of the run; it is
        called only for an error.
        """
        super().__init__(op, node)
        self._is_fed = is_fed
        self.inputs = inputs
        self.check = check
        self._run_graph = run_graph
        self._symbols = symbols or {}

    def fail(self, message: str) -> NoReturn:
        """Raises FeedError, since inference has accepted the node, so the feeds must be wrong.

        ModelError if no input depends on the feeds: then no run can succeed.
        """
        if self._is_fed():
            raise FeedError(f"{describe(self.node)}: {message}")
        super().fail(message)

    def shown(self) -> Infer:
        """The node as `Infer`, for shape rules that the reference shares with `infer`; no values are known in it."""
        return _CallInfer(self)

    def param(self, name: str) -> tuple[int, ...] | None:
        """A parameter, from attribute or input, as a flat tuple of numbers; None if it is absent.

        In inference, where symbols have no values, it may contain dimensions. In a run, FeedError (`fail`) if a symbol
        has no value.
        """
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
        """The inferred shape of output `index` in numbers.

        None if it contains symbols that are not known yet, if the rank is not known, or if the output is no tensor.
        """
        type_ = self.node.outputs[index].type
        try:
            return type_.evaluate(self._symbols) if isinstance(type_, TensorType) and type_.shape is not None else None
        except KeyError:
            return None

    def run_graph(self, body: Graph, inputs: Sequence[RuntimeValue]) -> list[RuntimeValue]:
        """The outputs of a nested graph for these inputs; captured values are bound already.

        An error (`fail`) where the caller of the reference cannot run graphs, as in inference.
        """
        if self._run_graph is None:
            return self.fail("this operator cannot run here: it has a nested graph")
        return self._run_graph(body, inputs)


class _CallInfer(Infer):
    """The view of `infer` inside a reference: errors are raised as errors of the reference."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.op, call.node, {})
        self._call = call

    def fail(self, message: str) -> NoReturn:
        self._call.fail(message)


class OpDef:
    """One operator: a subclass sets the class attributes, overrides methods, and is marked with `@register`.

    Instances hold no state. Methods without a default raise NotImplementedError unless a subclass overrides them.
    """

    name: ClassVar[str] = ""
    inputs: ClassVar[str] = "x"  # comma-separated names; a trailing "?" marks an optional input, a leading "*" the rest
    outputs: ClassVar[str] = "y"
    attrs: ClassVar[Mapping[str, Any]] = {}  # attribute -> default, or Required()
    params: ClassVar[Mapping[str, int]] = {}  # parameter inputs: attribute name -> input index
    symbolic: ClassVar[Collection[str]] = ()  # the `params` that are extents, or indices along an axis
    domain: ClassVar[str] = ""  # ONNX domain; "lathe" for operators that only passes emit
    shape_arithmetic: ClassVar[bool] = False
    pure: ClassVar[bool] = True  # False: must not be folded, merged or reordered (random numbers)
    commutative: ClassVar[bool] = False
    shaped_by: ClassVar[int | None] = None  # elementwise operators: the input to whose shape all others broadcast
    open_ended: ClassVar[bool] = False  # the running time depends on data, not on shapes; see `may_run_forever`
    kernel_dtypes: ClassVar[Collection[DType]] = (DType.FLOAT32,)  # element types that `write_kernel` covers
    reads_narrow: ClassVar[bool] = False  # float16 and bfloat16 inputs stay: the operator itself computes in float32
    agreeing: ClassVar[bool] = False  # the reference relies on extents that `infer` checks; see `check_run_inputs`
    rounds_freely: ClassVar[bool] = False  # ONNX leaves the last bits undefined: sums in any order, transcendentals
    jumps: ClassVar[bool] = False  # discontinuous somewhere, although it has slopes or a gradient
    zero_gradient: ClassVar[str] = ""  # the reason why the gradient is zero (almost) everywhere
    no_gradient: ClassVar[str] = ""  # the reason why no gradient is implemented

    def infer(self, c: Infer) -> Sequence[ValueType]:
        """The types of all outputs, of which a node may have fewer. ModelError (`c.fail`) if the inputs do not fit."""
        raise NotImplementedError(f"{self.name} has no type inference")

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """Dimensions that must be 0 or more for the types of `infer` to be right, besides the extents in those types.

        Empty by default.
        """
        return ()

    def known(self, c: Infer) -> Array | Sequence[Array] | None:
        """The elements of the output, or of all outputs, if inference knows them; otherwise None.

        Only for operators that derive them from more than the input values: from input types, as Shape does, or from a
        body.
        """
        return None

    def reference(self, c: Call, *inputs: RuntimeValue) -> RuntimeValue:
        """The outputs for NumPy inputs (None where absent): one array, or a tuple for several outputs.

        They may be views of the inputs, also read-only ones. Errors are raised by `c.fail`, or as Python's errors.
        """
        raise NotImplementedError(f"{self.name} has no reference")

    def quickly(self, c: NodeView) -> Callable[..., RuntimeValue] | None:
        """A fast version of `reference`, a function of the inputs, for runs that take microseconds; None by default.

        For inputs that pass the reference's checks, it returns the same result, in new memory, of the declared type,
        and without floating-point warnings. For any other input it may raise any exception: the reference then runs and
        reports the error.
        """
        return None

    def scalar(self, e: ScalarOps, c: NodeView, *x: Operand) -> Operand:
        """One element of the output, as an expression, built by `e`, of one element of each present input, `x`.

        `c` has the node's attributes. Only elementwise operators override it; otherwise NotImplementedError.
        """
        raise NotImplementedError(f"{self.name} is not elementwise")

    def write_kernel(self, k: Any, spec: Any) -> None:
        """Emits native code in the vector language; for operators from outside this package (docs/custom-operators.md).

        `k` is a `lathe.core.codegen.lang.Kernel` whose operands are the present inputs, then the outputs. `spec` is a
        `lathe.core.kernels.custom.spec.CustomSpec`, which holds their types and the node's attributes.
        """
        raise NotImplementedError(f"{self.name} has no kernel of its own")

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        """The row axis of each output, or `MixesRows` if an output may depend on rows of several callers.

        `axes[i]` is the axis of input i along which the rows of independent callers lie; None if the input is the same
        for all. The default is safe: `MixesRows` if any input has rows. Rules need not check parameters computed from
        the number of rows, extents or ranks: `lathe.core.passes.proofs.rows` does.
        """
        if all(axis is None for axis in axes):
            return [None] * len(c.node.outputs)
        return MixesRows(f"{self.name} has no rule that keeps rows apart")

    def slopes(self, g: Rewrite) -> Sequence[Slope]:
        """The derivative of an elementwise operator's output with respect to each input, at every element."""
        raise NotImplementedError(f"{self.name} has no slopes")

    def gradient(self, g: Backward) -> Sequence[Term | None]:
        """The gradients with respect to the inputs, from those with respect to the outputs (vector-Jacobian product).

        None, or a missing element at the end, means zero. If an input was broadcast, the caller sums its gradient to
        the input's shape.
        """
        raise NotImplementedError(f"{self.name} has no gradient")

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """The outputs in terms of other operators.

        Their gradients give this operator's gradient if it has none. For the operators that
        `lathe.core.passes.lowering.definitions` lists, the definition replaces the node in compiled models.
        """
        raise NotImplementedError(f"{self.name} has no definition")

    def param_of(self, name: str, value: Array) -> tuple[Any, ...] | None:
        """The parameter `name` from its known elements, as a flat tuple; None for symbols unless in `symbolic`."""
        flat = _flat(value)
        return flat if name in self.symbolic or not any(isinstance(item, SymDim) for item in flat) else None

    @property
    def differentiation(self) -> str:
        """How this operator is differentiated: "slopes", "gradient", "definition", "zero", "none", or "" if undeclared.

        The most derived class with a declaration decides. Operators of ai.onnx.ml have no gradients ("none").
        """
        for cls in type(self).__mro__:
            found = [kind for member, kind in _DIFFERENTIATION.items() if member in cls.__dict__]
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
        """The least and the greatest number of inputs; None for no upper limit."""
        return _arity(self.inputs)


@cache
def _arity(inputs: str) -> tuple[int, int | None]:
    names = [name.strip() for name in inputs.split(",") if name.strip()]
    variadic = bool(names) and names[-1].startswith("*")
    fixed = names[:-1] if variadic else names
    required = sum(not name.endswith("?") for name in fixed)
    return required, None if variadic else len(names)


ML = "ai.onnx.ml"

# From the member that a class declares to how its operator is differentiated.
_DIFFERENTIATION = {
    "slopes": "slopes", "gradient": "gradient", "zero_gradient": "zero", "no_gradient": "none",
    "definition": "definition",
}  # fmt: skip

_REGISTRY: dict[str, OpDef] = {}
_REVISIONS: dict[str, str] = {}  # from names of operators from outside this package to digests of their sources
_EVERYWHERE: set[str] = set()  # operators from outside this package that child processes register as well
_OpClass = TypeVar("_OpClass", bound=type[OpDef])


def register(cls: _OpClass) -> _OpClass:
    """Class decorator: registers an operator, by default under the class's name. ValueError for a duplicate.

    Rounds the float defaults of its attributes to float32, as ONNX files store attributes.
    """
    if "name" not in cls.__dict__:
        cls.name = cls.__name__
    if cls.name in _REGISTRY:
        raise ValueError(f"operator {cls.name} is registered twice")
    cls.attrs = {name: _as_float32(default) for name, default in cls.attrs.items()}
    _REGISTRY[cls.name] = cls()
    return cls


def _as_float32(default: Any) -> Any:
    """A default rounded to float32, as ONNX files store attributes: 0.2 is 0.20000000298."""
    return float(np.float32(default)) if isinstance(default, float) else default


def register_external(cls: type[OpDef], revision: str) -> None:
    """Adds an operator from outside this package. A second definition of the same class, as in a notebook, replaces it.

    `revision` is a digest of its source, see `revisions`. ValueError if another class has the name.
    """
    known = _REGISTRY.get(cls.name)
    if known is not None and (type(known).__module__, type(known).__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"operator {cls.name} is registered twice: {type(known).__qualname__} has the name already")
    _REGISTRY[cls.name] = cls()
    _REVISIONS[cls.name] = revision


def mark_known_to_children(names: Iterable[str]) -> None:
    """Records that child processes register the external operators `names` as well."""
    _EVERYWHERE.update(names)


def are_known_to_children() -> bool:
    """Whether child processes know all external operators of this process, so that they can compile for it."""
    return _REVISIONS.keys() <= _EVERYWHERE


def revisions(names: Iterable[str] | None = None) -> str:
    """The operators from outside this package, or those among `names`, as text `name@digest` separated by blanks.

    "" if there are none. It is part of the keys of compiled code, so that changed operators are compiled again.
    """
    chosen = _REVISIONS if names is None else _REVISIONS.keys() & set(names)
    return " ".join(f"{name}@{_REVISIONS[name]}" for name in sorted(chosen))


def get(name: str) -> OpDef:
    """The operator of this name. UnsupportedError if there is none."""
    if name not in _REGISTRY:
        raise UnsupportedError(f"operator {name} is not implemented, and no custom operator of this name is registered")
    return _REGISTRY[name]


def find(name: str) -> OpDef | None:
    return _REGISTRY.get(name)


def names() -> list[str]:
    """The names of all registered operators, sorted."""
    return sorted(_REGISTRY)


def describe(node: Node) -> str:
    """The name of a node in error messages: `node 'conv1' (Conv)`."""
    label = node.name or (node.outputs[0].name if node.outputs else "?")
    return f"node '{label}' ({node.op})"


def may_run_forever(nodes: Iterable[Node]) -> bool:
    """Whether data can make one of the nodes, or a node in their bodies, run without bound.

    If and Scan may only if a node in their bodies may, since their own iterations are bounded by shapes.
    """
    return any(get(node.op).open_ended or may_run_forever(n for b in node.subgraphs for n in b.nodes) for node in nodes)


def _flat(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return tuple(value.ravel().tolist())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _identifier(name: str) -> str:
    """The name as an identifier. If characters must be replaced, a checksum keeps different names different."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    if plain != name:
        plain = f"{plain}_{zlib.crc32(name.encode(errors='surrogatepass')):x}"
    return plain if plain.isidentifier() else f"v{plain}"


__all__ = [
    "Call",
    "Infer",
    "MixesRows",
    "NodeView",
    "OpDef",
    "OptionalType",
    "Required",
    "RowAxis",
    "RuntimeValue",
    "SequenceType",
    "are_known_to_children",
    "describe",
    "find",
    "get",
    "mark_known_to_children",
    "names",
    "register",
    "register_external",
    "revisions",
]  # fmt: skip
