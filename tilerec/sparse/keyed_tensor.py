"""`KeyedTensor`: named blocks of columns of one dense tensor; what pooled embeddings come as.

Glossary
    key dim  the dimension along which keys lie side by side; 1 for embeddings [B, sum of widths]
    columns  which of its positions belong to which key, see `sparse/columns.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.columns import Columns
from tilerec.sparse.items import check_tensor, shown_in_full
from tilerec.sparse.keys import shorten
from tilerec.sparse.regroup import RegroupPlan
from tilerec.torch_private import pytree


@final
class KeyedTensor:
    """Named blocks of columns.

    Args:
        keys: names, each once.
        length_per_key: the width of each.
        values: dense, `sum(length_per_key)` wide along `key_dim`.
        key_dim: the dimension the blocks lie along.
        offset_per_key, index_per_key: follow from the above and are checked against it.

    Raises `InputError` for repeated keys or widths that do not sum to the width of the values.

    "x" = columns 0 and 1, "y" = column 2::

        KeyedTensor(["x", "y"], [2, 1], torch.rand(32, 3))
    """

    __slots__ = ("_columns", "_key_dim", "_values")

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        check_tensor("KeyedTensor", "values", values)
        columns = Columns(keys, length_per_key)
        nothing = not columns.lengths and not values.numel()
        if not nothing and not -values.dim() <= key_dim < values.dim():
            raise InputError(
                f"KeyedTensor: values have shape {list(values.shape)} and no dimension {key_dim} for keys to lie "
                f"along; pass key_dim=, or values of more dimensions."
            )
        if not nothing and values.shape[key_dim] != columns.offsets[-1]:
            raise InputError(
                f"KeyedTensor: values have shape {list(values.shape)}, but the widths sum to "
                f"{columns.offsets[-1]} along "
                f"dimension {key_dim}."
            )
        if offset_per_key is not None and tuple(offset_per_key) != columns.offsets:
            raise InputError(
                "KeyedTensor: offset_per_key contradicts length_per_key; leave it out, it follows from it."
            )
        if index_per_key is not None and index_per_key != columns.keys.positions():
            raise InputError(
                "KeyedTensor: index_per_key contradicts keys; leave it out, it follows from them."
            )
        self._columns = columns
        self._values = values
        self._key_dim = key_dim

    @staticmethod
    def from_columns(columns: Columns, values: Tensor, key_dim: int = 1) -> KeyedTensor:
        """A keyed tensor of parts that are known to fit; checks nothing: for modules that make it each step."""
        keyed = KeyedTensor.__new__(KeyedTensor)
        keyed._columns = columns
        keyed._values = values
        keyed._key_dim = key_dim
        return keyed

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int | None = None
    ) -> KeyedTensor:
        """One key per tensor, concatenated along the key dimension; `cat_dim` is the same number, if given."""
        if cat_dim not in (None, key_dim):
            raise InputError(
                f"KeyedTensor.from_tensor_list: got cat_dim={cat_dim} with key_dim={key_dim}; expected the same "
                "number. Leave cat_dim out: the blocks of the keys lie side by side along key_dim."
            )
        if not tensors:
            raise InputError("KeyedTensor.from_tensor_list: the list is empty; wanted at least one tensor.")
        widths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, widths, torch.cat(list(tensors), dim=key_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """For each group, the columns of its keys side by side.

        A key may be in several groups. A group that is a run of neighbours in one input is returned as a view of it.
        Raises `InputError` for a key that no input has, or that two inputs have. In a model, `KTRegroupAsDict`
        works the copies out once.
        """
        dim = common_key_dim(keyed_tensors)
        plan = RegroupPlan.make([keyed._columns for keyed in keyed_tensors], groups)
        return plan.apply([keyed._values for keyed in keyed_tensors], dim)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """`regroup`, with a name for each group."""
        if len(groups) != len(keys):
            raise InputError(
                f"KeyedTensor.regroup_as_dict: {len(groups)} groups and {len(keys)} names; wanted as many."
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """Names in order; the caller's own list."""
        return list(self._columns.keys.names)

    def columns(self) -> Columns:
        """Names and widths as one static value."""
        return self._columns

    def values(self) -> Tensor:
        """All blocks side by side."""
        return self._values

    def key_dim(self) -> int:
        """The dimension the blocks lie along."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def offset_per_key(self) -> list[int]:
        """Where each block begins, with the end of the last [F + 1]."""
        return list(self._columns.offsets)

    def length_per_key(self) -> list[int]:
        """Width of each block [F]."""
        return list(self._columns.lengths)

    # `keyed[0]` asks for a block named 0, so Python's iteration by position must not be tried.
    __iter__ = None

    def __contains__(self, key: object) -> bool:
        """Whether there is a block of that name."""
        return key in self._columns.keys

    def __getitem__(self, key: str) -> Tensor:
        """One block, as a view. `UnknownKeyError` (an `InputError` and a `KeyError`) if it is not there."""
        start, stop = self._columns.span(key)
        return self._values.narrow(self._key_dim, start, stop - start)

    def to_dict(self) -> dict[str, Tensor]:
        """Every block, as views."""
        blocks = self._values.split(self._columns.lengths, dim=self._key_dim) if self._columns.lengths else ()
        return dict(zip(self._columns.keys.names, blocks, strict=True))

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        """A copy on `device` (a tensor already there is shared)."""
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor.from_columns(self._columns, moved, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive until work queued on `stream` is done. No effect for tensors on the host."""
        if self._values.device.type != "cpu":
            self._values.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Memory of the values."""
        return self._values.numel() * self._values.element_size()

    def __str__(self) -> str:
        if not self._columns.lengths:
            return "KeyedTensor()\n"
        if self._values.is_meta:
            return f"{self._describe()}\n"
        rows = [f'    "{key}": {block.tolist()}' for key, block in self.to_dict().items()]
        return "KeyedTensor({\n" + ",\n".join(rows) + "\n})\n"

    def __repr__(self) -> str:
        """The blocks of a small tensor that can be read, the shape otherwise: a debugger asks at any time."""
        if shown_in_full(self._values):
            return str(self)
        return self._describe()

    def _describe(self) -> str:
        held: object = self._values
        if not isinstance(held, Tensor):  # a tree of shapes, say, mapped from this one's leaves
            return f"KeyedTensor(keys {shorten(self._columns.keys.names)}, values {held!r})"
        return (
            f"KeyedTensor(keys {shorten(self._columns.keys.names)}, widths {shorten(self._columns.lengths)}, values "
            f"{list(self._values.shape)} {self._values.dtype}, device={str(self._values.device)!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, context = _flatten(self)
        return _rebuild, (leaves, _dump_context(context))


def common_key_dim(keyed_tensors: Sequence[KeyedTensor]) -> int:
    """The key dimension all share; `InputError` if there is no tensor or they differ."""
    dims = {keyed._key_dim for keyed in keyed_tensors}
    if len(dims) != 1:
        raise InputError(
            f"regroup: key dimensions {sorted(dims)} of {len(keyed_tensors)} tensors; wanted one, the same for all."
        )
    return dims.pop()


# The context is plain names and numbers: a program that builds keys of its own can be exported then.

_Context = tuple[tuple[str, ...], tuple[int, ...], int]


def _flatten(keyed: KeyedTensor) -> tuple[list[Any], _Context]:
    columns = keyed._columns
    return [keyed._values], (columns.keys.names, columns.lengths, keyed._key_dim)


def _flatten_with_keys(keyed: KeyedTensor) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(keyed)
    return [(pytree.GetAttrKey("values"), leaves[0])], context


def _unflatten(leaves: Any, context: _Context) -> KeyedTensor:
    (values,) = leaves
    names, lengths, key_dim = context
    return KeyedTensor.from_columns(Columns(names, lengths), values, key_dim)


def _dump_context(context: _Context) -> list[Any]:
    names, lengths, key_dim = context
    return [list(names), list(lengths), key_dim]


def _load_context(dumped: list[Any]) -> _Context:
    names, lengths, key_dim = dumped
    return tuple(names), tuple(lengths), key_dim


pytree.register_pytree_node(
    KeyedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="tilerec.KeyedTensor",
    to_dumpable_context=_dump_context,
    from_dumpable_context=_load_context,
    flatten_with_keys_fn=_flatten_with_keys,
)


def _rebuild(leaves: list[Any], dumped_context: list[Any]) -> KeyedTensor:
    """Undo `__reduce__`: a copy, or what comes out of a pickle."""
    return _unflatten(leaves, _load_context(dumped_context))


# Nothing but tensors, names and numbers goes in: `torch.load(weights_only=True)` and `torch.export.load` may read it.
torch.serialization.add_safe_globals([_rebuild])
