"""The GPU's measured peaks: a large product by the vendor's library, and a large copy by the driver."""

from __future__ import annotations

from contextlib import closing

from lathe.core.runtime.device.device_timing import mean_nanoseconds
from lathe.core.runtime.device.devices import open_device
from loadtest.gpu.case import Bench, Case, Finding, Options
from loadtest.gpu.pytorch_peers import torch_is_usable, vendor_product

SHARE = 0.05
_TIMES = 10


def cases(options: Options) -> list[Case]:
    return [Case("ceilings", "copy"), *(Case("ceilings", f"product/{each}") for each in options.precisions)]


def measure(case: Case, bench: Bench) -> Finding:
    if case.name == "copy":
        return _copy(bench.options.device, bench.options.copy)
    size, precision = bench.options.product, case.words[1]
    if not torch_is_usable(bench.options.device):
        return Finding(f"{precision}: no PyTorch on this GPU, which calls the vendor's product")
    flops = 2 * size**3 / vendor_product(size, precision)
    return Finding(f"{precision}: the vendor's product of {size}: {flops / 1e12:.1f} TFLOP/s", None, {"flops": flops})


def _copy(name: str, nbytes: int) -> Finding:
    """Bandwidth of a copy within device memory, counting bytes read and written."""
    device = open_device(name)
    with closing(device.stream()) as stream:
        places = [device.allocate(nbytes) for _ in range(2)]
        try:
            taken = mean_nanoseconds(device, stream, lambda: stream.copy(places[0], places[1], nbytes), _TIMES)
        finally:
            for place in places:
                device.free(place)
    bandwidth = 2 * nbytes / max(taken, 1) * 1e9
    text = f"copy of {nbytes / 2**20:.0f} MiB: {bandwidth / 1e9:.0f} GB/s, read and written"
    return Finding(text, None, {"bandwidth": bandwidth})
