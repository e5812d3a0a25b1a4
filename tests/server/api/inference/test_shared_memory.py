"""Tensors in system shared memory, with NVIDIA's client and its utilities on the other side."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from lathe.server.errors import BadRequest, Conflict, NotFound, Unsupported
from lathe.server.shared_memory import MAX_REGIONS, Regions
from lathe.server.types import Span
from tests.server.fakes import adder, doubler, echo
from tests.server.running import Running, rows, serving

TRANSPORTS = {"http": triton_http, "grpc": triton_grpc}
MAX_BODY = 1 << 16


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = {"doubler": doubler(), "adder": adder(), "strings": echo("BYTES"), "flags": echo("BOOL")}
    with serving(models, grpc_port=0, max_body=MAX_BODY) as running:
        yield running


@pytest.fixture(params=TRANSPORTS)
def triton(request: pytest.FixtureRequest) -> Any:
    return TRANSPORTS[request.param]


@pytest.fixture
def client(server: Running, triton: Any) -> Iterator[Any]:
    grpc_address = f"127.0.0.1:{server.server.config.app.state.grpc.port}"  # type: ignore[union-attr]
    with triton.InferenceServerClient(server.address if triton is triton_http else grpc_address) as found:
        yield found
        found.unregister_system_shared_memory()
        assert not statuses(found)


@contextmanager
def memory(size: int) -> Iterator[tuple[str, Any]]:
    """An object of `size` bytes: its key, and the client's handle."""
    key = f"/lathe-test-{secrets.token_hex(6)}"
    handle = shm.create_shared_memory_region("r", key, size)
    try:
        yield key, handle
    finally:
        shm.destroy_shared_memory_region(handle)


def statuses(client: Any) -> list[dict[str, Any]]:
    """Return the registered regions in the form of HTTP."""
    found = client.get_system_shared_memory_status()
    if isinstance(found, list):
        return found
    return [
        {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in found.regions.values()
    ]


def test_inputs_and_outputs_stay_in_a_region(client: Any, triton: Any) -> None:
    x = rows(3)
    with memory(256) as (key, handle):
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory("r", key, 256)
        assert statuses(client) == [{"name": "r", "key": key, "offset": 0, "byte_size": 256}]
        given, wanted = triton.InferInput("x", [3, 4], "FP32"), triton.InferRequestedOutput("y")
        given.set_shared_memory("r", x.nbytes)
        wanted.set_shared_memory("r", 128, offset=64)
        for start in (0, 100):  # the second request uses the remembered head
            shm.set_shared_memory_region(handle, [x + np.float32(start)])
            result = client.infer("doubler", [given], outputs=[wanted])
            output = result.get_output("y")
            assert list(output["shape"] if triton is triton_http else output.shape) == [3, 4]
            found = shm.get_contents_as_numpy(handle, np.float32, [3, 4], offset=64)
            np.testing.assert_array_equal(found, (x + np.float32(start)) * 2)
        client.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException, match="unknown shared memory region 'r'"):
            client.infer("doubler", [given], outputs=[wanted])


def test_regions_beside_tensors_in_the_message(client: Any, triton: Any) -> None:
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.ones((2, 16), np.int32)
    with memory(512) as (key, handle):
        shm.set_shared_memory_region(handle, [b], offset=128)
        client.register_system_shared_memory("r", key, 256, offset=128)  # a part of the object
        in_region = triton.InferInput("a", [2, 16], "INT32")
        in_region.set_shared_memory("r", b.nbytes)
        sent = triton.InferInput("b", [2, 16], "INT32").set_data_from_numpy(a)
        total = triton.InferRequestedOutput("total")
        total.set_shared_memory("r", 128, offset=128)
        for inputs in ([in_region, sent], [sent, in_region]):
            result = client.infer("adder", inputs, outputs=[total, triton.InferRequestedOutput("difference")])
            np.testing.assert_array_equal(result.as_numpy("difference"), b - a)
            found = shm.get_contents_as_numpy(handle, np.int32, [2, 16], offset=256)
            np.testing.assert_array_equal(found, a + b)
            shm.set_shared_memory_region(handle, [np.zeros(32, np.int32)], offset=256)


