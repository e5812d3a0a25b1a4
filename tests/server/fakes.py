"""Fakes of the data path's dependencies: a model in NumPy, and a registry that tests fill by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from lathe.server.app import Engine, assemble
from lathe.server.errors import NotFound, Unavailable, UnknownModel
from lathe.server.serving.servable import Servable
from lathe.server.settings import Settings
from lathe.server.types import ModelRef, Tensors, TensorSpec

Function = Callable[[Tensors], Tensors]


class FakeModel:
    """Computes with a given function and records the number of rows of each execution."""

    platform = "fake"
    memory_bytes = 1024
    batch_reason = "declared by the test"

    def __init__(
        self,
        function: Function,
        inputs: Iterable[TensorSpec],
        outputs: Iterable[TensorSpec],
        *,
        batchable: bool = True,
        max_batch: int = 8,
    ) -> None:
        self.function = function
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.batchable, self.max_batch = batchable, max_batch
        self.batches: list[int] = []
        self.gate = threading.Event()  # executions wait while it is cleared
        self.gate.set()
        self.entered = threading.Event()  # set when an execution begins
        self.closed = False

    def execute(self, inputs: Tensors) -> Tensors:
        first = inputs[self.inputs[0].name]
        self.batches.append(first.shape[0] if first.ndim else 0)
        self.entered.set()
        assert self.gate.wait(20)
        return self.function(inputs)

    def close(self) -> None:
        self.closed = True


def doubler(width: int = 4, **options: Any) -> FakeModel:
    """y = 2 * x over FP32 rows."""
    spec = TensorSpec("x", "FP32", (-1, width))
    return FakeModel(lambda t: {"y": t["x"] * 2}, [spec], [TensorSpec("y", "FP32", (-1, width))], **options)


def echo(datatype: str, **options: Any) -> FakeModel:
    """y = x of one datatype, rows of any width."""
    spec = TensorSpec("x", datatype, (-1, -1))
    return FakeModel(lambda t: {"y": t["x"].copy()}, [spec], [TensorSpec("y", datatype, (-1, -1))], **options)


def adder() -> FakeModel:
    """total = a + b, difference = a - b over INT32 rows of 16."""
    specs = [TensorSpec(name, "INT32", (-1, 16)) for name in ("a", "b")]
    outputs = [TensorSpec(name, "INT32", (-1, 16)) for name in ("total", "difference")]
    return FakeModel(lambda t: {"total": t["a"] + t["b"], "difference": t["a"] - t["b"]}, specs, outputs)


def softmax_over_batch() -> FakeModel:
    """Mixes rows, so it must never be batched across requests."""

    def run(tensors: Tensors) -> Tensors:
        e = np.exp(tensors["x"] - tensors["x"].max(axis=0))
        return {"y": e / e.sum(axis=0)}

    return FakeModel(run, [TensorSpec("x", "FP32", (-1, 2))], [TensorSpec("y", "FP32", (-1, 2))], batchable=False)


class FakeRegistry:
    """Models by name; loading and unloading set a flag."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Servable]] = {}
        self.is_unloaded: set[str] = set()

    def add(self, servable: Servable) -> None:
        versions = self.found.setdefault(servable.ref.name, {})
        versions[str(servable.ref.version)] = versions[""] = versions["live"] = servable

    def resolve(self, model: str, version: str = "") -> Servable:
        self._known(model)
        versions = self.found[model]
        if version not in versions:
            raise NotFound(f"model {model!r} has no version {version!r}")
        if model in self.is_unloaded:
            raise Unavailable(f"model {model!r} is not loaded")
        return versions[version]

    def route(self, model: str, version: str = "", key: str = "") -> Servable:
        return self.resolve(model, version)

    def settled(self, model: str, version: str = "") -> Servable | None:
        return self.route(model, version) if model in self.found else None

    def servables(self) -> list[Servable]:
        every = {id(servable): servable for versions in self.found.values() for servable in versions.values()}
        return [servable for servable in every.values() if servable.ref.name not in self.is_unloaded]

    async def index(self, ready: bool = False) -> list[dict[str, Any]]:
        rows = [
            {"name": name, "version": "1", "state": "UNAVAILABLE" if name in self.is_unloaded else "READY"}
            for name in self.found
        ]
        return [row for row in rows if not ready or row["state"] == "READY"]

    async def load(self, model: str, parameters: dict[str, Any] | None = None) -> None:
        self._known(model)
        self.is_unloaded.discard(model)

    async def unload(self, model: str, unload_dependents: bool = False) -> None:
        self._known(model)
        self.is_unloaded.add(model)

    def _known(self, model: str) -> None:
        if model not in self.found:
            raise UnknownModel.of(model, self.found)


def application(settings: Settings, models: dict[str, FakeModel]) -> tuple[Any, FakeRegistry, Engine]:
    """Return an application that serves these models as version 1, with its registry and engine."""
    registry = FakeRegistry()
    engine = Engine.build(settings, registry)

    @asynccontextmanager
    async def running(loaded: Callable[[], None]) -> AsyncIterator[None]:
        for name, model in models.items():
            registry.add(engine.factory.make(ModelRef(name, 1), model))
        loaded()
        yield
        await asyncio.gather(*(servable.retire() for servable in registry.servables()))

    return assemble(engine, registry, running), registry, engine
