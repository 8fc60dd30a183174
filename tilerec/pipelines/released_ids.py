"""`ReleasedIds`: stands for ids whose memory was released after they were routed."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, with_values

_aten = torch.ops.aten
_NO_DATA = {_aten.new_empty.default, _aten.detach.default}  # besides views


@final
class ReleasedIds(Tensor):
    """Tensor with the shape, dtype and device of ids, and without memory.

    Views of it are such tensors, too. An operator that reads or writes ids raises an `InputError`.
    """

    @staticmethod
    def __new__(cls, ids: Tensor) -> ReleasedIds:
        return Tensor._make_wrapper_subclass(
            cls, ids.shape, strides=ids.stride(), storage_offset=0, dtype=ids.dtype, device=ids.device
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.record_stream.default:  # there is no memory to keep
            return None
        own = args[0] if args else None
        if not isinstance(own, ReleasedIds) or not (func.is_view or func in _NO_DATA):
            raise InputError(
                f"Features of a batch: {func} reads ids that were released after they were routed; "
                "expected that sharded collections alone read them, and that tables are not resharded while batches "
                "are in flight. Leave free_features_storage_early out."
            )
        shape = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
        if func is _aten.new_empty.default:
            return torch.empty(args[1], dtype=own.dtype, device=own.device)
        found = func(shape, *args[1:], **(kwargs or {}))
        device = own.device
        if isinstance(found, (list, tuple)):
            return [_of(one, device) for one in found]
        return _of(found, device)


def _of(shape: Tensor, device: torch.device) -> ReleasedIds:
    return Tensor._make_wrapper_subclass(
        ReleasedIds, shape.shape, strides=shape.stride(), storage_offset=0, dtype=shape.dtype, device=device
    )


def without_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the same features without the memory of their ids."""
    return with_values(features, ReleasedIds(features.values()))
