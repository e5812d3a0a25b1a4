"""The functions of NVIDIA's driver by name, through NVIDIA's own Python bindings; error codes become Lathe's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lathe.core.errors import DeviceError, DeviceLost, DeviceMemoryError, UnsupportedError

# After these errors the driver refuses all further work of the context; its manual asks for a new process.
FATAL = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED",
        "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK", "MPS_CLIENT_TERMINATED", "EXTERNAL_DEVICE", "UNKNOWN",
    )
)  # fmt: skip


class Driver:
    """The functions of the bindings' module, whose error codes become Lathe's errors."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._functions: dict[str, Callable[..., Any]] = {}
        self._ok = module.CUresult.CUDA_SUCCESS
        self._full = module.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call the function `name`; returns its results without the error code: None, one value, or a tuple.

        DeviceMemoryError if there is no memory left, DeviceLost if the context is unusable from now on, DeviceError for
        any other failure.
        """
        function = self._functions.get(name) or self._functions.setdefault(name, getattr(self.module, name))
        answer = function(*arguments)
        if answer[0] != self._ok:
            raise self._error(name, answer[0])
        return None if len(answer) == 1 else answer[1] if len(answer) == 2 else answer[1:]

    def _error(self, name: str, code: Any) -> DeviceError:
        label, text = (_text(find(code)[1]) for find in (self.module.cuGetErrorName, self.module.cuGetErrorString))
        kind = DeviceMemoryError if code == self._full else DeviceLost if label in FATAL else DeviceError
        return kind(f"{name}: {label or 'unknown error'} ({int(code)}): {text or 'the driver says no more'}")

    def attribute(self, name: str, device: Any) -> int:
        return int(self("cuDeviceGetAttribute", getattr(self.module.CUdevice_attribute, name), device))


def _text(given: Any) -> str:
    return given.decode() if isinstance(given, bytes) else str(given or "")


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def load_driver(name: str) -> Driver:
    """The initialised driver. UnsupportedError that says what is missing, with `name` as the device's name."""
    try:
        driver = Driver(_bindings())
    except ImportError as error:
        raise UnsupportedError(f"device '{name}' needs NVIDIA's Python bindings: install the extra 'cuda'") from error
    try:
        driver("cuInit", 0)
    except DeviceError as error:
        raise UnsupportedError(f"device '{name}' needs a GPU and a driver that goes with it: {error}") from error
    except Exception as error:  # the bindings have errors of their own for a missing library
        raise UnsupportedError(f"device '{name}' needs NVIDIA's driver (libcuda), which was not found") from error
    return driver
