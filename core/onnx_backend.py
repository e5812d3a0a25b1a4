"""ONNX's backend interface, for its own test suite and for tools that use it.

    import onnx.backend.test, lathe.core.onnx_backend
    tests = onnx.backend.test.BackendTest(lathe.core.onnx_backend, __name__)

Interface: https://onnx.ai/onnx/api/backend.html. Devices: "CPU".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

import lathe
from lathe.core.frontends.proto import newest_opset
from lathe.core.ir.types import DType
from lathe.core.runtime.session.session import Session

_OPTIONS = ("precision", "threads", "max_batch", "optimize", "cache_dir", "tune", "winograd")


class LatheRep(BackendRep):
    """A compiled model behind ONNX's interface `BackendRep`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs in the model's order. `inputs`: one array, a sequence in the model's order, or a mapping by name.

        An ONNX sequence is a list of arrays, an absent optional is None; a list as `inputs` is a sequence of inputs,
        never an ONNX sequence. Element types that NumPy lacks are those of ml_dtypes. Arrays beyond the number of
        inputs, and further arguments, are ignored. Errors are those of `Session.run`.
        """
        by_name = isinstance(inputs, Mapping)
        feeds = inputs if by_name else dict(zip(self.session.inputs, _as_list(inputs), strict=False))
        return tuple(self.session.run(feeds).values())


class LatheBackend(Backend):
    """Compiles models. A node without a compiled kernel runs on its NumPy reference."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether Lathe can load the model, and `device` is a CPU. Nothing is compiled."""
        try:
            lathe.load(model.SerializeToString())
        except lathe.errors.ModelError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> LatheRep:
        """Compile a model. ModelError if it is not acceptable, UnsupportedError for another device than "CPU".

        The options `precision`, `threads`, `max_batch`, `optimize`, `cache_dir`, `tune` and `winograd` are passed to
        `lathe.compile`, all other arguments are ignored. Unlike there, the defaults are `threads=1` and `tune="off"`.
        """
        if not cls.supports_device(device):
            raise lathe.errors.UnsupportedError(f"device '{device}' is not supported, expected 'CPU'")
        options: dict[str, Any] = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        graph = lathe.load(model.SerializeToString())
        return LatheRep(lathe.compile(graph, **{"threads": 1, "tune": "off", **options}))

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node; returns a named tuple of those outputs that have a name.

        `inputs`: one value, or a list or tuple of one value for each input that the node names, in its order; a value
        is an array, or a list of arrays for an ONNX sequence. The opset is the argument `opset_version`, by default the
        newest one of the node's domain that Lathe knows. `outputs_info` and all other arguments are ignored. ValueError
        if the number of values differs from that of the inputs, or a value is an empty list; ModelError as for
        `prepare`, FeedError as for `LatheRep.run`.
        """
        names = [name for name in node.input if name]
        arrays = _as_list(inputs)
        model = _single_node_model(node, dict(zip(names, arrays, strict=True)), kwargs.get("opset_version"))
        return namedtupledict("Outputs", [name for name in node.output if name])(
            *cls.prepare(model, device).run(arrays)
        )

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0].upper() == "CPU"


def _as_list(inputs: Any) -> list[Any]:
    return list(inputs) if isinstance(inputs, list | tuple) else [inputs]


def _single_node_model(node: onnx.NodeProto, arrays: Mapping[str, Any], opset: int | None) -> onnx.ModelProto:
    inputs = [onnx.ValueInfoProto(name=name, type=_type_of(value)) for name, value in arrays.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    version = opset or newest_opset(node.domain)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, version)])


def _type_of(value: Any) -> onnx.TypeProto:
    """The ONNX type of an array (with its shape), or of a list of arrays: a sequence of tensors of unknown shape.

    The first array of a list gives the element type; ValueError for an empty list.
    """
    if isinstance(value, list):
        if not value:
            raise ValueError("sequence: expected at least one tensor, which gives the element type, got an empty list")
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(_onnx_code(value[0]), None))
    return helper.make_tensor_type_proto(_onnx_code(value), np.shape(value))


def _onnx_code(value: Any) -> int:
    return DType.from_numpy(np.asarray(value).dtype).onnx_code


is_compatible = LatheBackend.is_compatible
prepare = LatheBackend.prepare
run_model = LatheBackend.run_model
run_node = LatheBackend.run_node
supports_device = LatheBackend.supports_device
