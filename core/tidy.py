"""What compiling leaves behind in memory, given back."""

from __future__ import annotations

from core.codegen.jit import has_generated
from core.ir.graph import Graph
from core.runtime.memory import block_of, drop_code, give_back, is_much, let_go

NODE = 1 << 12  # bytes that the copies of a node take, roughly
_LLVM = "libllvmlite"


def tidy(graph: Graph) -> None:
    """Give back what compiling a graph took: copies of its constants and nodes, pages of files, the compiler's code."""
    for block in {id(block): block for block in map(block_of, graph.constants.values())}.values():
        let_go(block)
    used = sum(array.nbytes for array in graph.constants.values()) + NODE * len(graph.nodes)
    give_back(used)
    drop_compiler(used)


def drop_compiler(used: int) -> None:
    """Take LLVM's code out of memory after work on so many bytes, if that is much: to read it again takes the next
    compilation 10 ms."""
    if is_much(used) and has_generated():
        drop_code(_LLVM)
