"""The codec of inference requests and answers: JSON, optionally followed by raw tensors. Independent of HTTP.

Apart from tensors, the JSON of a client's requests rarely changes. Therefore a request that was parsed and checked is
cached by its JSON without the tensors' data. If all outputs are binary, or all are numbers in JSON, the cache also
holds the answer's JSON (without the numbers) for each combination of output shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import numpy as np
import orjson

from lathe.server.api.codec import json_tensors
from lathe.server.api.codec.classification import classify_steps
from lathe.server.api.codec.fields import expect, parameters_of, priority_of, refuse_sequences, timeout_of
from lathe.server.api.codec.input_slots import InputLocation, byte_size, parse_slots, raw_shape, raw_string
from lathe.server.api.codec.json_answer import JsonAnswer
from lathe.server.api.codec.json_split import NumberList, SplitJson, split_json
from lathe.server.api.codec.payloads import NUMBER_COST, Payload, payload_steps, raw_bytes, write_cost, written_bytes
from lathe.server.api.codec.reply import Reply, binary_reply, json_reply
from lathe.server.api.codec.shared_memory_spans import parse_span
from lathe.server.batching.signature import BatchGroup, Signature
from lathe.server.datatypes import BINARY_ONLY, NUMPY_OF
from lathe.server.errors import BadRequest, Internal, ServerError
from lathe.server.shared_memory import Regions
from lathe.server.steps import Steps, run_all
from lathe.server.types import Array, ModelRef, Parameters, RequestedOutput, Shape, Span, Tensors

MEMO_ENTRIES, MEMO_BYTES = 512, 4096  # the most parsed requests cached per version, and the bytes of the longest key
_MEMO_LOCK = Lock()

# `RequestKey` identifies a request without its tensors' data: its JSON without data, or (for gRPC) the message without
# data and the lengths of the omitted parts.
RequestKey: TypeAlias = bytes | tuple[bytes, tuple[int, ...]]
Key = TypeVar("Key", bytes, RequestKey)


@dataclass(slots=True)
class ParsedRequest:
    """A parsed request without its tensors, checked against the signature of a model."""

    id: str
    slots: tuple[InputLocation, ...]
    binary_bytes: int
    outputs: tuple[RequestedOutput, ...]
    parameters: Parameters
    timeout: float | None  # seconds
    priority: int  # 0: the model's default
    group: BatchGroup
    plain: bool  # all outputs are binary and of fixed-size elements: the answer's JSON depends only on their shapes
    numeric: bool = False  # all outputs are tensors of numbers or booleans in JSON
    answers: dict[tuple[Shape, ...], AnswerTemplate] = field(default_factory=dict)  # by the shapes of the outputs
    json_answers: dict[tuple[Shape, ...], JsonAnswer] = field(default_factory=dict)  # likewise
    views: tuple[tuple[str, Shape, np.dtype[Any], int], ...] = ()  # the inputs, if all are views into the body
    read_cost: int = 0  # cost of reading the inputs that are no views, in the unit of reading one byte
    element_bytes: int = 0  # bytes of memory of the inputs that are not inside the JSON
    text: int = 0  # bytes of the BYTES tensors among them

    @property
    def inlined(self) -> bool:
        """Whether the elements of any input are inside the JSON."""
        return any(slot.data is not None for slot in self.slots)

    @property
    def rows(self) -> int:
        """The rows that the request adds to a batch; 1 for a request that is never stacked."""
        return self.group.rows or 1

    def __post_init__(self) -> None:
        self.read_cost = sum(slot.read_cost for slot in self.slots)
        self.text = sum(slot.size for slot in self.slots if slot.datatype == "BYTES")
        self.element_bytes = sum(slot.element_bytes for slot in self.slots)
        if all(slot.is_view for slot in self.slots):
            self.views = tuple((slot.name, slot.shape, slot.dtype, slot.start) for slot in self.slots)

    def extra_memory(self, json_bytes: int) -> int:
        """The bytes of memory needed to read the inputs, in addition to a body with `json_bytes` of JSON."""
        return sum(slot.extra_memory(json_bytes) for slot in self.slots)

    def max_text_bytes(self, json_bytes: int) -> int:
        """The most bytes of text that the inputs can have, given `json_bytes` of JSON."""
        inside = any(slot.data is not None and slot.datatype == "BYTES" for slot in self.slots)
        return self.text + (json_bytes if inside else 0)

    def named(self, id: str) -> ParsedRequest:
        """A copy with another id. It shares the cached JSON answers, but not `answers`, which contain the id."""
        return ParsedRequest(
            id,
            self.slots,
            self.binary_bytes,
            self.outputs,
            self.parameters,
            self.timeout,
            self.priority,
            self.group,
            self.plain,
            self.numeric,
            json_answers=self.json_answers,
        )

    def sent_as_binary(self) -> ParsedRequest | None:
        """The same request with its only input as a view into a body of binary data; None if that is not possible.

        It is possible if the request has one input, inside the JSON, of numbers and not empty. The body must then hold
        only the input's bytes.
        """
        if len(self.slots) != 1:
            return None
        slot = self.slots[0]
        if slot.data is None or slot.datatype in ("BYTES", "BOOL"):
            return None
        size = byte_size(slot.datatype, slot.shape)
        binary = replace(slot, start=0, size=size, data=None)
        return replace(self, slots=(binary,), binary_bytes=size) if binary.is_view else None

    def reading(self, body: bytes | bytearray, json_bytes: int, taken: Sequence[object] = ()) -> Steps[Tensors]:
        """The inputs by name, without those in shared memory; BadRequest if length or data do not fit the request.

        The first `json_bytes` bytes of the body are JSON. The inputs are views into the rest, except BOOL, BYTES, empty
        tensors and those whose data were removed from the JSON (`taken`, as `Codec.head` returns it). TooLarge as
        `NumberList.tensor`.
        """
        if len(body) - json_bytes != self.binary_bytes:
            for data in taken:
                if isinstance(data, NumberList):
                    data.check()
            raise BadRequest(
                f"body: expected {self.binary_bytes} bytes of binary data after {json_bytes} bytes of JSON, "
                f"got {len(body) - json_bytes}"
            )
        if self.views:
            return {name: np.ndarray(shape, dtype, body, json_bytes + at) for name, shape, dtype, at in self.views}
        tensors: Tensors = {}
        for slot in self.slots:
            if slot.span is None:
                tensors[slot.name] = yield from slot.reading(body, json_bytes, taken)
        return tensors

    @property
    def spans(self) -> list[Span]:
        """The spans of the inputs that are in shared memory."""
        return [slot.span for slot in self.slots if slot.span is not None]


@dataclass(slots=True)
class AnswerTemplate:
    """The JSON of an answer; the payloads of binary outputs follow it in order."""

    json: bytes
    binary: bool  # payloads follow, so a header must give the length of the JSON
    _reply: Reply | None = None

    def reply(self, payloads: list[Payload]) -> Reply:
        """The reply without the payloads, made at the first call: the JSON fixes the lengths of the payloads."""
        if self._reply is None:
            self._reply = (
                binary_reply(self.json, sum(map(len, payloads))) if self.binary else json_reply(200, self.json)
            )
        return self._reply


class Codec:
    """Decodes the requests of one version and encodes its answers."""

    def __init__(self, ref: ModelRef, signature: Signature, regions: Regions) -> None:
        self.ref = ref
        self.signature = signature
        self.regions = regions
        self._memo_by_json: dict[bytes, ParsedRequest] = {}  # by the whole JSON, if it contains no tensor data
        self._memo_by_shell: dict[RequestKey, ParsedRequest] = {}

    # requests

    def begin(self, body: bytes | bytearray, json_bytes: int) -> tuple[ParsedRequest, Sequence[object]]:
        """The parsed request of a body, and the data of the inputs that are inside its JSON (see `head`).

        The first `json_bytes` bytes of the body are JSON; 0: the body, if it is not empty, is one raw tensor. Errors
        are those of `head` and `raw_head`.
        """
        if json_bytes == 0 and len(body):
            return self.raw_head(len(body)), ()
        return self.head(bytes(body[:json_bytes]))

    def tensors(
        self, head: ParsedRequest, body: bytes | bytearray, json_bytes: int, taken: Sequence[object] = ()
    ) -> Tensors:
        """The inputs by name: like `reading`, but in one call instead of in steps."""
        return run_all(self.reading(head, body, json_bytes, taken))

    def reading(
        self, head: ParsedRequest, body: bytes | bytearray, json_bytes: int, taken: Sequence[object] = ()
    ) -> Steps[Tensors]:
        """The inputs by name: as `ParsedRequest.reading`, and copies of those in shared memory; may run on any thread.

        `taken` is the data inside the JSON, the second result of `begin` or `head`. Errors are those of
        `ParsedRequest.reading` and of `shared`.
        """
        sent = yield from head.reading(body, json_bytes, taken)
        return {**sent, **(yield from self.shared(head))}

    def shared(self, head: ParsedRequest) -> Steps[Tensors]:
        """Copies of the inputs that are in shared memory, by name; may raise BadRequest, NotFound or TooLarge."""
        copies: Tensors = {}
        if head.spans:
            self.regions.check_inputs(head.spans)
        for slot in head.slots:
            if slot.span is not None:
                copies[slot.name] = yield from slot.reading(self.regions.read(slot.span), 0)
                yield
        return copies

    def known(self, text: bytes) -> ParsedRequest | None:
        """The cached parsed request of exactly this JSON, which has no tensor data; None if it is not cached."""
        return self._memo_by_json.get(text)

    def head(self, text: bytes) -> tuple[ParsedRequest, Sequence[object]]:
        """The parsed request of this JSON, and the data of the inputs inside it, in order; may run on any thread.

        The data of an input is a `NumberList` or a parsed JSON value, not checked yet. BadRequest or TooLarge for JSON
        that cannot be parsed, any ServerError for a request that does not fit the model.
        """
        known = self._memo_by_json.get(text) if len(text) <= MEMO_BYTES else None
        if known is not None:
            return known, ()
        parts = split_json(text)
        head = self._head_of_parts(parts) if parts is not None else None
        if parts is not None and head is not None:
            return head, parts.number_lists
        document, strict = json_tensors.parse(text, "body")
        taken = json_tensors.take_data(document)
        if not taken:
            return _remember(self._memo_by_json, text, self.read(document)), ()
        if not strict:
            return self.read(document), taken
        try:
            shell = orjson.dumps(document)
        except orjson.JSONEncodeError:  # orjson can read deeper nesting than it can write
            return self.read(document), taken
        return self.shell(shell, lambda: document), taken

    def _head_of_parts(self, parts: SplitJson) -> ParsedRequest | None:
        """The parsed request of a split document; None if the whole document has to be parsed."""
        head = self._memo_by_shell.get(parts.shell)
        if head is None:
            document = parts.document()
            if document is None:
                return None
            try:
                head = self.read(document)
            except ServerError:
                parts.check()
                raise
            _remember(self._memo_by_shell, parts.shell, head)
        return head.named(parts.id) if parts.id else head

    def shell(self, shell: RequestKey, document: Callable[[], object]) -> ParsedRequest:
        """The parsed request with this key from the cache; after a miss, made from the JSON that `document` returns."""
        head = self._memo_by_shell.get(shell)
        return head if head is not None else _remember(self._memo_by_shell, shell, self.read(document()))

    def read(self, document: object) -> ParsedRequest:
        """The parsed request of a document, checked against the model; may raise any ServerError.

        The document is the request's JSON. `data` of an input is the index of its elements (`json_tensors.take_data`).
        """
        root = expect(document, dict, "body")
        parameters = parameters_of(root.get("parameters"), "parameters")
        refuse_sequences(parameters)
        slots, blob_bytes = parse_slots(expect(root.get("inputs"), list, "inputs"), self.signature)
        group = self.signature.group({slot.name: (slot.datatype, slot.shape) for slot in slots})
        binary = parameters.get("binary_data_output", False) is True
        outputs = self.signature.requested_outputs(_outputs(root.get("outputs"), binary))
        if any(slot.span for slot in slots) or any(output.span for output in outputs):
            self.regions.check_allowed()
        if not root.get("outputs"):
            outputs = tuple(RequestedOutput(output.name, binary) for output in outputs)
        return ParsedRequest(
            id=expect(root.get("id", ""), str, "id"),
            slots=slots,
            binary_bytes=blob_bytes,
            outputs=outputs,
            parameters=parameters,
            timeout=timeout_of(parameters.get("timeout")),
            priority=priority_of(parameters.get("priority")),
            group=group,
            plain=all(o.binary and not o.classes and self._is_fixed_size(o.name) for o in outputs),
            numeric=all(self._is_numbers(output) for output in outputs),
        )

    def _is_numbers(self, output: RequestedOutput) -> bool:
        """Whether this output is asked for in JSON, and its elements are numbers or booleans that JSON can hold."""
        if output.binary or output.classes or output.span is not None:
            return False
        return self._is_fixed_size(output.name) and self.signature.outputs[output.name].datatype not in BINARY_ONLY

    def _is_fixed_size(self, output: str) -> bool:
        return self.signature.outputs[output].datatype != "BYTES"

    def raw_head(self, size: int) -> ParsedRequest:
        """The parsed request of a body without JSON: the `size` bytes of the only input.

        A dynamic first dimension is 1, another dynamic one follows from `size`; for BYTES all dynamic ones are 1. All
        outputs are returned in binary. BadRequest if the model has not exactly one input, if the input has any rank or
        several further dynamic dimensions, and for BYTES if the shape has not exactly one element.
        """
        if len(self.signature.inputs) != 1:
            count = len(self.signature.inputs)
            raise BadRequest(f"body: a raw body needs a model with one input, this one has {count}")
        spec = next(iter(self.signature.inputs.values()))
        if spec.any_rank:
            raise BadRequest(f"body: a raw body needs an input of a known rank, {spec.name!r} takes any")
        if spec.datatype == "BYTES":
            slot = raw_string(spec, size)
        else:
            shape = raw_shape(spec.shape, size // NUMPY_OF[spec.datatype].itemsize)
            slot = InputLocation(
                spec.name, spec.datatype, shape, NUMPY_OF[spec.datatype], 0, byte_size(spec.datatype, shape)
            )
        group = self.signature.group({slot.name: (slot.datatype, slot.shape)})
        outputs = tuple(RequestedOutput(name, True) for name in self.signature.outputs)
        plain = all(self._is_fixed_size(name) for name in self.signature.outputs)
        return ParsedRequest("", (slot,), slot.size, outputs, {}, None, 0, group, plain)

    # answers

    def cost(self, head: ParsedRequest, outputs: Tensors) -> int:
        """The estimated cost of writing an answer; the unit is the cost of reading one byte of a request."""
        total, specs = 0, self.signature.outputs
        for wanted in head.outputs:
            array = outputs.get(wanted.name)
            if array is not None and not (head.plain and array.flags.c_contiguous):
                total += write_cost(wanted, specs[wanted.name].datatype, array)
        return total

    def size(self, head: ParsedRequest, outputs: Tensors) -> int:
        """The approximate bytes of an answer; too low for an answer of high `cost`, whose texts are not counted."""
        specs = self.signature.outputs
        return sum(
            written_bytes(each, specs[each.name].datatype, outputs[each.name])
            for each in head.outputs
            if each.name in outputs
        )

    def most(self, head: ParsedRequest, rows: int) -> float:
        """An estimate, before the run, of the `cost` of an answer of `rows` rows, as if all elements were JSON numbers.

        0 if all outputs are binary and of fixed-size elements; otherwise infinite if an inner dimension is dynamic.
        """
        if head.plain:
            return 0
        inner = [self.signature.outputs[output.name].shape[1:] for output in head.outputs]
        if any(-1 in shape for shape in inner):
            return math.inf
        return rows * NUMBER_COST * sum(map(math.prod, inner))

    def answer(self, head: ParsedRequest, outputs: Tensors) -> tuple[Reply, list[Payload]]:
        """The reply with the first part of the answer, and the payloads that follow it, computed in one call.

        The answer is not compressed. Payloads may be views into `outputs`. Errors are those of `encode`.
        """
        if head.numeric and all(output.name in outputs for output in head.outputs):
            arrays = [outputs[output.name] for output in head.outputs]
            lists = [json_tensors.numbers(np.ascontiguousarray(array).reshape(-1))[1:-1] for array in arrays]
            return self.json_answer(head, tuple([array.shape for array in arrays])).reply(lists, head.id)
        answer, payloads = self.encode(head, outputs)
        return answer.reply(payloads), payloads

    def json_answer(self, head: ParsedRequest, shapes: tuple[Shape, ...]) -> JsonAnswer:
        """The JSON around the numbers of an answer; cached in `head`.

        `shapes` are those of the requested outputs, in the order of `head.outputs`.
        """
        found = head.json_answers.get(shapes)
        if found is None:
            if len(head.json_answers) >= MEMO_ENTRIES:
                head.json_answers.clear()
            document, entries = self._document("")
            for output, shape in zip(head.outputs, shapes, strict=True):
                entries.append(_entry(output.name, self.signature.outputs[output.name].datatype, shape))
            found = head.json_answers[shapes] = JsonAnswer(json_tensors.texts_around(document, entries))
        return found

    def encode(self, head: ParsedRequest, outputs: Tensors) -> tuple[AnswerTemplate, list[Payload]]:
        """The JSON of the answer and the binary payloads that follow it, computed in one call.

        Payloads may be views into `outputs`. Outputs in shared memory are written there. Errors are those of `output`,
        `json_tensors.dump_steps` and `Regions.write_all`.
        """
        if not head.plain:
            return run_all(self._encode_steps(head, outputs))
        shapes: tuple[Shape, ...] = ()
        payloads: list[Payload] = []
        for output in head.outputs:
            array = outputs.get(output.name)
            if array is None:
                raise Internal.missing_output(self.ref, output.name)
            shapes += (array.shape,)
            payloads.append(raw_bytes(array))
        answer = head.answers.get(shapes)
        if answer is None:
            if len(head.answers) >= MEMO_ENTRIES:
                head.answers.clear()
            answer, _ = run_all(self._encode_steps(head, outputs))
            head.answers[shapes] = answer
        return answer, payloads

    def encoding(self, head: ParsedRequest, outputs: Tensors) -> Steps[tuple[AnswerTemplate, list[Payload]]]:
        """Like `encode`, in steps; may run on any thread."""
        return self.encode(head, outputs) if head.plain else (yield from self._encode_steps(head, outputs))

    def _encode_steps(self, head: ParsedRequest, outputs: Tensors) -> Steps[tuple[AnswerTemplate, list[Payload]]]:
        document, entries = self._document(head.id)
        payloads: list[Payload] = []
        inline: list[tuple[dict[str, Any], Array, str]] = []
        shared: list[tuple[Span, Payload]] = []
        for output in head.outputs:
            datatype, array = yield from self.output(output, outputs)
            entry = _entry(output.name, datatype, array.shape)
            entries.append(entry)
            if output.binary:
                payloads.append((yield from payload_steps(datatype, array)))
                entry["parameters"] = {"binary_data_size": len(payloads[-1])}
            elif output.span is not None:
                shared.append((output.span, (yield from payload_steps(datatype, array))))
            else:
                inline.append((entry, array, datatype))
        text = yield from json_tensors.dump_steps(document, inline)
        self.regions.write_all(shared)
        return AnswerTemplate(text, bool(payloads)), payloads

    def _document(self, id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The document of an answer with id, model name and version, and its list `outputs`, which is still empty."""
        entries: list[dict[str, Any]] = []
        document: dict[str, Any] = {"id": id} if id else {}
        document |= {"model_name": self.ref.name, "model_version": str(self.ref.version), "outputs": entries}
        return document, entries

    def output(self, output: RequestedOutput, outputs: Tensors) -> Steps[tuple[str, Array]]:
        """The datatype and values of one requested output, after classification if the request asks for it.

        Internal if the model has not returned the output; BadRequest as `classify_steps`.
        """
        spec, array = self.signature.outputs[output.name], outputs.get(output.name)
        if array is None:
            raise Internal.missing_output(self.ref, output.name)
        if output.classes:
            labels = self.signature.labels.get(output.name, ())
            rows = self.signature.batchable
            return "BYTES", (yield from classify_steps(array, spec.datatype, output.classes, rows, labels))
        return spec.datatype, array


