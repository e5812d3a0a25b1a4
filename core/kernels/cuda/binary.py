"""A compiled GPU kernel: machine code for one architecture, and PTX if later architectures can run it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from lathe.core.errors import ArtifactError

_HEAD = struct.Struct("<4sIII")  # magic; sizes in bytes of the facts, the machine code, the PTX
_MAGIC = b"LGB2"


@dataclass(frozen=True, slots=True)
class Binary:
    """One kernel as the driver loads it. A program is a thread block of `warps * 32` threads.

    The function takes the addresses of the operands, n as int32, and two null addresses (Triton's own scratch, which no
    kernel here uses).
    """

    symbol: str
    arch: int  # the architecture of `cubin`, as in `GpuTarget.arch`
    warps: int
    shared_bytes: int  # dynamic shared memory of a program
    cubin: bytes
    ptx: str  # for this architecture and all later ones; "" if only this architecture can run the kernel
    compiler: str = ""  # name and version of the compiler

    def to_bytes(self) -> bytes:
        facts = json.dumps([self.symbol, self.arch, self.warps, self.shared_bytes, self.compiler]).encode()
        ptx = self.ptx.encode()
        return _HEAD.pack(_MAGIC, len(facts), len(self.cubin), len(ptx)) + facts + self.cubin + ptx

    @staticmethod
    def is_one(data: bytes) -> bool:
        """Whether `data` begins with the magic number of the bytes that `to_bytes` writes."""
        return data.startswith(_MAGIC)

    @staticmethod
    def from_bytes(data: bytes) -> Binary:
        """The binary that `to_bytes` wrote. ArtifactError for any other bytes, except changed machine code or PTX."""
        if len(data) < _HEAD.size or not Binary.is_one(data):
            raise ArtifactError("GPU kernel: the data are not a binary of a GPU kernel")
        _, facts, cubin, ptx = _HEAD.unpack_from(data)
        ends = [_HEAD.size, _HEAD.size + facts, _HEAD.size + facts + cubin, _HEAD.size + facts + cubin + ptx]
        if ends[-1] != len(data):
            raise ArtifactError(f"GPU kernel: expected {ends[-1]} bytes, got {len(data)}")
        code, text = data[ends[1] : ends[2]], data[ends[2] : ends[3]]
        try:
            found = json.loads(data[ends[0] : ends[1]])
            if not isinstance(found, list) or [type(fact) for fact in found] != [str, int, int, int, str]:
                raise ValueError("expected a symbol, three numbers and a compiler")
            symbol, arch, warps, shared, compiler = found
            return Binary(symbol, arch, warps, shared, code, text.decode(), compiler)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"GPU kernel: its facts or its PTX are malformed: {error}") from error
