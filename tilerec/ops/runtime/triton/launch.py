"""Fast relaunch of compiled kernels, without Triton's own lookup of the compiled program.

Triton inspects every argument of every launch, formats the options as text, and compares each global constant that the
kernel and its callees have read. That takes several times as long as the launch itself (`benchmarks/gpu_host.py`
measures both). `launch` computes a cheaper key instead, and reuses the program that Triton compiled for the first
launch with that key.

Nouns
  kind    the cache key of a launch: kernel, device, a face of each argument, names and values of constants and options
  face    the part of an argument that selects a program. Of a tensor: its dtype, and whether it begins at a multiple
          of 16 bytes; of an integer: the type that holds it; of others: their Python type. Kinds are at least as fine
          as Triton's own keys: two launches of one kind run one program in Triton, too. (A constant keeps its Python
          type: 1 and True would be equal here.)
  tail    the values of the constants, in the kernel's order: a compiled program takes all arguments by position

    launch(pooled_kernel, (512, 26), base, out, ids, …, id_count, bags, slots, GROUP=1, TILE=128, …, num_warps=1)

These launches run through Triton itself:

  - the first of each kind, which compiles
  - launches of an interpreted kernel
  - launches on AMD's GPUs, where programs depend on the size of a tensor's memory
  - launches while a profiler has launch hooks installed
  - launches with a number that Triton specializes on (1, multiples of 16; `do_not_specialize` avoids these)

Only the first launch of a kind sees a change of a switch such as `TRITON_DEBUG`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tilerec.torch_private import current_device, current_raw_stream


class _Known(NamedTuple):
    """Data shared by all launches of one kind."""

    compiled: Any
    tail: tuple[Any, ...]
    kernel: Any  # a reference, so that no other kernel gets its id


GRID_Y = 65_535
"""Programs that CUDA allows on the second axis of a grid (2³¹ - 1 on the first)."""

_KNOWN: dict[tuple[object, ...], _Known] = {}
_MOST = 4096
_TENSORS = frozenset((Tensor, nn.Parameter))
_PLAIN = _TENSORS | {int, float, bool, type(None)}
_INT32, _INT64 = 1 << 31, 1 << 63
_HIP = torch.version.hip is not None
_RUNTIME = knobs.runtime


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel[grid](*arguments, **constants)`: constants and options by name, everything else by position."""
    if kernel.__class__ is not JITFunction or _HIP:
        kernel[grid](*arguments, **constants)
        return
    device = current_device()
    # All faces in one expression: this is half of a launch's cost, and a function call per face would double it.
    # (`isinstance` takes three times as long for an argument that is not a tensor.)
    kind = (
        id(kernel),
        device,
        *[
            (a.dtype if not a.data_ptr() & 15 else (a.dtype,))
            if (own := a.__class__) in _TENSORS
            else (-_INT32 <= a < _INT32 or (2 if a < _INT64 else 3))
            if own is int
            else own
            for a in arguments
        ],
        *constants,
        *constants.values(),
    )
    known = _KNOWN.get(kind)
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    # A hook may be a chain, a function or None; Triton calls a chain or a function.
    if known is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or len(grid) > 2:
        _keep(kind, kernel, kernel[grid](*arguments, **constants), arguments, constants)
        return
    compiled = known.compiled
    compiled.run(
        grid[0], grid[1] if len(grid) > 1 else 1, 1, current_raw_stream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *arguments, *known.tail,
    )  # fmt: skip


def _keep(
    kind: tuple[object, ...],
    kernel: Any,
    compiled: object,
    arguments: Sequence[object],
    constants: dict[str, object],
) -> None:
    """Cache the compiled program if Triton would choose it for every later launch of this kind."""
    parameters = kernel.params
    plain, rest = parameters[: len(arguments)], parameters[len(arguments) :]
    if (
        not isinstance(compiled, CompiledKernel)  # the compilation is asynchronous, or a hook launches
        or kernel.pre_run_hooks
        # Triton inspects the contents of others (tuples, constants); a face does not.
        or not all(a.__class__ in _PLAIN for a in arguments)
        or any(p.is_constexpr for p in plain)
        or not all(p.is_constexpr for p in rest)
        or any(isinstance(a, int) and not p.do_not_specialize for p, a in zip(plain, arguments, strict=True))
    ):
        return
    tail = tuple([constants.get(p.name, p.default) for p in rest])
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    _KNOWN[kind] = _Known(compiled, tail, kernel)
