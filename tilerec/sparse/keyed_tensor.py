"""`KeyedTensor`: named blocks of columns of one dense tensor; the type of pooled embeddings.

Glossary
    key dim  the dimension along which the blocks are concatenated; 1 for embeddings [B, sum of widths]
    columns  the positions of each key along the key dim, see `sparse/columns.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.columns import Columns
from tilerec.sparse.keys import shorten
from tilerec.sparse.memory import record_stream
from tilerec.sparse.regroup import RegroupPlan
from tilerec.sparse.value_checks import LINES, check_tensor, is_printable_in_full
from tilerec.torch_private import pytree


@final
class KeyedTensor:
    """Named blocks of columns.

    Args:
        keys: names, each once.
        length_per_key: width of each block.
        values: dense, of size `sum(length_per_key)` along `key_dim`.
        key_dim: the dimension along which the blocks are concatenated.
        offset_per_key, index_per_key: derived from the other arguments; if given, they are checked.

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
                f"KeyedTensor: got values of shape {list(values.shape)}; expected a dimension key_dim={key_dim}. Pass "
                f"another key_dim=, or values of more dimensions."
            )
        if not nothing and values.shape[key_dim] != columns.offsets[-1]:
            raise InputError(
                f"KeyedTensor: got values of shape {list(values.shape)}; expected {columns.offsets[-1]} along "
                f"dimension {key_dim}, the sum of length_per_key. Correct length_per_key."
            )
        if offset_per_key is not None and tuple(offset_per_key) != columns.offsets:
            raise InputError(
                "KeyedTensor: got an offset_per_key that contradicts length_per_key; expected its running sums. Leave "
                "it out."
            )
        if index_per_key is not None and index_per_key != columns.keys.positions():
            raise InputError(
                "KeyedTensor: got an index_per_key that contradicts keys; expected their positions. Leave it out."
            )
        self._columns = columns
        self._values = values
        self._key_dim = key_dim

    @classmethod
    def from_columns(cls, columns: Columns, values: Tensor, key_dim: int = 1) -> KeyedTensor:
        """Build a keyed tensor from consistent parts, without checks, for modules that build one in each step."""
        keyed = cls.__new__(cls)
        keyed._columns = columns
        keyed._values = values
        keyed._key_dim = key_dim
        return keyed

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int | None = None
    ) -> KeyedTensor:
        """Concatenate one tensor per key along `key_dim`; `cat_dim`, if given, must equal it."""
        if cat_dim not in (None, key_dim):
            raise InputError(
                f"KeyedTensor.from_tensor_list: got cat_dim={cat_dim} with key_dim={key_dim}; expected the same "
                "number. Leave cat_dim out: blocks are concatenated along key_dim."
            )
        if not tensors:
            raise InputError(
                "KeyedTensor.from_tensor_list: got an empty list; expected at least one tensor. Pass one per key."
            )
        widths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, widths, torch.cat(list(tensors), dim=key_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return one tensor per group: the columns of its keys side by side.

        A key may be in several groups. A group of neighbouring blocks of one input is returned as a view of it. Raises
        `InputError` for a key that no input has, or that two inputs have. In a model use `KTRegroupAsDict`, which
        plans the copies once.
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
                f"KeyedTensor.regroup_as_dict: got {len(keys)} names; expected {len(groups)}. Pass one name per group."
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """Return a new list of the names, in order."""
        return list(self._columns.keys.names)

    def columns(self) -> Columns:
        """Return names and widths as one static value."""
        return self._columns

    def values(self) -> Tensor:
        """Return all blocks side by side."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the blocks are concatenated."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def offset_per_key(self) -> list[int]:
        """Return the start of each block, and the end of the last [F + 1]."""
        return list(self._columns.offsets)

    def length_per_key(self) -> list[int]:
        """Return the width of each block [F]."""
        return list(self._columns.lengths)

    # `keyed[0]` looks up a block named 0, so disable Python's iteration by position.
    __iter__ = None

    def __contains__(self, key: object) -> bool:
        """Return True if there is a block of that name."""
        return key in self._columns.keys

    def __getitem__(self, key: str) -> Tensor:
        """Return one block, as a view; raise `UnknownKeyError` (an `InputError` and a `KeyError`) if it is missing."""
        start, stop = self._columns.span(key)
        return self._values.narrow(self._key_dim, start, stop - start)

    def to_dict(self) -> dict[str, Tensor]:
        """Return all blocks by name, as views."""
        blocks = self._values.split(self._columns.lengths, dim=self._key_dim) if self._columns.lengths else ()
        return dict(zip(self._columns.keys.names, blocks, strict=True))

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        """Return a copy on `device`; a tensor that is already there is shared."""
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor.from_columns(self._columns, moved, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory allocated until the work queued on `stream` is done. No effect for tensors on the host."""
        record_stream([self._values], stream)

    def size_in_bytes(self) -> int:
        """Return the bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def __repr__(self) -> str:
        """Return the blocks if the tensor is small and readable, else its shape: debuggers call it at any time."""
        if not self._columns.lengths:
            return "KeyedTensor()\n"
        if is_printable_in_full(self._values) and len(self._columns.lengths) <= LINES:
            rows = [f'    "{key}": {block.tolist()}' for key, block in self.to_dict().items()]
            return "KeyedTensor({\n" + ",\n".join(rows) + "\n})\n"
        held: object = self._values
        if not isinstance(held, Tensor):  # a tree mapped from the leaves to other objects, such as shapes
            return f"KeyedTensor(keys {shorten(self._columns.keys.names)}, values {held!r})"
        return (
            f"KeyedTensor(keys {shorten(self._columns.keys.names)}, widths {shorten(self._columns.lengths)}, values "
            f"{list(self._values.shape)} {self._values.dtype}, device={str(self._values.device)!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, context = _flatten(self)
        return _rebuild, (leaves, _dump_context(context))


def common_key_dim(keyed_tensors: Sequence[KeyedTensor]) -> int:
    """Return the key dimension of all tensors; raise `InputError` if they differ, or if there is no tensor."""
    dims = {keyed._key_dim for keyed in keyed_tensors}
    if len(dims) != 1:
        raise InputError(
            f"regroup: got key dimensions {sorted(dims)} of {len(keyed_tensors)} tensors; expected one, the same for "
            "all. Pass tensors with one key_dim."
        )
    return dims.pop()


# The context contains only names and numbers, so programs that build new keys can be exported.

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
    """Rebuild from `__reduce__`, for copies and pickles."""
    return _unflatten(leaves, _load_context(dumped_context))


# The pickle contains only tensors, names and numbers, so `torch.load(weights_only=True)` and `torch.export.load` may
# read it.
torch.serialization.add_safe_globals([_rebuild])