def _entry(name: str, datatype: str, shape: Shape) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _remember(memo: dict[Key, ParsedRequest], key: Key, head: ParsedRequest) -> ParsedRequest:
    if len(key if isinstance(key, bytes) else key[0]) <= MEMO_BYTES:
        with _MEMO_LOCK:  # large documents are parsed on several threads
            if len(memo) >= MEMO_ENTRIES:
                del memo[next(iter(memo))]
            memo[key] = head
    return head


def _outputs(value: object, binary_default: bool) -> list[RequestedOutput]:
    items = [] if value is None else expect(value, list, "outputs")
    return [_output(expect(item, dict, f"outputs[{i}]"), i, binary_default) for i, item in enumerate(items)]


def _output(item: dict[str, Any], index: int, binary_default: bool) -> RequestedOutput:
    name = expect(item.get("name"), str, f"outputs[{index}].name")
    parameters = parameters_of(item.get("parameters"), f"output {name!r}.parameters")
    span = parse_span(parameters, f"output {name!r}")
    binary = expect(parameters.get("binary_data", binary_default), bool, f"output {name!r}.parameters.binary_data")
    classes = expect(parameters.get("classification", 0), int, f"output {name!r}.parameters.classification")
    if classes < 0:
        raise BadRequest(f"output {name!r}.parameters.classification: expected 0 or more, got {classes}")
    if span is not None:
        if classes:
            raise BadRequest(f"output {name!r}: expected classification or shared memory, got both")
        return RequestedOutput(name, span=span)
    return RequestedOutput(name, binary, classes)
