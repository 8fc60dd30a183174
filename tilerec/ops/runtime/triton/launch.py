"""Launching a kernel that was launched before, without asking Triton again what it has compiled for such a launch.

Triton looks at every argument of every launch, writes the options as text, and compares each global constant that the
kernel and those it calls have read: several times what the launch itself takes (`benchmarks/gpu_host.py` measures
both). Here launches are told apart by what they show, and what Triton compiled for the first of a kind is run for all
of it.

Nouns
  kind    what a launch shows: kernel, device, a face of each argument, names and values of constants and options
  face    of a tensor: its type, and whether it begins at a multiple of 16 bytes; of an integer: the type that holds it;
          of others: their Python type. At least as fine as what Triton tells launches apart by: two of one kind are one
          program to Triton, too (a constant keeps its Python type: 1 and True would be one here)
  tail    the values of the constants, in the kernel's order: what is compiled wants all arguments by position

    launch(pooled_kernel, (512, 26), base, out, ids, …, id_count, bags, slots, GROUP=1, TILE=128, …, num_warps=1)

The first launch of a kind is Triton's own, which compiles. So is every launch of an interpreted kernel, on AMD's GPUs
(programs depend on the size of a tensor's memory there), while a profiler has hooks in launches, and of a number that
is compiled into the kernel (1, multiples of 16: `do_not_specialize` keeps them out). A switch such as `TRITON_DEBUG`
is noticed by first launches only.
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
    """What the launches of one kind have in common."""

    compiled: Any
    tail: tuple[Any, ...]
    kernel: Any  # kept, so that its id stays its own


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
    """`kernel[grid](*arguments, **constants)`: constants and options by name, everything else by position."""
    if kernel.__class__ is not JITFunction or _HIP:
        kernel[grid](*arguments, **constants)
        return
    device = current_device()
    # Faces in one expression: half of what a launch costs is spent here, and a function for each would double it.
    # (`isinstance` takes three times as long for what is no tensor.)
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
    # A hook may be a chain, a function or None: Triton calls whatever is there.
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
    """Remember what Triton compiled, if the next launch of this kind is sure to get it, too."""
    parameters = kernel.params
    plain, rest = parameters[: len(arguments)], parameters[len(arguments) :]
    if (
        not isinstance(compiled, CompiledKernel)  # it is on its way, or there is a hook that launches
        or kernel.pre_run_hooks
        # Triton looks into others (tuples, constants), and a face does not.
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
