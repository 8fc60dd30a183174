"""`Table`: the holder of one table's parameter, named `<collection>.<table>.weight` in every state dict."""

from __future__ import annotations

import inspect
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.ops.random import table_key
from tilerec.spec.table import AnyTableConfig
from tilerec.storage.table_rows import Place, TableRows

INIT_BLOCK = 1 << 20
"""Rows that a user's `init_fn` gets at once: full width, the same blocks under every sharding."""


class Table(nn.Module):
    """One table: a leaf parameter `weight` `[num_embeddings, embedding_dim]` and what takes its gradients.

    Two collections share a table by sharing the holder (`ec.embeddings["t"] = ebc.embedding_bags["t"]`) or the
    parameter (`ec.embeddings["t"].weight = ebc.embedding_bags["t"].weight`); the attached optimizer comes
    along either way.
    """

    rows: TableRows
    weight: nn.Parameter

    def __init__(self, config: AnyTableConfig, device: torch.device | str | None, seed: int) -> None:
        super().__init__()
        self.config = config
        self.seed = seed  # of the collection that made it
        self.tied = False  # whether the parameter belongs to another collection's table
        first, second = table_key(seed, config.name)
        self.rows = TableRows(config.name, Place((first, second)))
        shape = (config.num_embeddings, config.embedding_dim)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=config.torch_dtype, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Write the initial values: the same for the same seed, however the table is cut."""
        weight = self.weight
        if weight.is_meta:
            return
        init_fn, place = self.config.init_fn, self.rows.place
        if init_fn is None:
            low, high = self.config.get_weight_init_min(), self.config.get_weight_init_max()
            torch.ops.tilerec.random_fill_(
                weight, place.key, place.row_offset, place.column_offset, "uniform", low, high
            )
            return
        takes_offset = "row_offset" in inspect.signature(init_fn).parameters
        for start in range(0, weight.shape[0], INIT_BLOCK):
            block = weight[start : start + INIT_BLOCK]
            result = init_fn(block, row_offset=start) if takes_offset else init_fn(block)
            if isinstance(result, Tensor) and result.data_ptr() != block.data_ptr():
                if result.shape != block.shape:
                    raise ConfigError(
                        f"Table '{self.config.name}': init_fn returned shape {tuple(result.shape)} for a "
                        "block of shape "
                        f"{tuple(block.shape)}; fill the block in place or return one of its shape."
                    )
                block.copy_(result)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight" and isinstance(value, nn.Parameter):
            theirs = getattr(value, "_tilerec_rows", None)
            if theirs is not None and theirs is not self.rows:
                self.rows, self.tied = theirs, True
            self.rows.bind(value)

    def _apply(self, fn: Any, recurse: bool = True) -> Table:
        super()._apply(fn, recurse)
        self.rows.bind(self.weight)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rows.bind(self.weight)

    def extra_repr(self) -> str:
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, dtype={self.weight.dtype}"


class Tables(nn.Module):
    """Tables by name, as `nn.ModuleDict` holds modules, but for any name (`items` and `keys` are natural ones here)."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        super().__init__()
        for name, table in tables.items():
            self[name] = table

    def __getitem__(self, name: str) -> Table:
        return cast(Table, self._modules[name])

    def __setitem__(self, name: str, table: Table) -> None:
        self._modules[name] = table

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def keys(self) -> KeysView[str]:
        """The tables' names."""
        return self._modules.keys()

    def values(self) -> ValuesView[Table]:
        """The tables."""
        return cast("ValuesView[Table]", self._modules.values())

    def items(self) -> ItemsView[str, Table]:
        """Names and tables."""
        return cast("ItemsView[str, Table]", self._modules.items())
