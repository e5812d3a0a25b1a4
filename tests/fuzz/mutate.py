"""Mutations of models: of fields, found through protobuf's descriptors, of the graph's structure, and of bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import onnx
from google.protobuf.message import Message
from onnx import helper

from lathe.core.ops.opdef import registry

Mutation: TypeAlias = Callable[[random.Random, onnx.ModelProto, Sequence[bytes]], None]

_INTEGERS = (0, 1, -1, 2, 3, 7, 17, 64, 65, 1000, 2**16, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"), 2.0**31)
_TEXTS = (
    "", "x", "n", "n*n", "-1", "axis", "axes", "shape", "to", "NOTSET", "SAME_UPPER", "linear", "cubic", "a.b/c:d",
    "a" * 300, "../../etc/passwd", "%x", '"', "\n", "\0", "inf", "lambda", "body", "then_branch", "local", "lathe",
    "com.microsoft", "ai.onnx.ml", "ij,jk->ik", "FusedElementwise", "é🙂",
)  # fmt: skip
_MOST_STEPS = 4
_OF_BYTES = 0.1  # share of cases whose bytes are mutated, not their messages
_OPEN = 0.6  # share of cases that declare no output types


def mutated(seed: str, corpus: Sequence[bytes], keep: Sequence[int] | None = None) -> bytes:
    """The case of a seed: one model of the corpus with one to four mutations, or those among them in `keep`.

    Every step has its own random numbers, so that leaving steps out does not change the others.
    """
    rng = random.Random(f"{seed}/model")
    data, of_bytes = rng.choice(corpus), rng.random() < _OF_BYTES
    if rng.random() < _OPEN:
        data = _without_declarations(data)
    for step in steps(seed) if keep is None else keep:
        data = _step(random.Random(f"{seed}/{step}"), data, corpus, of_bytes)
    return data


def steps(seed: str) -> range:
    """The numbers of a case's mutations."""
    return range(1 + random.Random(seed).randrange(_MOST_STEPS))


def _step(rng: random.Random, data: bytes, corpus: Sequence[bytes], of_bytes: bool) -> bytes:
    if of_bytes:
        return rng.choice(_BYTES)(rng, data, corpus)
    model = onnx.ModelProto.FromString(data)
    (_field if rng.random() < 0.5 else rng.choice(_STRUCTURE))(rng, model, corpus)
    return bytes(model.SerializeToString())


def _without_declarations(data: bytes) -> bytes:
    """The model without the types of its outputs, which would contradict most mutations of the nodes before them."""
    model = onnx.ModelProto.FromString(data)
    for info in model.graph.output:
        info.ClearField("type")
    return bytes(model.SerializeToString())


# -- fields -----------------------------------------------------------------------------------------------------------


def messages(root: Message) -> Iterator[Message]:
    """Every message in `root`, the outermost first."""
    queue = [root]
    for message in queue:
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                queue.extend(value if field.is_repeated else [value])


def _field(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """Change one field of one message, mostly a field that is set."""
    everything = list(messages(model))
    message = rng.choice(everything)
    there = [field for field, _ in message.ListFields()]
    fields = there if there and rng.random() < 0.85 else list(message.DESCRIPTOR.fields)
    field = rng.choice(fields)
    if field.is_repeated:
        _repeated(rng, model, getattr(message, field.name), field)
    elif field.message_type is not None:
        _nested(rng, everything, message, field)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(rng, model, field, getattr(message, field.name)))


def _nested(rng: random.Random, everything: list[Message], message: Message, field: Any) -> None:
    """Clear a message, or replace it by one of its kind from elsewhere in the model."""
    donors = [each for each in everything if each.DESCRIPTOR is field.message_type]
    if donors and rng.random() < 0.7:
        donor = type(donors[0])()
        donor.CopyFrom(rng.choice(donors))
        getattr(message, field.name).CopyFrom(donor)
    elif rng.random() < 0.5:
        message.ClearField(field.name)
    else:
        getattr(message, field.name).SetInParent()


