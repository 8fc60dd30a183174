"""Sharded collections: results and names of the unsharded ones, with rows on many ranks.

    route(features) -> RoutedFeatures     sends ids to the owners of their rows; may run early, for the next batch;
                                          `begin_route(features).finish()` is the same in two parts
    lookup(routed) -> LookedUpBatch       owners pool rows and send them to their homes
    combine(looked) -> output             turns the rows into the unsharded module's output
    forward                               runs the three in a row; takes features, or a routed batch. In a compiled
                                          program it is the ops of `compiled.py`, which do the same

Legend: B samples, C columns of the output, K keys of a batch, N ids, D columns of a read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_reads import key_positions
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.sharding.combine_autograd import Output, combine, pooled_output
from tilerec.sharding.compiled import Begun, Combination, TracedModule, begin, finish, is_traceable, traced_constants
from tilerec.sharding.exchange import Exchange, LookedUpBatch, RoutedAhead, RoutedFeatures, RouteInFlight
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.sharding.home_bags import check_variable, pooled_at_home, rows_of_samples, split_parts
from tilerec.sharding.route import RouteInput
from tilerec.sharding.tile_leaves import TileLeaves
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, from_leaves, leaves_of
from tilerec.sparse.keyed_tensor import KeyedTensor

# Collectives and ctypes cannot be traced. Compiled forwards call the ops of `compiled.py`; other calls break the graph.
_eager = graph_break


class ShardedCollection(TableCollection, TracedModule):
    """Common base of the two sharded collections; `shard_collection` converts an unsharded one in place."""

    exchange: Exchange
    _traced_dtype: torch.dtype  # of the output; a change of it raises `traced_settings`
    routed_ahead: RoutedAhead | None = None
    """Set by a pipeline during a forward: returns the result of a `route` that ran ahead of it, or None."""

    @property
    def _leaves(self) -> TileLeaves:
        return TileLeaves(self._tables)

    @property
    def fused_optimizer(self) -> ShardedFusedOptimizer:
        """The attached optimizers as one `torch.optim.Optimizer`, with the state of the whole tables."""
        return ShardedFusedOptimizer(self)

    def _lay_flat(self) -> None:
        """Do nothing: tiles keep the memory that the conversion gave them."""

    def _renew_sinks(self) -> None:
        super()._renew_sinks()
        self.renew_handle(self._tables.values())
        self._note_dtype()

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedCollection:
        super()._apply(fn, recurse)
        self._note_dtype()
        return self

    def _note_dtype(self) -> None:
        dtype = self._dtype(self._leaves.first)
        if dtype != self.__dict__.get("_traced_dtype", dtype):
            self.traced_settings += 1
        self._traced_dtype = dtype

    @_eager
    def route(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        """Send the ids to the owners of their rows. Collective, on its own channel, so it may run during a backward.

        Raises:
            InputError: the batch of this rank or of another rank (then named) is wrong. Every rank raises. A single
                rank with whole tables routes nothing: there the lookup raises.
        """
        return self.begin_route(features).finish()

    @_eager
    def begin_route(self, features: KeyedJaggedTensor, note: int = 0) -> RouteInFlight:
        """Post the sizes of the messages of a `route`, without waiting; `.finish()` sends the ids. Collective.

        All ranks begin and finish in the same order. Batches may be begun before earlier ones are finished. A batch
        that is wrong raises in `finish`, on every rank.

        Args:
            note: a number (int32) that travels with the sizes: `flight.headers.notes()` returns those of all ranks. The
                channel must carry notes; see `HeaderSizes`.
        """
        leaves = self._leaves
        stages = self.exchange.stages(leaves.accum_dtype())
        try:
            batch, keys = self._batch(features, leaves)
            if self.exchange.distinct is not None:
                batch = self.exchange.distinct(batch, keys)
        except Exception as error:
            return self.begin_refused(error, note)
        begun = stages.router.begin(batch, keys, note)
        return RouteInFlight(features, begun, stages, batch.weights, self._divisors(features))

    def begin_refused(self, failure: Exception, note: int = 0) -> RouteInFlight:
        """Begin to route a batch that this rank refuses; its `finish` raises `failure`, and every rank raises."""
        stages = self.exchange.stages(self._leaves.accum_dtype())
        return RouteInFlight(None, stages.router.begin_refused(failure, self.device, note), stages, None, ())

    def _routed(self, features: KeyedJaggedTensor | RoutedFeatures) -> RoutedFeatures:
        """Return a batch as routed: by the caller, by a pipeline ahead of its step, or now."""
        if isinstance(features, RoutedFeatures):
            return features
        found = None if self.routed_ahead is None else self.routed_ahead(self, features)
        return self.route(features) if found is None else found

    def _divisors(self, features: KeyedJaggedTensor) -> Sequence[Tensor | None]:
        """Return per read the divisors of its bags' sums, applied on the home rank; None where nothing divides."""
        return ()

    def _batch(self, features: KeyedJaggedTensor, leaves: TileLeaves) -> tuple[RouteInput, list[int]]:
        every = self._checked(features)
        keys = list(features.keys())
        position = key_positions(type(self).__name__, self._reads, keys)
        own = [position[read.feature] for read in self._reads]
        variable = features.variable_stride_per_key()
        batches = features.stride_per_key() if variable else [features.stride()]
        weights = features.weights() if getattr(self, "_is_weighted", False) else None
        if self.exchange.each_id or self.exchange.exact:
            sizes = features.length_per_key()
            bags = [sizes[k] for k in own]
        else:
            bags = [batches[k] if variable else batches[0] for k in own]
        offsets, forms = features.offsets(), cast("Sequence[int]", self._id_clamp.forms)
        if self.exchange.hot_counts is not None:
            self.exchange.hot_counts.add(every, forms, own, offsets, batches)
        if self.exchange.hot is not None:
            every, forms = self.exchange.hot(every, forms, own, offsets, batches)
        ids = every[0]
        at = [own[route.slot] for route in self.exchange.layout.routes]
        if len(every) > 1:
            # Ids were clamped to tables of several sizes, or have other hot ids in some: concatenate one copy of the
            # batch per form.
            count = ids.numel()
            ids = torch.cat(every)
            offsets = torch.cat([offsets[:1], *(offsets[1:] + i * count for i in range(len(every)))])
            weights = None if weights is None else torch.cat([weights] * len(every))
            batches = (batches if variable else batches * len(keys)) * len(every)
            at = [
                key + forms[route.slot] * len(keys) for key, route in zip(at, self.exchange.layout.routes, strict=True)
            ]
        facts = leaves.follow_first().facts(self.exchange.number, self.exchange.name)
        return RouteInput(ids, offsets, weights, batches, bags, facts), at

    def _is_current(self, routed: RoutedFeatures, leaves: TileLeaves) -> bool:
        """Return True if tiling and accumulation dtype have not changed since this batch was routed."""
        return self.exchange.made(routed.stages) and routed.stages.router.wide == leaves.accum_dtype()

    @_eager
    def lookup(self, routed: RoutedFeatures) -> LookedUpBatch:
        """Read and pool the rows that this rank holds, and send them to their homes. Collective.

        A batch is routed again, on every rank, if the tables were resharded (`reshard`) or became float64 since it
        was routed.
        """
        leaves, grad_enabled = self._leaves, torch.is_grad_enabled()
        if not self._is_current(routed, leaves):
            routed.behind()
            routed = self.route(routed.wait().features)
        routed.behind()
        rows = leaves.rows()
        if self.exchange.teams is not None and self.exchange.teams.apart:
            for own in rows:
                own.arrive()
        if grad_enabled:
            leaves.check_cached()
        combiner, reader = routed.stages.combiner, None
        if routed.routed.weights_need_grad:
            reader = combiner.reader(routed.routed.wait(), rows, leaves.bare_rows())
        looked = combiner.lookup(routed.routed, rows, leaves.held(), updates=grad_enabled)
        return LookedUpBatch(routed, replace(looked, reader=reader))

    @_eager
    def prefetch(  # type: ignore[override]
        self, features: KeyedJaggedTensor | RoutedFeatures
    ) -> RoutedFeatures:
        """Send a batch's ids to the owners of their rows, and prepare its lookup and update there. Collective.

        Rows of cached tables are loaded into their caches. On a GPU, rows of tables with an attached optimizer are
        sorted for the batch's update. All this work runs on the current stream, where the batch must have arrived. The
        batch's lookup waits for it, except for the sort: the update waits for that.

        All ranks call it once per batch, in batch order, any time before the batch's forward. Results are bitwise the
        same with and without the call.

        Returns:
            The routed batch, to pass to the forward. (The forward of an unsharded collection takes the features.)
        """
        routed = features if isinstance(features, RoutedFeatures) else self.route(features)
        leaves = self._leaves
        if not self._is_current(routed, leaves):
            return routed
        routed.behind()
        rows = leaves.rows()
        if any(own.cache is not None for own in rows):
            routed.stages.combiner.prefetch(routed.routed, rows)
        if routed.made is not None:
            routed = routed.wait().renewed()
            self._order_routed(routed)
        return routed

    def _order_routed(self, routed: RoutedFeatures) -> None:
        """Sort a batch's rows on their owners, ahead of its update."""
        if torch.is_grad_enabled():
            leaves = self._leaves.follow_first()
            routed.stages.combiner.order(routed.routed, leaves.sinks(), leaves.trained())

    @abstractmethod
    def combination(self, looked: LookedUpBatch) -> Combination:
        """Return the parts of `combine`."""

    def _combined(self, looked: LookedUpBatch) -> Tensor:
        """Return the output of a lookup as one tensor, differentiable."""
        found = self.combination(looked)
        return found.tail(combine(found.looked, found.output, found.leaves, found.exchange, found.current))

    def _parts(self, looked: LookedUpBatch, output: Output, tail: Callable[[Tensor], Tensor]) -> Combination:
        exchange = self.exchange
        exchange.check_made(looked.batch.stages, type(self).__name__)
        leaves = self._leaves.follow_first()
        return Combination(self, looked, output, leaves, exchange, lambda: self.exchange is exchange, tail)

    # -- compiled programs -------------------------------------------------------------------------------------

    def begin_traced(self, features: KeyedJaggedTensor, *options: bool) -> Begun:
        looked = self.lookup(self._routed(features))
        return Begun(self.combination(looked), looked.batch.features.weights_or_none())

    def _finish_traced(
        self, features: KeyedJaggedTensor, ticket: Tensor, weights: Tensor | None, size: Sequence[int]
    ) -> Tensor:
        names, dtype, weighted = traced_constants(self.handle, self.traced_settings)
        dense: list[Any] = []
        if names:
            tables = self._tables
            dense = [tables[name]._parameters[leaf] for name, leaf in names]
        return finish(ticket, self.handle, weights if weighted else None, dense, size, dtype, features.device())


