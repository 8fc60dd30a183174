"""`Exchange`: process groups, layout and stages of a sharded collection; and a batch on its way through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilerec.comms.codec import codec
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.sharding.distinct_ids import DistinctIds
from tilerec.sharding.header import header_sizes_of
from tilerec.sharding.hot_counts import HotCounts
from tilerec.sharding.hot_ids import HotIds
from tilerec.sharding.layout import ExchangeLayout, SlotRead, TableLayout
from tilerec.sharding.posted_headers import PostedHeaders, header_sizes
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.route import BegunRoute, Routed, Router
from tilerec.sharding.row_exchange import PooledRows, RowExchange
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.topology import Topology
from tilerec.storage.prefetched_results import StreamEvent


class Stages(NamedTuple):
    """Router and combiner for one accumulation dtype."""

    router: Router
    combiner: RowExchange


class Exchange:
    """Process groups and compiled layout of a sharded collection, with its stages by accumulation dtype."""

    def __init__(
        self, group: Group, route_group: Group, topology: Topology, tables: Sequence[TableLayout],
        slots: Sequence[SlotRead], *, weighted: bool, each_id: bool, exact: bool, teams: ReplicaGroups | None = None,
        name: str = "", number: int | None = None, hot_ids: int = 0,
    ) -> None:  # fmt: skip
        """Args:
        name: the collection's name in errors.
        hot_ids: number of most frequent ids of each table to count.
        number: the collection's number among those that share `route_group`; None: the next free one.
        """
        room = header_sizes_of(route_group)
        self.name, self.number = name, room.number() if number is None else number
        self.group, self.route_group, self.topology = group, route_group, topology
        self.teams = teams
        self.layout = ExchangeLayout(tables, slots, topology, group.rank, None if teams is None else teams.of)
        self.weighted, self.each_id, self.exact = weighted, each_id, exact
        # Slots of tables that are cut by columns: (slot, table, dtype in which its gradients are sent).
        self.column_cut = [
            (s, slot.table, _wire_dtype(tables[slot.table].wire.backward))
            for s, slot in enumerate(slots)
            if len(tables[slot.table].tiling.blocks) > 1
        ]
        self.hot = HotIds.of(self.layout)
        self.count_hot(hot_ids)
        self.distinct = None if exact else DistinctIds(self.layout, each_id=each_id)
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._stages: dict[torch.dtype, Stages] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self  # a copied module uses the same groups

    def over(self, topology: Topology, tables: Sequence[TableLayout]) -> Exchange:
        """Return an exchange over the same groups for resharded tables."""
        return Exchange(
            self.group, self.route_group, topology, tables, self.layout.slots,
            weighted=self.weighted, each_id=self.each_id, exact=self.exact, teams=self.teams, name=self.name,
            number=self.number, hot_ids=self._hot_ids,
        )  # fmt: skip

    def count_hot(self, most: int) -> None:
        """Count the `most` most frequent ids of every table from now on, and those of tables with hot rows."""
        self._hot_ids = most
        self.hot_counts = HotCounts.of(self.layout, most)

    def enter(self) -> None:
        """Reserve room for this exchange's header in the headers of the channel.

        All ranks call it when they begin to use the exchange.
        """
        header_sizes_of(self.route_group).enter(self.number, *header_sizes(self.layout))

    def all_stages(self) -> list[Stages]:
        """Return the stages of every dtype used so far."""
        return list(self._stages.values())

    def made(self, stages: Stages) -> bool:
        """Return True if this exchange made `stages`; False if they date from before a reshard."""
        return any(own is stages for own in self._stages.values())

    def check_made(self, stages: Stages, kind: str) -> None:
        """Raise a `ConfigError` if the collection of class `kind` was resharded between a lookup and its combine."""
        if not self.made(stages):
            raise ConfigError(
                f"{kind}: the tables were resharded between this batch's lookup and its combine; reshard between two "
                "steps, and look the batch up again."
            )

    def stages(self, wide: torch.dtype) -> Stages:
        """Return the router and the combiner that accumulate in `wide`; create them on first use."""
        if wide not in self._stages:
            each_id = self.each_id or self.exact
            self._stages[wide] = Stages(
                Router(
                    self.layout,
                    self.route_group,
                    weighted=self.weighted and not each_id,
                    each_id=each_id,
                    wide=wide,
                    names=() if self.teams is None else self.teams.names,
                    everyone=None if self.teams is None else self.teams.everyone,
                ),
                RowExchange(self.layout, self.group, wide, each_id=each_id),
            )
        return self._stages[wide]


@dataclass(frozen=True)
class RoutedFeatures:
    """A batch whose ids are in transit. The output needs its `features`."""

    features: KeyedJaggedTensor
    routed: Routed
    stages: Stages
    sample_weights: Tensor | None
    divisors: Sequence[Tensor | None]  # per mean read: number of ids in each bag at routing
    made: StreamEvent | None  # on a GPU: end of the work for the batch so far; other streams wait for it

    @staticmethod
    def of(
        features: KeyedJaggedTensor, routed: Routed, stages: Stages, sample_weights: Tensor | None,
        divisors: Sequence[Tensor | None],
    ) -> RoutedFeatures:  # fmt: skip
        """Return a batch that has just been routed on the current stream."""
        there = features.device()
        made = StreamEvent(there) if there.type == "cuda" else None
        return RoutedFeatures(features, routed, stages, sample_weights, divisors, made)

    def renewed(self) -> RoutedFeatures:
        """Return the batch with `made` at the end of the current stream's work."""
        return replace(self, made=None if self.made is None else StreamEvent(self.made.stream.device))

    def behind(self) -> None:
        """Make the current stream wait until the work done for the batch so far has finished."""
        if self.made is not None:
            routed, features = self.routed.wait(), self.features
            inverse = features.inverse_indices_or_none()
            self.made.wait(
                [
                    routed.ids, routed.offsets, routed.sample_weights, routed.slots, routed.positions,
                    routed.member_slots, features.values(), features.weights_or_none(), features.lengths_or_none(),
                    features.offsets_or_none(), None if inverse is None else inverse[1], *self.divisors,
                    *([] if routed.repeats is None else [routed.repeats.items_I, routed.repeats.starts_U1]),
                ]
            )  # fmt: skip

    def wait(self) -> RoutedFeatures:
        """Wait until the ids have arrived."""
        self.routed.wait()
        return self

    def receive(self) -> None:
        """Unpack the ids if they have arrived, on the CPU; never blocks. On a GPU, the lookup's stream unpacks them."""
        if self.made is None:
            self.routed.receive()

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"RoutedFeatures of {self.features.keys()}: cannot be copied or pickled, as its ids are in transit "
            "between the ranks of this model; copy the features, and route those."
        )


