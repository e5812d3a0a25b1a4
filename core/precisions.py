"""What a model may be compiled to compute in."""

from __future__ import annotations

PRECISIONS = ("float32", "tf32", "bfloat16", "float16")  # "tf32": products may round factors to 10 bits of mantissa
CHOICES = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"  # for help texts