def _repeated(rng: random.Random, model: onnx.ModelProto, items: Any, field: Any) -> None:
    kind = rng.randrange(5)
    if not items or kind == 0:
        if field.message_type is None:
            items.append(_scalar(rng, model, field, items[-1] if items else None))
        else:
            items.add()
    elif kind == 1:
        del items[rng.randrange(len(items))]
    elif kind == 2:
        _again(rng, items, field)
    elif kind == 3 and field.message_type is not None:
        items.sort(key=lambda item: rng.random())
    elif field.message_type is not None:
        items[rng.randrange(len(items))].CopyFrom(items[rng.randrange(len(items))])
    else:
        at = rng.randrange(len(items))
        items[at] = _scalar(rng, model, field, items[at])


def _again(rng: random.Random, items: Any, field: Any) -> None:
    """Repeat an item once, or up to 3000 times."""
    item = items[rng.randrange(len(items))]
    times = rng.choice((1, 1, 1, 2, 20, 3000 if field.message_type is None else 70))
    items.extend([item] * times)


def _scalar(rng: random.Random, model: onnx.ModelProto, field: Any, old: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return _text(rng, model)
    if field.type == field.TYPE_BYTES:
        return _bytes(rng, old or b"")
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice((*_FLOATS, rng.uniform(-4, 4)))
    if field.enum_type is not None:
        return rng.choice([value.number for value in field.enum_type.values])
    return _integer(rng, field, old or 0)


def _integer(rng: random.Random, field: Any, old: int) -> int:
    narrow = field.type == field.TYPE_INT32
    value = old + rng.choice((-1, 1, 2)) if rng.random() < 0.4 else rng.choice((*_INTEGERS, rng.randrange(30)))
    if field.type == field.TYPE_UINT64:
        return abs(value) % 2**64
    limit = 2**31 if narrow else 2**63
    return max(-limit, min(value, limit - 1))


def _text(rng: random.Random, model: onnx.ModelProto) -> str:
    """A word that the model uses elsewhere, an operator, or something odd."""
    kind = rng.randrange(10)
    if kind < 6:
        words = [word for node in model.graph.node for word in (*node.input, *node.output)]
        words += [info.name for info in model.graph.input]
        return rng.choice([*(word for word in words if isinstance(word, str)), "y"])  # other names are bytes
    return rng.choice(registry.names()) if kind < 8 else rng.choice(_TEXTS)


def _bytes(rng: random.Random, old: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return old[: rng.randrange(len(old) + 1)]
    if kind == 1:
        return old + bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 8))))
    if kind == 2:
        return rng.choice((*(text.encode() for text in _TEXTS), b"\xff\xfe"))
    return _flipped(rng, old, ()) if old else b"\0"


# -- structure --------------------------------------------------------------------------------------------------------


def _graphs(model: onnx.ModelProto) -> list[Any]:
    """Everything that has nodes: graphs, bodies, functions."""
    return [each for each in messages(model) if each.DESCRIPTOR.name in ("GraphProto", "FunctionProto") and each.node]  # type: ignore[attr-defined]


def _node(rng: random.Random, model: onnx.ModelProto) -> onnx.NodeProto:
    graphs = _graphs(model)
    return rng.choice(rng.choice(graphs).node) if graphs else model.graph.node.add()


