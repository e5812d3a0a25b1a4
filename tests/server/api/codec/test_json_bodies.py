"""Native code and Python's parser read JSON requests alike: values, heads and errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lathe.server.api.codec import codec as module
from lathe.server.api.codec import json_split
from lathe.server.api.codec.codec import Codec, ParsedRequest
from lathe.server.batching.signature import Signature
from lathe.server.datatypes import NUMPY_OF
from lathe.server.errors import ServerError
from lathe.server.shared_memory import Regions
from lathe.server.types import ModelRef, Tensors, TensorSpec
from tests.server.fakes import doubler
from tests.server.running import Running, serving

NUMBERS = ("FP32", "FP64", "BOOL", *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)))
FIELDS = ("id", "slots", "binary_bytes", "outputs", "parameters", "timeout", "priority", "group", "plain")


def new_codec(*inputs: tuple[str, str, tuple[int, ...]]) -> Codec:
    specs = [TensorSpec(*spec) for spec in inputs or (("x", "FP32", (-1, 4)),)]
    return Codec(ModelRef("m", 1), Signature(specs, [TensorSpec("y", "FP32", (-1, 4))], True), Regions())


def document(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**more, "inputs": inputs}).encode()


def tensor(data: object, shape: tuple[int, ...] = (1, 4), datatype: str = "FP32", name: str = "x") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


Outcome = tuple[str, object]


def read_result(codec: Codec, body: bytes) -> Outcome:
    """The result of reading a body: its head and bits, or the error."""
    try:
        with np.errstate(over="ignore"):
            head, taken = codec.begin(body, len(body))
            tensors = codec.tensors(head, body, len(body), taken)
    except ServerError as error:
        return type(error).__name__, error.message
    return "read", (fields(head), bits(tensors))


def fields(head: ParsedRequest) -> list[str]:
    """NaN in parameters compares equal in this form."""
    return [repr(getattr(head, name)) for name in FIELDS]


def bits(tensors: Tensors) -> dict[str, object]:
    return {name: (a.dtype, a.shape, a.tolist() if a.dtype.kind == "O" else a.tobytes()) for name, a in tensors.items()}


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[Codec, bytes], Outcome]:
    """Reads a body as a whole document, with a codec that remembers nothing."""

    def read(codec: Codec, body: bytes) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setattr(module, "split_json", lambda text: None)
            return read_result(Codec(codec.ref, codec.signature, codec.regions), body)

    return read


@pytest.fixture
def parsed_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the documents that Python parsed whole."""
    lengths: list[int] = []
    parse = module.json_tensors.parse

    def noted(text: bytes, field: str) -> Any:
        lengths.append(len(text))
        return parse(text, field)

    monkeypatch.setattr(module.json_tensors, "parse", noted)
    return lengths


X = [0.5, -1, 2e-3, 16777217]
GOOD = {
    "flat": document(tensor(X)),
    "nested": document(tensor([X])),
    "dense": json.dumps({"inputs": [tensor(X)]}, separators=(",", ":")).encode(),
    "indented": json.dumps({"inputs": [tensor([X, X], (2, 4))]}, indent=2).encode(),
    "data first": b'{"inputs":[{"data" : [1,2,3,4.5],"datatype":"FP32","shape":[1,4],"name":"x"}],"id":"a"}',
    "id": document(tensor(X), id="request 7"),
    "empty id": document(tensor(X), id=""),
    "id beyond ASCII": json.dumps({"id": "\u00fc\u4e2d\U0001f600", "inputs": [tensor(X)]}, ensure_ascii=False).encode(),
    "escapes in the id": document(tensor(X), id='\u00fc "quoted" \\ \n'),
    "NaN": document(tensor([float("nan"), float("inf"), -float("inf"), 0])),
    "parameters": document(tensor(X), parameters={"timeout": 60_000_000, "priority": 2, "binary_data_output": True}),
    "outputs": document(tensor(X), outputs=[{"name": "y", "parameters": {"binary_data": True}}]),
    "too large for single precision": document(tensor([1e39, -1e300, 1e-60, 0])),
    "parameters of the tensor": document({**tensor(X), "parameters": {"data": "x", "note": {"data": 5}}}),
}


@pytest.mark.parametrize("name", GOOD)
def test_plain_requests_are_read_without_being_parsed(
    name: str, whole: Callable[[Codec, bytes], Outcome], parsed_lengths: list[int]
) -> None:
    codec, body = new_codec(), GOOD[name]
    outcome = read_result(codec, body)
    again = read_result(codec, body)
    assert (parsed_lengths == []) == (name != "parameters of the tensor")
    assert outcome[0] == "read"
    assert outcome == again == whole(codec, body)


def test_requests_that_differ_in_numbers_and_ids_share_a_head(parsed_lengths: list[int]) -> None:
    codec = new_codec()
    heads = [codec.head(document(tensor([n, n / 3, -n, 0]), id=f"request {n}"))[0] for n in range(100)]
    assert len(codec._memo_by_shell) == 1
    assert [head.id for head in heads] == [f"request {n}" for n in range(100)]
    assert parsed_lengths == []