class ShardedEmbeddingBagCollection(ShardedCollection, EmbeddingBagCollection):
    """`EmbeddingBagCollection` whose rows are sharded over ranks."""

    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> KeyedTensor:
        """Return the unsharded module's output for this rank's batch; `features` may be routed already."""
        if is_traceable(features):
            return self.finish_traced(features, begin(self, features), features.weights_or_none())
        return self._forward(features)

    @_eager
    def _forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> KeyedTensor:
        return self.combine(self.lookup(self._routed(features)))

    def finish_traced(self, features: KeyedJaggedTensor, ticket: Tensor, weights: Tensor | None) -> KeyedTensor:
        """Return the output of a lookup that has begun in a compiled program, and has these sample weights."""
        size = [features.stride(), self._columns.offsets[-1]]
        return KeyedTensor.from_columns(self._columns, self._finish_traced(features, ticket, weights, size))

    @_eager
    def combine(self, looked: LookedUpBatch) -> KeyedTensor:
        """Return the unsharded module's output for this rank's batch."""
        return KeyedTensor.from_columns(self._columns, self._combined(looked))

    def combination(self, looked: LookedUpBatch) -> Combination:
        features = looked.batch.features
        dtype = self._dtype(self._leaves.first)
        variable = features.variable_stride_per_key()
        position = {key: k for k, key in enumerate(features.keys())}
        own = [position[read.feature] for read in self._reads]
        batches = features.stride_per_key() if variable else [features.stride()] * len(position)
        bags = [batches[k] for k in own]
        if self.exchange.exact:
            sizes = features.length_per_key()
            output = pooled_output(self._dims, [sizes[k] for k in own], False, [None] * len(own))
        else:
            output = pooled_output(self._dims, bags, not variable, list(looked.batch.divisors))

        def tail(flat: Tensor) -> Tensor:
            if self.exchange.exact:
                wide, weighted = self._leaves.accum_dtype(), self._is_weighted
                flat = pooled_at_home(self._reads, features, flat, own, wide, weighted=weighted)
            flat = flat.to(dtype)
            if not variable:
                return flat.view(features.stride(), sum(self._dims))
            return rows_of_samples(self._reads, features, flat, bags)

        return self._parts(looked, output, tail)

    def _batch(self, features: KeyedJaggedTensor, leaves: TileLeaves) -> tuple[RouteInput, list[int]]:
        batch = super()._batch(features, leaves)
        check_variable(type(self).__name__, self._reads, features)
        return batch

    def _divisors(self, features: KeyedJaggedTensor) -> Sequence[Tensor | None]:
        if self.exchange.exact or not any(read.mean for read in self._reads):
            return [None] * len(self._reads)
        position = {key: k for k, key in enumerate(features.keys())}
        own = [position[read.feature] for read in self._reads]
        lengths = features.lengths().clamp(min=1).to(self._leaves.accum_dtype())
        starts = [0]
        strides = (
            features.stride_per_key()
            if features.variable_stride_per_key()
            else [features.stride()] * len(features.keys())
        )
        for stride in strides:
            starts.append(starts[-1] + stride)
        return [
            lengths[starts[k] : starts[k + 1]] if read.mean else None for k, read in zip(own, self._reads, strict=True)
        ]


