"""The operators. Importing this package registers all families."""

from core.ir.build import set_inference
from core.ops import conv, elementwise, fused, norm, pool
from core.ops.inference import infer_node

set_inference(infer_node)

__all__ = ["conv", "elementwise", "fused", "norm", "pool"]
