"""A device that no code may wait for: meta, under a mode that raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")


aten = torch.ops.aten


# Ops whose result has as many elements as numbers on the device say.
SIZED = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")


class NoWaiting(TorchDispatchMode):
    """Raises where an op would have the host wait for `DEVICE`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [a.device for a in _pytree.tree_leaves(args) if isinstance(a, Tensor)]
        made = [a.device for a in _pytree.tree_leaves(out) if isinstance(a, Tensor)]
        waits = func is aten._to_copy.default and given != made and not (kwargs or {}).get("non_blocking")
        waits = waits or (func._opname in SIZED and DEVICE in given)
        waits = waits or (func is aten.repeat_interleave.Tensor and not (kwargs or {}).get("output_size"))
        assert not waits, f"{func} from {given} to {made}"
        assert func.namespace == "tilerec" or func is aten._to_copy.default or len(set(given)) < 2, func
        return out
