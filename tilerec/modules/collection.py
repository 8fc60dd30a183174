"""Base class of pooled and sequence collections: named tables, routes from features to tables, gradient sinks.

Nouns
  slot of a feature  a (table, feature) pair, in the order of the tables and, within a table, of its feature names
  embedding name     the feature's name; `feature@table` if a feature reads several tables
  route              for one batch's keys: the key, table and output of each slot, split into lookups whose gradients
                     have one destination (attached optimizers, or `.grad`)
  sink               the receiver of a table's gradients if it has an attached optimizer
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.cached_lookup import check_trained, key_segments
from tilerec.modules.data_parallel import check_not_in_ddp
from tilerec.modules.initial_values import draw_seed
from tilerec.modules.table import Table, Tables
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.ops.runtime.upload import constants, upload
from tilerec.optim.fused import FusedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import AnyTableConfig, DataType, data_type_to_dtype, dtype_to_data_type
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.flat_storage import flat_memory, lay_flat
from tilerec.storage.located_batch import FeatureBatch
from tilerec.storage.prefetched_results import PrefetchedResults, Sources
from tilerec.storage.table_rows import stats_of
from tilerec.torch_private import functorch_is_active, is_functorch_wrapped, submodules

OnBadId = Literal["error", "clamp"]


@dataclass(frozen=True)
class Slot:
    """One (table, feature) pair."""

    table: str
    feature: str
    name: str  # embedding name
    dim: int
    mean: bool


@dataclass(frozen=True)
class Lookup:
    """Slots that one op call looks up."""

    slots: tuple[int, ...]
    tables: tuple[int, ...]  # per slot, position among the collection's tables
    keys: tuple[int, ...]  # per slot, position in the batch's keys
    means: tuple[int, ...]
    names: str  # "feature@table" per slot, for messages
    attached: bool
    cached: bool  # whether one of the tables has a cache
    size: int  # position among the clamped ids (`_checked`); 0 if nothing is clamped


class Operands(NamedTuple):
    """Inputs of a forward that come from its tables.

    The sinks are one tensor that lives as long as the collection. A compiled graph takes it as an input, and declares
    submitted gradients as mutations of it. Handles change only when a table is tied to another collection's.
    """

    leaves: list[Tensor]
    attached: tuple[bool, ...]  # per table: whether this forward's gradients are submitted to its sink
    cached: tuple[bool, ...]  # per table: whether its rows are read from its cache lines
    sinks: Tensor
    no_sinks: Tensor


def feature_slots(configs: Sequence[AnyTableConfig], kind: str) -> tuple[Slot, ...]:
    """Return all slots of a collection after a check of the tables' names."""
    seen: set[str] = set()
    for config in configs:
        if not isinstance(config.name, str):
            raise ConfigError(
                f"{kind}: got table name {config.name!r} of type {type(config.name).__name__}; expected a str."
            )
        if not config.name or "." in config.name or "," in config.name or "@" in config.name:
            raise ConfigError(
                f"{kind}: got table name {config.name!r}; expected a non-empty name without '.', ',' or '@'."
            )
        if config.name in seen:
            raise ConfigError(
                f"{kind}: got two tables named '{config.name}'; expected unique names within a collection."
            )
        seen.add(config.name)
        for feature in config.feature_names:
            if not feature or "," in feature or "@" in feature:
                raise ConfigError(
                    f"Table '{config.name}': got feature {feature!r}; expected a non-empty name without ',' or '@'."
                )
    readers = Counter(feature for config in configs for feature in config.feature_names)
    return tuple(
        Slot(
            config.name,
            feature,
            feature if readers[feature] == 1 else f"{feature}@{config.name}",
            config.embedding_dim,
            getattr(getattr(config, "pooling", None), "name", "") == "MEAN",
        )
        for config in configs
        for feature in config.feature_names
    )


