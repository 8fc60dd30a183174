"""Sharded tables in optimizers: each tile is one parameter of the optimizer, each table one entry of a state dict.

    parameters on rank 0    t.weight [7, 2]   t.weight.1 [7, 2]       on rank 1    t.weight [7, 2]
    their state             [7, 2]            [7, 2]                               [7, 2]
    in a state dict         t.weight [7, 6]                                        t.weight [7, 6]

Nouns
  leaf   the parameter of a tile; a rank without tiles of a table has one leaf without rows
  part   state of a leaf: of its shape, a number per row (`[rows]` or `[rows, 1]`), or a single number
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.storage.table_rows import rows_of


class Stateful(Protocol):
    """An object in an optimizer's state that saves and loads itself, such as quantised moments."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and numbers by name."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a result of `state_dict`."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return True for an object with a `state_dict()` and a `load_state_dict()`."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


class TiledTable(ABC):
    """Interface of one rank to a table whose tiles are on several ranks."""

    @abstractmethod
    def leaves(self) -> list[nn.Parameter]:
        """Return this rank's leaves; the first has the table's own name."""

    @abstractmethod
    def shape_of(self, parts: Sequence[Tensor], what: str) -> tuple[int, ...]:
        """Return the shape, for the whole table, of state with these parts, one per leaf.

        Raises:
            ConfigError: `what` cannot be combined from tiles.
        """

    @abstractmethod
    def show(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole table's state for a state dict, in the memory of the parts."""

    @abstractmethod
    def take(self, parts: Sequence[Tensor], value: Tensor) -> None:
        """Write the whole table's state, plain or in tiles of any plan, to the parts. Collective."""

    @abstractmethod
    def counts(self, leaf: int) -> bool:
        """Return True if this rank counts the leaf, in a sum in which each cell of the table counts once."""

    @property
    @abstractmethod
    def ranks(self) -> Hashable:
        """The ranks of the table; equal for all tables of one model."""

    @abstractmethod
    def of_all_ranks(self, values: Tensor) -> Tensor:
        """Gather `[n]` numbers of each rank as `[W, n]`, the same bits on all ranks. Collective."""

    @abstractmethod
    def on_all_ranks(self, what: str, step: str) -> AbstractContextManager[None]:
        """Return a context manager that raises on all ranks if its block raises on one. Collective.

        `what` and `step` are for the message on the other ranks.
        """


def tiled_table_of(parameter: Tensor) -> TiledTable | None:
    """Return the sharded table that has `parameter` as a leaf, or None."""
    rows = rows_of(parameter)
    if rows is None:
        return None
    return next((holder for holder in rows.holders if isinstance(holder, TiledTable)), None)


@contextmanager
def together(parameters: Iterable[Tensor], what: str, step: str) -> Iterator[None]:
    """Enter `TiledTable.on_all_ranks` for the ranks of these parameters' tables; without tables do nothing.

    Collective: all of these ranks must enter it, with parameters of the same tables.
    """
    tables = {table.ranks: table for p in parameters if (table := tiled_table_of(p)) is not None}
    with ExitStack() as blocks:
        for table in tables.values():
            blocks.enter_context(table.on_all_ranks(what, step))
        yield


def is_secondary_leaf(parameter: Tensor) -> bool:
    """Return True for a leaf of a sharded table that is not its first leaf."""
    table = tiled_table_of(parameter)
    return table is not None and table.leaves()[0] is not parameter


def empty_tile_leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the empty leaves of tables without a tile on this rank; they never get a gradient."""
    return [p for p in parameters if not p.numel() and tiled_table_of(p) is not None]


def stepped_by_optimizer(parameter: Tensor) -> bool:
    """Return True if the leaf is trained and has no attached optimizer."""
    rows = rows_of(parameter)
    return parameter.requires_grad and (rows is None or rows.spec is None)


def gradient_layout(parameter: Tensor) -> torch.layout:
    """Return `torch.sparse_coo` for tables after `set_sparse_grad`, else `torch.strided`."""
    rows = rows_of(parameter)
    return torch.sparse_coo if rows is not None and rows.takes_gradients and rows.spec is None else torch.strided


def tables_by_name(params: Mapping[str, Tensor]) -> dict[str, TiledTable]:
    """Return the sharded tables among named parameters, by the name of their first leaf.

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
                f"Parameter '{name}': got only some of the {len(leaves)} tiles that its table has on this rank; "
                "expected all of them. Pass all parameters of the table (module.named_parameters())."
            )
        if leaves[0] is parameter:
            tables[name] = table
    return tables


def combine_parts(table: TiledTable, parts: Sequence[object], what: str) -> object:
    """Combine the optimizer's state of a table's leaves, one part per leaf, to the table's entry of a state dict."""
    first = parts[0]
    if isinstance(first, Tensor):
        tensors = _tensors(parts, what)
        table.shape_of(tensors, what)
        return table.show(tensors)
    if isinstance(first, Mapping):
        return {
            key: combine_parts(table, [part.get(key) for part in _mappings(parts, what)], f"{what} / '{key}'")
            for key in first
        }
    if is_stateful(first):
        raise ConfigError(
            f"{what}: got a {type(first).__name__} as state of each tile; expected tensors and numbers. Keep the whole "
            "table on every rank and out of shard(), or use an optimizer with tensors as state."
        )
    return first


def split_loaded_state(
    table: TiledTable, loaded: Mapping[Any, Any], what: str, plan: list[Callable[[], None]]
) -> list[dict[Any, Any]]:
    """Make new parts, one dict per leaf, for loaded state of the whole table; append the writes to `plan`.

    Raises:
        ConfigError: a tensor that does not have the table's shape, a number per row or a single number.
    """
    found: list[dict[Any, Any]] = [{} for _ in table.leaves()]
    for key in sorted(loaded, key=str):  # in the same order on every rank, since loading tiles is a collective
        value, where = loaded[key], f"{what} / '{key}'"
        parts: Sequence[Any]
        if isinstance(value, Mapping):
            parts = split_loaded_state(table, value, where, plan)
        elif isinstance(value, Tensor):
            parts = _parts_for(table, value, where, on_cpu=key == "step")
            plan.append(functools.partial(write_parts, table, parts, value))
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
        # A step count keeps its device: torch keeps it on the CPU.
        device = value.device if on_cpu else leaf.device
        if shape not in ((rows, dim), (rows,), (rows, 1)):
            own = shape
        parts.append(torch.zeros(own, dtype=value.dtype, device=device))
    wanted = table.shape_of(parts, what)
    if wanted != shape:
        raise ConfigError(f"{what}: got shape {shape}; expected {wanted}. Load state of the same table.")
    return parts


def accepts_any_state_shape(table: TiledTable) -> bool:
    """Return True if state of the leaves may have any shape, because every rank holds the whole table."""
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
        f"{what}: got {wanted} for one tile of the table and a {type(part).__name__} for another; expected the same "
        "for all. Call init_state() before state_dict()."
    )


@torch.no_grad()
def write_parts(table: TiledTable, parts: Sequence[Tensor], value: Tensor | float) -> None:
    """Write a loaded value of shape `shape_of(parts)` to the parts."""
    if not isinstance(value, Tensor):
        for part in parts:
            part.fill_(value)
    elif type(value) in (Tensor, nn.Parameter) and not value.dim():
        for part in parts:  # also for a leaf without rows
            part.copy_(value)
    else:
        table.take(parts, value)
