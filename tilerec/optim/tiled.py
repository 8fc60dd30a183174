"""Tables of which a rank holds tiles, as optimizers meet them: parameters of their own here, one table in state dicts.

    parameters on rank 0    t.weight [7, 2]   t.weight.1 [7, 2]       on rank 1    t.weight [7, 2]
    state beside them       [7, 2]            [7, 2]                               [7, 2]
    in a state dict         t.weight [7, 6]                                        t.weight [7, 6]

Nouns
  leaf   the parameter of a tile; a rank that holds nothing of a table has one of no rows
  part   a tensor beside a leaf: of its shape, a number per row (`[rows]` or `[rows, 1]`), or a single number
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.stateful import is_stateful
from tilerec.storage.table_rows import rows_of


class TiledTable(ABC):
    """A table whose tiles lie on several ranks, seen from one of them."""

    @abstractmethod
    def leaves(self) -> list[nn.Parameter]:
        """This rank's leaves; the first has the table's own name."""

    @abstractmethod
    def shape_of(self, parts: Sequence[Tensor], what: str) -> tuple[int, ...]:
        """The shape of the tensor of the whole table that the parts, one per leaf, are of.

        Raises:
            ConfigError: `what` is none that can be put together from tiles.
        """

    @abstractmethod
    def show(self, parts: Sequence[Tensor]) -> Tensor:
        """That tensor, over the parts' memory, as state dicts hold it."""

    @abstractmethod
    def take(self, parts: Sequence[Tensor], value: Tensor) -> None:
        """Write such a tensor, whole or in tiles of any kind, into the parts. All ranks call it."""

    @abstractmethod
    def counts(self, leaf: int) -> bool:
        """Whether this rank is the one to count a leaf where each cell of the table counts once."""

    @property
    @abstractmethod
    def ranks(self) -> Hashable:
        """Which ranks; tables of one model have the same."""

    @abstractmethod
    def of_all_ranks(self, values: Tensor) -> Tensor:
        """`[n]` numbers of each rank as `[W, n]`, the same bits everywhere. All ranks call it."""

    @abstractmethod
    def on_all_ranks(self, what: str, step: str) -> AbstractContextManager[None]:
        """A block that all ranks go through: where it raises on one, it raises on all. `what`, `step`: for the others'
        message."""


def tiled_table_of(parameter: Tensor) -> TiledTable | None:
    """The table in tiles one of whose leaves `parameter` is, or None."""
    rows = rows_of(parameter)
    if rows is None:
        return None
    return next((holder for holder in rows.holders if isinstance(holder, TiledTable)), None)


@contextmanager
def together(parameters: Iterable[Tensor], what: str, step: str) -> Iterator[None]:
    """`TiledTable.on_all_ranks` for all ranks that these parameters' tables lie on; a plain block without tables.

    All of these ranks go through it, with parameters of the same tables.
    """
    tables = {table.ranks: table for p in parameters if (table := tiled_table_of(p)) is not None}
    with ExitStack() as blocks:
        for table in tables.values():
            blocks.enter_context(table.on_all_ranks(what, step))
        yield


def is_further_leaf(parameter: Tensor) -> bool:
    """Whether it is a tile beside the one under whose name its table is shown."""
    table = tiled_table_of(parameter)
    return table is not None and table.leaves()[0] is not parameter


