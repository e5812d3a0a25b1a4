"""Returns the memory that compiling used."""

from __future__ import annotations

from lathe.core.codegen.jit import generated_since_last_call
from lathe.core.ir.graph import Graph
from lathe.core.runtime.host.memory import (
    drop_code_pages,
    is_worth_returning,
    owner_of,
    release_pages,
    return_to_system,
)

NODE_BYTES = 1 << 12  # bytes of the copies of a node, roughly
_LLVM = "libllvmlite"


def release_memory(graph: Graph) -> None:
    """Release memory after compiling a graph: pages of mapped files that hold its constants.

    For a graph of 16 MiB or more (`is_worth_returning`) also garbage, such as copies of constants, and LLVM's code.
    """
    for block in {id(block): block for block in map(owner_of, graph.constants.values())}.values():
        release_pages(block)
    used = sum(array.nbytes for array in graph.constants.values()) + NODE_BYTES * len(graph.nodes)
    return_to_system(used)
    drop_llvm_code(used)


def drop_llvm_code(used: int) -> None:
    """Drop the pages of LLVM's library from memory, if it generated code since the last call.

    No effect if `used`, the bytes of the work before, are too few for that to pay (`is_worth_returning`). Reading the
    code again takes the next compilation 10 ms.
    """
    if is_worth_returning(used) and generated_since_last_call():
        drop_code_pages(_LLVM)
