"""The operators. Importing this package registers all families."""

from lathe.core.ir.build import set_inference
from lathe.core.ops.control import control_flow, map_selected, scan, sequence
from lathe.core.ops.image import detection, image_decoder, patches, resize, sampling
from lathe.core.ops.ml import features, labels, linear, maps, svm, tree_models, trees
from lathe.core.ops.nn import (
    activation,
    cached_attention,
    conv,
    conv_gradient,
    fused,
    matmul,
    norm,
    optimizers,
    packed_image,
    pool,
    recurrent,
    segments,
    softmax,
)
from lathe.core.ops.opdef.inference import infer_node
from lathe.core.ops.quantized import dequantized_product, dynamic_quantize, qlinear, quantize, training
from lathe.core.ops.tensor import (
    creation,
    einsum,
    elementwise,
    indexing,
    inverse,
    logic,
    movement,
    order,
    random,
    reduce,
    signal,
    slicing,
)
from lathe.core.ops.text import codes, hashing, ngrams, strings, tokens

set_inference(infer_node)

__all__ = [
    "activation",
    "cached_attention",
    "codes",
    "control_flow",
    "conv",
    "conv_gradient",
    "creation",
    "dequantized_product",
    "detection",
    "dynamic_quantize",
    "einsum",
    "elementwise",
    "features",
    "fused",
    "hashing",
    "image_decoder",
    "indexing",
    "inverse",
    "labels",
    "linear",
    "logic",
    "map_selected",
    "maps",
    "matmul",
    "movement",
    "ngrams",
    "norm",
    "optimizers",
    "order",
    "packed_image",
    "patches",
    "pool",
    "qlinear",
    "quantize",
    "random",
    "recurrent",
    "reduce",
    "resize",
    "sampling",
    "scan",
    "segments",
    "sequence",
    "signal",
    "slicing",
    "softmax",
    "strings",
    "svm",
    "tokens",
    "training",
    "tree_models",
    "trees",
]
