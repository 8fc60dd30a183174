"""Attributes that objects of TorchRec have and tilerec's do not, added to tilerec's classes while stand-ins are there.

`KeyedJaggedTensor._values`, `_keys`, `_lengths`, `_weights`, `_offsets`; `JaggedTensor._lengths`, `_offsets`;
`KeyedTensor._keys`, `_length_per_key`; `wait()` of the outputs of collections; `_plan` of a wrapped model;
`local_shards()` and `copy_(whole)` of tables in state dicts. torch's `_apply_optimizer_in_backward` attaches optimizers
to tables, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from tilerec.compat.optim import apply_optimizer_in_backward
from tilerec.compat.state_dicts import copy_whole, local_shards
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.sharding.embedding import ShardedEmbeddingCollection
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.torch_private import replace_in_backward


class WaitedDict(dict[str, Any]):
    """The output of a sharded `EmbeddingCollection`: a dictionary that is there."""

    def wait(self) -> WaitedDict:
        """Return the dictionary."""
        return self


def _part(name: str) -> property:
    """Return a property for a field of a batch's record; setting it replaces the field."""

    def get(batch: Any) -> Any:
        return getattr(batch._parts, name)

    def put(batch: Any, value: Any) -> None:
        batch._parts, batch._jt_dict = batch._parts._replace(**{name: value}), None

    return property(get, put)


def _read(method: str) -> property:
    return property(lambda own: getattr(own, method)())


def _awaited(forward: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    def call(self: Any, features: Any) -> Any:
        out = forward(self, features)
        return WaitedDict(out) if type(out) is dict else out

    return call


class Patches:
    """Attributes added to classes, until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[type, str, Any]] = []

    def apply(self) -> None:
        """Add the attributes."""
        for name in ("values", "weights"):
            self._set(KeyedJaggedTensor, f"_{name}", _part(name))
        for kind, name, method in (
            (KeyedJaggedTensor, "_keys", "keys"),
            (KeyedJaggedTensor, "_lengths", "lengths_or_none"),
            (KeyedJaggedTensor, "_offsets", "offsets_or_none"),
            (JaggedTensor, "_lengths", "lengths_or_none"),
            (JaggedTensor, "_offsets", "offsets_or_none"),
            (KeyedTensor, "_keys", "keys"),
            (KeyedTensor, "_length_per_key", "length_per_key"),
        ):
            self._set(kind, name, _read(method))
        self._set(KeyedTensor, "wait", lambda own: own)
        self._set(DTensor, "local_shards", local_shards)
        self._set(DTensor, "copy_", copy_whole)
        self._set(ShardedEmbeddingCollection, "forward", _awaited(ShardedEmbeddingCollection.forward))
        for wrapper in (DistributedModelParallel, DMPCollection):
            self._set(wrapper, "_plan", property(lambda own: own.plan))
        self._in_backward = replace_in_backward(apply_optimizer_in_backward)

    def _set(self, kind: type, name: str, value: Any) -> None:
        self._before.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, value)

    def undo(self) -> None:
        """Restore the classes."""
        for kind, name, before in reversed(self._before):
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)
        self._before.clear()
        replace_in_backward(self._in_backward)
