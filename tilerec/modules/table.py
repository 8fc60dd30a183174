"""`Table`: the module that holds one table's parameter, named `<collection>.<table>.weight` in every state dict."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.initial_values import fill_initial
from tilerec.ops.random.definition import table_key
from tilerec.spec.table import AnyTableConfig
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.flat_storage import flat_memory, lay_flat
from tilerec.storage.row_cache import RowCache, stats_of
from tilerec.storage.row_file import file_of
from tilerec.storage.table_rows import TableRows, TilePosition, rows_of
from tilerec.torch_private import submodules


class Table(nn.Module):
    """One table: a leaf parameter `weight` `[num_embeddings, embedding_dim]`, with the receiver of its gradients.

    Two collections share a table by sharing the module (`ec.embeddings["t"] = ebc.embedding_bags["t"]`) or the
    parameter (`ec.embeddings["t"].weight = ebc.embedding_bags["t"].weight`). Both ways share the attached optimizer.
    Tables stay tied until one is tied to a third table. A new parameter assigned to one of them
    (`load_state_dict(assign=True)`) is assigned to all.

    Args:
        config: of the table.
        memory: `[num_embeddings, embedding_dim]` of the config's data type, not written yet.
        seed: of the collection.
    """

    rows: TableRows
    weight: nn.Parameter

    def __init__(self, config: AnyTableConfig, memory: Tensor, seed: int) -> None:
        super().__init__()
        self.config = config
        self.seed = seed  # of the collection that created the table
        self.tied = False  # whether the parameter belongs to another collection's table
        first, second = table_key(seed, config.name)
        self.rows = TableRows(config.name, TilePosition((first, second)))
        # `data` gives each table of the shared storage its own version counter.
        self.weight = nn.Parameter(memory.data)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the initial values: the same for the same seed, under every sharding."""
        weight = self.weight
        if weight.is_meta:
            return
        self.rows.about_to_write()
        place = self.rows.place
        fill_initial(weight, self.config, place.key, place.row_offset, place.column_offset)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name == "weight" and isinstance(value, nn.Parameter)
        if own:
            self._check(value)
        super().__setattr__(name, value)
        if own:
            self._bind()

    def _check(self, weight: nn.Parameter) -> None:
        """Raise a `ConfigError` if lookups could not read the parameter."""
        want = (self.config.num_embeddings, self.config.embedding_dim)
        if tuple(weight.shape) != want:
            raise ConfigError(
                f"Table '{self.config.name}': got a weight of shape {tuple(weight.shape)}; expected {want}, its "
                "config's (num_embeddings, embedding_dim). Tie or assign a parameter of that shape."
            )
        if not weight.is_contiguous() and file_of(weight) is None:
            raise ConfigError(
                f"Table '{self.config.name}': got a weight with strides {weight.stride()}; expected {(want[1], 1)} "
                "(contiguous rows). Pass weight.contiguous()."
            )

    def _bind(self) -> None:
        """Set `rows` to the rows of the current parameter."""
        weight = self.weight
        theirs = rows_of(weight)
        if theirs is not None and theirs is not self.rows:
            self.rows.holders.discard(self)
            self.rows, self.tied = theirs, True
        self.rows.holders.add(self)
        for holder in self.rows.holders:
            holder._parameters["weight"] = weight
        self.rows.bind(weight)

    def _all_rows(self) -> list[TableRows]:
        """Return the rows of every leaf."""
        return [self.rows]

    @property
    def cache(self) -> RowCache | None:
        """The cache of the rows (of one leaf of them), or one like it if this rank holds copies of hot rows only."""
        return self.rows.cache or self.rows.cache_beside

    def settle(self) -> None:
        """Write pending transfers and cached rows to the weight and its optimizer's state."""
        for rows in self._all_rows():
            rows.settle()

    def cache_stats(self, reset: bool) -> CacheStats | None:
        """Return the statistics of the caches, None without a cache; `reset` zeroes them."""
        caches = [rows.cache for rows in self._all_rows()]
        return stats_of(caches, reset) if any(caches) else None

    def __getattr__(self, name: str) -> Any:
        # nn.Module resolves parameters here. A read of a leaf by its name writes the cached rows back first.
        if name in self.__dict__.get("_parameters", ()):
            for rows in self._all_rows():
                if rows.cache is not None:
                    rows.settle()
                    rows.about_to_write()  # through the name, other code may write
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Table:
        """Apply `fn` as `nn.Module` does; write the initial values into memory that `to_empty` allocates."""
        empties = self.weight.is_meta or empties_memory(fn)
        self.rows.about_to_write()  # another precision rounds
        if not self._move_cache(fn):
            super()._apply(fn, recurse)
        self._bind()
        if empties:
            self.reset_parameters()
        return self

    def _move_cache(self, fn: Any) -> bool:
        """Apply `.to(device)` to the caches; rows stay in host memory. Return False if `fn` is for the leaves."""
        caches = [(rows, cache) for rows in self._all_rows() if (cache := rows.cache or rows.cache_beside) is not None]
        if not caches:
            return False
        for rows, _ in caches:
            rows.settle()
        first, cache = caches[0]
        sample = fn(torch.empty(0, dtype=first.leaf.dtype, device=cache.device or first.leaf.device))
        on_host = sample.device.type in ("cpu", "meta")
        for _, cache in caches:
            cache.drop()
            cache.device = None if on_host else sample.device
        for rows, _ in () if on_host else caches:
            leaf = rows.leaf
            if rows.cache is None:  # copies of hot rows are on the device themselves
                leaf.data = fn(leaf.data)
            elif leaf.is_meta:
                leaf.data = torch.empty(leaf.shape, dtype=sample.dtype, device="cpu")
            elif leaf.dtype != sample.dtype or leaf.device.type != "cpu":
                leaf.data = leaf.data.to(device="cpu", dtype=sample.dtype)
        return not on_host

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        value = state_dict.get(f"{prefix}weight")
        if hasattr(value, "full_tensor"):
            error_msgs.append(
                f"Table '{self.config.name}': got {prefix}weight as a {type(value).__name__}, whose parts lie on "
                "several ranks; expected a whole tensor. Load tilerec.parallel.full_state_dict(sharded_module), or "
                "shard this module first."
            )
            return
        self.settle()
        if value is not None:
            self.rows.about_to_write()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._bind()  # torch may have replaced the parameter's attributes by those of the loaded tensor

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def extra_repr(self) -> str:
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, dtype={self.weight.dtype}"


