"""ONNX models of mixtures of experts, as exporters write them: each expert gathers the tokens that chose it."""

from __future__ import annotations

from onnx import TensorProto, helper

from tests.core.onnx_writer import OnnxWriter


class ExpertModel(OnnxWriter):
    """Logits of x [batch, length, width] choose `chosen` of `experts` for each token. The result is their weighted sum.

    With `adds=False`, an expert writes the rows of its tokens instead of adding to them: `chosen` is 1 then.
    """

    def __init__(self, experts: int, chosen: int, width: int, inner: int, adds: bool = True, seed: int = 0) -> None:
        super().__init__(seed)
        self.width, self.inner, self.adds = width, inner, adds
        tokens = self.op("Reshape", "x", self.ints(-1, width))
        scores = self.op("Softmax", self.op("MatMul", tokens, self.weight(width, experts)), axis=-1)
        top = helper.make_node("TopK", [scores, self.ints(chosen)], ["shares", "numbers"], axis=-1)
        self.nodes.append(top)
        self.numbers = self.op("Transpose", "numbers", perm=[1, 0])
        written = self.op("Mul", tokens, self.const(0.0))
        for number in range(experts):
            written = self._expert(tokens, written, number)
        self.result = self.op("Reshape", written, self.op("Shape", "x"))

    def model(self) -> bytes:
        info = helper.make_tensor_value_info
        y = self.op("Identity", self.result, name="y")
        x = info("x", TensorProto.FLOAT, ["batch", "length", self.width])
        graph = helper.make_graph(self.nodes, "experts", [x], [info(y, TensorProto.FLOAT, None)], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        return bytes(model.SerializeToString())

    def _expert(self, tokens: str, written: str, number: int) -> str:
        found = self.op("NonZero", self.op("Equal", self.numbers, self.const(number, "int64")))
        columns = self.op("Transpose", found, perm=[1, 0])
        place = self.op("Slice", columns, self.ints(0), self.ints(1), self.ints(1))
        token = self.op("Slice", columns, self.ints(1), self.ints(2), self.ints(1))
        rows = self.op("GatherND", tokens, token)
        gate, up = (self.op("MatMul", rows, self.weight(self.width, self.inner)) for _ in range(2))
        hidden = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        made = self.op("MatMul", hidden, self.weight(self.inner, self.width))
        share = self.op("GatherND", "shares", self.op("Concat", token, place, axis=1))
        made = self.op("Mul", made, self.op("Unsqueeze", share, self.ints(1)))
        if not self.adds:
            return self.op("ScatterND", written, token, made)
        index = self.op("Expand", token, self.op("Shape", made))
        return self.op("ScatterElements", written, index, made, axis=0, reduction="add")