class ShardedEmbeddingCollection(ShardedCollection, EmbeddingCollection):
    """`EmbeddingCollection` whose rows are sharded over ranks."""

    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> dict[str, JaggedTensor]:
        """Return the unsharded module's output for this rank's batch; `features` may be routed already."""
        if is_traceable(features):
            return self.finish_traced(features, begin(self, features), features.weights_or_none())
        return self._forward(features)

    @_eager
    def _forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> dict[str, JaggedTensor]:
        return self.combine(self.lookup(self._routed(features)))

    def finish_traced(
        self, features: KeyedJaggedTensor, ticket: Tensor, weights: Tensor | None
    ) -> dict[str, JaggedTensor]:
        """Return the output of a lookup that has begun in a compiled program; `weights` is not used."""
        # Without the batch's own numbers of ids, which a compiled program guards one by one, it reads them itself.
        features = from_leaves(*leaves_of(features))
        counts = self._counts(features)
        size = sum([count * dim for count, dim in zip(counts, self._dims, strict=True)])
        return self._jagged(features, counts, self._finish_traced(features, ticket, None, [size]))

    @_eager
    def combine(self, looked: LookedUpBatch) -> dict[str, JaggedTensor]:
        """Return the unsharded module's output for this rank's batch."""
        features = looked.batch.features
        return self._jagged(features, self._counts(features), self._combined(looked))

    def _counts(self, features: KeyedJaggedTensor) -> list[int]:
        """Return the number of ids of each read."""
        sizes = features.length_per_key()
        position = {key: k for k, key in enumerate(features.keys())}
        return [sizes[position[read.feature]] for read in self._reads]

    def combination(self, looked: LookedUpBatch) -> Combination:
        counts, dtype = self._counts(looked.batch.features), self._dtype(self._leaves.first)
        output = pooled_output(self._dims, counts, False, [None] * len(counts))
        return self._parts(looked, output, lambda flat: flat.to(dtype))

    def _jagged(self, features: KeyedJaggedTensor, counts: Sequence[int], flat: Tensor) -> dict[str, JaggedTensor]:
        sizes = [count * dim for count, dim in zip(counts, self._dims, strict=True)]
        results = {}
        compiling = torch.compiler.is_compiling()
        parts = flat.split(sizes) if compiling else split_parts(flat, sizes)
        by_key = features.to_dict() if compiling else features  # one split in place of many slices
        for read, part, count in zip(self._reads, parts, counts, strict=True):
            feature = by_key[read.feature]
            results[read.name] = JaggedTensor(
                part.view(count, read.dim),
                feature.values() if self._need_indices else None,
                feature.lengths(),
                feature.offsets(),
            )
        return results
