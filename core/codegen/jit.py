"""Compilation of kernels to object files, and a linker that loads them into the process and unloads them."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from lathe.core.codegen.lang import Kernel
from lathe.core.codegen.target import comma_separated, host, initialize, target_machine
from lathe.core.errors import ArtifactError
from lathe.core.kernels.call import KernelSpec
from lathe.core.kernels.target import Target

# Generators unroll and vectorise the kernels that they write, and keep values in registers. These passes add common
# subexpression elimination and loop rotation. LLVM's -O3 takes five times as long for code that runs no faster (its
# loop passes undo some of the tiling).
_PASSES = ("sroa", "simplify_cfg", "instruction_combine", "new_gvn", "loop_rotate", "simplify_cfg")

_generated = threading.Event()

_NEEDS = b"lathe needs: "  # prefix of the note in an object file that lists the instruction sets


def compile_kernel(kernel: Kernel) -> bytes:
    """The object file of one kernel: position-independent code for its target. Equal kernels give equal bytes.

    No code can be added to the kernel afterwards. RuntimeError, which names the kernel's spec, if LLVM rejects its
    assembly: a bug of the generator.
    """
    try:
        return compile_text(kernel.finish(), kernel.target)
    except RuntimeError as error:
        raise RuntimeError(f"kernel {kernel.spec.key} is not valid LLVM assembly: {error}") from error


def compile_text(text: str, target: Target) -> bytes:
    """The object file of the LLVM assembly `text`, with a note of the instruction sets that `target` has.

    `required_features_of` reads the note. RuntimeError if LLVM rejects the text.
    """
    machine = target_machine(target)
    _generated.set()
    return bytes(machine.emit_object(_optimize(text + _note(target), machine)))


def generated_since_last_call() -> bool:
    """Whether this process has generated code since the last call of this function."""
    before = _generated.is_set()
    _generated.clear()
    return before


def required_features_of(data: bytes) -> frozenset[str] | None:
    """LLVM's names of the instruction sets that an object file may use; None if the file has no such note."""
    start = data.find(_NEEDS)
    end = data.find(b"\0", start)
    if start < 0 or end < 0:
        return None
    return frozenset(filter(None, data[start + len(_NEEDS) : end].decode("ascii", "replace").split(",")))


def assembly_of(kernel: Kernel) -> str:
    """The machine code of a kernel as assembly text, for people."""
    machine = target_machine(kernel.target)
    return str(machine.emit_assembly(_optimize(kernel.finish(), machine)))


def object_key(spec: KernelSpec, target: Target) -> str:
    """The object cache's key of `spec`: a SHA-256 digest of the spec, target, generators' source and LLVM version."""
    text = "\n".join((spec.key, target.key, generator_version(), llvm_version()))
    return hashlib.sha256(text.encode()).hexdigest()


class Library:
    """Object files linked into this process. `close` unmaps their code; after that no address may be called."""

    def __init__(self, objects: Mapping[str, bytes], further: Iterable[str] = ()) -> None:
        """Link the object files in `objects`, a map from each symbol to the file that defines it.

        `further` lists more symbols that these files define, so that `address` finds them too. ArtifactError if a file
        cannot be linked, does not note the instruction sets that it needs, or needs one that the host lacks: it is
        damaged, or compiled for another machine.
        """
        for symbol, data in objects.items():
            _check_host_supports(symbol, data)
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
        """The address of the function `symbol`. KeyError if it is not linked, ArtifactError after `close`."""
        if self._linker is None:
            raise ArtifactError(f"the library of {symbol} is closed")
        return self._addresses[symbol]

    def close(self) -> None:
        """Unload the code. Further calls do nothing."""
        linker, self._linker = self._linker, None
        if linker is not None:
            self._tracker.close()
            linker.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generator_version() -> str:
    """A digest of the source in core/codegen, core/kernels and core/ops: a change invalidates all cached objects."""
    return _source_digest(("codegen", "kernels", "ops"))


def compiler_version() -> str:
    """A digest of the whole compiler's source: another version may plan differently, or rely on another runtime."""
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
    """LLVM assembly of an unreferenced constant with the needed instruction sets: it works in any object format."""
    text = _NEEDS.decode() + ",".join(sorted(target.needs))
    return f'\n@lathe_needs = internal constant [{len(text) + 1} x i8] c"{text}\\00"\n'


def _check_host_supports(symbol: str, data: bytes) -> None:
    needs = required_features_of(data)
    if needs is None:
        raise ArtifactError(f"compiled code could not be linked: {symbol} does not say which instructions it needs")
    if lacking := needs - host().needs:
        raise ArtifactError(
            f"compiled code was made for another machine: {symbol} needs {comma_separated(lacking)}, "
            f"which {_host_name()} lacks"
        )


def _host_name() -> str:
    name = os.environ.get("LATHE_TARGET")
    return f"LATHE_TARGET={name}" if name else "this machine"


def _linker() -> llvm.LLJIT:
    """A linker for one library.

    Creating a linker takes a millisecond. One shared by all libraries would leak some kilobytes for each library.
    """
    initialize()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    return llvm.create_lljit_compiler(machine, use_jit_link=True, suppress_errors=True)


def _optimize(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
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