def test_only_binary_outputs_have_parameters(client: Any, triton: Any) -> None:
    """NVIDIA's client in C++ reads `binary_data_size` of every output that has parameters."""
    over_http = triton is triton_http
    a = np.arange(32, dtype=np.int32).reshape(2, 16)
    inputs = [triton.InferInput(name, [2, 16], "INT32").set_data_from_numpy(a) for name in ("a", "b")]
    with memory(128) as (key, _):
        client.register_system_shared_memory("r", key, 128)
        wanted = {way: triton.InferRequestedOutput("total") for way in ("message", "region", "classes")}
        wanted["region"].set_shared_memory("r", 128)
        wanted["classes"] = triton.InferRequestedOutput("total", class_count=2)
        if over_http:
            wanted["json"] = triton.InferRequestedOutput("total", binary_data=False)
        beside = triton.InferRequestedOutput("difference")
        for way, output in wanted.items():
            result = client.infer("adder", inputs, outputs=[output, beside])
            found = result.get_output("total")
            parameters = found.get("parameters") if over_http else dict(found.parameters)
            in_binary = over_http and way in ("message", "classes")
            assert (set(parameters or ()), way) == ({"binary_data_size"} if in_binary else set(), way)
            np.testing.assert_array_equal(result.as_numpy("difference"), a - a)


def test_strings_and_booleans_in_a_region(client: Any, triton: Any) -> None:
    text = np.array([["plain", "grün", ""]], dtype=np.object_)
    packed = serialize_byte_tensor(text)
    with memory(256) as (key, handle):
        shm.set_shared_memory_region(handle, [packed])
        client.register_system_shared_memory("r", key, 256)
        given, wanted = triton.InferInput("x", [1, 3], "BYTES"), triton.InferRequestedOutput("y")
        size = len(packed.item())
        given.set_shared_memory("r", size)
        wanted.set_shared_memory("r", 100, offset=100)
        client.infer("strings", [given], outputs=[wanted])
        found = shm.get_contents_as_numpy(handle, np.object_, [1, 3], offset=100)
        assert [element.decode() for element in found.ravel()] == text.ravel().tolist()
        shm.set_shared_memory_region(handle, [np.array([[0, 1, 7]], np.uint8)])
        flags = triton.InferInput("x", [1, 3], "BOOL")
        flags.set_shared_memory("r", 3)
        assert client.infer("flags", [flags]).as_numpy("y").tolist() == [[False, True, True]]


def test_a_truncated_object_is_an_error_and_does_not_end_the_process(client: Any, triton: Any) -> None:
    """If it were mapped, reading it would end the process."""
    x = rows(1)
    with memory(1 << 14) as (key, _):
        client.register_system_shared_memory("r", key, 1 << 14)
        given, wanted = triton.InferInput("x", [1, 4], "FP32"), triton.InferRequestedOutput("y")
        given.set_shared_memory("r", 16, offset=8192)
        wanted.set_shared_memory("r", 16, offset=8192)
        os.truncate(f"/dev/shm{key}", 4096)
        sent = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(x)
        for inputs, outputs in (([given], None), ([sent], [wanted])):
            with pytest.raises(InferenceServerException, match="at least 16384 bytes, as registered, got 4096"):
                client.infer("doubler", inputs, outputs=outputs)
        assert os.path.getsize(f"/dev/shm{key}") == 4096
        np.testing.assert_array_equal(client.infer("doubler", [sent]).as_numpy("y"), x * 2)
        os.truncate(f"/dev/shm{key}", 1 << 14)  # so that the client can unmap it


@pytest.mark.parametrize(
    ("size", "offset", "message"),
    [
        (16, 120, "expected bytes within its 128, got 16 at 120"),
        (16, 1 << 40, "expected bytes within its 128"),
        (15, 0, "expected 16 for FP32"),
        (1 << 40, 0, "expected 16 for FP32"),
    ],
)
def test_inputs_outside_of_the_region_are_refused(
    client: Any, triton: Any, size: int, offset: int, message: str
) -> None:
    with memory(128) as (key, _):
        client.register_system_shared_memory("r", key, 128)
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_shared_memory("r", size, offset=offset)
        with pytest.raises(InferenceServerException, match=message):
            client.infer("doubler", [given])


