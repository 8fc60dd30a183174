"""Kernels compiled for sm_90 (Hopper) on a machine without a GPU, and what came out: what tests hold them to.

A gate says which kernel, with which types and compile-time constants. `compiled(gates)` compiles all of them in a
process of their own (Triton compiles nothing in a process that interprets) with a cache of its own, and returns what
the assembler says: registers and spills of a thread, shared memory of a program, and how often each memory instruction,
fused addition, division and root stands in the code.

    gate = Gate("row sums", "tilerec.ops.lookup.triton.pooled:kernel", {"base": "*fp32", ...}, {"TILE": 128, ...})
    assert compiled([gate])["row sums"].count("ld.global.v4.b32") == 8

Types: "*fp32", "*bf16", "*fp16", "*fp8e4nv" (e4m3fn), "*i64", "*i32" of pointers; "i32", "i64", "fp32" of numbers. A
constant that is a jitted function is written "module:name", with a `:` in it. `aligned`: pointers (or numbers) that are
multiples of 16, as Triton finds them to be at a launch; by default every pointer.

As a script, it reads lists of gates from stdin, as JSON, one a line, and prints a list of results for each. With two
arguments, a file and a time (of `time.time()`), it reads one list and appends results to the file, a line each, until
all are done or it is that late. In place of a result there may be an error's words.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[3]
_INSTRUCTIONS = re.compile(
    r"\b((?:ld|st)\.(?:global|shared|local)[\w.:]*|atom\.[\w.]*|red\.[\w.]*|shfl[\w.]*|bar\.sync|(?:fma|div|sqrt)\.[\w.]*)"
)


@dataclass(frozen=True)
class Gate:
    """What to compile."""

    name: str
    kernel: str  # "module:function"
    signature: Mapping[str, str]  # argument to type, in any order
    constants: Mapping[str, Any]
    aligned: Sequence[str] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"num_warps": 1, "enable_fp_fusion": False})
    capability: int = 90  # of the GPU, times 10: 80 Ampere, 90 Hopper, 100 Blackwell


@dataclass(frozen=True)
class Compiled:
    """What came out."""

    registers: int
    spilled: int  # bytes, stores and loads
    shared: int  # bytes
    instructions: dict[str, int]
    on_their_way: int
    """16-byte loads that the machine code begins before it adds, multiplies or stores: the longest such series. The
    assembler may wait for one before it begins the next, to save registers, where in PTX they stand together."""

    def warps(self, each: int = 1) -> int:
        """How many warps of programs of `each` warps a Hopper multiprocessor has room for, by registers and programs.

        65,536 registers, given to warps in steps of 256; at most 64 warps, of at most 32 programs.
        """
        fit = 65_536 // (-(-self.registers * 32 // 256) * 256)
        return min(fit // each, 64 // each, 32) * each

    def count(self, *prefixes: str) -> int:
        """Instructions that begin with one of these: `count("ld.global.v4")`."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefixes))


nightly = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="compiles for ten seconds: nightly")
"""Gates of kernels that few changes touch; of lookups, updates and jagged ops some are always held."""


def aside() -> int:
    """Bytes that a kernel may spill: a few under Triton 3.6 and 3.9, which keep to 128 registers in some kernels."""
    return 32 if importlib.metadata.version("triton").startswith(("3.6.", "3.9.")) else 0


def compiled(gates: Sequence[Gate]) -> dict[str, Compiled]:
    """Compile them all; fails with the compiler's words if one does not compile."""
    process, said = _compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([dataclasses.asdict(gate) for gate in gates]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        _compiler.cache_clear()
        code = process.wait()
        said.seek(0)
        raise AssertionError(f"the compiling process ended with {code}: {said.read()[-4000:]}")
    found = {result.pop("name"): result for result in json.loads(answer)}
    assert not [result["error"] for result in found.values() if "error" in result]
    return {gate.name: Compiled(**found[gate.name]) for gate in gates}


@functools.cache
def _compiler() -> tuple[subprocess.Popen[str], IO[str]]:
    """The process that compiles for all tests of this one, as importing takes as long as a kernel; its complaints.

    It ends when its input does.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env=environment,
        text=True,
    )
    atexit.register(process.communicate)
    return process, said


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _compile(gate: Gate, folder: Path) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
    from triton.compiler import ASTSource

    kernel = _named(gate.kernel)
    names = list(kernel.arg_names)
    unknown = set(names) ^ (gate.signature.keys() | gate.constants.keys())
    assert not unknown, f"{gate.name}: arguments {sorted(unknown)} are missing, or not the kernel's"
    constants = {
        name: _named(value) if isinstance(value, str) and ":" in value else value
        for name, value in gate.constants.items()
    }
    aligned = gate.aligned
    if aligned is None:
        anywhere = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
        aligned = [n for n, type_ in gate.signature.items() if type_.startswith("*") and n not in anywhere]
    source = ASTSource(
        kernel,
        signature={name: gate.signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    # The assembler is asked once, below, where it says what it made.
    CUDABackend.make_cubin = lambda *_args, **_named: b"none"
    out = triton.compile(source, target=GPUTarget("cuda", gate.capability, 32), options=dict(gate.options))
    ptx = folder / "kernel.ptx"
    ptx.write_text(out.asm["ptx"])
    arch = re.search(r"\.target\s+(\w+)", out.asm["ptx"])
    assert arch is not None
    assembled = subprocess.run(
        [
            get_ptxas(gate.capability).path,
            "-v",
            "--gpu-name",
            arch[1],
            str(ptx),
            "-o",
            str(folder / "kernel.o"),
        ],
        capture_output=True,
        text=True,
    )
    said = assembled.stderr + assembled.stdout
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spills is not None, said
    return Compiled(
        int(registers[1]),
        int(spills[1]) + int(spills[2]),
        int(out.metadata.shared),
        dict(Counter(_INSTRUCTIONS.findall(out.asm["ptx"]))),
        _on_their_way(Path(get_ptxas(90).path).parent / "nvdisasm", folder / "kernel.o"),
    )


def _on_their_way(disassembler: Path, code: Path) -> int:
    """The longest series of 16-byte loads without arithmetic or a store in between."""
    text = subprocess.run([disassembler, "-c", code], capture_output=True, text=True).stdout
    most = series = 0
    for name in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", text):
        if name.startswith("LDG.E.128"):
            series += 1
            most = max(most, series)
        elif name.startswith(("FADD", "FMUL", "FFMA", "STG")):
            series = 0
    return most


def _tried(gate: Gate, folder: Path) -> dict[str, Any]:
    """What came out, or the compiler's words."""
    try:
        return {"name": gate.name, **dataclasses.asdict(_compile(gate, folder))}
    except Exception as error:
        return {"name": gate.name, "error": f"{type(error).__name__}: {error}"}


def _main() -> None:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilerec-gates-")
    try:
        with tempfile.TemporaryDirectory(dir=os.environ["TRITON_CACHE_DIR"]) as folder:
            if len(sys.argv) == 3:
                with open(sys.argv[1], "a") as out:
                    for gate in json.load(sys.stdin):
                        if time.time() > float(sys.argv[2]):
                            break
                        out.write(json.dumps(_tried(Gate(**gate), Path(folder))) + "\n")
                        out.flush()
                return
            for line in sys.stdin:
                print(json.dumps([_tried(Gate(**gate), Path(folder)) for gate in json.loads(line)]), flush=True)
    finally:
        shutil.rmtree(os.environ["TRITON_CACHE_DIR"])


if __name__ == "__main__":
    _main()
