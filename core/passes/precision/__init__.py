"""Passes that change element types: bfloat16, float16 and quantized graphs."""