def empty_leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that stand for a table of which this rank holds nothing: no gradient ever comes to them."""
    return [p for p in parameters if not p.numel() and tiled_table_of(p) is not None]


def waits_for_step(parameter: Tensor) -> bool:
    """Whether the leaf of a table is trained, and no optimizer attached to it."""
    rows = rows_of(parameter)
    return parameter.requires_grad and (rows is None or rows.spec is None)


def gradient_layout(parameter: Tensor) -> torch.layout:
    """Sparse for tables that were told so (`set_sparse_grad`), else strided."""
    rows = rows_of(parameter)
    return (
        torch.sparse_coo if rows is not None and rows.takes_gradients and rows.spec is None else torch.strided
    )


def tables_by_name(params: Mapping[str, Tensor]) -> dict[str, TiledTable]:
    """The tables in tiles among named parameters, by the name of their first leaf.

    Raises:
        ConfigError: some leaves of a table are missing.
    """
    tables: dict[str, TiledTable] = {}
    given = {id(parameter) for parameter in params.values()}
    for name, parameter in params.items():
        table = tiled_table_of(parameter)
        if table is None:
            continue
        leaves = table.leaves()
        if any(id(leaf) not in given for leaf in leaves):
            raise ConfigError(
                f"'{name}' is one of {len(leaves)} tiles of its table on this rank, and others of them are not among "
                "the optimizer's parameters; pass all parameters of the table (module.named_parameters())."
            )
        if leaves[0] is parameter:
            tables[name] = table
    return tables


def shown_parts(table: TiledTable, parts: Sequence[object], what: str) -> object:
    """What an optimizer holds beside the leaves of a table, one per leaf, as a state dict holds it."""
    first = parts[0]
    if isinstance(first, Tensor):
        tensors = _tensors(parts, what)
        table.shape_of(tensors, what)
        return table.show(tensors)
    if isinstance(first, Mapping):
        return {
            key: shown_parts(table, [part.get(key) for part in _mappings(parts, what)], f"{what} / '{key}'")
            for key in first
        }
    if is_stateful(first):
        raise ConfigError(
            f"{what}: got a {type(first).__name__} beside each tile of the table; expected tensors and numbers. Keep "
            "the table in one piece on every rank and out of shard(), or use an optimizer whose state are tensors."
        )
    return first


def adopted_parts(
    table: TiledTable, loaded: Mapping[Any, Any], what: str, plan: list[Callable[[], None]]
) -> list[dict[Any, Any]]:
    """New parts, one dict per leaf, for loaded state of the whole table; `plan` gets the writes that fill them.

    Raises:
        ConfigError: a tensor that is none of the table's shape, a number per row or a single number.
    """
    found: list[dict[Any, Any]] = [{} for _ in table.leaves()]
    for key in sorted(loaded, key=str):  # in one order on every rank: tiles travel
        value, where = loaded[key], f"{what} / '{key}'"
        parts: Sequence[Any]
        if isinstance(value, Mapping):
            parts = adopted_parts(table, value, where, plan)
        elif isinstance(value, Tensor):
            parts = _parts_for(table, value, where, on_cpu=key == "step")
            plan.append(functools.partial(fill_parts, table, parts, value))
        else:
            parts = [copy.deepcopy(value) for _ in found]
        for own, part in zip(found, parts, strict=True):
            own[key] = part
    return found


def _parts_for(table: TiledTable, value: Tensor, what: str, on_cpu: bool) -> list[Tensor]:
    leaves, shape = table.leaves(), tuple(value.shape)
    rows, dim = table.shape_of(leaves, what)
    parts = []
    for leaf in leaves:
        own = tuple(leaf.shape) if shape == (rows, dim) else (len(leaf), *shape[1:])
        # A step count stays where it was: torch keeps it on the CPU.
        device = value.device if on_cpu else leaf.device
        if shape not in ((rows, dim), (rows,), (rows, 1)):
            own = shape
        parts.append(torch.zeros(own, dtype=value.dtype, device=device))
    wanted = table.shape_of(parts, what)
    if wanted != shape:
        raise ConfigError(f"{what}: got shape {shape}, wanted {wanted}.")
    return parts


def takes_any_shape(table: TiledTable) -> bool:
    """Whether state beside its leaves may have shapes of its own: every rank holds all of the table."""
    try:
        table.shape_of([leaf.new_zeros(2, 2, 2) for leaf in table.leaves()], "any state")
    except ConfigError:
        return False
    return True


def _tensors(parts: Iterable[object], what: str) -> list[Tensor]:
    return [part if isinstance(part, Tensor) else _refuse(part, "a tensor", what) for part in parts]


def _mappings(parts: Iterable[object], what: str) -> list[Mapping[object, object]]:
    return [part if isinstance(part, Mapping) else _refuse(part, "a dict", what) for part in parts]


def _refuse(part: object, wanted: str, what: str) -> NoReturn:
    raise ConfigError(
        f"{what}: {wanted} beside one tile of the table and a {type(part).__name__} beside another; call init_state() "
        "before state_dict()."
    )


@torch.no_grad()
def fill_parts(table: TiledTable, parts: Sequence[Tensor], value: Tensor | float) -> None:
    """Write a loaded value of `shape_of(parts)` into the parts."""
    if not isinstance(value, Tensor):
        for part in parts:
            part.fill_(value)
    elif type(value) in (Tensor, nn.Parameter) and not value.dim():
        for part in parts:  # also beside a leaf of no rows
            part.copy_(value)
    else:
        table.take(parts, value)
