"""A compiled kernel: machine code for one architecture, and PTX where later ones can run it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from core.errors import ArtifactError

_HEAD = struct.Struct("<4sIII")  # magic; bytes of the facts, of the machine code, of the PTX
_MAGIC = b"LGB2"


@dataclass(frozen=True, slots=True)
class Binary:
    """One kernel as the driver loads it. A program is a block of `warps * 32` threads.

    The function takes the addresses of the operands, n as int32, and two more addresses that stay null (Triton's own
    scratch, which no kernel here uses).
    """

    symbol: str
    arch: int  # the architecture of `cubin`, as in `GpuTarget.arch`
    warps: int
    shared_bytes: int  # dynamic shared memory of a program
    cubin: bytes
    ptx: str  # for this architecture and all later ones; "" where only this one can run the kernel
    compiler: str = ""  # name and version of what compiled it

    def to_bytes(self) -> bytes:
        facts = json.dumps([self.symbol, self.arch, self.warps, self.shared_bytes, self.compiler]).encode()
        ptx = self.ptx.encode()
        return _HEAD.pack(_MAGIC, len(facts), len(self.cubin), len(ptx)) + facts + self.cubin + ptx

    @staticmethod
    def is_one(data: bytes) -> bool:
        """Whether bytes begin as those of a binary."""
        return data.startswith(_MAGIC)

    @staticmethod
    def from_bytes(data: bytes) -> Binary:
        """ArtifactError for anything but what `to_bytes` gave."""
        if len(data) < _HEAD.size or not Binary.is_one(data):
            raise ArtifactError("these bytes are no binary of a GPU's kernel")
        _, facts, cubin, ptx = _HEAD.unpack_from(data)
        ends = [_HEAD.size, _HEAD.size + facts, _HEAD.size + facts + cubin, _HEAD.size + facts + cubin + ptx]
        if ends[-1] != len(data):
            raise ArtifactError(f"the binary of a GPU's kernel has {len(data)} bytes, expected {ends[-1]}")
        symbol, arch, warps, shared, compiler = json.loads(data[ends[0] : ends[1]])
        code, text = data[ends[1] : ends[2]], data[ends[2] : ends[3]].decode()
        return Binary(symbol, arch, warps, shared, code, text, compiler)
