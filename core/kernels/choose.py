"""Choice of the kernel for a node: the first selector of the operator's row that returns a call.

The rows are in `kernel_table.py` (CPU), `kernel_table_cuda.py` (GPU) and `reference/spec.py` (simulated GPU). Custom
operators add rows of their own with `add_row`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace

from lathe.core.kernels.call import KernelCall, Request, Row, has_elements

_TABLES = {  # by device; each module is imported at its first use
    "cpu": "lathe.core.kernels.kernel_table",
    "cuda": "lathe.core.kernels.kernel_table_cuda",
    "simulated": "lathe.core.kernels.reference.spec",
}
_CUSTOM_ROWS: dict[tuple[str, str], Row] = {}  # by device and operator: custom operators

_MOST_OPERANDS = 1024  # code grows with each operand; a node with more is a mistake or an attack


def select(request: Request) -> KernelCall | None:
    """The kernel for a node, or None if no kernel covers it: then the node runs on its NumPy reference.

    None also for more than 1024 inputs and outputs, and if one of them is empty for all batch sizes.
    """
    node = request.node
    if len(node.inputs) + len(node.outputs) > _MOST_OPERANDS or not has_elements(node):
        return None
    request_with_select = replace(request, select=select)
    for selector in row_of(node.op, request.target.device).selectors:
        call = selector(request_with_select)
        if call is not None:
            return call
    return None


def candidates(request: Request) -> tuple[KernelCall, ...]:
    """All kernels that the tuner may time for a node, without repetition.

    The kernel that `select` prefers comes first, then those of the row's offers. Empty if `select` returns None.
    """
    first = select(request)
    if first is None:
        return ()
    distinct = {first.spec.key: first}
    request_with_select = replace(request, select=select)
    for offer in row_of(request.node.op, request.target.device).offers:
        for call in offer(request_with_select):
            distinct.setdefault(call.spec.key, call)
    return tuple(distinct.values())


def row_of(op: str, device: str = "cpu") -> Row:
    """The selectors and offers of an operator on a device: the row of `add_row`, otherwise that of the device's table.

    An empty row if there is neither.
    """
    added = _CUSTOM_ROWS.get((device, op))
    return added if added is not None else _table(device).get(op, Row())


def families(op: str, device: str = "cpu") -> tuple[str, ...]:
    """The modules of an operator's selectors on a device, in the order of its row, each once, such as "conv.batch".

    They are the names below `lathe.core.kernels`, without the ending `spec`.
    """
    modules = (selector.__module__.partition(".kernels.")[2] for selector in row_of(op, device).selectors)
    return tuple(dict.fromkeys(module.removesuffix("spec").rstrip("._") for module in modules))


def add_row(op: str, row: Row, device: str = "cpu") -> None:
    """Replace the row of an operator on a device by this one, for the rest of the process."""
    _CUSTOM_ROWS[device, op] = row


def _table(device: str) -> Mapping[str, Row]:
    if device not in _TABLES:
        return {}
    table: Mapping[str, Row] = importlib.import_module(_TABLES[device]).TABLE
    return table
