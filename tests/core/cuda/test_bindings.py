"""The fake driver of the tests has the functions that NVIDIA's bindings have, with their parameters."""

from __future__ import annotations

import inspect

from cuda.bindings import driver

from lathe.core.runtime.device.cuda_driver import FATAL
from tests.core.cuda.fake_driver import ATTRIBUTES, CUfunction_attribute, CUresult, CUstreamCaptureMode, FakeDriver


def test_functions_have_the_parameters_of_the_bindings() -> None:
    names = [name for name in vars(FakeDriver) if name.startswith("cu")]
    assert len(names) > 30
    for name in names:
        fake = list(inspect.signature(getattr(FakeDriver, name)).parameters)[1:]
        assert fake == list(inspect.signature(getattr(driver, name)).parameters), name


def test_fatal_errors_exist_in_the_bindings() -> None:
    assert not [name for name in FATAL if not hasattr(driver.CUresult, name)]


def test_constants_have_the_names_and_values_of_the_bindings() -> None:
    for kind in (CUresult, CUfunction_attribute, CUstreamCaptureMode):
        for member in kind:
            assert int(getattr(getattr(driver, kind.__name__), member.name)) == member, member
    for name in ATTRIBUTES:
        assert hasattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    flags = (driver.CU_MEMHOSTALLOC_PORTABLE, driver.CUstream_flags.CU_STREAM_NON_BLOCKING,
             driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)  # fmt: skip
    assert flags == (1, 1, 2)
