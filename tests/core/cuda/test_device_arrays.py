"""Runs whose inputs and outputs stay in a GPU's memory (`Session.run_on_device`), on simulated GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lathe
from lathe.core.errors import FeedError, UnsupportedError
from lathe.core.ir.build import Builder
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType, symbol
from lathe.core.runtime.device import devices
from lathe.core.runtime.device.device import Device
from lathe.core.runtime.device.simulated import SimulatedDevice
from lathe.core.runtime.device.upload import Uploader
from lathe.core.runtime.session import dlpack
from lathe.core.runtime.session.device_arrays import DeviceArray, device_array
from lathe.core.runtime.session.dlpack import DeviceType
from tests.core.cuda.fake_driver import FakeDriver, FakeGpu

NAME = "cuda:0"


def two_outputs() -> Graph:
    graph = Graph("two")
    b = Builder(graph)
    x, y = (b.input(name, TensorType(DType.FLOAT32, (symbol("batch"), 6))) for name in "xy")
    graph.outputs = [b("Add", x, y), b("ReduceMax", b("Abs", x), axes=(1,), keepdims=0)]
    return graph


@pytest.fixture(params=[SimulatedDevice, lambda: FakeGpu(FakeDriver())], ids=["simulated", "fake driver"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made: Device = request.param()
    monkeypatch.setitem(devices._devices, NAME, made)
    return made


class Memory:
    """Arrays in the memory of a device; `freed` at the end."""

    def __init__(self, device: Device) -> None:
        self.device, self._stream = device, device.stream()
        self._blocks: list[int] = []

    def put(self, array: NDArray[Any]) -> DeviceArray:
        address = self.device.allocate(array.nbytes)
        self._blocks.append(address)
        with closing(Uploader(self.device, self._stream)) as uploader:
            uploader.put(address, [np.ascontiguousarray(array).data.cast("B")])
        return DeviceArray(address, array.shape, array.dtype)

    def get(self, array: DeviceArray) -> NDArray[Any]:
        block = self.device.host_bytes(array.nbytes)
        self._stream.copy_out(block.ctypes.data, array.address, array.nbytes)
        self._stream.synchronize()
        found = block.view(array.dtype).reshape(array.shape).copy()
        self.device.free_host(block)
        return found

    def close(self) -> None:
        for block in self._blocks:
            self.device.free(block)
        self._stream.close()


def test_inputs_and_outputs_stay_on_the_device(device: Device) -> None:
    """For several batch sizes, with one input from the host; the results are those of `run`."""
    with closing(Memory(device)) as memory, lathe.compile(two_outputs(), device=NAME, tune="off") as session:
        for n in (1, 3, 3, 3, 9):
            x, y = (np.random.default_rng((n, i)).standard_normal((n, 6)).astype(np.float32) for i in (0, 1))
            expected = session.run({"x": x, "y": y})
            with session.run_on_device({"x": memory.put(x), "y": y}) as results:
                assert list(results) == list(expected) and len(results) == 2
                for name, array in results.items():
                    np.testing.assert_array_equal(memory.get(array), expected[name])
                    assert array.__cuda_array_interface__["shape"] == expected[name].shape


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT64, DType.UINT8, DType.BOOL, DType.FLOAT16])
def test_numpy_reads_outputs_by_dlpack(dtype: DType) -> None:
    """A simulated device is in host memory, so NumPy's own reader of DLPack is the oracle."""
    graph = Graph("same")
    b = Builder(graph)
    graph.outputs = [b("Transpose", b.input("x", TensorType(dtype, (symbol("batch"), 2, 3))), perm=(0, 2, 1))]
    x = (np.random.default_rng(0).standard_normal((5, 2, 3)) * 3).astype(dtype.numpy)
    with lathe.compile(graph, device="simulated", tune="off") as session, session.run_on_device({"x": x}) as results:
        [array] = results.values()
        np.testing.assert_array_equal(np.from_dlpack(array), x.transpose(0, 2, 1))


def test_capsules_give_the_arrays_that_were_exported() -> None:
    """For bfloat16, scalars and empty arrays as well; nothing is kept once the capsules are gone."""
    for array in (
        np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int8), np.array(2.5), np.ones(3, bool),
        np.arange(4).astype(DType.BFLOAT16.numpy),
    ):  # fmt: skip
        capsule = dlpack.export(array.ctypes.data, array.shape, array.dtype, (DeviceType.CUDA, 0))
        block = dlpack.read(capsule)
        assert (block.address, block.shape, block.dtype) == (array.ctypes.data, array.shape, array.dtype)
        assert len(dlpack._exported) == 1
        del capsule, block
        assert not dlpack._exported


def test_consumed_capsules_are_forgotten_with_the_consumer() -> None:
    array = DeviceArray(0, (0,), np.dtype(np.float32), place=(DeviceType.CPU, 0))
    view = np.from_dlpack(array)
    assert len(dlpack._exported) == 1
    del view
    assert not dlpack._exported


