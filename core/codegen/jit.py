"""From kernels to code in memory: compile to object files, keep those on disk, load and unload them."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from core.codegen.lang import Kernel
from core.codegen.target import host, initialize, listed, target_machine
from core.errors import ArtifactError
from core.kernels.catalog.base import KernelSpec
from core.kernels.target import Target

# Kernels are written unrolled, in vectors and registers. What is left to do is to share subexpressions and turn loops;
# LLVM's -O3 takes five times as long for code that runs no faster (its loop passes undo some of the tiling).
_PASSES = ("sroa", "simplify_cfg", "instruction_combine", "new_gvn", "loop_rotate", "simplify_cfg")

_generated = threading.Event()

_NEEDS = b"lathe needs: "  # begins the text in an object file that lists instruction sets


def compile_kernel(kernel: Kernel) -> bytes:
    """The object file of one kernel: position-independent code for its target. Same kernel, same bytes."""
    try:
        return compile_text(kernel.finish(), kernel.target)
    except RuntimeError as error:
        raise RuntimeError(f"kernel {kernel.spec.key} is not valid LLVM assembly: {error}") from error


def compile_text(text: str, target: Target) -> bytes:
    """The object file of a module given as LLVM assembly. It says which instruction sets it needs."""
    machine = target_machine(target)
    _generated.set()
    return bytes(machine.emit_object(_optimized(text + _note(target), machine)))


def has_generated() -> bool:
    """Whether this process has generated code since it was last asked."""
    before = _generated.is_set()
    _generated.clear()
    return before


def needs_of(data: bytes) -> frozenset[str] | None:
    """LLVM's names of the instruction sets that an object file may use; None where it does not say."""
    start = data.find(_NEEDS)
    end = data.find(b"\0", start)
    if start < 0 or end < 0:
        return None
    return frozenset(filter(None, data[start + len(_NEEDS) : end].decode("ascii", "replace").split(",")))


def assembly_of(kernel: Kernel) -> str:
    """The machine code of a kernel as text, for people."""
    machine = target_machine(kernel.target)
    return str(machine.emit_assembly(_optimized(kernel.finish(), machine)))


def object_key(spec: KernelSpec, target: Target) -> str:
    """Everything that the object file of `spec` depends on, as one digest."""
    text = "\n".join((spec.key, target.key, generator_version(), llvm_version()))
    return hashlib.sha256(text.encode()).hexdigest()


class Library:
    """Object files linked into this process. `close` unmaps their code; no address may be called afterwards."""

    def __init__(self, objects: Mapping[str, bytes], further: Iterable[str] = ()) -> None:
        """`objects` maps each symbol to the object file that defines it; `further` names
        more symbols of the same files.

        ArtifactError when one of them cannot be linked, or has instructions that the host lacks: damaged, or made for
        another kind of machine.
        """
        for symbol, data in objects.items():
            _check_runs_here(symbol, data)
        builder = llvm.JITLibraryBuilder().add_current_process()
        for symbol, data in objects.items():
            builder.add_object_img(data).export_symbol(symbol)
        for symbol in further:
            builder.export_symbol(symbol)
        self._linker: llvm.LLJIT | None = _linker()
        try:
            self._tracker = builder.link(self._linker, "lathe")
        except RuntimeError as error:
            self._linker.close()
            raise ArtifactError(f"compiled code could not be linked: {error}") from error
        self._addresses = {symbol: int(self._tracker[symbol]) for symbol in (*objects, *further)}

    def address(self, symbol: str) -> int:
        """Where the function `symbol` lies. KeyError when it is not here, ArtifactError once it is closed."""
        if self._linker is None:
            raise ArtifactError(f"the library of {symbol} is closed")
        return self._addresses[symbol]

    def close(self) -> None:
        """Unload the code. Harmless when repeated."""
        linker, self._linker = self._linker, None
        if linker is not None:
            self._tracker.close()
            linker.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generator_version() -> str:
    """A digest of the source that writes code: changing a generator makes all its cached objects stale."""
    return _source_digest(("codegen", "kernels", "ops"))


def compiler_version() -> str:
    """A digest of the whole compiler's source: another one may plan, and promise the runtime, something else."""
    return _source_digest((".",))


@functools.cache
def _source_digest(folders: tuple[str, ...]) -> str:
    core = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((core / folder).rglob("*.py")):
            digest.update(path.relative_to(core).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def llvm_version() -> str:
    return f"{llvmlite.__version__}/{'.'.join(map(str, llvm.llvm_version_info))}"


def _note(target: Target) -> str:
    """A constant that nothing refers to: it is in the object file, whatever that file's format."""
    text = _NEEDS.decode() + ",".join(sorted(target.needs))
    return f'\n@lathe_needs = internal constant [{len(text) + 1} x i8] c"{text}\\00"\n'


def _check_runs_here(symbol: str, data: bytes) -> None:
    needs = needs_of(data)
    if needs is None:
        raise ArtifactError(f"compiled code could not be linked: {symbol} does not say which instructions it needs")
    if lacking := needs - host().needs:
        raise ArtifactError(
            f"compiled code was made for another machine: {symbol} needs {listed(lacking)}, which {_here()} lacks"
        )


def _here() -> str:
    name = os.environ.get("LATHE_TARGET")
    return f"LATHE_TARGET={name}" if name else "this machine"


def _linker() -> llvm.LLJIT:
    """A linker for one library. Making one takes a millisecond; a shared one would keep some kilobytes of every library
    that ever was in it."""
    initialize()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    return llvm.create_lljit_compiler(machine, use_jit_link=True, suppress_errors=True)


def _optimized(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(text)
    module.verify()
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    passes = llvm.create_new_function_pass_manager()
    for name in _PASSES:
        getattr(passes, f"add_{name}_pass")()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return module
