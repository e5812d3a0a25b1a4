"""Devices by name: one object per device and process, which all sessions on it share.

cpu            the host, which has no such object
cuda:K         the K-th GPU of NVIDIA's driver ("cuda" is the first); needs the extra `cuda`
simulated:K    host memory, with references as kernels: to try plans and placements without a GPU
interpreted:K  the same, with the GPU's kernels in Triton's interpreter; needs Triton
sm_90          the description of a GPU that is not here: compiles for it and runs nothing (absent_gpu.py)
"""

from __future__ import annotations

import threading

from lathe.core.errors import UnsupportedError
from lathe.core.kernels.cuda.toolchain import is_interpreter_supported, triton_version
from lathe.core.kernels.target import GPU_PREFIX
from lathe.core.runtime.device.device import Device

HOST = "cpu"
KINDS = ("cuda", "simulated", "interpreted")

_devices: dict[str, Device] = {}
_lock = threading.Lock()


def canonical(name: str) -> str:
    """The name with its index ("cuda" becomes "cuda:0"); "cpu" and descriptions (`sm_90`) as they are.

    UnsupportedError for a name that is no device; whether the device exists is not checked.
    """
    kind, _, index = name.partition(":")
    if name == HOST:
        return name
    if name.startswith(GPU_PREFIX):
        from lathe.core.runtime.device.absent_gpu import parse_target

        parse_target(name)
        return name
    if kind not in KINDS or not (index or "0").isdecimal():
        expected = ", ".join(repr(known) for known in (HOST, *KINDS))
        raise UnsupportedError(f"device '{name}' is not supported, expected {expected}, or one with an index (cuda:1)")
    return f"{kind}:{int(index or 0)}"


def open_device(name: str) -> Device:
    """The device of this name, the same object on every call. A lost device is renewed; DeviceLost if that fails.

    UnsupportedError that says what is missing if there is no such device.
    """
    name = canonical(name)
    with _lock:
        if name not in _devices:
            _devices[name] = _make_device(name)
        device = _devices[name]
        if device.lost:
            device.renew()
        return device


def loss_of(name: str) -> str:
    """Why an open device was lost; "" if it works or was never opened. `name`: as `canonical` gives it."""
    device = _devices.get(name)
    return device.lost if device is not None else ""


def find_device(name: str) -> None:
    """Open a device to see whether it exists. Errors as for `open_device`; the host always exists."""
    if canonical(name) != HOST:
        open_device(name)


def _make_device(name: str) -> Device:
    if name.startswith(GPU_PREFIX):
        from lathe.core.runtime.device.absent_gpu import AbsentDevice

        return AbsentDevice(name)
    kind, _, index = name.partition(":")
    if kind == "cuda":
        from lathe.core.runtime.device.cuda import CudaDevice

        return CudaDevice.open(int(index))
    from lathe.core.runtime.device.simulated import INTERPRETER, REFERENCES, SimulatedDevice

    if kind == "interpreted" and not is_interpreter_supported():
        found = triton_version() or "none"
        raise UnsupportedError(f"device '{name}' needs Triton {INTERPRETER}x, found {found}: install the extra 'cuda'")
    return SimulatedDevice(name, INTERPRETER if kind == "interpreted" else REFERENCES)