@pytest.mark.parametrize("datatype", NUMBERS)
def test_values_of_every_type(
    datatype: str, whole: Callable[[Codec, bytes], Outcome], parsed_lengths: list[int]
) -> None:
    rng, dtype = np.random.default_rng(5), NUMPY_OF[datatype]
    codec = new_codec(("x", datatype, (-1, 3, 2)))
    for size in (1, 2, 50):
        raw = rng.integers(0, 256, size * 6 * dtype.itemsize, np.uint8)
        array = (raw % 2).astype(np.bool_) if datatype == "BOOL" else raw.view(dtype)
        if dtype.kind == "f":
            array = np.nan_to_num(array)
        array = array.reshape(size, 3, 2)
        for data in (array.ravel().tolist(), array.tolist()):
            body = document(tensor(data, array.shape, datatype))
            assert read_result(codec, body) == (
                "read",
                (read_result(codec, body)[1][0], {"x": (dtype, array.shape, array.tobytes())}),
            )  # type: ignore[index]
            assert parsed_lengths == []
            assert read_result(codec, body) == whole(codec, body)
            parsed_lengths.clear()


def test_several_inputs(whole: Callable[[Codec, bytes], Outcome], parsed_lengths: list[int]) -> None:
    codec = new_codec(("a", "INT8", (-1, 2)), ("b", "FP64", (-1, 2, 2)), ("c", "BOOL", (-1, 1)))
    inputs = [
        tensor([True, False], (2, 1), "BOOL", "c"),
        tensor([-128, 127, 0, 1], (2, 2), "INT8", "a"),
        tensor([[[0.1, 2], [3, 4]], [[5, 6], [7, 1e300]]], (2, 2, 2), "FP64", "b"),
    ]
    outcome = read_result(codec, document(*inputs))
    assert parsed_lengths == []
    assert outcome[0] == "read"
    assert outcome == whole(codec, document(*inputs))


CODECS = {
    "FP32": lambda: new_codec(),
    "two": lambda: new_codec(("x", "FP32", (-1, 4)), ("n", "INT8", (-1, 2))),
    "text": lambda: new_codec(("x", "FP32", (-1, 4)), ("t", "BYTES", (-1, 1))),
    "half": lambda: new_codec(("x", "FP16", (-1, 4))),
}
ODD = {
    "data twice": b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4],"data":[5,6,7,8]}]}',
    "inputs twice": b'{"inputs":[],"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
    "inputs of both": b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}],"inputs":[]}',
    "id twice": document(tensor(X), id="a")[:-1] + b',"id":"b"}',
    "id twice, escaped": document(tensor(X), id="a")[:-1] + b',"\\u0069d":"b"}',
    "id is a list": document(tensor(X), id=[1]),
    "id of another": document(tensor(X), parameters={"id": "a"}),
    "id of both": document(tensor(X), parameters={"id": "a"}, id="b"),
    "id is null": document(tensor(X), id=None),
    "escaped key": document(tensor(X)).replace(b'"data"', b'"d\\u0061ta"'),
    "escaped key before the data": document(tensor(X)).replace(b'"data"', b'"d\\u0061ta": [1, 2, 3, 4], "data"'),
    "escaped key after the data": document(tensor(X)).replace(b"16777217]", b'16777217], "d\\u0061ta": [1, 2, 3, 4]'),
    "a name that ends with the key": document(tensor(X, name='\\"data')),
    "a name with brackets": document(tensor(X, name='"data": [1]')),
    "data at the root": document(tensor(X), data=[1, 2, 3]),
    "data in parameters": document(tensor(X), parameters={"data": [1, 2, 3]}),
    "data for the null": b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":null}], "data":[1,2,3,4]}',
    "data of another depth": document({**tensor(X), "more": {"data": [1, 2]}}),
    "data is 0": document(tensor(0), data=[1, 2, 3, 4]),
    "data is no list": document(tensor({"data": [1, 2, 3, 4]})),
    "a string": document(tensor([1, 2, 3, "4"])),
    "a string first": document(tensor(["1", 2, 3, 4])),
    "an object": document(tensor([1, 2, 3, {}])),
    "ragged": document(tensor([[1, 2, 3, 4], [1]], (2, 4))),
    "too few": document(tensor([1, 2, 3])),
    "too many": document(tensor([1, 2, 3, 4, 5])),
    "none": document(tensor([], (0, 4))),
    "none, nested": document(tensor([[]], (0, 4))),
    "far more elements than there are": document(tensor(X, (1 << 40, 4))),
    "any text": document(tensor(["a"], (1, 1), "BYTES", "t"), tensor(X)),
    "any text first": document(tensor(X), tensor(["]", "data"], (1, 2), "BYTES", "t")),
    "an integer too large": document(tensor(X), tensor([1, 128], (1, 2), "INT8", "n")),
    "an integer with a point": document(tensor(X), tensor([1, 2.0], (1, 2), "INT8", "n")),
    "NaN among integers": document(tensor(X), tensor([1, float("nan")], (1, 2), "INT8", "n")),
    "a size of 25 digits, and NaN": document(tensor([1, float("nan")], (1, 2), "INT8", "n")).replace(
        b"[1, 2]", b"[1, %s]" % (b"1" * 25)
    ),
    "infinite": document(tensor(X)).replace(b"16777217", b"1e400"),
    "a wrong shape and no JSON": document(tensor(X, (2, 2))).replace(b"16777217", b"01"),
    "a wrong name and no JSON": document(tensor(X, name="z")).replace(b"16777217", b"1e"),
    "binary data that is missing, and no JSON": document(
        tensor([1, 2.0, 3, 4]),
        {"name": "n", "shape": [1, 2], "datatype": "INT8", "parameters": {"binary_data_size": 2}},
    ).replace(b"2.0", b"2."),
    "binary data that is missing": document(
        tensor(X), {"name": "n", "shape": [1, 2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}
    ),
    "half": document(tensor(X, datatype="FP16")),
    "no UTF-8 in the id": document(tensor(X), id="?").replace(b"?", b"\xff"),
    "half of a surrogate pair": document(tensor(X), id="?").replace(b"?", b"\xed\xa0\x80"),
    "text after the document": document(tensor(X)) + b"]",
    "cut": document(tensor(X))[:-1],
    "cut in the data": document(tensor(X))[:-12],
    "a zero byte": document(tensor(X)).replace(b"0.5", b"0\x00.5"),
    "the placeholder of a list of numbers": document(tensor(json_split._PLACEHOLDERS[0]), data=[1, 2, 3, 4]),
}


