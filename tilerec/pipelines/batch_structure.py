"""Structure of a batch of any class: its tensors, its jagged features by path, its size, its move to a device.

A batch is a tree of dataclasses, named tuples, dicts, lists, tuples and other objects with attributes. Its leaves are
tensors and `KeyedJaggedTensor`s.

    Batch(dense, KJT, labels)         paths: .sparse_features
    {"user": (KJT, KJT), "y": t}      paths: ["user"][0], ["user"][1]
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.pipelines.released_ids import ReleasedIds
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.storage.tensor_mark import mark_of
from tilerec.torch_private import pytree

Path = tuple[tuple[bool, Any], ...]
"""Steps from a batch to a part of it: (True, key of an item) or (False, name of an attribute)."""

_LEAVES = (Tensor, KeyedJaggedTensor, JaggedTensor, KeyedTensor)


def leaves_of(batch: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the leaf of each tensor and each sparse tensor of a batch, depth first."""
    yield from _leaves((), batch, set())


def _leaves(path: Path, node: Any, above: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, _LEAVES):
        yield path, node
        return
    if id(node) in above:  # a cycle
        return
    above.add(id(node))
    for step, child in _children(node):
        yield from _leaves((*path, step), child, above)
    above.discard(id(node))


def _children(node: Any) -> list[tuple[tuple[bool, Any], Any]]:
    names = _field_names(node.__class__)  # first, because most batches are dataclasses; None for a class itself
    if names is not None:
        return [((False, name), getattr(node, name)) for name in names if hasattr(node, name)]
    if isinstance(node, Mapping):
        return [((True, key), child) for key, child in node.items()]
    if isinstance(node, (list, tuple)):
        return [((True, index), child) for index, child in enumerate(node)]
    if hasattr(node, "__dict__") and not isinstance(node, (type, nn.Module)) and not callable(node):
        return [((False, name), child) for name, child in vars(node).items()]
    return []


@functools.lru_cache(maxsize=64)
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a dataclass, None for other classes and for those that are a mapping or a sequence, too."""
    if issubclass(kind, (Mapping, list, tuple)) or not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def path_of(batch: Any, part: Any) -> Path | None:
    """Return the first path at which a batch holds this very object, or None."""
    return next((path for path, leaf in leaves_of(batch) if leaf is part), None)


def original_of(batch: Any, features: Any) -> Any:
    """Return the features of a batch that hold the same tensors as these; these themselves if there are none.

    A compiled program passes the tensors of a batch's features, in another object.
    """
    if not isinstance(features, KeyedJaggedTensor):
        return features
    for _, leaf in leaves_of(batch):
        if leaf is features or (isinstance(leaf, KeyedJaggedTensor) and _has_same_tensors(leaf, features)):
            return leaf
    return features


def _has_same_tensors(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    return one.keys() == other.keys() and _feature_marks(one) == _feature_marks(other)


def _feature_marks(features: KeyedJaggedTensor) -> list[Any]:
    lengths = features.lengths_or_none()
    parts = (features.values(), features.weights_or_none(), features.offsets() if lengths is None else lengths)
    return [None if part is None else mark_of(part) for part in parts]


def part_at(batch: Any, path: Path) -> Any:
    """Return the part of a batch at a path, or None if the batch has no such path."""
    try:
        for is_item, name in path:
            batch = batch[name] if is_item else getattr(batch, name)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None
    return batch


def path_text(path: Path) -> str:
    """Return a path as Python writes it: `.sparse_features`, `["user"][0]`."""
    return "".join(f"[{name!r}]" if is_item else f".{name}" for is_item, name in path) or "the batch itself"


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch that have memory, those of its sparse tensors included."""
    found: list[Tensor] = []
    _collect_tensors(batch, found, set())
    return found