def empties_memory(fn: Any) -> bool:
    """Return True for the function that `nn.Module.to_empty` applies, which allocates memory and copies nothing."""
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


class Tables(nn.Module):
    """Tables by name. Unlike `nn.ModuleDict`, it accepts names of dict methods, such as `items` and `keys`."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        super().__init__()
        for name, table in tables.items():
            self[name] = table

    @staticmethod
    def of(configs: Sequence[AnyTableConfig], device: torch.device | str | None, seed: int) -> Tables:
        """Return new tables with initial values, contiguous in one storage per data type."""
        memory: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(c.torch_dtype for c in configs):
            group = [c for c in configs if c.torch_dtype == dtype]
            places = flat_memory([(c.num_embeddings, c.embedding_dim) for c in group], dtype, device)
            memory.update(zip([c.name for c in group], places, strict=True))
        return Tables({c.name: Table(c, memory[c.name], seed) for c in configs})

    def lay_flat(self, seed: int) -> None:
        """Lay out the collection's own tables contiguously; those tied to another collection stay in its storage."""
        lay_flat(t.weight for t in self.values() if t.seed == seed and not t.tied)

    def __getitem__(self, name: str) -> Table:
        return cast(Table, submodules(self)[name])

    def __setitem__(self, name: str, table: Table) -> None:
        submodules(self)[name] = table

    def __contains__(self, name: object) -> bool:
        return name in submodules(self)

    def __iter__(self) -> Iterator[str]:
        return iter(submodules(self))

    def __len__(self) -> int:
        return len(submodules(self))

    def keys(self) -> KeysView[str]:
        """Return the tables' names."""
        return submodules(self).keys()

    def values(self) -> ValuesView[Table]:
        """Return the tables."""
        return cast("ValuesView[Table]", submodules(self).values())

    def items(self) -> ItemsView[str, Table]:
        """Return names and tables."""
        return cast("ItemsView[str, Table]", submodules(self).items())


def tables_below(module: nn.Module, holder: str) -> dict[str, Table]:
    """Return the tables in a module's child `holder`, by name. Reads the module dicts directly, as it runs per step."""
    return cast("dict[str, Table]", submodules(cast(nn.Module, submodules(module)[holder])))
