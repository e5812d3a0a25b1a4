"""Devices by name: one object per device and process, which all sessions on it share.

cpu            the host, which has no such object
cuda:K         the K-th GPU of NVIDIA's driver ("cuda" is the first); needs the extra `cuda`
simulated:K    host memory, with references for kernels: to try plans and placements anywhere
interpreted:K  the same, with the GPU's kernels in Triton's interpreter; needs Triton
sm_90          a GPU that is not here, by its description: compiles for it and runs nothing (core/runtime/absent.py)
"""

from __future__ import annotations

import threading

from core.errors import UnsupportedError
from core.kernels.cuda.toolchain import interprets, triton_version
from core.kernels.target import GPU_PREFIX
from core.runtime.device import Device

HOST = "cpu"
KINDS = ("cuda", "simulated", "interpreted")

_open: dict[str, Device] = {}
_lock = threading.Lock()


def canonical(name: str) -> str:
    """The name with its index. UnsupportedError for what is no device."""
    kind, _, index = name.partition(":")
    if name == HOST:
        return name
    if name.startswith(GPU_PREFIX):
        from core.runtime.absent import described

        described(name)
        return name
    if kind not in KINDS or not (index or "0").isdecimal():
        expected = ", ".join(repr(known) for known in (HOST, *KINDS))
        raise UnsupportedError(f"device '{name}' is not supported, expected {expected}, or one with an index (cuda:1)")
    return f"{kind}:{int(index or 0)}"


def open_device(name: str) -> Device:
    """UnsupportedError that says what is missing where there is no such device. One that was lost is put to use again;
    DeviceLost where it cannot be."""
    name = canonical(name)
    with _lock:
        if name not in _open:
            _open[name] = _opened(name)
        device = _open[name]
        if device.lost:
            device.renew()
        return device


def loss_of(name: str) -> str:
    """Why a device that was opened has been lost since; "" where it was not."""
    device = _open.get(name)
    return device.lost if device is not None else ""


def find_device(name: str) -> None:
    """UnsupportedError, as of `open_device`, where there is no such device; the host always is."""
    if canonical(name) != HOST:
        open_device(name)


def _opened(name: str) -> Device:
    if name.startswith(GPU_PREFIX):
        from core.runtime.absent import AbsentDevice

        return AbsentDevice(name)
    kind, _, index = name.partition(":")
    if kind == "cuda":
        from core.runtime.cuda import CudaDevice

        return CudaDevice.open(int(index))
    from core.runtime.simulated import INTERPRETER, REFERENCES, SimulatedDevice

    if kind == "interpreted" and not interprets():
        found = triton_version() or "none"
        raise UnsupportedError(f"device '{name}' needs Triton {INTERPRETER}x, found {found}: install the extra 'cuda'")
    return SimulatedDevice(name, INTERPRETER if kind == "interpreted" else REFERENCES)
