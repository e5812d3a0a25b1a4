"""Models of many kinds that no kernel was tuned for: `loadtest.engine --set others` compares engines on them.

They are the published architectures, reduced so that one run takes milliseconds. They are written the way exporters
(above all PyTorch's) write them: normalisations, activations and rotations as chains of primitive operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from loadtest.model_builder import Builder, Entry

# -- images -----------------------------------------------------------------------------------------------------------


def efficientnet(b: Builder, x: str) -> str:
    """Inverted residuals with squeeze-and-excite and SiLU (Tan & Le 2019), 96 x 96 pixels."""
    x = b.silu(b.batchnorm(b.conv(x, 3, 32, 3, stride=2), 32))
    channels = 32
    for expansion, width, kernel, stride in (
        (1, 16, 3, 1), (6, 24, 3, 2), (6, 24, 3, 1), (6, 40, 5, 2), (6, 40, 5, 1), (6, 80, 3, 2), (6, 80, 3, 1),
        (6, 112, 5, 1), (6, 112, 5, 1), (6, 192, 5, 2), (6, 192, 5, 1), (6, 320, 3, 1),
    ):  # fmt: skip
        hidden, y = channels * expansion, x
        if expansion != 1:
            y = b.silu(b.batchnorm(b.conv(y, channels, hidden, 1), hidden))
        y = b.silu(b.batchnorm(b.conv(y, hidden, hidden, kernel, stride, group=hidden), hidden))
        y = _excite(b, y, hidden, channels // 4, "Sigmoid")
        y = b.batchnorm(b.conv(y, hidden, width, 1), width)
        x = b.op("Add", x, y) if stride == 1 and channels == width else y
        channels = width
    return b.pool_and_classify(b.silu(b.batchnorm(b.conv(x, channels, 1280, 1), 1280)), 1280, 100)


def _excite(b: Builder, x: str, channels: int, squeezed: int, gate: str) -> str:
    """Squeeze-and-excite: scales every channel by a gate computed from all channels (Hu et al. 2018)."""
    y = b.op("GlobalAveragePool", x)
    y = b.conv(y, channels, squeezed, 1)
    y = b.silu(y) if gate == "Sigmoid" else b.op("Relu", y)
    return b.op("Mul", x, b.op(gate, b.conv(y, squeezed, channels, 1)))


def mobilenetv3(b: Builder, x: str) -> str:
    """Inverted residuals with HardSwish and partial squeeze-and-excite (Howard et al. 2019), 96 x 96 pixels."""
    x = b.op("HardSwish", b.batchnorm(b.conv(x, 3, 16, 3, stride=2), 16))
    channels = 16
    for kernel, hidden, width, excited, act, stride in (
        (3, 16, 16, True, "Relu", 2), (3, 72, 24, False, "Relu", 2), (3, 88, 24, False, "Relu", 1),
        (5, 96, 40, True, "HardSwish", 2), (5, 240, 40, True, "HardSwish", 1), (5, 240, 40, True, "HardSwish", 1),
        (5, 120, 48, True, "HardSwish", 1), (5, 144, 48, True, "HardSwish", 1), (5, 288, 96, True, "HardSwish", 2),
        (5, 576, 96, True, "HardSwish", 1), (5, 576, 96, True, "HardSwish", 1),
    ):  # fmt: skip
        y = b.op(act, b.batchnorm(b.conv(x, channels, hidden, 1), hidden))
        y = b.op(act, b.batchnorm(b.conv(y, hidden, hidden, kernel, stride, group=hidden), hidden))
        if excited:
            y = _excite(b, y, hidden, hidden // 4, "HardSigmoid")
        y = b.batchnorm(b.conv(y, hidden, width, 1), width)
        x = b.op("Add", x, y) if stride == 1 and channels == width else y
        channels = width
    return b.pool_and_classify(b.op("HardSwish", b.batchnorm(b.conv(x, channels, 576, 1), 576)), 576, 100)


def unet(b: Builder, x: str) -> str:
    """A U-Net that upsamples with transposed convolutions (Ronneberger et al. 2015), 64 x 64 pixels."""
    return _unet(b, x, _transposed_conv_upsample)


def unet_resize(b: Builder, x: str) -> str:
    """A U-Net that upsamples with a bilinear Resize and a 1x1 convolution."""
    return _unet(b, x, _resize_upsample)


def _transposed_conv_upsample(b: Builder, x: str, inputs: int, outputs: int) -> str:
    weight = b.normal(inputs, outputs, 2, 2, scale=1 / math.sqrt(inputs))
    return b.op("ConvTranspose", x, weight, b.normal(outputs, scale=0.1), kernel_shape=[2, 2], strides=[2, 2])


def _resize_upsample(b: Builder, x: str, inputs: int, outputs: int) -> str:
    scales = b.constant(np.array([1, 1, 2, 2], np.float32))
    larger = b.op("Resize", x, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
    return b.conv(larger, inputs, outputs, 1)


def _unet(b: Builder, x: str, up: Callable[[Builder, str, int, int], str]) -> str:
    skips, channels = [], 3
    for width in (32, 64, 128):
        x = _double_conv(b, x, channels, width)
        skips.append((x, width))
        x, channels = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), width
    x, channels = _double_conv(b, x, channels, 256), 256
    for skip, width in reversed(skips):
        x = _double_conv(b, b.op("Concat", skip, up(b, x, channels, width), axis=1), 2 * width, width)
        channels = width
    return b.op("Sigmoid", b.conv(x, channels, 2, 1))


def _double_conv(b: Builder, x: str, inputs: int, outputs: int) -> str:
    x = b.op("Relu", b.batchnorm(b.conv(x, inputs, outputs, 3), outputs))
    return b.op("Relu", b.batchnorm(b.conv(x, outputs, outputs, 3), outputs))


def vgg(b: Builder, x: str) -> str:
    """Ten 3x3 convolutions and two dense layers (Simonyan & Zisserman 2014), 64 x 64 pixels."""
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3)):
        for _ in range(count):
            x, channels = b.op("Relu", b.conv(x, channels, width, 3)), width
        x = b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = b.op("Relu", b.dense(b.op("Flatten", x), 512 * 16, 512))
    return b.dense(x, 512, 100)


def densenet(b: Builder, x: str) -> str:
    """DenseNet-121: each layer of a block reads all earlier ones (Huang et al. 2017), 64 x 64 pixels."""
    x = b.op("Relu", b.batchnorm(b.conv(x, 3, 64, 7, stride=2), 64))
    x, channels, growth = b.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), 64, 32
    for block, layers in enumerate((6, 12, 24, 16)):
        if block:
            x = b.conv(b.op("Relu", b.batchnorm(x, channels)), channels, channels // 2, 1)
            x, channels = b.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), channels // 2
        parts = [x]
        for _ in range(layers):
            joined = b.op("Concat", *parts, axis=1) if len(parts) > 1 else x
            y = b.conv(b.op("Relu", b.batchnorm(joined, channels)), channels, 4 * growth, 1)
            parts.append(b.conv(b.op("Relu", b.batchnorm(y, 4 * growth)), 4 * growth, growth, 3))
            channels += growth
        x = b.op("Concat", *parts, axis=1)
    return b.pool_and_classify(b.op("Relu", b.batchnorm(x, channels)), channels, 100)


def resnext(b: Builder, x: str) -> str:
    """Bottlenecks with grouped 3x3 convolutions, eight groups (Xie et al. 2017), 64 x 64 pixels."""
    x, channels = b.op("Relu", b.batchnorm(b.conv(x, 3, 32, 3, stride=2), 32)), 32
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        y = b.op("Relu", b.batchnorm(b.conv(x, channels, width, 1), width))
        y = b.op("Relu", b.batchnorm(b.conv(y, width, width, 3, stride, group=8), width))
        y = b.batchnorm(b.conv(y, width, 2 * width, 1), 2 * width)
        if channels != 2 * width or stride != 1:
            x = b.batchnorm(b.conv(x, channels, 2 * width, 1, stride), 2 * width)
        x, channels = b.op("Relu", b.op("Add", x, y)), 2 * width
    return b.pool_and_classify(x, channels, 100)


def resnet_groupnorm(b: Builder, x: str) -> str:
    """A ResNet of 14 layers, normalised over groups of channels (Wu & He 2018), 64 x 64 pixels."""
    x, channels = b.op("Relu", _groupnorm(b, b.conv(x, 3, 64, 3, stride=2), 64)), 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        y = b.op("Relu", _groupnorm(b, b.conv(x, channels, width, 3, stride), width))
        y = _groupnorm(b, b.conv(y, width, width, 3), width)
        if stride != 1 or channels != width:
            x = _groupnorm(b, b.conv(x, channels, width, 1, stride), width)
        x, channels = b.op("Relu", b.op("Add", x, y)), width
    return b.pool_and_classify(x, channels, 100)


def _groupnorm(b: Builder, x: str, channels: int) -> str:
    """GroupNorm as exported: InstanceNormalization with the groups as channels, then scale and bias."""
    ones, zeros = b.constant(np.ones(32, np.float32)), b.constant(np.zeros(32, np.float32))
    y = b.op("InstanceNormalization", b.reshape(x, 0, 32, -1), ones, zeros, epsilon=1e-5)
    y = b.op("Reshape", y, b.op("Shape", x))
    scale = b.constant(b.rng.uniform(0.9, 1.1, (channels, 1, 1)).astype(np.float32))
    return b.op("Add", b.op("Mul", y, scale), b.normal(channels, 1, 1, scale=0.1))


def vit(b: Builder, x: str, layers: int = 4, width: int = 192, heads: int = 3) -> str:
    """A pre-norm ViT with 196 patches and a class token (Dosovitskiy et al. 2021), one product for Q, K and V."""
    patches = b.op("Conv", x, b.normal(width, 3, 16, 16, scale=0.04), b.normal(width), strides=[16, 16])
    tokens = b.op("Transpose", b.reshape(patches, 0, width, -1), perm=[0, 2, 1])
    batch = b.op("Gather", b.op("Shape", x), b.integers(0))
    shape = b.op("Concat", batch, b.integers(1, width), axis=0)
    x = b.op("Concat", b.op("Expand", b.normal(1, 1, width), shape), tokens, axis=1)
    x = b.op("Add", x, b.normal(1, 197, width, scale=0.1))
    for _ in range(layers):
        x = b.op("Add", x, _attention(b, b.layernorm(x, width), width, heads))
        y = b.gelu(b.linear(b.layernorm(x, width), width, 4 * width))
        x = b.op("Add", x, b.linear(y, 4 * width, width))
    return b.dense(b.op("Gather", b.layernorm(x, width), b.constant(np.array(0)), axis=1), width, 100)


def _attention(b: Builder, x: str, width: int, heads: int) -> str:
    joint = b.reshape(b.linear(x, width, 3 * width), 0, -1, 3, heads, width // heads)
    parts = b.op("Transpose", joint, perm=[2, 0, 3, 1, 4])
    query, key, value = (b.op("Gather", parts, b.constant(np.array(i)), axis=0) for i in range(3))
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    weights = b.op("Softmax", b.op("Mul", scores, b.scalar(1 / math.sqrt(width / heads))), axis=-1)
    mixed = b.op("Transpose", b.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return b.linear(b.reshape(mixed, 0, -1, width), width, width)


# -- sequences --------------------------------------------------------------------------------------------------------


def decoder(b: Builder, x: str, layers: int = 2, width: int = 256, heads: int = 8, length: int = 64) -> str:
    """RMSNorm, rotary positions, causal attention and SwiGLU (Touvron et al. 2023) over a prompt of 64."""
    mask = b.constant(np.triu(np.full((1, 1, length, length), -1e9, np.float32), 1))
    size = width // heads
    angles = np.outer(np.arange(length), 1e4 ** (-np.arange(0, size, 2) / size))
    both = np.concatenate([angles, angles], axis=1)[None, None].astype(np.float32)
    cos, sin = b.constant(np.cos(both)), b.constant(np.sin(both))
    for _ in range(layers):
        y = _rms_norm(b, x, width)

        def head(y: str = y) -> str:
            product = b.op("MatMul", y, b.normal(width, width, scale=1 / math.sqrt(width)))
            return b.op("Transpose", b.reshape(product, 0, 0, heads, size), perm=[0, 2, 1, 3])

        query, key, value = _rotary(b, head(), cos, sin, size), _rotary(b, head(), cos, sin, size), head()
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = b.op("Add", b.op("Mul", scores, b.scalar(1 / math.sqrt(size))), mask)
        mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
        joined = b.reshape(b.op("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, width)
        x = b.op("Add", x, b.op("MatMul", joined, b.normal(width, width, scale=1 / math.sqrt(width))))
        x = b.op("Add", x, _swiglu(b, _rms_norm(b, x, width), width, 704))
    return b.op("MatMul", _rms_norm(b, x, width), b.normal(width, 512, scale=1 / math.sqrt(width)))


def _rms_norm(b: Builder, x: str, width: int) -> str:
    mean = b.op("ReduceMean", b.op("Pow", x, b.scalar(2)), axes=[-1])
    deviation = b.op("Sqrt", b.op("Add", mean, b.scalar(1e-6)))
    inverse = b.op("Div", b.scalar(1), deviation)
    weight = b.constant(b.rng.uniform(0.9, 1.1, width).astype(np.float32))
    return b.op("Mul", weight, b.op("Mul", x, inverse))


def _rotary(b: Builder, x: str, cos: str, sin: str, size: int) -> str:
    turned = b.op("Concat", b.op("Neg", b.slice(x, size // 2, size, 3)), b.slice(x, 0, size // 2, 3), axis=-1)
    return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))


def _swiglu(b: Builder, x: str, width: int, hidden: int) -> str:
    gate = b.op("MatMul", x, b.normal(width, hidden, scale=1 / math.sqrt(width)))
    up = b.op("MatMul", x, b.normal(width, hidden, scale=1 / math.sqrt(width)))
    return b.op("MatMul", b.op("Mul", b.silu(gate), up), b.normal(hidden, width, scale=1 / math.sqrt(hidden)))


def gru(b: Builder, x: str) -> str:
    """Two GRU layers over 64 steps, as exported: time-major inside, batch-major at the inputs and outputs."""
    x, width = b.op("Transpose", x, perm=[1, 0, 2]), 128
    for hidden in (256, 256):
        x = b.op("Squeeze", _recurrent(b, "GRU", x, width, hidden, 3, linear_before_reset=1), b.integers(1))
        width = hidden
    last = b.op("Gather", b.op("Transpose", x, perm=[1, 0, 2]), b.constant(np.array(-1)), axis=1)
    return b.dense(last, width, 10)


def lstm(b: Builder, x: str) -> str:
    """A bidirectional and a forward LSTM layer over 48 steps, with an output for every step."""
    x = b.op("Transpose", x, perm=[1, 0, 2])
    both = b.op("Transpose", _recurrent(b, "LSTM", x, 96, 128, 4, directions=2), perm=[0, 2, 1, 3])
    x = b.op("Squeeze", _recurrent(b, "LSTM", b.reshape(both, 0, 0, -1), 256, 192, 4), b.integers(1))
    return b.linear(b.op("Transpose", x, perm=[1, 0, 2]), 192, 32)


def _recurrent(
    b: Builder, kind: str, x: str, width: int, hidden: int, gates: int, directions: int = 1, **attributes: int
) -> str:
    scale = 1 / math.sqrt(hidden)
    w, r = (b.normal(directions, gates * hidden, size, scale=scale) for size in (width, hidden))
    bias = b.normal(directions, 2 * gates * hidden, scale=0.1)
    direction = "bidirectional" if directions == 2 else "forward"
    return b.op(kind, x, w, r, bias, hidden_size=hidden, direction=direction, **attributes)


# -- recommendations --------------------------------------------------------------------------------------------------

TABLES, ROWS, BAG, DIM = 26, 2000, 4, 32


def dlrm(b: Builder, x: str) -> str:
    """Dense features and 26 embedding bags, their pairwise products, and two perceptrons (Naumov et al. 2019)."""
    for inputs, outputs in ((13, 512), (512, 256), (256, DIM)):
        x = b.op("Relu", b.dense(x, inputs, outputs))
    vectors = [x]
    for table in range(TABLES):
        rows = b.op("Gather", b.normal(ROWS, DIM), b.slice("ids", table * BAG, (table + 1) * BAG, 1), axis=0)
        vectors.append(b.op("ReduceSum", rows, b.integers(1), keepdims=0))
    joined = b.op("Concat", *(b.op("Unsqueeze", vector, b.integers(1)) for vector in vectors), axis=1)
    products = b.op("MatMul", joined, b.op("Transpose", joined, perm=[0, 2, 1]))
    count = TABLES + 1
    below = np.flatnonzero(np.tri(count, k=-1))
    pairs = b.op("Gather", b.reshape(products, 0, count * count), b.constant(below), axis=1)
    scaled = b.op("Mul", pairs, b.scalar(1 / DIM))
    y = b.op("Concat", x, scaled, axis=1)
    for inputs, outputs in ((DIM + len(below), 512), (512, 256)):
        y = b.op("Relu", b.dense(y, inputs, outputs))
    return b.op("Sigmoid", b.dense(y, 256, 1))


OTHERS = {
    "efficientnet": Entry((3, 96, 96), efficientnet, (100,)),
    "mobilenetv3": Entry((3, 96, 96), mobilenetv3, (100,)),
    "unet": Entry((3, 64, 64), unet, (2, 64, 64)),
    "unet-resize": Entry((3, 64, 64), unet_resize, (2, 64, 64)),
    "vgg": Entry((3, 64, 64), vgg, (100,)),
    "densenet": Entry((3, 64, 64), densenet, (100,)),
    "resnext": Entry((3, 64, 64), resnext, (100,)),
    "resnet-groupnorm": Entry((3, 64, 64), resnet_groupnorm, (100,)),
    "vit": Entry((3, 224, 224), vit, (100,)),
    "decoder": Entry((64, 256), decoder, (64, 512)),
    "gru": Entry((64, 128), gru, (10,)),
    "lstm": Entry((48, 96), lstm, (48, 32)),
    "dlrm": Entry((13,), dlrm, (1,), {"ids": (TABLES * BAG, ROWS)}),
}