def test_outputs_that_do_not_fit_leave_the_region_unchanged(client: Any, triton: Any) -> None:
    a = np.ones((1, 16), np.int32)
    inputs = [triton.InferInput(name, [1, 16], "INT32").set_data_from_numpy(a) for name in ("a", "b")]
    with memory(128) as (key, handle):
        client.register_system_shared_memory("r", key, 128)
        first, second = triton.InferRequestedOutput("total"), triton.InferRequestedOutput("difference")
        first.set_shared_memory("r", 64)
        for size, offset, message in ((63, 64, "room for 64 bytes of output"), (64, 65, "within its 128")):
            second.set_shared_memory("r", size, offset=offset)
            with pytest.raises(InferenceServerException, match=message):
                client.infer("adder", inputs, outputs=[first, second])
        assert not shm.get_contents_as_numpy(handle, np.uint8, [128]).any()


def test_a_request_reads_no_more_from_regions_than_a_message_may_hold(client: Any, triton: Any) -> None:
    with memory(2 * MAX_BODY) as (key, _):
        client.register_system_shared_memory("r", key, 2 * MAX_BODY)
        given = triton.InferInput("x", [MAX_BODY // 16 + 1, 4], "FP32")
        given.set_shared_memory("r", MAX_BODY + 16)
        with pytest.raises(InferenceServerException, match=f"at most {MAX_BODY} bytes in shared memory"):
            client.infer("doubler", [given])


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/..", "/.", "a/b", "//etc/passwd", "/../../etc/passwd", "a\0b", "x" * 300]
)
def test_a_key_names_only_an_object(client: Any, key: str) -> None:
    with pytest.raises(InferenceServerException, match="key: expected the name of a shared memory object"):
        client.register_system_shared_memory("r", key, 1)


def test_keys_that_name_no_shared_memory_object_are_refused(client: Any, tmp_path: Path) -> None:
    name = f"lathe-test-{secrets.token_hex(6)}"
    link, pipe, folder = (Path(f"/dev/shm/{name}-{kind}") for kind in ("link", "pipe", "folder"))
    (tmp_path / "secret").write_bytes(b"secret")
    try:
        link.symlink_to(tmp_path / "secret")
        os.mkfifo(pipe)
        folder.mkdir()
        for path, message in (
            (link, "cannot be opened"),
            (pipe, "is no regular file"),
            (folder, "there is none"),
            (Path("/dev/shm") / name, "there is none"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                client.register_system_shared_memory("r", f"/{path.name}", 1)
    finally:
        link.unlink()
        pipe.unlink()
        folder.rmdir()


def test_regions_are_registered_and_unregistered(client: Any) -> None:
    with memory(4096) as (key, _):
        for size, offset, message in ((0, 0, "byte_size: expected"), (4097, 0, "got 4096"), (1, 4096, "got 4096")):
            with pytest.raises(InferenceServerException, match=message):
                client.register_system_shared_memory("r", key, size, offset=offset)
        client.register_system_shared_memory("r", key, 4096)
        with pytest.raises(InferenceServerException, match="'r' is registered already"):
            client.register_system_shared_memory("r", key, 4096)
        client.register_system_shared_memory("s", key, 96, offset=4000)
        assert {region["name"] for region in statuses(client)} == {"r", "s"}
        client.unregister_system_shared_memory("nobody")  # allowed, as in Triton
        client.unregister_system_shared_memory("s")
        assert [region["name"] for region in statuses(client)] == ["r"]
        with pytest.raises(InferenceServerException, match="unknown shared memory region 's'"):
            client.get_system_shared_memory_status("s")


def test_cuda_regions_are_not_supported(client: Any) -> None:
    found = client.get_cuda_shared_memory_status()
    assert found == [] or not found.regions
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported"):
        client.register_cuda_shared_memory("r", base64.b64encode(b"handle"), 0, 16)


def test_the_extension_is_announced(client: Any, triton: Any) -> None:
    metadata = client.get_server_metadata()
    assert "system_shared_memory" in (metadata["extensions"] if triton is triton_http else metadata.extensions)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"shared_memory_region": "r"}, "shared_memory_byte_size: expected a number of bytes, got None"),
        ({"shared_memory_byte_size": 16}, "shared_memory_region: expected the name of a region, got None"),
        ({"shared_memory_region": 7, "shared_memory_byte_size": 16}, "expected the name of a region, got 7"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": -1}, "expected a number of bytes, got -1"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": True}, "expected a number of bytes, got True"),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 0.5},
            "shared_memory_offset: expected a number of bytes, got 0.5",
        ),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 16, "binary_data_size": 16}, "got both"),
    ],
)
def test_invalid_region_parameters_are_refused(server: Running, parameters: dict[str, Any], message: str) -> None:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": parameters}
    answer = server.infer("doubler", {"inputs": [item]})
    assert (answer.status, message in answer.error) == (400, True), answer.error


