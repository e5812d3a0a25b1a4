"""Runs whose inputs and outputs stay in a GPU's memory (`Session.run_on_device`), on simulated GPUs."""

from __future__ import annotations

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
from lathe.core.runtime.session.device_arrays import DeviceArray, device_array
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