class TableCollection(nn.Module):
    """Tables of one collection and the routing of a batch's features to them (abstract; see the two collections)."""

    def __init__(
        self,
        tables: Sequence[AnyTableConfig],
        device: torch.device | str | None,
        holder: str,
        output_dtype: DataType | torch.dtype | None,
        on_bad_id: OnBadId,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if on_bad_id not in get_args(OnBadId):
            raise ConfigError(
                f"{kind}: got on_bad_id={on_bad_id!r}; expected one of {list(get_args(OnBadId))}."
            )
        self._configs = tuple(tables)
        self._slots = feature_slots(self._configs, kind)
        self._holder = holder
        self._output_dtype = (
            data_type_to_dtype(output_dtype) if isinstance(output_dtype, DataType) else output_dtype
        )
        if self._output_dtype is not None:
            dtype_to_data_type(self._output_dtype)
        self._on_bad_id = on_bad_id
        self._clamped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._ahead = PrefetchedResults()  # per batch, offsets and clamped ids
        self._routes: dict[Any, tuple[Lookup, ...]] = {}
        self._readers = readers(self._configs)
        self._sizes = self._slot_sizes()
        self.seed = draw_seed()
        memory = self._memory(device)
        made = {c.name: Table(c, memory[c.name], self.seed) for c in self._configs}
        self.add_module(holder, Tables(made))
        self._renew_sinks()

    def _memory(self, device: torch.device | str | None) -> dict[str, Tensor]:
        """Return uninitialised table memory by name, contiguous in one storage per data type."""
        places: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(c.torch_dtype for c in self._configs):
            group = [c for c in self._configs if c.torch_dtype == dtype]
            memory = flat_memory([(c.num_embeddings, c.embedding_dim) for c in group], dtype, device)
            places.update(zip([c.name for c in group], memory, strict=True))
        return places

    def _slot_sizes(self) -> tuple[int, ...]:
        """Return, per slot, the index of its table's size among its feature's sizes; ids are clamped to that size."""
        if self._on_bad_id == "error":
            return (0,) * len(self._slots)
        rows = {c.name: c.num_embeddings for c in self._configs}
        return tuple(self._readers[slot.feature].index(rows[slot.table]) for slot in self._slots)

    def _lay_flat(self) -> None:
        """Lay the collection's own tables out contiguously; tables tied to another collection stay in its storage."""
        lay_flat(t.weight for t in self._tables.values() if t.seed == self.seed and not t.tied)

    @property
    def _tables(self) -> dict[str, Table]:
        holder = cast(nn.Module, submodules(self)[self._holder])
        return cast("dict[str, Table]", submodules(holder))

    @property
    def device(self) -> torch.device:
        """Device of the tables; of a cached table the cache's device; the CPU if there are no tables."""
        table = next(iter(self._tables.values()), None)
        if table is None:
            return torch.device("cpu")
        rows = table.rows
        return rows.leaf.device if rows.cache is None or rows.cache.device is None else rows.cache.device

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """`torch.optim.Optimizer` interface of the attached optimizers (empty if none is attached)."""
        return FusedOptimizer(self)

    @property
    def clamped_ids(self) -> int:
        """Number of ids clamped so far because they were outside their table (`on_bad_id="clamp"`)."""
        return int(self._clamped)

    def reset_parameters(self) -> None:
        """Write the initial values again. The values are the same, as they depend only on seed and position."""
        for table in self._tables.values():
            table.reset_parameters()

    def _dtype(self, leaves: Sequence[Tensor]) -> torch.dtype:
        """Return `output_dtype`, or the promoted type of the current tables."""
        if self._output_dtype is not None:
            return self._output_dtype
        dtypes = {leaf.dtype: None for leaf in leaves}
        dtypes.pop(torch.float8_e4m3fn, None)  # fp8 promotes to any other type; no op computes in it
        if len(dtypes) == 1:
            return next(iter(dtypes))
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def _route(
        self, keys: Sequence[str], attached: tuple[bool, ...], cached: tuple[bool, ...], split: Sequence[Any]
    ) -> tuple[Lookup, ...]:
        """Return the lookups of a batch with these keys; slots with different marks in `split` never share a lookup."""
        position = {key: k for k, key in enumerate(keys)}
        order = {config.name: t for t, config in enumerate(self._configs)}
        groups: dict[Any, list[int]] = {}
        for s, slot in enumerate(self._slots):
            if slot.feature not in position:
                raise InputError(
                    f"{type(self).__name__}: feature '{slot.feature}' of table '{slot.table}' is not in the "
                    "batch, whose keys "
                    f"are {list(keys)[:20]}. Add it (an empty feature has lengths of 0) or drop it from the table."
                )
            t = order[slot.table]
            groups.setdefault((attached[t], cached[t], self._sizes[s], split[s]), []).append(s)
        lookups = []
        for (is_attached, is_cached, size, _), members in groups.items():
            slots = [self._slots[s] for s in members]
            lookups.append(
                Lookup(
                    tuple(members),
                    tuple(order[slot.table] for slot in slots),
                    tuple(position[slot.feature] for slot in slots),
                    tuple(int(slot.mean) for slot in slots),
                    ",".join(f"{slot.feature}@{slot.table}" for slot in slots),
                    is_attached,
                    is_cached,
                    size,
                )
            )
        return tuple(lookups)

    def _operands(self) -> Operands:
        """Return a forward's inputs from its tables. Reads the module dicts directly, as it runs per table and step."""
        tables = list(self._tables.values())
        leaves: list[Tensor] = [cast(nn.Parameter, table._parameters["weight"]) for table in tables]
        rows = [table.rows for table in tables]
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            # A tensor substituted by torch.func.functional_call is not the table's leaf: autograd returns its gradient.
            attached = tuple(
                [
                    r.takes_gradients and w.requires_grad and r.leaf is w
                    for r, w in zip(rows, leaves, strict=True)
                ]
            )
        else:
            attached = (False,) * len(leaves)
        if any(attached) and not torch.compiler.is_compiling():
            check_not_in_ddp(rows, attached)
        if [r.handle for r in rows] != self._handles:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{type(self).__name__}: a table was tied or replaced. Call the module once before compiling it."
                )
            self._renew_sinks()
        # A tensor substituted by torch.func.functional_call is read directly, without the cache.
        cached = tuple(
            [r.cache is not None and r.leaf is w and not w.is_meta for r, w in zip(rows, leaves, strict=True)]
        )
        return Operands(leaves, attached, cached, self._sinks, self._no_sinks)

    def _lookups(
        self, keys: Sequence[str], attached: tuple[bool, ...], cached: tuple[bool, ...], split: Sequence[Any]
    ) -> tuple[Lookup, ...]:
        if torch.compiler.is_compiling():  # traced once, so no caching
            return self._route(keys, attached, cached, split)
        mark = (tuple(keys), attached, cached)
        if mark not in self._routes:
            if len(self._routes) > 64:  # bound the memory for key lists that keep changing
                self._routes.clear()
            self._routes[mark] = self._route(keys, attached, cached, split)
        return self._routes[mark]

    def _feature_batch(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> FeatureBatch:
        """Return a lookup's batch without offsets. Pooled collections add offsets, bags and weights."""
        rows = [table.rows for table in self._tables.values()]
        segments = key_segments(features.length_per_key(), lookup.keys)
        return FeatureBatch(
            rows, [own.leaf for own in rows], ids, None, None, lookup.tables, [begin for begin, _ in segments],
            [end - begin for begin, end in segments], lookup.names, segments,
        )  # fmt: skip

    def _location(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> FeatureBatch | None:
        """Return the location of a lookup's rows if they are not in their leaves.

        Raises:
            ConfigError: a trained cached table has no attached optimizer.
        """
        if not lookup.cached:
            return None
        batch = self._feature_batch(features, lookup, ids)
        if torch.is_grad_enabled():
            check_trained([table.rows for table in self._tables.values()], lookup.tables)
        return batch

    @graph_break
    def prefetch(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Load the rows of a later batch into the caches of cached tables, and sort its ids for the update.

        The sort applies to tables on a GPU with an attached optimizer. It runs on the current stream, on which the
        batch must be complete. The batch's forward waits for the results of that stream, and its backward for the sort.
        Writes to the batch in between must increment PyTorch's version counter: do not write through `.data` or by a
        CUDA graph replay.

        Call it once per batch, in the order of the batches, any time before the batch's forward. Results are bitwise
        the same without it. Rows stay in the cache until the batch's backward, so each prefetched batch occupies lines.

        Returns:
            `features`. Pass this same object to the forward; for another object, the rows are fetched again.

        Raises:
            InputError: the forward would raise it for this batch.
        """
        self._check(features)
        _, attached, cached, _, _ = self._operands()
        ahead = features.device().type == "cuda" and any(attached) and not features.values().is_inference()
        if any(cached) or ahead:
            lookups = self._lookups(features.keys(), attached, cached, self._split())
            ids = self._ids_ahead(features, lookups)
            readers = Counter(t for lookup in lookups for t in set(lookup.tables))
            for lookup, own_ids in zip(lookups, ids, strict=True):
                if lookup.cached:
                    self._feature_batch(features, lookup, own_ids).prefetch()
                elif ahead and lookup.attached and all(readers[t] == 1 for t in lookup.tables):
                    self._order_ahead(features, lookup, own_ids)
        return features

    def _ids_ahead(self, features: KeyedJaggedTensor, lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the ids of each lookup of a prefetched batch, and keep computed offsets and ids for its forward.

        Cache lines and sort orders are keyed by tensor identity, so the forward must use these very tensors. It waits
        for the stream on which they were computed.
        """
        new = features.offsets_or_none() is None
        every = self._in_tables(features) if self._on_bad_id == "clamp" else [features.values()]
        if new or self._on_bad_id == "clamp":
            self._ahead.keep(_sources(features), [features.offsets(), *every], features.device())
        return [every[lookup.size] for lookup in lookups]

    def _order_ahead(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> None:
        """Sort the ids of a prefetched lookup for its update."""

    def _split(self) -> Sequence[Any]:
        """Return a mark per slot; slots with different marks need separate lookups."""
        return (0,) * len(self._slots)

    def _has_caches(self) -> bool:
        return any(table.rows.cache is not None for table in self._tables.values())

    def cache_stats(self, reset: bool = False) -> dict[str, CacheStats]:
        """Return hits, misses and traffic of each cached table on this rank, since it was cached or last reset."""
        return {
            name: stats_of(table._all_rows(), reset)
            for name, table in self._tables.items()
            if any(rows.cache is not None for rows in table._all_rows())
        }

    def _renew_sinks(self) -> None:
        self._handles = [table.rows.handle for table in self._tables.values()]
        self._sinks = torch.tensor(self._handles, dtype=torch.int64, device="cpu")
        self._no_sinks = torch.zeros(0, dtype=torch.int64, device="cpu")

    def _checked(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Return the batch's ids for every `Lookup.size`; with `on_bad_id="clamp"`, clamp and count bad ids."""
        self._check(features)
        ids = features.values()
        made = None
        if not torch.compiler.is_compiling() and self._ahead:
            made = self._ahead.take(_sources(features), stays=not torch.is_grad_enabled())
        if self._on_bad_id == "error":
            return [ids]
        every = self._in_tables(features) if made is None else made[1:]
        bad = (every[0] != ids).sum()
        # The count stays on the ids' device, so the host does not wait for a number that it may never read.
        self._clamped = self._clamped.to(bad.device, non_blocking=True) + bad
        if not torch.compiler.is_compiling() and ids.device.type == "cpu" and int(bad):
            warnings.warn(
                f"{type(self).__name__}: {int(bad)} ids of this batch lay outside their tables and were clamped "
                f"({self.clamped_ids} so far, see clamped_ids).",
                stacklevel=3,
            )
        return every

    def _check(self, features: KeyedJaggedTensor) -> None:
        """Raise an `InputError` unless `features` is a valid batch of ids."""
        if not isinstance(features, KeyedJaggedTensor):
            raise InputError(
                f"{type(self).__name__}: got a {type(features).__name__}; expected a KeyedJaggedTensor. Make one with "
                "KeyedJaggedTensor.from_lengths_sync(keys, values, lengths), or from_jt_dict(dict of JaggedTensors)."
            )
        if not torch.compiler.is_compiling() and functorch_is_active():
            self._refuse_transforms(features)
        ids = features.values()
        if ids.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"{type(self).__name__}: got ids of dtype {ids.dtype}; expected int32 or int64. Cast the batch's "
                "values."
            )
        parts = features._parts
        given = (
            ("lengths", parts.segments.given_lengths),
            ("offsets", parts.segments.given_offsets),
            ("weights", parts.weights),
        )
        for name, tensor in given:
            if tensor is not None and tensor.device != ids.device:
                raise InputError(
                    f"KeyedJaggedTensor: got {name} on {tensor.device}; expected {ids.device}, where the values are. "
                    "Move the batch with .to()."
                )

    def _in_tables(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Return clamped ids for each table size of a feature, from the smallest; several tables may read a feature."""
        ids, keys = features.values(), features.keys()
        key_N = torch.ops.tilerec.segment_ids(key_starts(features), ids.shape[0])
        return [
            self._clamp(ids, keys, key_N, size)
            for size in range(max(map(len, self._readers.values()), default=1))
        ]

    def _refuse_transforms(self, features: KeyedJaggedTensor) -> None:
        """Raise if a torch.func transform differentiates a table or the weights.

        Lookups have no rule for torch.func: forward mode would return zeros silently, and reverse mode would raise
        obscure errors.
        """
        tensors = [
            *(table._parameters["weight"] for table in self._tables.values()),
            features.weights_or_none(),
        ]
        for tensor in tensors:
            if tensor is not None and (tensor.requires_grad or is_functorch_wrapped(tensor)):
                raise RuntimeError(
                    f"{type(self).__name__}: lookups do not support torch.func transforms (grad, vjp, jvp, vmap, ...). "
                    "Use torch.autograd.grad over torch.func.functional_call, or freeze the tables "
                    "(requires_grad_(False)) and transform the rest."
                )

    def _clamp(self, ids: Tensor, keys: Sequence[str], key_N: Tensor, size: int) -> Tensor:
        """Return ids clamped to the `size`-th of their feature's table sizes; keys that no table reads keep theirs."""
        info = torch.iinfo(ids.dtype)
        rows = [
            self._readers[k][min(size, len(self._readers[k]) - 1)] if k in self._readers else None
            for k in keys
        ]
        last_K = constants([info.max if n is None else n - 1 for n in rows], ids.device)
        first_K = constants([info.min if n is None else 0 for n in rows], ids.device)
        return torch.minimum(torch.maximum(ids, first_K[key_N].to(ids.dtype)), last_K[key_N].to(ids.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> TableCollection:
        super()._apply(fn, recurse)
        self._lay_flat()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routes": {}, "_clamped": self._clamped.cpu()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._renew_sinks()
        self._lay_flat()


def readers(configs: Sequence[AnyTableConfig]) -> dict[str, list[int]]:
    """Return, by feature, the distinct sizes of the tables that read it, in ascending order."""
    sizes: dict[str, set[int]] = {}
    for config in configs:
        for feature in config.feature_names:
            sizes.setdefault(feature, set()).add(config.num_embeddings)
    return {feature: sorted(several) for feature, several in sizes.items()}


def _sources(features: KeyedJaggedTensor) -> Sources | None:
    """Return the tensors and keys that prefetched results are computed from, as their cache key."""
    return Sources.of((features.values(), features.offsets()), tuple(features.keys()))


def key_starts(features: KeyedJaggedTensor) -> Tensor:
    """Return the start of each key's values, and the end of the last: int64 [K + 1]."""
    offsets = features.offsets()
    if features.variable_stride_per_key():
        bags = upload(list(accumulate(features.stride_per_key(), initial=0)), offsets.device)
    else:
        bags = torch.arange(len(features.keys()) + 1, device=offsets.device) * features.stride()
    return offsets[bags]