@dataclass(frozen=True)
class RouteInFlight:
    """A batch that `begin_route` has begun to route: the sizes of its messages are in flight."""

    features: KeyedJaggedTensor | None  # None: this rank refuses the batch
    begun: BegunRoute
    stages: Stages
    sample_weights: Tensor | None
    divisors: Sequence[Tensor | None]

    @property
    def headers(self) -> PostedHeaders | None:
        """The headers in flight; None for a single rank that routes nothing."""
        return self.begun.headers

    def wait(self) -> None:
        """Wait for the sizes in flight, of a batch that goes no further."""
        if self.headers is not None:
            self.headers.wait()

    def finish(self) -> RoutedFeatures:
        """Send the ids to the owners of their rows. Collective; see `ShardedCollection.route` for errors."""
        routed = self.stages.router.finish(self.begun)
        assert self.features is not None, "a refused batch raises above"
        return RoutedFeatures.of(self.features, routed, self.stages, self.sample_weights, self.divisors)


RoutedAhead = Callable[..., Any]
"""`f(collection, features, *options)`: returns the routed batch for a call of the collection's forward, or None."""


@dataclass(frozen=True)
class LookedUpBatch:
    """A batch whose rows are in transit to their homes."""

    batch: RoutedFeatures
    looked: PooledRows


def _wire_dtype(name: str) -> torch.dtype:
    """Return the dtype whose range limits the values that a wire format can carry."""
    dtype = codec(name).wire_dtype
    return dtype if dtype is not None and dtype.is_floating_point else torch.float32
