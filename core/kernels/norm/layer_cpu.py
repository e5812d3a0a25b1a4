"""LayerNormalization and RMSNormalization of rows: statistics in two passes over a cached row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lathe.core.codegen.lang import Kernel, Pointer, Val
from lathe.core.ir.types import DType
from lathe.core.kernels.cpu.nest import even_chunks, for_each_vector, grain, has_masks
from lathe.core.kernels.cpu.reduction import ParallelAccumulators, parts_of, reduce_pairwise
from lathe.core.kernels.norm.spec import LayerNormSpec
from lathe.core.kernels.target import Target

_F32 = DType.FLOAT32
_COST = 8  # operations per element
_CHAINS = 4  # independent sums, so that additions need not wait for one another


@dataclass(frozen=True, slots=True)
class _Operands:
    x: Pointer
    scale: Pointer
    bias: Pointer | None
    y: Pointer
    mean: Pointer | None
    deviation: Pointer | None


def generate(spec: LayerNormSpec, target: Target) -> Kernel:
    k = Kernel(spec, target)
    operands = _operands(k, spec)
    in_registers = spec.length <= k.lanes * k.target.registers * 3 // 4
    steps = grain(8, _COST) // max(spec.length, 1)
    with even_chunks(k, k.dim(spec.rows), steps) as (start, stop), k.loop(start, stop) as row:
        x, y = operands.x.at(row * spec.length), operands.y.at(row * spec.length)
        normalize = _short_row if in_registers else _long_row
        mean, deviation = normalize(k, spec, operands, x, y)
        for pointer, value in ((operands.mean, mean), (operands.deviation, deviation)):
            if pointer is not None:
                pointer.store(value, row)
    return k


def _operands(k: Kernel, spec: LayerNormSpec) -> _Operands:
    present = (True, True, spec.bias, True, spec.mean, spec.deviation)
    numbers = iter(range(sum(present)))
    x, scale, bias, y, mean, deviation = (k.operand(next(numbers), _F32) if here else None for here in present)
    if x is None or scale is None or y is None:
        raise ValueError("normalization: expected the operands x, scale and y")
    x, y = (pointer.view(spec.dtype).converting(_F32) for pointer in (x, y))
    return _Operands(x, scale, bias, y, mean, deviation)


def _short_row(k: Kernel, spec: LayerNormSpec, o: _Operands, x: Pointer, y: Pointer) -> tuple[Val, Val]:
    """Normalise a row that fits the registers; returns its mean and inverse deviation."""
    parts = parts_of(k, spec.length)
    row = [x.load(part.start, part.lanes, part.mask) for part in parts]
    mean = k.constant(0, _F32)
    if spec.centered:
        mean = _total(k, row) * (1.0 / spec.length)
        row = [v - mean for v in row]
        row = [v if p.mask is None else k.ops.select(p.mask, v, 0.0) for p, v in zip(parts, row, strict=True)]
    deviation = _inverse_deviation(k, spec, k.ops.sum(_sum_of_squares(k, row)))
    for part, value in zip(parts, row, strict=True):
        result = _affine_result(k, o, value * deviation, part.start, part.lanes, part.mask)
        y.store(result, part.start, part.mask)
    return mean, deviation


def _total(k: Kernel, row: Sequence[Val]) -> Val:
    return k.ops.sum(reduce_pairwise(row, k.ops.add)) if row else k.constant(0, _F32)


def _sum_of_squares(k: Kernel, row: Sequence[Val]) -> Val:
    """The vector of sums of squares of `row`, lane by lane, in four chains."""
    chains = [v * v for v in row[:_CHAINS]]
    for i, v in enumerate(row[_CHAINS:]):
        chains[i % _CHAINS] = k.ops.fma(v, v, chains[i % _CHAINS])
    return reduce_pairwise(chains, k.ops.add)


def _affine_result(k: Kernel, o: _Operands, value: Val, start: Val | int, lanes: int, mask: Val | None) -> Val:
    """The normalised `value`, elements from `start` on of a row, times their scale, plus their bias if there is one."""
    scale = o.scale.load(start, lanes, mask)
    return value * scale if o.bias is None else k.ops.fma(value, scale, o.bias.load(start, lanes, mask))


def _inverse_deviation(k: Kernel, spec: LayerNormSpec, squares: Val) -> Val:
    return 1.0 / k.ops.sqrt(squares * (1.0 / spec.length) + k.constant(spec.epsilon, _F32))


def _long_row(k: Kernel, spec: LayerNormSpec, o: _Operands, x: Pointer, y: Pointer) -> tuple[Val, Val]:
    mean = sum_of(k, x, spec.length) / spec.length if spec.centered else k.constant(0, _F32)
    deviation = _inverse_deviation(k, spec, squares_of(k, x, spec.length, mean))

    def finish(i: Val, lanes: int, mask: Val | None) -> None:
        y.store(_affine_result(k, o, (x.load(i, lanes, mask) - mean) * deviation, i, lanes, mask), i, mask)

    for_each_vector(k, spec.length, finish, k.lanes, has_masks(k.target, [4]), unroll=4)
    return mean, deviation


def sum_of(k: Kernel, x: Pointer, length: Val | int) -> Val:
    """The sum of `length` contiguous elements."""
    return ParallelAccumulators(k, _F32, 0, k.ops.add).over(
        length, lambda acc, i, lanes, mask: acc + x.load(i, lanes, mask)
    )


def squares_of(k: Kernel, x: Pointer, length: Val | int, mean: Val) -> Val:
    """The sum of the squared differences of `length` contiguous elements from `mean`."""
    chains = ParallelAccumulators(k, _F32, 0, k.ops.add)

    def step(acc: Val, i: Val, lanes: int, mask: Val | None) -> Val:
        centered = chains.masked(x.load(i, lanes, mask) - mean, mask)
        return k.ops.fma(centered, centered, acc)

    return chains.over(length, step)
