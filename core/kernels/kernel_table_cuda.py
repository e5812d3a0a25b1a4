"""The order in which selectors are asked for a kernel on an NVIDIA GPU, for each operator (see `kernel_table.py`)."""

from lathe.core.kernels.attention import cuda_spec as attention
from lathe.core.kernels.call import Row
from lathe.core.kernels.conv import cuda_spec as conv
from lathe.core.kernels.conv import gradient_cuda_spec as conv_gradient
from lathe.core.kernels.copy import cuda_spec as copy
from lathe.core.kernels.copy import pack_image_cuda_spec as packed_image
from lathe.core.kernels.cumulative import cuda_spec as cumulative
from lathe.core.kernels.depthwise import cuda_spec as depthwise
from lathe.core.kernels.elementwise import cuda_spec as elementwise
from lathe.core.kernels.gemm import cuda_spec as gemm
from lathe.core.kernels.indexing import gather_cuda_spec as gather
from lathe.core.kernels.indexing import scatter_cuda_spec as scatter
from lathe.core.kernels.norm import cuda_spec as norm
from lathe.core.kernels.pool import cuda_spec as pool
from lathe.core.kernels.pool import gradient_cuda_spec as pool_gradient
from lathe.core.kernels.recurrent import cuda_spec as recurrent
from lathe.core.kernels.reduce import cuda_spec as reduce
from lathe.core.kernels.reduce.spec import KINDS as REDUCTIONS
from lathe.core.kernels.resize import cuda_spec as resize
from lathe.core.kernels.softmax import cuda_spec as softmax
from lathe.core.kernels.topk import cuda_spec as topk

_PRODUCT = Row((gemm.gemm,), (gemm.other_kernels,))
_CONV = Row((conv.conv, depthwise.depthwise), (conv.other_tiles, depthwise.other_tiles))
_TRANSPOSED = Row((conv.transposed, depthwise.depthwise), (conv.other_tiles_of_transposed, depthwise.other_tiles))
_POOL = Row((pool.pool,), (pool.other_tiles,))
_SOFTMAX = Row((softmax.softmax,), (softmax.other_tiles,))
_NORM = Row((norm.norm,), (norm.other_tiles,))

TABLE: dict[str, Row] = {
    # products and convolutions
    **dict.fromkeys(("MatMul", "FusedMatMul"), _PRODUCT),
    **dict.fromkeys(("Conv", "FusedConv"), _CONV),
    "ConvTranspose": _TRANSPOSED,
    "ConvWeightGradient": Row((conv_gradient.conv_gradient,), (conv_gradient.other_tiles,)),
    # attention and recurrence
    "FusedAttention": Row((attention.attention,), (attention.other_tiles,)),
    "RecurrentSteps": Row((recurrent.recurrent,), (recurrent.other_tiles,)),
    # windows
    **dict.fromkeys(("MaxPool", "AveragePool"), _POOL),
    "MaxPoolGradient": Row((pool_gradient.pool_gradient,), (pool_gradient.other_tiles,)),
    # element by element, and along axes
    **dict.fromkeys(elementwise.OPS, Row((elementwise.elementwise,), (elementwise.other_tilings,))),
    **dict.fromkeys(REDUCTIONS, Row((reduce.reduce,), (reduce.other_tiles,))),
    **dict.fromkeys(("ArgMax", "ArgMin"), Row((reduce.arg_reduce,), (reduce.other_arg_tiles,))),
    "CumSum": Row((cumulative.running_sums,), (cumulative.other_tiles,)),
    **dict.fromkeys(("Softmax", "GuardedSoftmax", "LogSoftmax"), _SOFTMAX),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization"), _NORM),
    "BatchNormalization": Row((norm.batch_norm,)),
    "TopK": Row((topk.top,), (topk.other_kernels,)),
    # copies and indices
    **dict.fromkeys(copy.SELECTORS, Row((copy.copy,), (copy.other_tilings,))),
    "Gather": Row((gather.gather,), (gather.other_sizes,)),
    "ScatterND": Row((scatter.scatter_rows,), (scatter.other_tiles,)),
    "ScatterElements": Row((scatter.scatter_elements,)),
    # images
    "PackImage": Row((packed_image.pack_image,), (packed_image.other_sizes,)),
    "Resize": Row((resize.resize,), (resize.other_sizes,)),
}
