"""A model of llama.cpp by llama-cpp-python, whose log is silent."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

_kept: list[Any] = []  # functions that llama.cpp calls


def load(path: str) -> tuple[Any, Any, int]:
    """The C interface of llama.cpp, the model in a GGUF file, and the number of its tokens."""
    api: Any = import_module("llama_cpp")
    api.llama_backend_init()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    api.llama_log_set(quiet, None)
    _kept.append(quiet)
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    return api, model, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