def _operator(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    node = _node(rng, model)
    node.op_type = rng.choice(registry.names())
    node.domain = registry.get(node.op_type).domain
    if rng.random() < 0.5:
        del node.attribute[:]


def _edge(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """Another input for a node, possibly from a node after it."""
    node = _node(rng, model)
    name = _text(rng, model)
    if node.input and rng.random() < 0.7:
        node.input[rng.randrange(len(node.input))] = name
    else:
        node.input.append(name)


def _opset(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    model.opset_import.add() if not model.opset_import else None
    rng.choice(model.opset_import).version = rng.randrange(1, 29)


def _attribute(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """Give an attribute that the operator has a value of any kind."""
    node = _node(rng, model)
    definition = registry.find(node.op_type)
    known = [*definition.attrs, *definition.params] if definition else []
    name = rng.choice(known or ["axis"])
    value = rng.choice((*_INTEGERS, *_FLOATS, *_TEXTS, [1], [0, 1], [-1], [2**62, 3], [1.5], ["a"], [1, 1, 1, 1]))
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value, attr_type=_kind(value))])


def _kind(value: Any) -> int:
    first = value[0] if isinstance(value, list) else value
    kinds = onnx.AttributeProto
    single, many = {int: (kinds.INT, kinds.INTS), float: (kinds.FLOAT, kinds.FLOATS)}.get(
        type(first), (kinds.STRING, kinds.STRINGS)
    )
    return int(many if isinstance(value, list) else single)


def _graft(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """A node, an initializer, an input or a function of another model."""
    donor = onnx.ModelProto.FromString(rng.choice(corpus))
    kind = rng.choice(("node", "initializer", "input", "sparse_initializer", "functions"))
    source, target = (donor.functions, model.functions) if kind == "functions" else (
        getattr(donor.graph, kind), getattr(model.graph, kind))  # fmt: skip
    if source:
        target.add().CopyFrom(rng.choice(source))


def _into_function(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """A node becomes a call of a function that holds it (and may call itself)."""
    node = _node(rng, model)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    name = f"F{rng.randrange(3)}"
    inputs, outputs = [n for n in node.input if n], [n for n in node.output if n]
    opsets = [*model.opset_import, helper.make_opsetid("local", 1)]
    model.functions.append(helper.make_function("local", name, inputs, outputs, [inner], opsets))
    del node.attribute[:]
    node.op_type, node.domain = name, "local"
    if not any(entry.domain == "local" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("local", 1))


def _into_body(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """A node moves into both branches of an If."""
    node = _node(rng, model)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    body = helper.make_graph([inner], "body", [], outputs)
    condition = helper.make_tensor("", onnx.TensorProto.BOOL, [], [rng.random() < 0.5])
    model.graph.initializer.append(condition)
    model.graph.initializer[-1].name = f"c{len(model.graph.initializer)}"
    made = helper.make_node(
        "If", [model.graph.initializer[-1].name], [i.name for i in outputs], then_branch=body, else_branch=body
    )
    node.CopyFrom(made)


def _dimension(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """Another size for a declared dimension, or none."""
    dims = [each for each in messages(model) if each.DESCRIPTOR.name == "Dimension"]
    if not dims:
        return
    dim: Any = rng.choice(dims)
    if rng.random() < 0.5:
        dim.dim_param = rng.choice(("n", "m", "n", "", "N + 1", "0", "if"))
    else:
        dim.dim_value = rng.choice(_INTEGERS)


def _constant(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    """Replace a tensor or an input by a constant of random integers, since these give shapes, axes and sizes."""
    tensors = [t for t in messages(model) if isinstance(t, onnx.TensorProto)]
    name = rng.choice([info.name for info in model.graph.input] or ["x"])
    length = rng.randrange(5)
    if tensors and rng.random() < 0.5:
        tensor = rng.choice(tensors)
        name, length = tensor.name, min(max(1, abs(tensor.dims[0])), 64) if tensor.dims else length
    else:
        tensor = model.graph.initializer.add()
    values = [rng.choice(_INTEGERS) for _ in range(length)]
    shape = [length] if rng.random() < 0.8 or length != 1 else []
    tensor.CopyFrom(helper.make_tensor(name, onnx.TensorProto.INT64, shape, values))


def _external(rng: random.Random, model: onnx.ModelProto, corpus: Sequence[bytes]) -> None:
    if rng.random() < 0.8:
        return  # other parts of such a model are not read
    tensors = [t for t in messages(model) if isinstance(t, onnx.TensorProto)]
    tensor = rng.choice(tensors) if tensors else model.graph.initializer.add(name="w")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


# -- bytes ------------------------------------------------------------------------------------------------------------


def _flipped(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _holed(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 8, 64)) :]


def _spliced(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    other = rng.choice(corpus)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _varint_bomb(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Varints that never end or are huge."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + b"\xff" * rng.choice((1, 4, 9, 10, 200)) + rng.choice((b"\x01", b"\x7f", b"")) + data[at + 1 :]


def _deep(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Start-of-message bytes repeated: groups and messages inside each other."""
    return data[: rng.randrange(len(data) + 1)] + rng.choice((b"\x3a\x7f", b"\x0b", b"\x0a\x64\x2a\x62")) * 5000


_BYTES = (_flipped, _flipped, _cut, _holed, _spliced, _varint_bomb, _deep)
_STRUCTURE: tuple[Mutation, ...] = (
    _operator, _operator, _edge, _edge, _opset, _attribute, _attribute, _graft, _into_function, _into_body, _dimension,
    _constant, _constant, _external,
)  # fmt: skip
