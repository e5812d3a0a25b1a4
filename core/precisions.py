"""The number formats in which a compiled model may compute."""

from __future__ import annotations

INT8_ROWS = "int8-activations"  # products with constant weights of few bits may round their other factor to int8
# "tf32": products may round factors to a 10-bit mantissa
PRECISIONS = ("float32", "tf32", "bfloat16", "float16", INT8_ROWS)
PRECISION_CHOICES = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"  # for help texts
