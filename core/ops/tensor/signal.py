"""Signal operators: Fourier transforms and mel filters. Complex numbers have a last axis of two, (real, imaginary)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lathe.core.ir.dims import has_only_sizes
from lathe.core.ir.graph import Array, Value
from lathe.core.ir.types import Dim, DType, TensorType, ValueType
from lathe.core.ops.nn.spatial import batch_rows
from lathe.core.ops.opdef.backward import Rewrite
from lathe.core.ops.opdef.registry import Call, Infer, MixesRows, OpDef, RowAxis, RuntimeValue, register
from lathe.core.ops.opdef.terms import Term, Writer
from lathe.core.ops.opdef.type_rules import FLOAT, as_computed, as_dtype, check_kind, normalize_axis, untouched_rows

# The most multiplications per element of a signal. At this bound the reference's FFT takes about half the time of the
# products on one thread. But it has only one thread, and as a fallback it splits native code. Tables must stay small.
MOST_WORK = 1024


def has_products(dtype: DType) -> bool:
    """Whether matrix products of this float type have kernels: of all but float64."""
    return dtype is not DType.FLOAT64


@register
class DFT(OpDef):
    """The discrete Fourier transform along `axis` of [.., 1 or 2], zero-padded or cut to `dft_length`: [.., 2].

    `onesided` keeps the first dft_length // 2 + 1 elements of a real signal's spectrum; with `inverse` it takes these
    and returns the signal [.., 1].
    """

    agreeing = True
    rounds_freely = True
    inputs = "input, dft_length?, axis?"
    outputs = "output"
    attrs = {"inverse": 0, "onesided": 0}
    params = {"dft_length": 1, "axis": 2}
    symbolic = ("dft_length",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = check_kind(c, 0, FLOAT), c.shape(0)
        if shape is None or (c.has_param("axis") and c.param("axis") is None):
            return [TensorType(dtype, None)]
        axis = self._axis(c, len(shape))
        if isinstance(shape[-1], int) and shape[-1] not in (1, 2):
            c.fail(f"input is {c.tensor(0)}, expected a last axis of 1 or 2")
        length = self._length(c, shape[axis])
        if isinstance(length, int) and length < 1:
            c.fail(f"the transform has length {length}, expected at least 1")
        halved = c.attr("onesided") and not c.attr("inverse")
        dims = [*shape[:-1], 1 if c.attr("onesided") and c.attr("inverse") else 2]
        dims[axis] = length // 2 + 1 if halved else length
        return [TensorType(dtype, tuple(dims))]

    def supposes(self, c: Infer) -> Sequence[Dim]:
        """In dynamic-shape code, `MOST_WORK` minus each symbolic length: longer transforms would make slow products."""
        shape = c.shape(0)
        if shape is None or not has_products(c.dtype(0)) or (c.has_param("axis") and c.param("axis") is None):
            return ()
        return [MOST_WORK - extent for extent in dict.fromkeys(self.extents(c)) if has_only_sizes(extent)]

    def extents(self, c: Infer) -> tuple[Dim, ...]:
        """The transform's length, the same length again, and the extent of the input.

        The lengths stand where `STFT.extents` has the elements of all frames and of one frame.
        """
        shape = c.tensor(0).dims
        size = shape[self._axis(c, len(shape))]
        length: Dim = self._length(c, size)
        return length, length, size

    def _axis(self, c: Infer | Call, rank: int) -> int:
        axis = normalize_axis(c, (c.param("axis") or (-2,))[0], rank)
        return axis if axis < rank - 1 else int(c.fail(f"axis is {axis}, expected one before the last"))

    def _length(self, c: Infer | Call, size: Any) -> Any:
        given = c.param("dft_length")
        if given is not None:
            return given[0]
        if isinstance(c, Infer) and c.has_param("dft_length"):
            return c.fresh_dim("length")
        return 2 * (size - 1) if c.attr("inverse") and c.attr("onesided") else size

    def reference(self, c: Call, x: Array, *_: RuntimeValue) -> Array:
        axis = self._axis(c, x.ndim)
        length = int(self._length(c, x.shape[axis]))
        signal = _complex(as_computed(x))
        if c.attr("inverse") and c.attr("onesided"):
            return np.asarray(np.fft.irfft(signal, length, axis)[..., None]).astype(x.dtype)
        spectrum = (np.fft.ifft if c.attr("inverse") else np.fft.fft)(signal, length, axis)
        if c.attr("onesided"):
            spectrum = np.take(spectrum, range(length // 2 + 1), axis)
        return _pairs(spectrum, x.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        shape = c.shape(0)
        if shape is None or (c.has_param("axis") and c.param("axis") is None):
            return super().rows(c, axes)
        return untouched_rows(c, axes, {self._axis(c, len(shape)), len(shape) - 1})

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """Matrix products with tables of cosines and sines, which are constants if the lengths are known.

        UnsupportedError for an unknown axis or last extent, or if neither the input's extent nor the transform's length
        consists of sizes of dynamic-shape code, and not both are numbers.
        """
        x = g.x()
        if x.shape[-1] not in (1, 2) or (g.has_param("axis") and g.param("axis") is None):
            g.unsupported(f"its axis, and the last extent of {g.tensor(0)}, must be known to write it as products")
        axis, inverse, halved = self._axis(g, x.rank), bool(g.attr("inverse")), bool(g.attr("onesided"))
        size = x.shape[axis]
        length = self._length(g, size)
        if isinstance(size, int) and isinstance(length, int):
            matrix = _dft_matrix(size, length, inverse, halved)
            products = _symmetric if size == length and not (halved and inverse) else _products
            first, *second = [products(part, axis, matrix) for part in _parts(x)]
        elif has_only_sizes(size) or has_only_sizes(length):
            tables = _run_tables(x, size, length, inverse, halved)
            first, *second = [(_matmul(part, axis, tables[0]), _matmul(part, axis, tables[1])) for part in _parts(x)]
        else:
            g.unsupported(f"the length along axis {axis} of {g.tensor(0)} must be known to write it as products")
        results = list(first)
        for cosines, sines in second:
            results = [first[0] - sines, first[1] + cosines]
        kept = results[:1] if halved and inverse else results
        columns = [part.unsqueeze(part.rank) for part in kept]
        return [columns[0].op("Concat", *columns[1:], axis=x.rank - 1)]


@register
class STFT(OpDef):
    """Fourier transforms of windowed frames of signals [N, L, 1 or 2]: [N, frames, bins, 2]."""

    agreeing = True
    rounds_freely = True
    inputs = "signal, frame_step, window?, frame_length?"
    outputs = "output"
    attrs = {"onesided": 1}
    params = {"frame_step": 1, "frame_length": 3}
    symbolic = ("frame_length",)

    def infer(self, c: Infer) -> Sequence[ValueType]:
        dtype, shape = check_kind(c, 0, FLOAT), c.shape(0)
        step, length = c.param("frame_step"), self._frame_length(c)
        if shape is None:
            return [TensorType(dtype, None)]
        if len(shape) != 3 or (isinstance(shape[2], int) and shape[2] not in (1, 2)):
            c.fail(f"signal is {c.tensor(0)}, expected [N,L,1] or [N,L,2]")
        if step is not None and (not isinstance(step[0], int) or step[0] < 1):
            c.fail(f"frame_step is {step[0]}, expected at least 1")
        if isinstance(length, int) and (length < 1 or (isinstance(shape[1], int) and length > shape[1])):
            c.fail(f"a frame has {length} samples, expected 1 to the {shape[1]} of the signal")
        if step is None or length is None:
            return [TensorType(dtype, (shape[0], c.fresh_dim("frames"), c.fresh_dim("bins"), 2))]
        frames = (shape[1] - length) // step[0] + 1
        return [TensorType(dtype, (shape[0], frames, length // 2 + 1 if c.attr("onesided") else length, 2))]

    def extents(self, c: Infer) -> tuple[Dim, ...]:
        """The numbers of elements of all frames of a signal together, and of one; zeros if the latter is not known."""
        length, frames = self._frame_length(c), c.node.output.shape[1]
        return (0, 0) if length is None else (frames * length, length)

    def _frame_length(self, c: Infer) -> Dim | None:
        if c.has_param("frame_length"):
            return (c.param("frame_length") or (None,))[0]
        if c.has_input(2):
            window = c.shape(2)
            return None if window is None else window[0]
        shape = c.shape(0)
        return None if shape is None else shape[1]

    def reference(self, c: Call, signal: Array, *rest: Array | None) -> Array:
        window = rest[1] if len(rest) > 1 else None
        (step,) = c.param("frame_step") or (1,)
        default = signal.shape[1] if window is None else len(window)
        (length,) = c.param("frame_length") or (default,)
        if window is not None and len(window) != length:
            c.fail(f"window has {len(window)} elements, frame_length is {length}")
        samples = _complex(as_computed(signal))
        starts = np.arange(0, samples.shape[1] - length + 1, step)
        frames: Any = samples[:, starts[:, None] + np.arange(length)]
        spectrum = np.fft.fft(frames if window is None else frames * as_computed(window), axis=-1)
        return _pairs(spectrum[..., : length // 2 + 1] if c.attr("onesided") else spectrum, signal.dtype)

    def rows(self, c: Infer, axes: Sequence[RowAxis]) -> Sequence[RowAxis] | MixesRows:
        return batch_rows(c, axes)

    def definition(self, g: Rewrite) -> Sequence[Term]:
        """A Gather of the frames, a product with the window, and a DFT. UnsupportedError for unknown lengths."""
        signal, window, step = g.x(0), g.x_or_none(2), g.param("frame_step")
        count, length = signal.shape[1], self._frame_length(g)
        if step is None or not isinstance(length, int):
            g.unsupported(f"frame_step and the lengths of {g.tensor(0)} must be known to differentiate it")
        if isinstance(count, int):
            starts = np.arange(0, count - length + 1, step[0])
            places = g.writer.array(starts[:, None] + np.arange(length))
        elif has_only_sizes(count):
            places = g.writer.iota((g.node.output.shape[1], length), (step[0], 1))
        else:
            g.unsupported(f"the length of {g.tensor(0)} must be known to differentiate it")
        frames = signal.gather(places, 1)
        if window is not None:
            frames = frames * window.reshape((length, 1))
        return [frames.op("DFT", axis=(2,), onesided=g.attr("onesided"))]


@register
class MelWeightMatrix(OpDef):
    """Triangular filters [dft_length // 2 + 1, num_mel_bins] with edges evenly spaced on the mel scale."""

    inputs = "num_mel_bins, dft_length, sample_rate, lower_edge_hertz, upper_edge_hertz"
    outputs = "output"
    attrs = {"output_datatype": 1}
    params = {name.strip(): index for index, name in enumerate(inputs.split(","))}
    symbolic = ("num_mel_bins", "dft_length")
    zero_gradient = "it depends on parameters only"

    def infer(self, c: Infer) -> Sequence[ValueType]:
        bins, length = c.param("num_mel_bins"), c.param("dft_length")
        rows: Dim = c.fresh_dim("bins") if length is None else length[0] // 2 + 1
        columns: Dim = c.fresh_dim("mels") if bins is None else bins[0]
        return [TensorType(as_dtype(c, c.attr("output_datatype")), (rows, columns))]

    def reference(self, c: Call, *_: RuntimeValue) -> Array:
        given: list[Any] = [c.param(name) for name in self.params]
        mels, length, rate, low, high = (value[0] for value in given)
        edges = _mel_edges(mels, length, rate, low, high)
        rows = length // 2 + 1
        if edges.min() < 0 or edges[:-1].max() >= rows or edges[-1] > rows:
            c.fail(f"its edges lie in bins {edges.min()} to {edges.max()}, expected 0 to {rows - 1}")
        bins, weights = np.arange(rows), np.zeros((rows, mels))
        for i in range(mels):
            left, centre, right = edges[i : i + 3]
            if left == centre:
                weights[centre, i] = 1
            else:
                rising = (bins >= left) & (bins <= centre)
                weights[rising, i] = (bins[rising] - left) / (centre - left)
            falling = (bins >= centre) & (bins < right)
            weights[falling, i] = (right - bins[falling]) / max(right - centre, 1)
        return weights.astype(as_dtype(c, c.attr("output_datatype")).numpy)


def _dft_matrix(size: int, length: int, inverse: bool, halved: bool) -> Any:
    """The transform of `size` numbers, zero-padded or cut to `length`, as a complex matrix [results, size].

    `halved` is `onesided` of DFT: half of the results, or with `inverse` half of the numbers.
    """
    used = min(size, length)
    # Angles are reduced below one turn, where sines are most accurate.
    turns = np.outer(np.arange(length), np.arange(used)) % length / length
    cosines, sines = np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)
    real, imaginary = (np.where(np.abs(part) < 1e-15, 0, part) for part in (cosines, sines))
    matrix = (real + 1j * imaginary) / length if inverse else real - 1j * imaginary
    if halved and inverse:  # inner bins also stand for their mirror images
        twice = np.arange(used) * 2 % length != 0
        matrix = np.where(np.arange(used) <= length // 2, matrix * (1 + twice), 0)
    elif halved:
        matrix = matrix[: length // 2 + 1]
    return np.pad(matrix, [(0, 0), (0, size - used)])


def _run_tables(x: Term, size: Dim, length: Dim, inverse: bool, halved: bool) -> tuple[Term, Term]:
    """The real and the imaginary part of the matrix of `_dft_matrix`, as terms computed in the run.

    Used for symbolic extents. Angles are reduced to half a turn, where float32 is most accurate.
    """
    writer = x.writer
    results = length // 2 + 1 if halved and not inverse else length
    row, column, whole = writer.iota((results, 1), (1, 0)), writer.iota((1, size), (0, 1)), writer.iota((), (), length)
    turns = (row * column).cast(DType.FLOAT64) / whole.cast(DType.FLOAT64)
    angles = ((turns - turns.op("Round")) * (2 * np.pi)).cast(DType.FLOAT32)
    real, imaginary = angles.op("Cos"), angles.op("Sin")
    if inverse:
        factors = 1 / whole.cast(DType.FLOAT32)
        if halved:  # inner bins also stand for their mirror images
            twice = column * 2
            is_end = column.equals(0).op("Or", twice.equals(whole))
            factors = (twice > whole).where(0, is_end.where(factors, factors * 2))
        real, imaginary = real * factors, imaginary * factors
    else:
        imaginary = -imaginary
    if size != length and not (halved and inverse):  # the signal is cut to `length`
        real, imaginary = ((column < whole).where(part, 0) for part in (real, imaginary))
    return real.cast(x.dtype), imaginary.cast(x.dtype)


def _parts(x: Term) -> list[Term]:
    """The real and the imaginary part of x [.., 1 or 2], each [..]; no imaginary part if it is known to be 0."""
    node, last = x.value.producer, x.rank - 1
    if x.shape[-1] == 1:
        return [x.squeeze(last)]
    if node is not None and node.op == "Concat" and node.attrs.get("axis") in (-1, last) and len(node.inputs) == 2:
        parts = [Term(x.writer, value).squeeze(last) for value in node.inputs if value is not None]
        return parts[:1] if _is_zero(x.writer, node.inputs[1]) else parts
    return [x.gather(x.writer.array(i, DType.INT64), last) for i in range(2)]


def _is_zero(writer: Writer, value: Value | None) -> bool:
    """Whether a value is a constant of zeros."""
    while value is not None and value.producer is not None and value.producer.op in ("Expand", "Reshape", "Unsqueeze"):
        value = value.producer.inputs[0]
    array = writer.known.get(value) if value is not None else None
    return array is not None and not np.any(array)


def _products(x: Term, axis: int, matrix: Any) -> tuple[Term, Term]:
    """The real and the imaginary part of the transform of real numbers x along `axis`, by two matrix products."""
    return _matmul(x, axis, matrix.real), _matmul(x, axis, matrix.imag)


def _symmetric(x: Term, axis: int, matrix: Any) -> tuple[Term, Term]:
    """`_products`, using the symmetry of the tables: cosines are even, sines odd around the middle.

    Products are half as long, and results that are 0 by a symmetry of the signal are exactly 0.
    """
    length = matrix.shape[1]
    pairs = (length - 1) // 2
    if not pairs:
        return _products(x, axis, matrix)
    ahead, back = x.slice(axis, 1, 1 + pairs), x.slice(axis, length - 1, length - 1 - pairs, -1)
    alone = [x.slice(axis, place, place + 1) for place in (0, length // 2)[: 2 - length % 2]]
    even = alone[0].op("Concat", ahead + back, *alone[1:], axis=axis)
    cosines, sines = matrix.real[:, : length // 2 + 1], matrix.imag[:, 1 : 1 + pairs]
    return _matmul(even, axis, cosines), _matmul(ahead - back, axis, sines)


def _matmul(x: Term, axis: int, matrix: Any) -> Term:
    """`x` multiplied by a matrix [results, elements], an array or a term, along one axis."""
    last, known = x.rank - 1, not isinstance(matrix, Term)
    if axis == last:
        return x @ (x.writer.array(matrix.T, x.dtype) if known else matrix.swap())
    order = [*(i for i in range(last) if i != axis), axis, last]
    product = (x.writer.array(matrix, x.dtype) if known else matrix) @ x.transpose(*order)
    return product.transpose(*(order.index(i) for i in range(x.rank)))


def _mel_edges(mels: int, length: int, rate: int, low: float, high: float) -> Any:
    """The bins of the spectrum at the mels + 2 edges of the filters, spaced evenly in mel from `low` Hz on."""
    first, last = (2595 * np.log10(1 + edge / 700) for edge in (low, high))
    mel = first + np.arange(mels + 2) * ((last - first) / (mels + 2))
    return ((length + 1) * (700 * (10 ** (mel / 2595) - 1)) // rate).astype(np.int64)


def _complex(x: Any) -> Any:
    """x [.., 1] as real numbers, or x [.., 2] as complex numbers, of shape [..]."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _pairs(x: Any, dtype: Any) -> Array:
    return np.stack([x.real, x.imag], axis=-1).astype(dtype)
