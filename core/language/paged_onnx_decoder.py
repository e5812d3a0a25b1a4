"""`PagedOnnxDecoder`: a decoder as ONNX file in the form of ONNX Runtime GenAI, over a cache of pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from lathe.core.compiler.options import make_options
from lathe.core.frontends.external import ExternalFiles
from lathe.core.frontends.onnx import import_model
from lathe.core.frontends.proto import parse_model
from lathe.core.language.cached_graph import CacheLayout, with_states
from lathe.core.language.packed_decoder import PackedDecoder, compiled_head, compiled_step
from lathe.core.language.paged_onnx import paged_models
from lathe.core.language.text_sizes import TextSizes


class PagedOnnxDecoder(PackedDecoder):
    """Tokens of many sequences together, as `CachedDecoder` runs them."""

    @classmethod
    def of(
        cls, path: Path, sizes: TextSizes, *, pages: int, page_size: int = 32, capacity: int = 512,
        threads: int | None = None,
    ) -> PagedOnnxDecoder | None:  # fmt: skip
        """Compile the decoder in an ONNX file; None if it has another form than `paged_models` knows.

        Raises as `lathe.load`. MemoryError if the cache does not fit.
        """
        layout = CacheLayout(pages, page_size)
        found = paged_models(parse_model(path.read_bytes(), True), sizes, layout)
        if found is None:
            return None
        step = with_states(import_model(found.step, ExternalFiles.beside(path)))
        (hidden,) = step.outputs
        dims = [dim if isinstance(dim, int) else str(dim) for dim in hidden.shape]
        info = helper.make_tensor_value_info(hidden.name, hidden.dtype.onnx_code, dims)
        found.head.graph.input[0].CopyFrom(info)
        head = import_model(found.head, ExternalFiles.beside(path))  # each file object gives a file's bytes once
        options = make_options(threads=threads, max_batch=capacity)
        return cls(
            compiled_step(step, options),
            compiled_head(head, options),
            vocabulary=sizes.vocabulary,
            context=sizes.context,
            pages=pages,
            page_size=page_size,
            capacity=capacity,
        )

    def _inputs(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return tokens[:, None]
