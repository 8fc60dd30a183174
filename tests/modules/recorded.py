"""What a CUDA graph does, without a GPU: the ops of a step are recorded, and run again on the same tensors.

Python does not run again: numbers that it passed by value stay as they were, and what it looked at is not looked at
anew. Memory stays where it is: inputs are written in place, and results are read where the recorded ones were.

    recorded = Recorded(lambda: module(batch))
    batch.values().copy_(others)
    out = recorded.replay()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Recorded:
    """The ops of one call of `step`, which runs now; `result` is what it returned."""

    def __init__(self, step: Callable[[], Any]) -> None:
        with _Recorder() as recorder:
            self.result = step()
        self._calls = [call for call in recorder.calls if not _is_view(call[0])]

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> Any:
        """The same ops again."""
        for func, args, kwargs, kept in self._calls:
            made = func(*args, **kwargs)
            for place, value in zip(_pytree.tree_leaves(kept), _pytree.tree_leaves(made), strict=True):
                if isinstance(place, Tensor) and place is not value:
                    assert place.shape == value.shape, f"{func}: a graph's results have one size"
                    place.copy_(value)
        return self.result


def _is_view(func: Any) -> bool:
    """Its result lies in its argument's memory, where it is still: nothing to do."""
    schema = func._schema
    aliased = any(result.alias_info is not None for result in schema.returns)
    return (aliased and not schema.is_mutable) or func is torch.ops.aten.detach.default
