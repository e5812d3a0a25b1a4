"""Architectures that recipes can name: their validated settings, and the graphs built from them.

settings = ARCHITECTURES["lenet5"](channels=(6, 16))
graph = architecture(settings, {"x": Column("x", DType.FLOAT32, (1, 28, 28))}, outputs=10, seed=0)
"""

from lathe.core.train.zoo.registry import ARCHITECTURES, Architecture, architecture
from lathe.core.train.zoo.settings import Row, Settings

__all__ = ["ARCHITECTURES", "Architecture", "Row", "Settings", "architecture"]
