"""The number formats in which a compiled model may compute."""

from __future__ import annotations

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")  # "tf32": products may round factors to a 10-bit mantissa
PRECISION_CHOICES = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"  # for help texts
