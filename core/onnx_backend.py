"""The hook of ONNX's own test suite and of tools that speak its backend interface.

    import onnx.backend.test, core
    tests = onnx.backend.test.BackendTest(core.onnx_backend, __name__)

Interface: https://onnx.ai/onnx/api/backend.html. Devices: "CPU".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

import core
from core.frontends.proto import newest_opset
from core.ir.types import DType
from core.runtime.session import Session

_OPTIONS = ("precision", "threads", "max_batch", "optimize", "cache_dir", "tune", "winograd")


class LatheRep(BackendRep):
    """A prepared model."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs in the model's order. `inputs` is one array, a sequence in the model's order, or a mapping.

        An ONNX sequence is a list of arrays, an absent optional None; element types NumPy lacks are those of ml_dtypes.
        """
        feeds = inputs if isinstance(inputs, Mapping) else dict(zip(self.session.inputs, _listed(inputs), strict=False))
        return tuple(self.session.run(feeds).values())


class LatheBackend(Backend):
    """Compiles models; what has no compiled kernel runs on the reference."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model loads."""
        try:
            core.load(model.SerializeToString())
        except core.errors.ModelError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> LatheRep:
        """Compile a model. ModelError when it is not acceptable, UnsupportedError for another device.

        Of the further arguments, those of `core.compile` count; without `threads` there is one, and nothing is tuned.
        """
        if not cls.supports_device(device):
            raise core.errors.UnsupportedError(f"device '{device}' is not supported, expected 'CPU'")
        options: dict[str, Any] = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        graph = core.load(model.SerializeToString())
        return LatheRep(core.compile(graph, **{"threads": 1, "tune": "off", **options}))

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node on arrays and lists of arrays, at its domain's newest opset unless `opset_version` is given; the
        result's fields are its outputs."""
        names = [name for name in node.input if name]
        arrays = _listed(inputs)
        model = _single_node_model(node, dict(zip(names, arrays, strict=True)), kwargs.get("opset_version"))
        return namedtupledict("Outputs", [name for name in node.output if name])(
            *cls.prepare(model, device).run(arrays)
        )

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0].upper() == "CPU"


def _listed(inputs: Any) -> list[Any]:
    return list(inputs) if isinstance(inputs, list | tuple) else [inputs]


def _single_node_model(node: onnx.NodeProto, arrays: Mapping[str, Any], opset: int | None) -> onnx.ModelProto:
    inputs = [onnx.ValueInfoProto(name=name, type=_type_of(value)) for name, value in arrays.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    version = opset or newest_opset(node.domain)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, version)])


def _type_of(value: Any) -> onnx.TypeProto:
    """The type of a tensor, or of a list of tensors of one element type."""
    if isinstance(value, list):
        if not value:
            raise ValueError("an empty list does not tell the type of its elements")
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(_code(value[0]), None))
    return helper.make_tensor_type_proto(_code(value), np.shape(value))


def _code(value: Any) -> int:
    return DType.from_numpy(np.asarray(value).dtype).onnx_code


is_compatible = LatheBackend.is_compatible
prepare = LatheBackend.prepare
run_model = LatheBackend.run_model
run_node = LatheBackend.run_node
supports_device = LatheBackend.supports_device