class _ByDLPack:
    """An array on a GPU of another library that only knows DLPack. NumPy's writer is the oracle."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return DeviceType.CUDA, 0

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


def test_inputs_by_dlpack_stay_on_the_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(type(device), "wait_for_stream", lambda self, handle: waited.append(handle))
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    with closing(Memory(device)) as memory, lathe.compile(two_outputs(), device=NAME, tune="off") as session:
        place = memory.put(x).address
        on_device = np.frombuffer((ctypes.c_char * x.nbytes).from_address(place), np.float32).reshape(x.shape)
        given = _ByDLPack(on_device)
        with session.run_on_device({"x": given, "y": x}) as results:
            np.testing.assert_array_equal(memory.get(next(iter(results.values()))), x + x)
        assert given.streams == waited == [1]  # the default stream
        with pytest.raises(FeedError, match="input 'x': expected a contiguous array, got one with strides"):
            session.run_on_device({"x": _ByDLPack(np.zeros((6, 3), np.float32).T), "y": x})


def test_types_that_dlpack_lacks_are_refused() -> None:
    with pytest.raises(TypeError, match="DLPack has no element type"):
        dlpack.export(0, (1,), np.dtype("S3"), (DeviceType.CPU, 0))
    with pytest.raises(FeedError, match="input 'x': expected an element type of NumPy or bfloat16, got code 5"):
        device_array("x", _ByDLPack(np.zeros(2, np.complex64)))


def test_two_results_may_be_open_and_closing_twice_is_harmless(device: Device) -> None:
    with closing(Memory(device)) as memory, lathe.compile(two_outputs(), device=NAME, tune="off") as session:
        arrays = [np.full((2, 6), value, np.float32) for value in (1, 5)]
        runs = [session.run_on_device(dict.fromkeys("xy", memory.put(array))) for array in arrays]
        for run, array in zip(runs, arrays, strict=True):
            np.testing.assert_array_equal(memory.get(next(iter(run.values()))), 2 * array)
            run.close()
            run.close()
        assert session.run({"x": arrays[0], "y": arrays[0]})


def test_forgotten_results_do_not_hold_their_memory(device: Device) -> None:
    """Without that, the third run would wait for ever."""
    x = np.ones((1, 6), np.float32)
    with lathe.compile(two_outputs(), device=NAME, tune="off") as session:
        for _ in range(5):
            session.run_on_device({"x": x, "y": x})


def test_the_stream_of_an_input_is_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(type(device), "wait_for_stream", lambda self, handle: waited.append(handle))

    class Named:
        """An array that names the stream in which it is computed, or none."""

        def __init__(self, array: DeviceArray, **stream: Any) -> None:
            facts = {key: value for key, value in array.__cuda_array_interface__.items() if key != "stream"}
            self.__cuda_array_interface__ = {**facts, **stream}

    with closing(Memory(device)) as memory, lathe.compile(two_outputs(), device=NAME, tune="off") as session:
        array = memory.put(np.ones((1, 6), np.float32))
        for given, expected in (({"stream": 77}, [77]), ({"stream": None}, []), ({}, [1])):
            waited.clear()
            session.run_on_device({"x": Named(array, **given), "y": np.ones((1, 6), np.float32)}).close()
            assert waited == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: replace(array, shape=(2, 5)), "input 'x'"),
        (lambda array: replace(array, dtype=np.dtype(np.float64)), "input 'x'"),
        (lambda array: replace(array, shape=(1, 6)), "dimension batch"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    device: Device, change: Callable[[DeviceArray], DeviceArray], message: str
) -> None:
    with closing(Memory(device)) as memory, lathe.compile(two_outputs(), device=NAME, tune="off") as session:
        array = memory.put(np.ones((2, 6), np.float32))
        with pytest.raises(FeedError, match=message):
            session.run_on_device({"x": change(array), "y": array})
        session.run_on_device({"x": array, "y": array}).close()


@pytest.mark.parametrize("facts", [{"strides": (4, 8)}, {"mask": np.ones(1)}])
def test_strided_and_masked_arrays_are_refused(facts: dict[str, Any]) -> None:
    class Other:
        __cuda_array_interface__ = {
            "shape": (2, 2), "typestr": "<f4", "data": (256, False), "version": 3, **facts,
        }  # fmt: skip

    with pytest.raises(FeedError, match="input 'x': expected a contiguous array"):
        device_array("x", Other())


def test_models_on_the_host_are_refused() -> None:
    x = np.ones((1, 6), np.float32)
    with lathe.compile(two_outputs(), tune="off") as session, pytest.raises(UnsupportedError, match="session on a GPU"):
        session.run_on_device({"x": x, "y": x})
    graph = two_outputs()
    (name,) = (node.name for node in graph.nodes if node.op == "Abs")
    with (
        lathe.compile(graph, tune="off", device="simulated", placement={name: "cpu"}) as session,
        pytest.raises(UnsupportedError, match="needs a model that runs on one GPU, this one runs on"),
    ):
        session.run_on_device({"x": x, "y": x})