@pytest.mark.parametrize("model", CODECS)
@pytest.mark.parametrize("name", ODD)
def test_unusual_requests_are_read_like_whole_documents(
    name: str, model: str, whole: Callable[[Codec, bytes], Outcome]
) -> None:
    codec, body = CODECS[model](), ODD[name]
    expected = whole(codec, body)
    assert read_result(codec, body) == expected
    assert read_result(codec, body) == expected, "the second time, when more is remembered"


PIECES = [
    *(bytes([c]) for c in b'[]{},:"\\ \n\t0123456789.-+eE\x00\xff'),
    *(b'"data"', b'"data":[', b'"id":"q"', b"NaN", b"Infinity", b"null", b"true", b"1e999", b'"inputs"', b"1" * 25),
    *(b"\\u0064", b"[[", b"]]", b"},{", b'"x"', b"128", b"1.5", b"\xc3\xbc", b'"data":[1,2,3,4],', b'"id":"b",'),
]


def mutate(rng: random.Random, body: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(7):
            case 0:
                body = body[:at] + rng.choice(PIECES) + body[at:]
            case 1:
                body = body[:at] + body[at + rng.randint(1, 6) :]
            case 2:
                body = body[:at] + rng.choice(PIECES) + body[at + 1 :]
            case 3:
                start = rng.randrange(len(body) + 1)
                body = body[:at] + body[start : start + rng.randint(1, 40)] + body[at:]
            case _:
                digits = [at for at, c in enumerate(body) if c in b"0123456789"] or [0]
                at = rng.choice(digits)
                body = body[:at] + rng.choice([b"%d" % rng.randrange(10_000), b"0.5", b"", b"e5"]) + body[at + 1 :]
    return body


def compare_mutated(seed: int, count: int, whole: Callable[[Codec, bytes], Outcome]) -> None:
    rng = random.Random(seed)
    codecs = [make() for make in (*CODECS.values(), *[CODECS["FP32"]] * 4)]
    bodies = [*GOOD.values()] * 3 + [*ODD.values()]
    read = 0
    for _ in range(count):
        codec, body = rng.choice(codecs), mutate(rng, rng.choice(bodies))
        expected = whole(codec, body)
        assert read_result(codec, body) == expected, body
        read += expected[0] == "read"
    assert read > count // 20, "most are damaged, but not all"


def test_mutated_bodies_are_read_alike(whole: Callable[[Codec, bytes], Outcome]) -> None:
    compare_mutated(1, 10_000, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_mutated_bodies_are_read_alike(seed: int, whole: Callable[[Codec, bytes], Outcome]) -> None:
    compare_mutated(seed, 100_000, whole)


@pytest.fixture(scope="module", params=["direct", "asgi"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving({"doubler": doubler()}, request.param) as running:
        yield running


def test_answers_carry_the_id_and_the_numbers(server: Running) -> None:
    for number in range(3):
        body = document(tensor([number, 2, 3, 4.25]), id=f"call {number}")
        answer = server.ask("POST", "/v2/models/doubler/infer", body).json
        assert answer["id"] == f"call {number}"
        assert answer["outputs"][0]["data"] == [2 * number, 4, 6, 8.5]
    answer = server.ask("POST", "/v2/models/doubler/infer", document(tensor(X))).json
    assert "id" not in answer


def test_binary_answers_carry_the_id(server: Running) -> None:
    """Their JSON is remembered with the head, and requests with other ids have their own heads."""
    for number in range(3):
        body = document(tensor(X), id=f"call {number}", parameters={"binary_data_output": True})
        assert server.ask("POST", "/v2/models/doubler/infer", body).json["id"] == f"call {number}"
