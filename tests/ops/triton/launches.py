"""What a GPU would be given to do: Triton's launches, torch's kernels and copies, counted on a machine without a GPU.

Nouns
  launch   one kernel of ours (`variants.py` records them; they do not run here)
  kernel   one torch op that is a kernel on a GPU, or several: a sort counts as one here. Views and allocations are none
  copy     numbers sent to the device or from it: a few bytes beside the stream's kernels
  given    all of these, in their order, by name

A dispatch mode hands every op of ours to the host function that serves it on GPUs, and looks at what that does. Tensors
lie on the CPU. What the kernels should have written is never written, so only ops whose results the host does not read
can be counted; that is nearly all of them (`run=True` lets the kernels run, for the others). What updates tell is read,
as soon as it is there, and here that is at once: so launches that begin it do that (`_begin`).

    with counted() as given:
        module(batch)
    given.launches    ["chunk_kernel", "pooled_kernel"]; given.variants: what Triton would compile for them
    given.kernels     ["aten.sort.stable"]
    given.copies      ["report"]
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from tests.ops.triton.variants import Variant, variant_of
from tilerec.ops.runtime import upload as sending
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton import reports
from tilerec.ops.update.triton import small_sort
from tilerec.ops.update.triton.status import EMPTY_STATUS

_ALLOCATIONS = (
    "empty",
    "new_empty",
    "lift_fresh",
    "detach",
    "alias",
    "_unsafe_view",
    "set_",
    "is_pinned",
    "_pin_memory",
)


class Given:
    """What a GPU would be given, in its order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []  # kind, name
        self.variants: list[Variant] = []  # of the launches

    def of(self, kind: str) -> list[str]:
        return [name for own, name in self.all if own == kind]

    @property
    def launches(self) -> list[str]:
        return self.of("launch")

    @property
    def kernels(self) -> list[str]:
        return self.of("kernel")

    @property
    def copies(self) -> list[str]:
        return self.of("copy")

    @property
    def count(self) -> int:
        """Launches and kernels."""
        return len(self.launches) + len(self.kernels)

    def __repr__(self) -> str:
        return ", ".join(name if kind == "launch" else f"{kind} {name}" for kind, name in self.all)


class _Mode(TorchDispatchMode):
    def __init__(self, given: Given) -> None:
        super().__init__()
        self.given = given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func.name().partition("::")
        if space == "tilerec":
            host = hosts().get(name.partition(".")[0])
            if host is not None:
                with self:
                    return host(*args, **kwargs)
            with self:  # not served by kernels: the reference, in torch's kernels
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        result = func(*args, **kwargs)
        if _is_kernel(func, [*args, result]):
            self.given.all.append(("kernel", f"{space}.{name}"))
        return result


def _is_kernel(func: Any, tensors: Sequence[Any]) -> bool:
    if func.name().partition("::")[2].startswith(_ALLOCATIONS):
        return False
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return False  # a view
    some = [t for t in tensors if isinstance(t, Tensor)]
    if _counts_updates(func, [t for t in _pytree.tree_leaves(tensors) if isinstance(t, Tensor)]):
        return False
    return not any(_of_ticket(t) for t in some) and not (some and all(t.numel() == 0 for t in some))


def _of_ticket(tensor: Tensor) -> bool:
    """A lookup's ticket (`gradient.new_ticket`): two numbers that stay on the host."""
    return tensor.dtype == torch.int64 and tensor.untyped_storage().nbytes() == 16


def _counts_updates(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Reads or adds to update counts of tables, which are on the host (`table_rows.py`)."""
    name = func.name().partition("::")[2].partition(".")[0]
    return name in ("_local_scalar_dense", "_foreach_add_") and all(
        t.dim() == 0 and t.dtype == torch.int64 for t in tensors
    )


@functools.cache
def hosts() -> dict[str, Callable[..., Any]]:
    """The functions that serve our ops on GPUs, by op."""
    from tilerec.ops import gpu_backends

    found: dict[str, Callable[..., Any]] = {}
    real = LIBRARY.impl
    LIBRARY.impl = lambda name, function, key, **_: found.update({name: function})  # type: ignore[method-assign]
    try:
        gpu_backends.register()
    finally:
        LIBRARY.impl = real  # type: ignore[method-assign]
    return found


def _begin(kernel: Any, args: Sequence[Any]) -> None:
    """Initialize an update's status (`report.py`) in place of the kernel that makes keys: no rows skipped."""
    if kernel.fn.__name__ in ("occurrence_keys", "sort_blocks", "init_status_kernel"):
        status = args[kernel.arg_names.index("status")]
        with _disable_current_modes():
            status.zero_()
            status[: len(EMPTY_STATUS)] = torch.tensor(EMPTY_STATUS)


@contextlib.contextmanager
def counted(run: bool = False) -> Iterator[Given]:
    """Count what is given to the device. `run`: let the kernels run, interpreted."""
    hosts()  # all modules are there before their names are exchanged
    given = Given()

    def noting(kind: str, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            given.all.append((kind, name))
            return real(*args, **kwargs)

        return noted

    kernel = interpreter.InterpretedFunction
    real = kernel.run

    def launched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given.all.append(("launch", self.fn.__name__))
        given.variants.append(variant_of(self, args, kwargs))
        if not run:
            _begin(self, args)
            return None
        with _disable_current_modes():
            return real(self, *args, grid=grid, warmup=warmup, **kwargs)

    # What is kept is sent once; `upload.py`'s own calls are those.
    def unseen(*args: Any) -> Any:
        """Reports that came back untaken are used again, so on a GPU a step makes none."""
        with _disable_current_modes():
            return new_report(*args)

    new_report = reports.new_report
    instead = {
        "upload": (sending.upload, noting("copy", "numbers", sending.upload)),
        "post": (reports.post, noting("copy", "report", reports.post)),
        "new_report": (new_report, unseen),
    }
    with contextlib.ExitStack() as undo:
        for module in [m for name, m in sys.modules.items() if name.startswith("tilerec.") and m is not sending]:
            for name, (original, other) in instead.items():
                if vars(module).get(name) is original:
                    setattr(module, name, other)
                    undo.callback(setattr, module, name, original)
        kernel.run = launched
        undo.callback(setattr, kernel, "run", real)
        if not run:  # as on a GPU: the interpreter is spared this sort
            undo.callback(setattr, small_sort, "MOST", small_sort.MOST)
            small_sort.MOST = 65_536
        undo.enter_context(_Mode(given))
        yield given
