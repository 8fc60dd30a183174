"""Sharded modules with managed collision: ids and tables are spread over ranks."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.id_counts import IdPlace, IdStats, Summary
from tilerec.modules.id_resize import Resized
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddings,
)
from tilerec.modules.remapped_bags import remapped_batch
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.sharding.compiled import Begun, TracedModule, begin_managed, is_traceable
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.exchange import LookedUpBatch, RoutedAhead, RoutedFeatures, RouteInFlight
from tilerec.sharding.id_exchange import IdExchange
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.storage.prefetched_results import StreamEvent

_eager = graph_break


class ShardedManagedCollisionCollection(ManagedCollisionCollection):
    """`ManagedCollisionCollection` whose buckets are spread over ranks; `shard_ids` converts one in place."""

    exchange: IdExchange

    @_eager
    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Map this rank's part of the global batch as the unsharded module maps the global batch. Collective.

        After it, `evict()` returns evicted rows of the tiles of this rank.
        """
        if self.exchange.group.size == 1:
            return ManagedCollisionCollection.forward(self, features, mutate_miss_lengths)
        try:
            batch = self.begin(features, mutate_miss_lengths)
        except Exception as error:
            self.exchange.refuse(error)
        rows, evicted = self.exchange(batch)
        for table, rows_M in evicted.items():
            self.modules_by_table[table].keep_evicted(rows_M)
        return remapped_batch(features, rows, self._drops)

    def stats(self) -> dict[str, IdStats]:
        own = {table: module.id_map.summary() for table, module in self.modules_by_table.items()}
        self.exchange.group.begin("stats")
        gathered = cast("list[dict[str, Summary]]", self.exchange.group.all_gather_object(own))
        return {
            table: module.id_map.stats_of([parts[table] for parts in gathered])
            for table, module in self.modules_by_table.items()
        }

    def inspect(self, feature: str, id_: int) -> IdPlace:
        group, failure, place = self.exchange.group, None, None
        group.begin("inspect")
        try:
            module = self.modules_by_table[self.table_of(feature)]
            if module.id_map.holds(id_):
                place = replace(module.inspect(feature, id_), rank=group.rank)
        except Exception as error:
            failure = error
        query = f"{feature}, {id_}"
        own_answer = (query, failure is not None, place)
        answers = cast("list[tuple[str, bool, IdPlace | None]]", group.all_gather_object(own_answer))
        if failure is not None:
            raise failure
        for rank, (other, failed, _) in enumerate(answers):
            if other != query or failed:
                raise InputError(
                    f"inspect: rank {group.rank} inspects ({query}) and rank {rank} inspects ({other}); expected the "
                    "same id on all ranks. Inspect one id at a time, on all ranks."
                )
        return next(found for _, _, found in answers if found is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedManagedCollisionCollection:
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        kept = {name: value for name, value in self.__dict__.items() if name != "exchange"}
        twin.__dict__.update(copy.deepcopy(kept, memo))
        own = self.exchange
        tables = {name: copy.deepcopy(table, memo) for name, table in own.tables.items()}
        twin.exchange = IdExchange(
            own.group, twin.modules_by_table, twin._table_features, tables, own.member_of, own.facts.number
        )
        return twin


@dataclass(frozen=True)
class RoutedManaged:
    """A batch whose ids have been mapped to rows, which are in transit.

    Attributes:
        number: number of the batch among those of its module.
        features: the batch with its ids, to map it again if the maps change before its lookup.
        maps: `ManagedCollisionModule.version` of each module when the batch was mapped.
    """

    number: int
    remapped: KeyedJaggedTensor
    routed: RoutedFeatures
    features: KeyedJaggedTensor
    mutate_miss_lengths: bool
    maps: tuple[int, ...]

    def wait(self) -> RoutedManaged:
        """Wait until the rows have arrived at their holders."""
        self.routed.wait()
        return self

    def receive(self) -> None:
        """Unpack the rows if they have arrived; never blocks."""
        self.routed.receive()


@dataclass(frozen=True)
class ManagedRouteInFlight:
    """A batch whose ids have been mapped, and whose rows are being routed; the fields are those of `RoutedManaged`."""

    number: int
    remapped: KeyedJaggedTensor
    begun: RouteInFlight
    features: KeyedJaggedTensor
    mutate_miss_lengths: bool
    maps: tuple[int, ...]

    def wait(self) -> None:
        """Wait for the sizes in flight, of a batch that goes no further."""
        self.begun.wait()

    def finish(self) -> RoutedManaged:
        """Send the rows to their holders. Collective."""
        return RoutedManaged(
            self.number,
            self.remapped,
            self.begun.finish(),
            self.features,
            self.mutate_miss_lengths,
            self.maps,
        )


@dataclass(frozen=True)
class LookedUpManaged:
    """A batch whose rows are in transit to their homes."""

    remapped: KeyedJaggedTensor
    looked: LookedUpBatch


class ShardedManagedCollisionEmbeddings(ManagedCollisionEmbeddings, TracedModule):
    """Common base of the two sharded modules.

    Ids are mapped when a batch is routed, which may be early. Rows that lose their id in this step are reset when that
    batch is looked up, so that the backward of the previous batch still updates the old id's row.
    """

    routed_ahead: RoutedAhead | None = None
    """See `ShardedCollection.routed_ahead`."""
    _routed: int
    _resets: deque[tuple[int, tuple[int, ...], dict[str, Tensor | None], StreamEvent | None]]
    _mapped: StreamEvent | None = None  # on a GPU: the point in its stream where the latest batch has been mapped

    @_eager
    def route(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> RoutedManaged:
        """Map the ids, and send the rows to their holders. Collective; see `ShardedCollection.route`."""
        return self.begin_route(features, mutate_miss_lengths).finish()

    @_eager
    def begin_route(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> ManagedRouteInFlight:
        """Map the ids, and begin to route the rows; see `ShardedCollection.begin_route`. Collective.

        Mapping waits for the other ranks twice, and raises here if the batch of a rank is wrong.
        """
        collection = cast(ShardedManagedCollisionCollection, self._managed_collision_collection)
        try:
            self._check(features)
        except Exception as error:
            collection.exchange.refuse(error)
        if self._mapped is not None:
            self._mapped.wait(())  # the latest batch, or an evaluation, may have run on another stream
        remapped = collection(features, mutate_miss_lengths)
        self._routed += 1
        maps = self._maps()
        # Kept even if routing fails: the next lookup must not read the weights of an evicted id.
        lost, there = collection.lost_rows(), features.device()
        self._mapped = StreamEvent(there) if there.type == "cuda" else None
        self._resets.append((self._routed, maps, lost, self._mapped))
        begun = cast(ShardedCollection, self._embedding_module).begin_route(remapped)
        return ManagedRouteInFlight(self._routed, remapped, begun, features, mutate_miss_lengths, maps)

    def begin_refused(self, failure: Exception) -> NoReturn:
        """Refuse this rank's batch: every rank raises in its `begin_route`, and this one raises `failure`."""
        collection = cast(ShardedManagedCollisionCollection, self._managed_collision_collection)
        collection.exchange.refuse(failure)

    @_eager
    def lookup(self, routed: RoutedManaged) -> LookedUpManaged:
        """Reset the rows that this batch or an earlier one took from other ids, then look up. Collective.

        A batch is mapped and routed again, on every rank, if its ids were mapped before the capacity changed
        (`resize_ids`) or before other state was loaded.
        """
        if routed.maps != self._maps():
            routed.wait()
            routed = self.route(routed.features, routed.mutate_miss_lengths)
        self._reset_up_to(routed.number)
        looked = cast(ShardedCollection, self._embedding_module).lookup(routed.routed)
        return LookedUpManaged(routed.remapped, looked)

    @_eager
    def prefetch(self, features: KeyedJaggedTensor | RoutedManaged) -> RoutedManaged:
        """Map a batch's ids, send the rows to their holders, and prepare its lookup and update there. Collective.

        All ranks call it once per batch, in batch order; see `ShardedCollection.prefetch`. Rows that the batch takes
        from other ids are reset at its lookup only.

        Returns:
            The routed batch, to pass to the forward.
        """
        routed = features if isinstance(features, RoutedManaged) else self.route(features)
        tables = cast(ShardedCollection, self._embedding_module)
        return replace(routed, routed=tables.prefetch(routed.routed))

    def resize(self, table: str, zch_size: int | None = None, total_num_buckets: int | None = None) -> Resized:
        """Raise a `ConfigError`: a resize changes the plan, so `resize_ids` does it."""
        raise ConfigError(
            f"Table '{table}' is sharded: call tilerec.parallel.resize_ids(model, '{table}', ...) on all ranks, "
            "with the model that was sharded; its plan changes with it."
        )

    def settle(self) -> None:
        """Reset the rows taken by batches that were routed and never looked up."""
        self._reset_up_to(self._routed)

    def _reset_up_to(self, number: int) -> None:
        maps = self._maps()
        while self._resets and self._resets[0][0] <= number:
            _, when, evicted, mapped = self._resets.popleft()
            if mapped is not None:
                mapped.wait(list(evicted.values()))
            if when == maps:  # otherwise the rows belong to a map that has been replaced
                self._reset(evicted)

    def _maps(self) -> tuple[int, ...]:
        return tuple([m.version for m in self._managed_collision_collection.modules_by_table.values()])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # The state contains the ids of batches that are routed already, so their rows must be reset first.
        self.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _combined(self, looked: LookedUpManaged) -> tuple[Any, KeyedJaggedTensor | None]:
        tables = cast(Any, self._embedding_module)
        return tables.combine(looked.looked), looked.remapped if self._return_remapped_features else None

    def begin_traced(self, features: KeyedJaggedTensor, *options: bool) -> Begun:
        (mutate,) = options
        routed = self._routed_now(features, mutate)
        looked = self.lookup(routed)
        tables = cast(ShardedCollection, self._embedding_module)
        return Begun(tables.combination(looked.looked), routed.features.weights_or_none(), looked.remapped)

    def _forward(self, features: Any, mutate: bool) -> tuple[Any, KeyedJaggedTensor | None]:
        if is_traceable(features):
            tables = cast(Any, self._embedding_module)
            drops = self._managed_collision_collection._drops
            ticket, remapped = begin_managed(self, features, mutate, drops)
            out = tables.finish_traced(remapped, ticket, features.weights_or_none())
            return out, remapped if self._return_remapped_features else None
        return self._eager_forward(features, mutate)

    @_eager
    def _eager_forward(self, features: Any, mutate: bool) -> tuple[Any, KeyedJaggedTensor | None]:
        return self._combined(self.lookup(self._routed_now(features, mutate)))

    def _routed_now(self, features: Any, mutate: bool) -> RoutedManaged:
        """Return a batch as routed: by the caller, by a pipeline ahead of its step, or now."""
        if isinstance(features, RoutedManaged):
            return features
        found = None if self.routed_ahead is None else self.routed_ahead(self, features, mutate)
        return self.route(features, mutate) if found is None else found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resets": deque(self._resets)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.renew_handle()


def settle_ids(model: nn.Module) -> None:
    """Reset the rows taken by routed batches in all modules of a model, before its tables or ids move."""
    for part in model.modules():
        if isinstance(part, ShardedManagedCollisionEmbeddings):
            part.settle()


class ShardedManagedCollisionEmbeddingBagCollection(
    ShardedManagedCollisionEmbeddings, ManagedCollisionEmbeddingBagCollection
):
    """`ManagedCollisionEmbeddingBagCollection` whose ids and rows are sharded over ranks."""

    def forward(
        self, features: KeyedJaggedTensor | RoutedManaged, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor, KeyedJaggedTensor | None]:
        """Return this rank's part of the unsharded module's output for the global batch. Collective.

        Args:
            features: may be routed already.
        """
        return self._forward(features, mutate_miss_lengths)

    def combine(self, looked: LookedUpManaged) -> tuple[KeyedTensor, KeyedJaggedTensor | None]:
        """Return the unsharded module's output for this rank's batch."""
        return self._combined(looked)


class ShardedManagedCollisionEmbeddingCollection(
    ShardedManagedCollisionEmbeddings, ManagedCollisionEmbeddingCollection
):
    """`ManagedCollisionEmbeddingCollection` whose ids and rows are sharded over ranks."""

    def forward(
        self, features: KeyedJaggedTensor | RoutedManaged, mutate_miss_lengths: bool = True
    ) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Return this rank's part of the unsharded module's output for the global batch. Collective.

        Args:
            features: may be routed already.
        """
        return self._forward(features, mutate_miss_lengths)

    def combine(self, looked: LookedUpManaged) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Return the unsharded module's output for this rank's batch."""
        return self._combined(looked)
