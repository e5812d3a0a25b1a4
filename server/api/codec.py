"""The wire format of one inference: JSON, optionally followed by raw tensors, both ways. Knows nothing of HTTP.

But for its tensors, a request's JSON says little that changes between calls of one client. So a head that was read and
checked once is remembered by its bytes without the tensors' data, together with the answer's JSON for each shape of the
outputs where those are binary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import numpy as np
import orjson

from server.api import jsondata
from server.api.classification import classifying
from server.api.fields import expect, parameters_of, priority_of, refuse_sequences, timeout_of
from server.api.jsonanswer import JsonAnswer
from server.api.jsonparts import Lump, Parts, split
from server.api.payloads import MOVED, NUMBER_COST, Payload, cost, payload, raw_bytes, size
from server.api.reply import Reply, binary_reply, json_reply
from server.api.spans import span_of
from server.batching.signature import Group, Shape, Signature, element_count
from server.datatypes import BINARY_ONLY, ELEMENT, NUMPY_OF, object_array, unpacking
from server.errors import BadRequest, Internal, ServerError
from server.regions import Regions
from server.steps import Steps, whole
from server.types import Array, ModelRef, Parameters, RequestedOutput, Span, Tensors, TensorSpec

MEMO_ENTRIES, MEMO_BYTES = 512, 4096  # heads remembered per version, and the longest of them
_MAX_DIM = 1 << 40
_REMEMBERING = Lock()

# What a request says but for its tensors' data: its JSON written without, or a message's bytes without and the lengths
# of what is left out.
Body: TypeAlias = bytes | bytearray | memoryview
Shell: TypeAlias = bytes | tuple[bytes, tuple[int, ...]]
Key = TypeVar("Key", bytes, Shell)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one input's elements are: ``size`` bytes at ``start`` after the JSON, or inside it: ``data`` then is their
    number among what :func:`jsondata.take_data` takes out."""

    name: str
    datatype: str
    shape: Shape
    dtype: np.dtype[Any]
    start: int
    size: int
    data: int | None = None
    bare: bool = False  # the bytes are one string as it is
    span: Span | None = None  # where they are instead of in the body

    @property
    def is_view(self) -> bool:
        """Whether the body has its elements as they are."""
        in_the_body = self.data is None and self.span is None
        return in_the_body and self.datatype not in ("BYTES", "BOOL") and self.size > 0

    @property
    def copied(self) -> int:
        """What it costs to read its binary data, in bytes that are read."""
        if self.is_view:
            return 0
        return self.size if self.datatype in ("BYTES", "BOOL") else self.size // MOVED  # which is in shared memory

    @property
    def held(self) -> int:
        """How many bytes its elements take in memory; 0 for what is inside the JSON. A shape may say anything, but each
        element of a BYTES tensor has its length on the wire."""
        return self.size + (ELEMENT * min(self.count, self.size // 4 + 1) if self.datatype == "BYTES" else 0)

    @property
    def count(self) -> int:
        """How many elements its shape says."""
        return element_count(self.shape)

    def made(self, json_bytes: int) -> int:
        """Return how many bytes are needed to read it, besides the body that has ``json_bytes`` of JSON."""
        if self.data is None:
            return 0 if self.is_view else self.held
        count = min(self.count, json_bytes // 2)  # of which each has a character and a comma
        if self.datatype == "BYTES":
            return 2 * (count * ELEMENT + json_bytes)  # a string, then bytes
        return count * self.dtype.itemsize

    def reading(self, body: Body, base: int, taken: Sequence[object] = ()) -> Steps[Array]:
        """Return the input, from a body in which binary data begins at ``base``, or what was taken out of its JSON."""
        if self.data is not None:
            data, field = taken[self.data], f"input {self.name!r}"
            if isinstance(data, Lump):
                return data.tensor(self.datatype, self.shape, field)
            return jsondata.to_array(data, self.datatype, self.shape, field)
        at = base + self.start
        if self.datatype == "BYTES":
            view = memoryview(body)[at : at + self.size]
            if self.bare:
                return object_array([bytes(view)], self.shape)
            return (yield from unpacking(view, self.shape, element_count(self.shape), f"input {self.name!r}"))
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        array = np.ndarray(self.shape, self.dtype, body, at)
        return array.view(np.uint8) != 0 if self.datatype == "BOOL" else array  # any other byte than 0 and 1 is no bool


@dataclass(slots=True)
class Head:
    """A request's JSON, read and checked against a model."""

    id: str
    slots: tuple[Slot, ...]
    blob_bytes: int
    outputs: tuple[RequestedOutput, ...]
    parameters: Parameters
    timeout: float | None  # seconds
    priority: int  # 0: the model's default
    group: Group
    plain: bool  # every output binary and a tensor, so answers depend on shapes alone
    numeric: bool = False  # every output a tensor of numbers in JSON
    answers: dict[tuple[Shape, ...], Answer] = field(default_factory=dict)
    json_answers: dict[tuple[Shape, ...], JsonAnswer] = field(default_factory=dict)
    plain_slots: tuple[tuple[str, Shape, np.dtype[Any], int], ...] = ()  # of inputs that are all mere views
    copied: int = 0  # what it costs to read those that are no mere views of the body, in bytes that are read
    held: int = 0  # bytes that the inputs take in memory which are not inside the JSON
    text: int = 0  # those of them that are text in BYTES tensors

    @property
    def inlined(self) -> bool:
        """Whether inputs are inside the JSON."""
        return any(slot.data is not None for slot in self.slots)

    @property
    def rows(self) -> int:
        """How many rows a request adds to a batch; 1 for what is never stacked."""
        return self.group.rows or 1

    def __post_init__(self) -> None:
        self.copied = sum(slot.copied for slot in self.slots)
        self.text = sum(slot.size for slot in self.slots if slot.datatype == "BYTES")
        self.held = sum(slot.held for slot in self.slots)
        if all(slot.is_view for slot in self.slots):
            self.plain_slots = tuple((slot.name, slot.shape, slot.dtype, slot.start) for slot in self.slots)

    def made(self, json_bytes: int) -> int:
        """Return how many bytes are needed to read the inputs, besides the body that has ``json_bytes`` of JSON."""
        return sum(slot.made(json_bytes) for slot in self.slots)

    def text_of(self, json_bytes: int) -> int:
        """Return how many bytes of text the inputs have at most."""
        inside = any(slot.data is not None and slot.datatype == "BYTES" for slot in self.slots)
        return self.text + (json_bytes if inside else 0)

    def named(self, id: str) -> Head:
        """Return the head of a request that differs in its id alone."""
        return Head(
            id,
            self.slots,
            self.blob_bytes,
            self.outputs,
            self.parameters,
            self.timeout,
            self.priority,
            self.group,
            self.plain,
            self.numeric,
            json_answers=self.json_answers,
        )

    def sent_as_binary(self) -> Head | None:
        """Return the head of a request that says the same of its one tensor of numbers, and has that as a view behind
        its JSON instead of inside; None where there is no such."""
        if len(self.slots) != 1:
            return None
        slot = self.slots[0]
        if slot.data is None or slot.datatype in ("BYTES", "BOOL"):
            return None
        size = _byte_size(slot.datatype, slot.shape)
        binary = replace(slot, start=0, size=size, data=None)
        return replace(self, slots=(binary,), blob_bytes=size) if binary.is_view else None

    def reading(self, body: bytes | bytearray, json_bytes: int, taken: Sequence[object] = ()) -> Steps[Tensors]:
        """Return views into the body (copies only for BYTES and for what was taken out of the JSON)."""
        if len(body) - json_bytes != self.blob_bytes:
            for data in taken:
                if isinstance(data, Lump):
                    data.check()
            raise BadRequest(
                f"body: expected {self.blob_bytes} bytes of binary data after {json_bytes} bytes of JSON, "
                f"got {len(body) - json_bytes}"
            )
        if self.plain_slots:
            return {
                name: np.ndarray(shape, dtype, body, json_bytes + at) for name, shape, dtype, at in self.plain_slots
            }
        tensors: Tensors = {}
        for slot in self.slots:
            if slot.span is None:
                tensors[slot.name] = yield from slot.reading(body, json_bytes, taken)
        return tensors

    @property
    def spans(self) -> list[Span]:
        """Where inputs are that are in shared memory."""
        return [slot.span for slot in self.slots if slot.span is not None]


@dataclass(slots=True)
class Answer:
    """The JSON of a response; the binary outputs' payloads follow it in order."""

    json: bytes
    binary: bool  # payloads follow, so the reader must be told where the JSON ends
    _reply: Reply | None = None

    def reply(self, payloads: list[Payload]) -> Reply:
        """Return the reply but for its payloads, of which only the lengths count: they follow from the JSON."""
        if self._reply is None:
            self._reply = (
                binary_reply(self.json, sum(map(len, payloads))) if self.binary else json_reply(200, self.json)
            )
        return self._reply


class Codec:
    """Reads requests for one version and writes its answers."""

    def __init__(self, ref: ModelRef, signature: Signature, regions: Regions) -> None:
        self.ref = ref
        self.signature = signature
        self.regions = regions
        self._memo: dict[bytes, Head] = {}  # by JSON that has no data inside
        self._shells: dict[Shell, Head] = {}

    # requests

    def begin(self, body: bytes | bytearray, json_bytes: int) -> tuple[Head, Sequence[object]]:
        """Return the checked head of a body of which the first ``json_bytes`` are JSON, 0: one raw tensor; and the data
        of inputs that are inside the JSON."""
        if json_bytes == 0 and len(body):
            return self.raw_head(len(body)), ()
        return self.head(bytes(body[:json_bytes]))

    def tensors(self, head: Head, body: bytes | bytearray, json_bytes: int, taken: Sequence[object] = ()) -> Tensors:
        """Return the inputs in one go; as :meth:`reading`."""
        return whole(self.reading(head, body, json_bytes, taken))

    def reading(
        self, head: Head, body: bytes | bytearray, json_bytes: int, taken: Sequence[object] = ()
    ) -> Steps[Tensors]:
        """Return the inputs, those in shared memory copied from there; on any thread."""
        sent = yield from head.reading(body, json_bytes, taken)
        return {**sent, **(yield from self.shared(head))}

    def shared(self, head: Head) -> Steps[Tensors]:
        """Return copies of the inputs that are in shared memory; raises BadRequest, NotFound, TooLarge."""
        copies: Tensors = {}
        if head.spans:
            self.regions.check_inputs(head.spans)
        for slot in head.slots:
            if slot.span is not None:
                copies[slot.name] = yield from slot.reading(self.regions.read(slot.span), 0)
                yield
        return copies

    def known(self, text: bytes) -> Head | None:
        """Return the checked head for this JSON if it is remembered."""
        return self._memo.get(text)

    def head(self, text: bytes) -> tuple[Head, Sequence[object]]:
        """Return the checked head for this JSON, and the data of inputs that are inside it; on any thread."""
        known = self._memo.get(text) if len(text) <= MEMO_BYTES else None
        if known is not None:
            return known, ()
        parts = split(text)
        head = self._of_parts(parts) if parts is not None else None
        if parts is not None and head is not None:
            return head, parts.lumps
        document, strict = jsondata.parse(text, "body")
        taken = jsondata.take_data(document)
        if not taken:
            return _remember(self._memo, text, self.read(document)), ()
        if not strict:
            return self.read(document), taken
        try:
            shell = orjson.dumps(document)
        except orjson.JSONEncodeError:  # it reads what is nested deeper than it writes
            return self.read(document), taken
        return self.shell(shell, lambda: document), taken

    def _of_parts(self, parts: Parts) -> Head | None:
        """Return the checked head of JSON that was not parsed whole; None where it has to be."""
        head = self._shells.get(parts.shell)
        if head is None:
            document = parts.document()
            if document is None:
                return None
            try:
                head = self.read(document)
            except ServerError:
                parts.check()
                raise
            _remember(self._shells, parts.shell, head)
        return head.named(parts.id) if parts.id else head

    def shell(self, shell: Shell, document: Callable[[], object]) -> Head:
        """Return the checked head of a request that says this; ``document`` is asked for where it was not seen yet."""
        head = self._shells.get(shell)
        return head if head is not None else _remember(self._shells, shell, self.read(document()))

    def read(self, document: object) -> Head:
        """Check a request's document, in the form of its JSON without data, against the model."""
        root = expect(document, dict, "body")
        parameters = parameters_of(root.get("parameters"), "parameters")
        refuse_sequences(parameters)
        slots, blob_bytes = _slots(expect(root.get("inputs"), list, "inputs"), self.signature)
        group = self.signature.group({slot.name: (slot.datatype, slot.shape) for slot in slots})
        binary = parameters.get("binary_data_output", False) is True
        outputs = self.signature.requested(_outputs(root.get("outputs"), binary))
        if any(slot.span for slot in slots) or any(output.span for output in outputs):
            self.regions.check_allowed()
        if not root.get("outputs"):
            outputs = tuple(RequestedOutput(output.name, binary) for output in outputs)
        return Head(
            id=expect(root.get("id", ""), str, "id"),
            slots=slots,
            blob_bytes=blob_bytes,
            outputs=outputs,
            parameters=parameters,
            timeout=timeout_of(parameters.get("timeout")),
            priority=priority_of(parameters.get("priority")),
            group=group,
            plain=all(o.binary and not o.classes and self._is_fixed_size(o.name) for o in outputs),
            numeric=all(self._is_numbers(output) for output in outputs),
        )

    def _is_numbers(self, output: RequestedOutput) -> bool:
        """Whether an output is asked for as numbers in JSON, and there are words for these."""
        if output.binary or output.classes or output.span is not None:
            return False
        return self._is_fixed_size(output.name) and self.signature.outputs[output.name].datatype not in BINARY_ONLY

    def _is_fixed_size(self, output: str) -> bool:
        return self.signature.outputs[output].datatype != "BYTES"

    def raw_head(self, size: int) -> Head:
        """Return the head of a body without JSON, which is the one input's only row; outputs go back binary."""
        if len(self.signature.inputs) != 1:
            count = len(self.signature.inputs)
            raise BadRequest(f"body: a raw body needs a model with one input, this one has {count}")
        spec = next(iter(self.signature.inputs.values()))
        if spec.any_rank:
            raise BadRequest(f"body: a raw body needs an input of a known rank, {spec.name!r} takes any")
        if spec.datatype == "BYTES":
            slot = _raw_string(spec, size)
        else:
            shape = _raw_shape(spec.shape, size // NUMPY_OF[spec.datatype].itemsize)
            slot = Slot(spec.name, spec.datatype, shape, NUMPY_OF[spec.datatype], 0, _byte_size(spec.datatype, shape))
        group = self.signature.group({slot.name: (slot.datatype, slot.shape)})
        outputs = tuple(RequestedOutput(name, True) for name in self.signature.outputs)
        plain = all(self._is_fixed_size(name) for name in self.signature.outputs)
        return Head("", (slot,), slot.size, outputs, {}, None, 0, group, plain)

    # answers

    def cost(self, head: Head, outputs: Tensors) -> int:
        """Return what it costs to write an answer, in bytes that are read."""
        total, specs = 0, self.signature.outputs
        for wanted in head.outputs:
            array = outputs.get(wanted.name)
            if array is not None and not (head.plain and array.flags.c_contiguous):
                total += cost(wanted, specs[wanted.name].datatype, array)
        return total

    def size(self, head: Head, outputs: Tensors) -> int:
        """Return about how many bytes an answer has that costs little to write."""
        specs = self.signature.outputs
        return sum(
            size(each, specs[each.name].datatype, outputs[each.name]) for each in head.outputs if each.name in outputs
        )

    def most(self, head: Head, rows: int) -> float:
        """Return what an answer of so many rows costs at most; infinite where the model may give any number of
        elements."""
        if head.plain:
            return 0
        inner = [self.signature.outputs[output.name].shape[1:] for output in head.outputs]
        if any(-1 in shape for shape in inner):
            return math.inf
        return rows * NUMBER_COST * sum(map(math.prod, inner))

    def answer(self, head: Head, outputs: Tensors) -> tuple[Reply, list[Payload]]:
        """Return the reply that an answer begins with and the payloads that follow, in one go."""
        if head.numeric and all(output.name in outputs for output in head.outputs):
            arrays = [outputs[output.name] for output in head.outputs]
            lists = [jsondata.numbers(np.ascontiguousarray(array).reshape(-1))[1:-1] for array in arrays]
            return self.json_answer(head, tuple([array.shape for array in arrays])).reply(lists, head.id)
        answer, payloads = self.encode(head, outputs)
        return answer.reply(payloads), payloads

    def json_answer(self, head: Head, shapes: tuple[Shape, ...]) -> JsonAnswer:
        """Return what an answer says around its numbers and its id, where the outputs have these shapes."""
        found = head.json_answers.get(shapes)
        if found is None:
            if len(head.json_answers) >= MEMO_ENTRIES:
                head.json_answers.clear()
            document, entries = self._document("")
            for output, shape in zip(head.outputs, shapes, strict=True):
                entries.append(_entry(output.name, self.signature.outputs[output.name].datatype, shape))
            found = head.json_answers[shapes] = JsonAnswer(jsondata.texts_around(document, entries))
        return found

    def encode(self, head: Head, outputs: Tensors) -> tuple[Answer, list[Payload]]:
        """Return the JSON of the answer and the binary payloads that follow it, in one go."""
        if not head.plain:
            return whole(self._composing(head, outputs))
        shapes: tuple[Shape, ...] = ()
        payloads: list[Payload] = []
        for output in head.outputs:
            array = outputs[output.name]
            shapes += (array.shape,)
            payloads.append(raw_bytes(array))
        answer = head.answers.get(shapes)
        if answer is None:
            if len(head.answers) >= MEMO_ENTRIES:
                head.answers.clear()
            answer, _ = whole(self._composing(head, outputs))
            head.answers[shapes] = answer
        return answer, payloads

    def encoding(self, head: Head, outputs: Tensors) -> Steps[tuple[Answer, list[Payload]]]:
        """Return the same, on any thread."""
        return self.encode(head, outputs) if head.plain else (yield from self._composing(head, outputs))

    def _composing(self, head: Head, outputs: Tensors) -> Steps[tuple[Answer, list[Payload]]]:
        document, entries = self._document(head.id)
        payloads: list[Payload] = []
        inline: list[tuple[dict[str, Any], Array, str]] = []
        shared: list[tuple[Span, Payload]] = []
        for output in head.outputs:
            datatype, array = yield from self.output(output, outputs)
            entry = _entry(output.name, datatype, array.shape)
            entries.append(entry)
            if output.binary:
                payloads.append((yield from payload(datatype, array)))
                entry["parameters"] = {"binary_data_size": len(payloads[-1])}
            elif output.span is not None:
                shared.append((output.span, (yield from payload(datatype, array))))
            else:
                inline.append((entry, array, datatype))
        text = yield from jsondata.dumping(document, inline)
        self.regions.write_all(shared)
        return Answer(text, bool(payloads)), payloads

    def _document(self, id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return an answer's document, and its list of outputs, which is empty."""
        entries: list[dict[str, Any]] = []
        document: dict[str, Any] = {"id": id} if id else {}
        document |= {"model_name": self.ref.name, "model_version": str(self.ref.version), "outputs": entries}
        return document, entries

    def output(self, output: RequestedOutput, outputs: Tensors) -> Steps[tuple[str, Array]]:
        """Return datatype and values of one requested output, classified if that was asked for."""
        spec, array = self.signature.outputs[output.name], outputs.get(output.name)
        if array is None:
            raise Internal(f"model {self.ref} gave no output {output.name!r}")
        if output.classes:
            labels = self.signature.labels.get(output.name, ())
            rows = self.signature.batchable
            return "BYTES", (yield from classifying(array, spec.datatype, output.classes, rows, labels))
        return spec.datatype, array


def _entry(name: str, datatype: str, shape: Shape) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _remember(memo: dict[Key, Head], key: Key, head: Head) -> Head:
    if len(key if isinstance(key, bytes) else key[0]) <= MEMO_BYTES:
        with _REMEMBERING:  # large documents are read on threads
            if len(memo) >= MEMO_ENTRIES:
                del memo[next(iter(memo))]
            memo[key] = head
    return head


def _slots(inputs: list[object], signature: Signature) -> tuple[tuple[Slot, ...], int]:
    slots: dict[str, Slot] = {}
    at = 0
    for index, item in enumerate(inputs):
        slot = _slot(expect(item, dict, f"inputs[{index}]"), f"inputs[{index}]", at)
        if slot.name in slots:
            raise BadRequest(f"inputs: {slot.name!r} is given twice")
        if slot.name not in signature.inputs and slot.name not in signature.optional:
            raise BadRequest(f"inputs: expected {signature.expected}, got {slot.name!r}")
        slots[slot.name] = slot
        at += slot.size if slot.span is None else 0
    ordered = [slots.pop(name) for name in signature.inputs if name in slots]
    return (*ordered, *slots.values()), at


def _slot(item: dict[str, Any], place: str, start: int) -> Slot:
    name = expect(item.get("name"), str, f"{place}.name")
    place = f"input {name!r}"
    datatype = expect(item.get("datatype"), str, f"{place}.datatype")
    dtype = NUMPY_OF.get(datatype)
    if dtype is None:
        raise BadRequest(f"{place}.datatype: expected one of {', '.join(NUMPY_OF)}, got {datatype!r}")
    shape = _shape(expect(item.get("shape"), list, f"{place}.shape"), place)
    parameters = parameters_of(item.get("parameters"), f"{place}.parameters")
    span = span_of(parameters, place)
    if span is not None:
        return _shared_slot(item, Slot(name, datatype, shape, dtype, 0, span.size, span=span))
    if "binary_data_size" not in parameters:
        if item.get("data") is None:
            raise BadRequest(f"{place}: expected data or parameters.binary_data_size, got neither")
        return Slot(name, datatype, shape, dtype, start, 0, item["data"])
    if "data" in item:
        raise BadRequest(f"{place}: expected data or parameters.binary_data_size, got both")
    size = expect(parameters["binary_data_size"], int, f"{place}.parameters.binary_data_size")
    return _sized(Slot(name, datatype, shape, dtype, start, size))


def _shared_slot(item: dict[str, Any], slot: Slot) -> Slot:
    if "data" in item or "binary_data_size" in item["parameters"]:
        raise BadRequest(f"input {slot.name!r}: expected shared memory or data in the message, got both")
    return _sized(slot)


def _sized(slot: Slot) -> Slot:
    """Raise BadRequest unless there are as many bytes as the shape says."""
    expected = _byte_size(slot.datatype, slot.shape)
    if slot.size < 0 or (slot.datatype != "BYTES" and slot.size != expected):
        what = f"expected {expected} for {slot.datatype} {list(slot.shape)}, got {slot.size}"
        raise BadRequest(f"input {slot.name!r}: bytes of binary data: {what}")
    return slot


def _shape(values: list[object], place: str) -> Shape:
    if len(values) > 32:
        raise BadRequest(f"{place}.shape: expected at most 32 dimensions, got {len(values)}")
    shape = tuple([expect(value, int, f"{place}.shape") for value in values])
    if not all(0 <= size <= _MAX_DIM for size in shape):
        raise BadRequest(f"{place}.shape: expected sizes from 0 to {_MAX_DIM}, got {list(shape)}")
    return shape


def _byte_size(datatype: str, shape: Shape) -> int:
    return NUMPY_OF[datatype].itemsize * element_count(shape)


def _raw_shape(spec: Shape, elements: int) -> Shape:
    """Fill in a raw body's shape: one row, and at most one further open dimension taken from the body's size."""
    shape = [1, *spec[1:]] if spec and spec[0] == -1 else list(spec)
    if shape.count(-1) > 1:
        raise BadRequest(f"body: a raw body needs a model with at most one open dimension, this one takes {list(spec)}")
    if -1 in shape:
        rest = element_count(tuple(size for size in shape if size != -1))
        shape[shape.index(-1)] = elements // max(rest, 1)
    return tuple(shape)


def _raw_string(spec: TensorSpec, size: int) -> Slot:
    """Return the slot of a raw body that is the one string of its input, without a length before it."""
    shape = tuple(1 if axis < 0 else axis for axis in spec.shape)
    if element_count(shape) != 1:
        raise BadRequest(
            f"body: a raw body is one string, and input {spec.name!r} takes {element_count(shape)} for {list(shape)}"
        )
    return Slot(spec.name, spec.datatype, shape, NUMPY_OF["BYTES"], 0, size, bare=True)


def _outputs(value: object, binary_default: bool) -> list[RequestedOutput]:
    items = [] if value is None else expect(value, list, "outputs")
    return [_output(expect(item, dict, f"outputs[{i}]"), i, binary_default) for i, item in enumerate(items)]


def _output(item: dict[str, Any], index: int, binary_default: bool) -> RequestedOutput:
    name = expect(item.get("name"), str, f"outputs[{index}].name")
    parameters = parameters_of(item.get("parameters"), f"output {name!r}.parameters")
    span = span_of(parameters, f"output {name!r}")
    binary = expect(parameters.get("binary_data", binary_default), bool, f"output {name!r}.parameters.binary_data")
    classes = expect(parameters.get("classification", 0), int, f"output {name!r}.parameters.classification")
    if classes < 0:
        raise BadRequest(f"output {name!r}.parameters.classification: expected 0 or more, got {classes}")
    if span is not None:
        if classes:
            raise BadRequest(f"output {name!r}: expected classification or shared memory, got both")
        return RequestedOutput(name, span=span)
    return RequestedOutput(name, binary, classes)