def _collect_tensors(node: Any, found: list[Tensor], above: set[int]) -> None:
    # Without `leaves_of`, whose paths take longer than all else: every step of a pipeline calls this.
    if isinstance(node, Tensor):
        found.append(node)
    elif isinstance(node, KeyedJaggedTensor):  # as below, in a tenth of the time
        inverse = node.inverse_indices_or_none()
        parts = (node.values(), node.weights_or_none(), node.lengths_or_none(), node.offsets_or_none())
        found.extend([part for part in parts if part is not None and not isinstance(part, ReleasedIds)])
        found.extend([] if inverse is None else [inverse[1]])
    elif isinstance(node, _LEAVES):
        found.extend(part for part in pytree.tree_leaves(node) if isinstance(part, Tensor))
    elif id(node) not in above:  # no cycle
        above.add(id(node))
        for _, child in _children(node):
            _collect_tensors(child, found, above)
        above.discard(id(node))


@dataclasses.dataclass(frozen=True)
class Marks:
    """Tensors and the version of each when it was read; see `mark_of`."""

    tensors: list[Tensor]
    marks: list[Any]

    @staticmethod
    def of(tensors: list[Tensor]) -> Marks:
        """Return the present marks of the tensors."""
        return Marks(tensors, [mark_of(tensor) for tensor in tensors])

    def without(self, tensors: list[Tensor]) -> Marks:
        """Return the marks of the other tensors."""
        left = {id(tensor) for tensor in tensors}
        kept = [k for k, tensor in enumerate(self.tensors) if id(tensor) not in left]
        return Marks([self.tensors[k] for k in kept], [self.marks[k] for k in kept])

    def changed(self) -> bool:
        """Return True if a tensor was written to since."""
        return self.marks != [mark_of(tensor) for tensor in self.tensors]


def samples_of(batch: Any) -> int:
    """Return the number of samples: `batch_size`, `stride()`, or the first dimension of the first leaf.

    Raises:
        ConfigError: the batch has no tensor that shows its size.
    """
    size = getattr(batch, "batch_size", None)
    if isinstance(size, int):
        return size
    for _, leaf in leaves_of(batch):
        if isinstance(leaf, KeyedJaggedTensor):
            return leaf.stride()
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ConfigError(
        f"Pipeline: got a {type(batch).__name__} without batch_size and without tensors; expected a batch whose number "
        "of samples can be read. Give the class a property batch_size."
    )


def empty_like(batch: Any) -> Any:
    """Return a batch of the same structure without samples: every tensor's first dimension is 0.

    Raises:
        ConfigError: a part of the batch has no form without samples.
    """

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, KeyedJaggedTensor) and not leaf.variable_stride_per_key():
            weights = leaf.weights_or_none()
            return KeyedJaggedTensor(
                leaf.keys(),
                leaf.values().new_empty((0, *leaf.values().shape[1:])),
                None if weights is None else weights.new_empty((0, *weights.shape[1:])),
                leaf.lengths().new_empty(0),
                stride=0 if not leaf.keys() else None,
            )
        if isinstance(leaf, Tensor):
            return leaf.new_empty((0, *leaf.shape[1:])) if leaf.dim() else leaf.clone()
        raise ConfigError(
            f"Pipeline: got a batch with a {type(leaf).__name__} that has no form without samples, and ranks with "
            "different numbers of batches need one. Pass empty=, a batch without samples."
        )

    return mapped(batch, empty)


def mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure with `function(leaf)` in place of each leaf."""
    if isinstance(batch, _LEAVES):
        return function(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: mapped(child, function) for key, child in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(child, function) for child in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(child, function) for child in batch)
    children = list(_children(batch))
    if not children:
        return batch
    twin = copy.copy(batch)
    for (_, name), child in children:
        object.__setattr__(twin, name, mapped(child, function))
    return twin


def moved(batch: Any, device: torch.device) -> Any:
    """Return a copy of the batch on a device, made without waiting.

    A batch's own `to(device, non_blocking=)` is used if it has one.
    """
    if callable(getattr(batch, "to", None)):
        return batch.to(device=device, non_blocking=True)
    return mapped(batch, lambda leaf: leaf.to(device=device, non_blocking=True))


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Keep the memory of a batch until the work queued on `stream` has finished; no effect for host memory."""
    for tensor in tensors_of(batch):
        if tensor.device.type == "cuda":
            tensor.record_stream(stream)
