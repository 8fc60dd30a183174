"""Base class of pooled and sequence collections: named tables, lookups of a batch's features, gradient sinks.

Nouns
  read    a table and a feature whose ids it is read with (`feature_reads.py`)
  lookup  for one batch's keys: reads that one op call looks up, because their gradients have one destination (attached
          optimizers, or `.grad`)
  sink    the receiver of a table's gradients if it has an attached optimizer
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tilerec.modules.batch_format import check_format
from tilerec.modules.cached_lookup import check_trained, key_segments
from tilerec.modules.data_parallel import check_not_in_ddp
from tilerec.modules.feature_reads import feature_reads, key_positions
from tilerec.modules.id_clamp import IdClamp, OnBadId
from tilerec.modules.initial_values import draw_seed
from tilerec.modules.table import Table, Tables, tables_below
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.optim.fused import FusedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import AnyTableConfig, DataType, data_type_to_dtype, dtype_to_data_type
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.located_batch import FeatureBatch
from tilerec.storage.prefetched_results import PrefetchedResults, Sources


@dataclass(frozen=True)
class Lookup:
    """Reads that one op call looks up."""

    reads: tuple[int, ...]
    tables: tuple[int, ...]  # per read, position among the collection's tables
    keys: tuple[int, ...]  # per read, position in the batch's keys
    means: tuple[int, ...]
    names: str  # "feature@table" per read, for messages
    attached: bool
    cached: bool  # whether one of the tables has a cache
    form: int  # of its ids (`IdClamp`)


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
        self._configs = tuple(tables)
        self._reads = feature_reads(self._configs, kind)
        self._id_clamp = IdClamp(kind, on_bad_id, self._configs, self._reads)
        self._holder = holder
        self._output_dtype = data_type_to_dtype(output_dtype) if isinstance(output_dtype, DataType) else output_dtype
        if self._output_dtype is not None:
            dtype_to_data_type(self._output_dtype)
        self._on_bad_id = on_bad_id
        self._clamped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._ahead = PrefetchedResults()  # per batch, offsets and clamped ids
        self._routes: dict[Any, tuple[Lookup, ...]] = {}
        self.seed = draw_seed()
        self.add_module(holder, Tables.of(self._configs, device, self.seed))
        self._renew_sinks()

    def _lay_flat(self) -> None:
        """Lay the collection's own tables out contiguously; tables tied to another collection stay in its storage."""
        cast(Tables, getattr(self, self._holder)).lay_flat(self.seed)

    @property
    def _tables(self) -> dict[str, Table]:
        return tables_below(self, self._holder)

    @property
    def device(self) -> torch.device:
        """Device of the tables; of a cached table the cache's device; the CPU if there are no tables."""
        table = next(iter(self._tables.values()), None)
        if table is None:
            return torch.device("cpu")
        cache = table.cache
        return table.rows.leaf.device if cache is None or cache.device is None else cache.device

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
        """Return the lookups of a batch with these keys; reads with different marks in `split` never share a lookup."""
        position = key_positions(type(self).__name__, self._reads, keys)
        order = {config.name: t for t, config in enumerate(self._configs)}
        groups: dict[Any, list[int]] = {}
        for r, read in enumerate(self._reads):
            t = order[read.table]
            groups.setdefault((attached[t], cached[t], self._id_clamp.forms[r], split[r]), []).append(r)
        lookups = []
        for (is_attached, is_cached, form, _), members in groups.items():
            reads = [self._reads[r] for r in members]
            lookups.append(
                Lookup(
                    tuple(members),
                    tuple(order[read.table] for read in reads),
                    tuple(position[read.feature] for read in reads),
                    tuple(int(read.mean) for read in reads),
                    ",".join(f"{read.feature}@{read.table}" for read in reads),
                    is_attached,
                    is_cached,
                    form,
                )
            )
        return tuple(lookups)

    def _operands(self) -> Operands:
        """Return a forward's inputs from its tables. Reads the module dicts directly, as it runs per table and step."""
        tables = list(self._tables.values())
        leaves: list[Tensor] = [table._parameters["weight"] for table in tables]  # type: ignore[misc]
        rows = [table.rows for table in tables]
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            # A tensor substituted by torch.func.functional_call is not the table's leaf: autograd returns its gradient.
            attached = tuple(
                [r.takes_gradients and w.requires_grad and r.leaf is w for r, w in zip(rows, leaves, strict=True)]
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
        no_sinks = self._no_sinks
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            no_sinks = self._empty_sinks()  # as an input of a program for all sizes, it could have any size
        return Operands(leaves, attached, cached, self._sinks, no_sinks)

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
        every = self._id_clamp(features)
        if new or self._id_clamp.active:
            self._ahead.keep(_sources(features), [features.offsets(), *every], features.device())
        return [every[lookup.form] for lookup in lookups]

    def _order_ahead(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> None:
        """Sort the ids of a prefetched lookup for its update."""

    def _split(self) -> Sequence[Any]:
        """Return a mark per read; reads with different marks need separate lookups."""
        return (0,) * len(self._reads)

    def _has_caches(self) -> bool:
        return any(table.cache is not None for table in self._tables.values())

    def cache_stats(self, reset: bool = False) -> dict[str, CacheStats]:
        """Return hits, misses and traffic of each cached table on this rank, since it was cached or last reset."""
        found = {name: table.cache_stats(reset) for name, table in self._tables.items()}
        return {name: stats for name, stats in found.items() if stats is not None}

    def _renew_sinks(self) -> None:
        self._handles = [table.rows.handle for table in self._tables.values()]
        self._sinks = torch.tensor(self._handles, dtype=torch.int64, device="cpu")
        self._no_sinks = self._empty_sinks()

    @staticmethod
    def _empty_sinks() -> Tensor:
        return torch.zeros(0, dtype=torch.int64, device="cpu")

    def _checked(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Return the batch's ids for every `Lookup.form`; with `on_bad_id="clamp"`, clamp and count bad ids."""
        self._check(features)
        made = None
        if not torch.compiler.is_compiling() and self._ahead:
            made = self._ahead.take(_sources(features), stays=not torch.is_grad_enabled())
        ids = features.values()
        if not self._id_clamp.active:
            return [ids]
        every = self._id_clamp(features) if made is None else made[1:]
        if torch.compiler.is_exporting():  # a program has no place for a count
            return every
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
        """Raise an error unless `features` is a valid batch of ids."""
        check_format(type(self).__name__, features, lambda: self._tables.values())

    def _replace_config(self, config: AnyTableConfig) -> None:
        """Replace a table's config after the table got another number of rows."""
        self._configs = tuple(config if own.name == config.name else own for own in self._configs)
        self._id_clamp = IdClamp(type(self).__name__, self._on_bad_id, self._configs, self._reads)
        self._routes.clear()

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


def _sources(features: KeyedJaggedTensor) -> Sources | None:
    """Return the tensors and keys that prefetched results are computed from, as their cache key."""
    return Sources.of((features.values(), features.offsets()), tuple(features.keys()))
