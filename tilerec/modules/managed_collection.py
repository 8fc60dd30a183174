"""`ManagedCollisionCollection`: maps the ids of a batch to rows, table by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.feature_reads import raise_missing_feature
from tilerec.modules.id_clamp import key_starts
from tilerec.modules.id_counts import IdPlace, IdStats
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.remapped_bags import remapped_batch
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import AnyTableConfig

# Rows depend on all earlier batches, so there is nothing to trace. A compiled model has one graph break around the map.


class ManagedCollisionCollection(nn.Module):
    """Id maps of several tables: each table's module maps the features of that table.

    Args:
        managed_collision_modules: table name to module. Tables without a module keep their ids as row numbers.
        embedding_configs: of all tables. A mapped feature must belong to exactly one table.
        need_preprocess: whether the modules' `input_hash_func` is applied to ids first.

    Raises:
        ConfigError: a module has no table, has another number of rows than its table, or is used twice; or a mapped
            feature belongs to two tables.

    Example:
        >>> config = EmbeddingBagConfig(49152, 4, "user", feature_names=["user"])
        >>> modules = {"user": HashZchManagedCollisionModule(49152)}
        >>> mcc = ManagedCollisionCollection(modules, [config])
        >>> ids = torch.tensor([-1, 10**15, -1])
        >>> mcc(KeyedJaggedTensor.from_lengths_sync(["user"], ids, torch.tensor([1, 1, 1]))).values().tolist()
        [34747, 30069, 34747]
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[AnyTableConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._embedding_configs = tuple(embedding_configs)
        self._need_preprocess = need_preprocess
        self._table_features = _features_of(managed_collision_modules, self._embedding_configs)
        for table, features in self._table_features.items():
            managed_collision_modules[table].bind(table, features)
        self._managed_collision_modules = nn.ModuleDict(dict(managed_collision_modules))
        self.register_load_state_dict_pre_hook(_check_before_load)

    @property
    def modules_by_table(self) -> dict[str, ManagedCollisionModule]:
        """Table name to module."""
        return cast("dict[str, ManagedCollisionModule]", dict(self._managed_collision_modules.items()))

    def embedding_configs(self) -> Sequence[AnyTableConfig]:
        """Return the configs of all tables, as given, with their current numbers of rows."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Return the number of buckets by table name."""
        return {table: module.buckets() for table, module in self.modules_by_table.items()}

    @graph_break
    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Replace ids by rows; in training mode, assign rows to ids that have none.

        Args:
            features: keys in any order. Keys that no table here maps are returned unchanged. Variable batch sizes and
                weights are kept.
            mutate_miss_lengths: allow bags to become shorter when ids are dropped. False raises for tables that drop
                ids.

        Returns:
            A batch of the same keys; values int64 in `[0, num_embeddings)`.

        Raises:
            InputError: a feature is not in the batch, or its ids are not integers. The maps are then unchanged.
        """
        if torch.compiler.is_exporting():
            return self._exported(features)
        batch = self.begin(features, mutate_miss_lengths)
        rows: dict[str, Tensor] = {}
        for table, module in self.modules_by_table.items():
            names = self._table_features[table]
            mapped = module.map(batch[table], [batch.sizes[name] for name in names], batch.times[table])
            module.keep_evicted(mapped.evicted_M)
            rows.update(zip(names, mapped.rows_N.split([batch.sizes[name] for name in names]), strict=True))
        return remapped_batch(features, rows, self._drops)

    def _exported(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return `forward`'s result of evaluation mode without reading the number of ids per feature."""
        ids_N, keys = features.values(), features.keys()
        key_N = torch.ops.tilerec.segment_ids(key_starts(features), ids_N.shape[0])
        rows_N = ids_N.to(torch.int64)
        for table, module in self.modules_by_table.items():
            mapped_N = module.id_map.exported_rows(
                module.id_map.hashed(ids_N) if self._need_preprocess else ids_N.to(torch.int64), module.writes
            )
            own_K = torch.tensor([key in self._table_features[table] for key in keys], device=ids_N.device)
            rows_N = torch.where(own_K[key_N], mapped_N, rows_N)
        return KeyedJaggedTensor(keys, rows_N, features.weights_or_none(), features.lengths())

    def begin(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool) -> TableIds:
        """Return a batch's checked ids by table."""
        if not isinstance(features, KeyedJaggedTensor):
            raise InputError(f"{type(self).__name__}: got a {type(features).__name__}; expected a KeyedJaggedTensor.")
        keys = features.keys()
        starts = dict(zip(keys, features.offset_per_key(), strict=False))
        sizes = dict(zip(keys, features.length_per_key(), strict=True))
        ids = TableIds(sizes)
        for table, names in self._table_features.items():
            module = self.modules_by_table[table]
            module.id_map.check_lengths(mutate_miss_lengths)
            for name in names:
                if name not in sizes:
                    raise_missing_feature(type(self).__name__, name, table, keys)
            parts = [features.values()[starts[name] : starts[name] + sizes[name]] for name in names]
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            ids[table] = module.id_map.hashed(joined) if self._need_preprocess else joined.to(torch.int64)
            ids.times[table] = module.now()
        return ids

    @property
    def _drops(self) -> bool:
        return not all(module.settings.shares for module in self.modules_by_table.values())

    def evict(self) -> dict[str, Tensor | None]:
        """Return, by table, the rows evicted since the last call; see `ManagedCollisionModule.evict`."""
        return {table: module.evict() for table, module in self.modules_by_table.items()}

    def lost_rows(self) -> dict[str, Tensor | None]:
        """Return the rows of `evict` without waiting for a device; see `EvictedRows`."""
        return {table: module.evicted.take() for table, module in self.modules_by_table.items()}

    def tick(self) -> None:
        """Copy the current times to the devices before a CUDA graph replay; see `ManagedCollisionModule.tick`."""
        for module in self.modules_by_table.values():
            module.tick()

    def open_slots(self) -> dict[str, Tensor]:
        """Return, by table, the number of rows held here that have no id yet."""
        return {table: module.open_slots() for table, module in self.modules_by_table.items()}

    def stats(self) -> dict[str, IdStats]:
        """Return counts of mapped ids by table. If sharded, of all ranks; collective."""
        return {table: module.stats() for table, module in self.modules_by_table.items()}

    def inspect(self, feature: str, id_: int) -> IdPlace:
        """Return the place of a feature's id; see `IdPlace`. Collective if sharded."""
        return self.modules_by_table[self.table_of(feature)].inspect(feature, id_)

    def table_of(self, feature: str) -> str:
        """Return the table that maps a feature."""
        for table, names in self._table_features.items():
            if feature in names:
                return table
        raise InputError(
            f"{type(self).__name__}: got feature '{feature}', which no table maps; expected one of "
            f"{[name for names in self._table_features.values() for name in names][:20]}."
        )


class TableIds(dict[str, Tensor]):
    """Ids by table, concatenated in feature order. `sizes`: ids per feature. `times`: by table, its clock's time."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.times: dict[str, int] = {}


def _features_of(
    modules: Mapping[str, ManagedCollisionModule], configs: Sequence[AnyTableConfig]
) -> dict[str, list[str]]:
    """Return checked features by table, for the tables that have a module."""
    kind = "ManagedCollisionCollection"
    by_name = {config.name: config for config in configs}
    found: dict[str, list[str]] = {}
    table_of: dict[str, str] = {}
    for table, module in modules.items():
        if not isinstance(module, ManagedCollisionModule):
            raise ConfigError(
                f"{kind}: got a {type(module).__name__} as the module of table '{table}'; expected a "
                "HashZchManagedCollisionModule or MCHManagedCollisionModule."
            )
        if table not in by_name:
            raise ConfigError(
                f"{kind}: got a module for table '{table}'; expected a table of embedding_configs: "
                f"{list(by_name)[:20]}."
            )
        rows = by_name[table].num_embeddings
        if module.output_size() != rows:
            raise ConfigError(
                f"{kind}: table '{table}' has {rows} rows, but its module has {module.output_size()}. Set zch_size and "
                "num_embeddings to the same number."
            )
        found[table] = list(by_name[table].feature_names)
    if len({id(module) for module in modules.values()}) < len(modules):
        raise ConfigError(f"{kind}: two tables share one module. Give each its own.")
    for config in configs:
        for feature in config.feature_names:
            other = table_of.setdefault(feature, config.name)
            if other != config.name and (config.name in modules or other in modules):
                raise ConfigError(
                    f"{kind}: feature '{feature}' belongs to tables '{other}' and '{config.name}', but a batch can "
                    "hold rows of one table per feature. Put the feature into the batch twice, under two names."
                )
    return found


def _check_before_load(
    collection: nn.Module, state: dict[str, Any], prefix: str, _: Any, strict: bool, *__: Any
) -> None:
    """Raise before loading anything if any table's state is incomplete or does not match."""
    assert isinstance(collection, ManagedCollisionCollection)
    for table, module in collection.modules_by_table.items():
        start = f"{prefix}_managed_collision_modules.{table}."
        own = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
        names = [*module.id_map.state_tensors(), *module.numbers()]
        missing = [name for name in names if name not in own]
        if missing and (strict or len(missing) < len(names)):
            raise ConfigError(
                f"Table '{table}': the state lacks {[start + name for name in missing]}; it is truncated, or from a "
                "table with other settings (times to live, admission). Nothing is loaded."
            )
        refused = None if missing else module.id_map.mismatch_error(own, module._view)
        if refused is not None:
            raise ConfigError(refused)