def test_classification_into_a_region_is_refused(server: Running) -> None:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    where = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "classification": 2}
    answer = server.infer("doubler", {"inputs": [item], "outputs": [{"name": "y", "parameters": where}]})
    assert (answer.status, "classification or shared memory" in answer.error) == (400, True)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, True),
        ({"shared_memory": False}, False),
        ({"host": "0.0.0.0", "open_management": True}, False),
        ({"host": "0.0.0.0", "open_management": True, "shared_memory": True}, True),
    ],
)
def test_which_scopes_may_use_regions(settings: dict[str, Any], allowed: bool) -> None:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    item["parameters"] = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    with memory(16) as (key, _), serving({"doubler": doubler()}, **settings) as running:
        answer = running.ask(
            "POST", "/v2/systemsharedmemory/region/r/register", f'{{"key":"{key}","byte_size":16}}'.encode()
        )
        assert answer.status == (200 if allowed else 501)
        assert running.infer("doubler", {"inputs": [item]}).status == (200 if allowed else 501)
        extensions = running.ask("GET", "/v2").json["extensions"]
        assert ("system_shared_memory" in extensions) == allowed
        assert running.ask("GET", "/v2/systemsharedmemory/status").status == 200


def test_regions_are_bounded_and_closed() -> None:
    regions, before = Regions(allowed=True), len(os.listdir("/proc/self/fd"))
    with memory(16) as (key, _):
        held = len(os.listdir("/proc/self/fd"))
        for number in range(MAX_REGIONS):
            regions.register(str(number), key, 0, 16)
        with pytest.raises(Conflict, match=f"at most {MAX_REGIONS} regions"):
            regions.register("one more", key, 0, 16)
        regions.unregister()
        for bad in ("/missing", "a/b"):
            with pytest.raises(BadRequest):
                regions.register("r", bad, 0, 16)
        with pytest.raises(BadRequest, match="at least 17 bytes"):
            regions.register("r", key, 1, 16)
        assert len(os.listdir("/proc/self/fd")) == held
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_object_without_permission_is_not_opened() -> None:
    with memory(16) as (key, _), pytest.raises(Unsupported, match="LATHE_SHARED_MEMORY"):
        Regions().register("r", key, 0, 16)
    with pytest.raises(NotFound):
        Regions().read(Span("r", 0, 1))


def test_a_region_unregistered_while_it_is_used_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next file would get its descriptor, and would be read and written instead."""
    regions, real = Regions(allowed=True), os.preadv

    def unregistered(file: int, buffers: Any, at: int) -> int:
        regions.unregister("r")
        return real(file, buffers, at)

    with memory(16) as (key, handle):
        shm.set_shared_memory_region(handle, [np.arange(16, dtype=np.uint8)])
        regions.register("r", key, 0, 16)
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "preadv", unregistered)
        assert bytes(regions.read(Span("r", 0, 16))) == bytes(range(16))
        assert regions.status() == []
        assert len(os.listdir("/proc/self/fd")) == before - 1
