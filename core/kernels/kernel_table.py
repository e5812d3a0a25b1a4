"""The order in which selectors are asked for a kernel on the CPU, for each operator.

The first selector of a row that returns a call decides. Each selector speaks for its own kernel only, so a specialised
kernel stands to the left of a more general one. `offers` yield further kernels that the tuner may time. To add a
kernel, write its files and add its selector here.
"""

from lathe.core.kernels.amx.spec import amx, amx_instead_of_winograd
from lathe.core.kernels.attention.segment_spec import segment_attention
from lathe.core.kernels.attention.spec import attention
from lathe.core.kernels.call import VIEWS, Row
from lathe.core.kernels.conv.batch_spec import batch_conv, batch_conv_transpose, batch_weight_gradient
from lathe.core.kernels.conv.spec import dynamic_conv, implicit_gemm, pointwise
from lathe.core.kernels.conv_chain.spec import conv_chain, other_bands
from lathe.core.kernels.copy.iota_spec import iota
from lathe.core.kernels.copy.pad_spec import pad as pad_by_widths
from lathe.core.kernels.copy.spec import blocks, concat, duplicate, expand, pad, slice_, split, tile, transpose
from lathe.core.kernels.cumulative.spec import cumulative
from lathe.core.kernels.depthwise.spec import depthwise
from lathe.core.kernels.direct.spec import direct
from lathe.core.kernels.dynamic_windows.spec import dynamic_depthwise, dynamic_pool
from lathe.core.kernels.elementwise.spec import OPS as ELEMENTWISE
from lathe.core.kernels.elementwise.spec import elementwise
from lathe.core.kernels.experts.spec import experts
from lathe.core.kernels.gemm.dynamic_spec import dynamic_gemm
from lathe.core.kernels.gemm.spec import gemm
from lathe.core.kernels.indexing.gather_elements_spec import gather_elements
from lathe.core.kernels.indexing.gather_rows_spec import gather_rows
from lathe.core.kernels.indexing.gather_spec import gather
from lathe.core.kernels.indexing.scatter_spec import scatter_elements, scatter_rows
from lathe.core.kernels.norm.spec import batch_norm, group_norm, layer_norm
from lathe.core.kernels.paged_cache.attention_spec import cached_attention
from lathe.core.kernels.paged_cache.write_spec import cache_write
from lathe.core.kernels.pool.gradient_spec import pool_gradient
from lathe.core.kernels.pool.indices_spec import pool_indices
from lathe.core.kernels.pool.spec import pool
from lathe.core.kernels.recurrent.spec import recurrent
from lathe.core.kernels.reduce.segment_spec import segment_reduce
from lathe.core.kernels.reduce.spec import KINDS as REDUCTIONS
from lathe.core.kernels.reduce.spec import arg_reduce, reduce
from lathe.core.kernels.resize.dynamic_spec import dynamic_resize
from lathe.core.kernels.resize.spec import resize
from lathe.core.kernels.sampling.grid_sample_spec import grid_sample
from lathe.core.kernels.sampling.roi_align_spec import roi_align
from lathe.core.kernels.softmax.spec import softmax
from lathe.core.kernels.sparse.spec import sparse, with_zeros
from lathe.core.kernels.strassen.spec import strassen
from lathe.core.kernels.strassen.tile_offers import other_tiles
from lathe.core.kernels.svm.spec import svm
from lathe.core.kernels.topk.spec import topk
from lathe.core.kernels.trees.spec import trees
from lathe.core.kernels.weight_only.dot_spec import finer_rows, weight_only_coarse, weight_only_dot
from lathe.core.kernels.weight_only.spec import weight_only
from lathe.core.kernels.winograd.lines_spec import winograd_lines
from lathe.core.kernels.winograd.spec import for_slow_memory, winograd, without_winograd

_PRODUCT = Row((sparse, amx, strassen, gemm, dynamic_gemm), offers=(with_zeros, other_tiles))

_CONV = (
    dynamic_depthwise,
    sparse,
    amx,
    strassen,
    depthwise,
    direct,
    winograd,
    winograd_lines,
    implicit_gemm,
    pointwise,
    dynamic_conv,
)
_CONV_OFFERS = (with_zeros, amx_instead_of_winograd, other_tiles, for_slow_memory, without_winograd)

TABLE: dict[str, Row] = {
    # products and convolutions
    "MatMul": _PRODUCT,
    "FusedMatMul": _PRODUCT,
    "DequantizedMatMul": Row((weight_only_coarse, weight_only_dot, weight_only), offers=(finer_rows,)),
    "ExpertProduct": Row((experts,)),
    "Conv": Row(_CONV, _CONV_OFFERS),
    "FusedConv": Row((*_CONV, batch_conv), _CONV_OFFERS),
    "PooledConv": Row((direct,)),
    "ConvChain": Row((conv_chain,), offers=(other_bands,)),
    "ConvTranspose": Row((batch_conv_transpose,)),
    "ConvWeightGradient": Row((batch_weight_gradient,)),
    # attention and recurrence
    "FusedAttention": Row((attention,)),
    "SegmentAttention": Row((segment_attention,)),
    "CacheWrite": Row((cache_write,)),
    "CachedAttention": Row((cached_attention,)),
    "RecurrentSteps": Row((recurrent,)),
    # windows
    "MaxPool": Row((dynamic_pool, pool, pool_indices)),
    "AveragePool": Row((dynamic_pool, pool)),
    "MaxPoolGradient": Row((pool_gradient,)),
    # element by element, and along axes
    **dict.fromkeys(ELEMENTWISE, Row((elementwise,))),
    **dict.fromkeys(REDUCTIONS, Row((reduce,))),
    **dict.fromkeys(("ArgMax", "ArgMin"), Row((arg_reduce,))),
    **dict.fromkeys(("CumSum", "CumProd"), Row((cumulative,))),
    **dict.fromkeys(("Softmax", "GuardedSoftmax", "LogSoftmax"), Row((softmax,))),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), Row((layer_norm,))),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization"), Row((group_norm,))),
    "BatchNormalization": Row((batch_norm,)),
    "SegmentReduce": Row((segment_reduce,)),
    "TopK": Row((topk,)),
    # copies and indices
    **dict.fromkeys(sorted(VIEWS), Row((duplicate,))),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), Row((blocks,))),
    "Transpose": Row((transpose,)),
    "Expand": Row((expand,)),
    "Tile": Row((tile,)),
    "Slice": Row((slice_,)),
    "Concat": Row((concat,)),
    "Split": Row((split,)),
    "Pad": Row((pad, pad_by_widths)),
    "Iota": Row((iota,)),
    "Gather": Row((gather,)),
    "GatherElements": Row((gather_elements,)),
    "GatherND": Row((gather_rows,)),
    "ScatterND": Row((scatter_rows,)),
    "ScatterElements": Row((scatter_elements,)),
    # images
    "Resize": Row((dynamic_resize, resize)),
    "GridSample": Row((grid_sample,)),
    "RoiAlign": Row((roi_align,)),
    # models of ai.onnx.ml
    **dict.fromkeys(("SVMRegressor", "SVMClassifier"), Row((svm,))),
    **dict.fromkeys(("TreeEnsembleRegressor", "TreeEnsemble"), Row((trees,))),
}
