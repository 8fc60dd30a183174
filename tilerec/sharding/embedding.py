"""Sharded collections: results and names of the unsharded ones, with rows on many ranks.

    route(features) -> Routed     sends ids to the owners of their rows; may run early, for the next batch
    lookup(routed) -> Looked      owners pool rows and send them to their homes
    combine(looked) -> output     turns the rows into the unsharded module's output
    forward                       runs the three in a row; takes features, or a Routed

Legend: B samples, C columns of the output, K keys of a batch, N ids, D columns of a slot.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from tilerec.comms.codec import codec
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.cached_lookup import check_trained
from tilerec.modules.collection import TableCollection, key_starts
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.initial_values import fill_initial
from tilerec.modules.inverse_indices import check_samples, sample_bags
from tilerec.modules.table import Table
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.sharding.combine_autograd import Gradients, Output, combine, pooled_output
from tilerec.sharding.dense_gradients import dense_grads
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.sharding.header import ATTACHED, TRAINED, LookupFacts, header_sizes_of
from tilerec.sharding.layout import ExchangeLayout, SlotRead, TableLayout
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.route import Routed, RouteInput, Router, header_sizes
from tilerec.sharding.row_exchange import PooledRows, RowExchange
from tilerec.sharding.table import ShardedTable, shard_table
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.plan import Wire
from tilerec.spec.tile import Tiling, rectangles
from tilerec.spec.topology import Topology
from tilerec.storage.flat_storage import flat_memory
from tilerec.storage.prefetched_results import StreamEvent
from tilerec.storage.row_cache import RowCache
from tilerec.storage.shared_param_group import SharedParamGroup

OWN_STORAGE_FROM_BYTES = 1 << 20
"""Minimum bytes of a rank's tiles of one table for a storage of their own."""

SHARED_STORAGE_BYTES = 4 << 20
"""Approximate bytes of a storage that smaller tables share."""

# Collectives and ctypes cannot be traced: a compiled model has one graph break around its tables.
_eager = graph_break


class Stages(NamedTuple):
    """Router and combiner for one accumulation dtype."""

    router: Router
    combiner: RowExchange


@dataclass(frozen=True)
class RoutedFeatures:
    """A batch whose ids are in transit. The output needs its `features`."""

    features: KeyedJaggedTensor
    routed: Routed
    stages: Stages
    sample_weights: Tensor | None
    divisors: Sequence[Tensor | None] = ()  # per mean slot: number of ids in each bag at routing
    made: StreamEvent | None = (
        None  # on a GPU: end of the work for the batch so far; other streams wait for it
    )

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
                ]
            )  # fmt: skip

    def wait(self) -> RoutedFeatures:
        """Wait until the ids have arrived."""
        self.routed.wait()
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"RoutedFeatures of {self.features.keys()}: cannot be copied or pickled, as its ids are in transit "
            "between the ranks of this model; copy the features, and route those."
        )


@dataclass(frozen=True)
class LookedUpBatch:
    """A batch whose rows are in transit to their homes."""

    batch: RoutedFeatures
    looked: PooledRows


class Exchange:
    """Process groups and compiled layout of a sharded module."""

    def __init__(
        self, group: Group, route_group: Group, topology: Topology, tables: Sequence[TableLayout],
        slots: Sequence[SlotRead], *, weighted: bool, each_id: bool, exact: bool, teams: ReplicaGroups | None = None,
        name: str = "", number: int | None = None,
    ) -> None:  # fmt: skip
        """Args:
        name: the collection's name in errors.
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
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._stages: dict[torch.dtype, Stages] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self  # a copied module uses the same groups

    def over(self, topology: Topology, tables: Sequence[TableLayout]) -> Exchange:
        """Return an exchange over the same groups for resharded tables."""
        return Exchange(
            self.group, self.route_group, topology, tables, self.layout.slots,
            weighted=self.weighted, each_id=self.each_id, exact=self.exact, teams=self.teams, name=self.name,
            number=self.number,
        )  # fmt: skip

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


class ShardedCollection(TableCollection):
    """Common base of the two sharded collections; `shard_collection` converts an unsharded one in place."""

    exchange: Exchange

    @property
    def _sharded_tables(self) -> list[ShardedTable]:
        return cast("list[ShardedTable]", list(self._tables.values()))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The attached optimizers as one `torch.optim.Optimizer`, with the state of the whole tables."""
        return ShardedFusedOptimizer(self)

    def _lay_flat(self) -> None:
        """Do nothing: tiles keep the memory that the conversion gave them."""

    def _first_leaves(self) -> list[nn.Parameter]:
        return cast("list[nn.Parameter]", [table._parameters["weight"] for table in self._tables.values()])

    def _follow_first_leaves(self) -> None:
        """Copy `requires_grad` of `<table>.weight`, a leaf that every rank has, to the other tiles of the table."""
        for table in self._sharded_tables:
            if len(table.tiles) > 1:
                first, *others = table.leaves()
                for leaf in others:
                    if leaf.requires_grad != first.requires_grad:
                        leaf.requires_grad_(first.requires_grad)

    def _accum_dtype(self) -> torch.dtype:
        dtypes = {leaf.dtype for leaf in self._first_leaves()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @_eager
    def route(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        """Send the ids to the owners of their rows. Collective, on its own channel, so it may run during a backward.

        Raises:
            InputError: the batch of this rank or of another rank (then named) is wrong. Every rank raises. A single
                rank with whole tables routes nothing: there the lookup raises.
        """
        stages = self.exchange.stages(self._accum_dtype())
        try:
            batch, keys = self._batch(features)
        except Exception as error:
            stages.router.refuse(error, self.device)
        routed, there = stages.router(batch, keys), features.device()
        divisors = self._divisors(features)
        made = StreamEvent(there) if there.type == "cuda" else None
        return RoutedFeatures(features, routed, stages, batch.weights, divisors, made)

    def _divisors(self, features: KeyedJaggedTensor) -> Sequence[Tensor | None]:
        """Return per slot the divisors of its bags' sums, applied on the home rank; None where nothing divides."""
        return ()

    def _batch(self, features: KeyedJaggedTensor) -> tuple[RouteInput, list[int]]:
        every = self._checked(features)
        keys = list(features.keys())
        position = {key: k for k, key in enumerate(keys)}
        for slot in self._slots:
            if slot.feature not in position:
                raise InputError(
                    f"{type(self).__name__}: feature '{slot.feature}' of table '{slot.table}' is not in the batch, "
                    f"whose keys are {keys[:20]}; add it (an empty feature has lengths of 0) or drop it from the table."
                )
        own = [position[slot.feature] for slot in self._slots]
        variable = features.variable_stride_per_key()
        if variable and isinstance(self, EmbeddingBagCollection):
            check_samples(type(self).__name__, [slot.feature for slot in self._slots], features)
        batches = features.stride_per_key() if variable else [features.stride()]
        weights = features.weights() if getattr(self, "_is_weighted", False) else None
        if self.exchange.each_id or self.exchange.exact:
            sizes = features.length_per_key()
            bags = [sizes[k] for k in own]
        else:
            bags = [batches[k] if variable else batches[0] for k in own]
        ids, offsets = every[0], features.offsets()
        at = [own[route.slot] for route in self.exchange.layout.routes]
        if len(every) > 1:
            # Ids were clamped to tables of several sizes: concatenate one copy of the batch per size.
            count = ids.numel()
            ids = torch.cat(every)
            offsets = torch.cat([offsets[:1], *(offsets[1:] + i * count for i in range(len(every)))])
            weights = None if weights is None else torch.cat([weights] * len(every))
            batches = (batches if variable else batches * len(keys)) * len(every)
            at = [
                key + self._sizes[route.slot] * len(keys)
                for key, route in zip(at, self.exchange.layout.routes, strict=True)
            ]
        return RouteInput(ids, offsets, weights, batches, bags, self._facts()), at

    def _facts(self) -> LookupFacts:
        """Return the facts that must be equal on all ranks; if they differ, no rank routes."""
        self._follow_first_leaves()
        exchange, tables, leaves = self.exchange, self._sharded_tables, self._first_leaves()
        training = bytes(
            [
                0 if not leaf.requires_grad else TRAINED | ATTACHED * _attached(table, leaf)
                for leaf, table in zip(leaves, tables, strict=True)
            ]
        )
        names, trains = tuple(self._tables), torch.is_grad_enabled() and any(training)
        rules: dict[str, SharedParamGroup] = {}
        for name, table, word in zip(names, tables, training, strict=True) if trains else ():
            if word & ATTACHED and table.rows.group is not None:
                rules[name] = table.rows.group
        return LookupFacts(exchange.number, exchange.name, names, trains, training, rules)

    def _is_current(self, routed: RoutedFeatures) -> bool:
        """Return True if tiling and accumulation dtype have not changed since this batch was routed."""
        return self.exchange.made(routed.stages) and routed.stages.router.wide == self._accum_dtype()

    @_eager
    def lookup(self, routed: RoutedFeatures) -> LookedUpBatch:
        """Read and pool the rows that this rank holds, and send them to their homes. Collective.

        A batch is routed again, on every rank, if the tables were resharded (`reshard`) or became float64 since it
        was routed.
        """
        if not self._is_current(routed):
            routed.behind()
            routed = self.route(routed.wait().features)
        routed.behind()
        if self.exchange.teams is not None and self.exchange.teams.apart:
            for rows in self._rows():
                rows.arrive()
        combiner, grad_enabled = routed.stages.combiner, torch.is_grad_enabled()
        if grad_enabled:
            # Every rank checks all tables, so that either all ranks raise or none.
            cached = [table.rows for table in self._sharded_tables if table.rows.cache is not None]
            check_trained(cached, range(len(cached)))
        reader = None
        if routed.routed.weights_need_grad:
            bare = [table.tile_rows[0] for table in self._sharded_tables if not table.tiles]
            reader = combiner.reader(routed.routed.wait(), self._rows(), bare)
        looked = combiner.lookup(routed.routed, self._rows(), self._leaves(), updates=grad_enabled)
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
        if not self._is_current(routed):
            return routed
        routed.behind()
        rows = self._rows()
        if any(own.cache is not None for own in rows):
            routed.stages.combiner.prefetch(routed.routed, rows)
        if routed.made is not None:
            routed.routed.wait()
            routed = replace(routed, made=StreamEvent(routed.made.stream.device))
            self._order_routed(routed)
        return routed

    def _order_routed(self, routed: RoutedFeatures) -> None:
        """Sort a batch's rows on their owners, ahead of its update."""
        if torch.is_grad_enabled():
            self._follow_first_leaves()
            trained = [leaf.requires_grad for leaf in self._first_leaves()]
            routed.stages.combiner.order(routed.routed, self._sinks_of_leaves(), trained)

    def _sinks_of_leaves(self) -> list[int]:
        """Return per leaf the handle of the sink of its gradients; -1: a dense `.grad`, or no gradient."""
        return [
            rows.handle if rows.takes_gradients and leaf.requires_grad and rows.leaf is leaf else -1
            for rows, leaf in zip(self._rows(), self._leaves(), strict=True)
        ]

    def _leaves(self) -> list[nn.Parameter]:
        """Return the leaves, in the order in which the layout lists the rectangles that this rank holds."""
        return [
            leaf
            for table in self._sharded_tables
            for leaf, _ in zip(table.leaves(), table.tiles, strict=False)
        ]

    def _rows(self) -> list[Any]:
        return [
            rows
            for table in self._sharded_tables
            for rows, _ in zip(table.tile_rows, table.tiles, strict=False)
        ]

    def _flat(self, looked: LookedUpBatch, output: Output) -> Tensor:
        """Return the flat output, differentiable."""
        batch = looked.batch
        if not self.exchange.made(batch.stages):
            raise ConfigError(
                f"{type(self).__name__}: the tables were resharded between this batch's lookup and its combine; "
                "reshard between two steps, and look the batch up again."
            )
        self._follow_first_leaves()
        leaves, sinks = self._leaves(), self._sinks_of_leaves()
        first = self._first_leaves()
        trained = [leaf.requires_grad for leaf in first]
        wants = any(trained) or batch.routed.weights_need_grad
        travels = batch.stages.router.weighted
        combiner = batch.stages.combiner
        return combine(
            combiner,
            looked.looked,
            output,
            self._gradients(combiner, leaves, sinks, first, trained),
            self.exchange.anchor if wants else None,
            batch.sample_weights if travels else None,
        )

    def _gradients(
        self, combiner: RowExchange, leaves: list[nn.Parameter], sinks: list[int], first: list[nn.Parameter],
        trained: list[bool],
    ) -> Gradients:  # fmt: skip
        tables = self._sharded_tables
        held = [t for t, table in enumerate(tables) for _ in table.tiles]
        bare = [t for t, table in enumerate(tables) if not table.tiles]
        attached = [
            trains and _attached(table, leaf)
            for trains, table, leaf in zip(trained, tables, first, strict=True)
        ]
        guarded = [
            (s, dtype)
            for s, t, dtype in self.exchange.column_cut
            if attached[t] and _is_elementwise(tables[t])
        ]
        exchange = self.exchange
        return Gradients(
            lambda: self.exchange is exchange,
            leaves,
            [first[t] for t in bare],
            held + bare,
            sinks,
            trained,
            attached,
            guarded,
            functools.partial(self._dense_grads, combiner, leaves, sinks),
            self._rows(),
        )

    def _dense_grads(
        self, combiner: RowExchange, leaves: list[nn.Parameter], sinks: list[int], record: GradientRecord
    ) -> dict[int, Tensor]:
        """Return the gradients of the leaves that have no optimizer attached."""
        wanted = [i for i, leaf in enumerate(leaves) if sinks[i] == -1 and leaf.requires_grad]
        if not wanted:
            return {}
        owners = [rows.peers.replicas for rows in self._rows()]
        return dense_grads(
            self.exchange.group,
            leaves,
            owners,
            combiner.leaf_order,
            wanted,
            record,
            exact=self.exchange.exact,
            teams=self.exchange.teams,
        )


class ShardedEmbeddingBagCollection(ShardedCollection, EmbeddingBagCollection):
    """`EmbeddingBagCollection` whose rows are sharded over ranks."""

    @_eager
    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> KeyedTensor:
        """Return the unsharded module's output for this rank's batch; `features` may be routed already."""
        routed = features if isinstance(features, RoutedFeatures) else self.route(features)
        return self.combine(self.lookup(routed))

    @_eager
    def combine(self, looked: LookedUpBatch) -> KeyedTensor:
        """Return the unsharded module's output for this rank's batch."""
        features = looked.batch.features
        dtype = self._dtype(self._first_leaves())
        variable = features.variable_stride_per_key()
        position = {key: k for k, key in enumerate(features.keys())}
        own = [position[slot.feature] for slot in self._slots]
        batches = features.stride_per_key() if variable else [features.stride()] * len(position)
        bags = [batches[k] for k in own]
        if self.exchange.exact:
            flat = self._pool_at_home(looked, own, bags, variable)
        else:
            output = pooled_output(self._dims, bags, not variable, list(looked.batch.divisors))
            flat = self._flat(looked, output)
        flat = flat.to(dtype)
        if not variable:
            size = features.stride()
            return KeyedTensor.from_columns(self._columns, flat.view(size, sum(self._dims)))
        bag_of = sample_bags(features)  # checked before the batch was routed
        parts = flat.split([count * dim for count, dim in zip(bags, self._dims, strict=True)])
        blocks = [
            part.view(count, dim)[bag_of[slot.feature]]
            for part, count, dim, slot in zip(parts, bags, self._dims, self._slots, strict=True)
        ]
        return KeyedTensor.from_columns(self._columns, torch.cat(blocks, dim=1))

    def _divisors(self, features: KeyedJaggedTensor) -> Sequence[Tensor | None]:
        if self.exchange.exact or not any(slot.mean for slot in self._slots):
            return [None] * len(self._slots)
        position = {key: k for k, key in enumerate(features.keys())}
        own = [position[slot.feature] for slot in self._slots]
        lengths = features.lengths().clamp(min=1).to(self._accum_dtype())
        starts = [0]
        strides = (
            features.stride_per_key()
            if features.variable_stride_per_key()
            else [features.stride()] * len(features.keys())
        )
        for stride in strides:
            starts.append(starts[-1] + stride)
        return [
            lengths[starts[k] : starts[k + 1]] if slot.mean else None
            for k, slot in zip(own, self._slots, strict=True)
        ]

    def _pool_at_home(
        self, looked: LookedUpBatch, own: Sequence[int], bags: Sequence[int], variable: bool
    ) -> Tensor:
        """Pool unpooled rows on the home rank, in the unsharded order (exact mode)."""
        features = looked.batch.features
        sizes = features.length_per_key()
        counts = [sizes[k] for k in own]
        output = pooled_output(self._dims, counts, False, [None] * len(own))
        flat = self._flat(looked, output)
        rows = [
            block.view(count, dim)
            for block, count, dim in zip(
                flat.split([c * d for c, d in zip(counts, self._dims, strict=True)]),
                counts,
                self._dims,
                strict=True,
            )
        ]
        weights = features.weights() if self._is_weighted else None
        starts = key_starts(features)
        ids = torch.arange(features.values().shape[0], device=flat.device)
        key_N = torch.ops.tilerec.segment_ids(starts, ids.shape[0])
        slots = list(range(len(own)))
        batches = features.stride_per_key() if variable else [features.stride()]
        out, _ = torch.ops.tilerec.pooled_lookup(
            rows, self._no_sinks, ids - starts[key_N], features.offsets(), weights, slots,
            list(own), [int(slot.mean) for slot in self._slots], batches, self._accum_dtype(),
            ",".join(f"{slot.feature}@{slot.table}" for slot in self._slots),
        )  # fmt: skip
        if variable and len(batches) == 1:  # one key: the op treated the batch as uniform
            out = torch.cat([part.reshape(-1) for part in out.split(self._dims, dim=1)])
        return out.reshape(-1)


class ShardedEmbeddingCollection(ShardedCollection, EmbeddingCollection):
    """`EmbeddingCollection` whose rows are sharded over ranks."""

    @_eager
    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> dict[str, JaggedTensor]:
        """Return the unsharded module's output for this rank's batch; `features` may be routed already."""
        routed = features if isinstance(features, RoutedFeatures) else self.route(features)
        return self.combine(self.lookup(routed))

    @_eager
    def combine(self, looked: LookedUpBatch) -> dict[str, JaggedTensor]:
        """Return the unsharded module's output for this rank's batch."""
        features = looked.batch.features
        sizes = features.length_per_key()
        position = {key: k for k, key in enumerate(features.keys())}
        counts = [sizes[position[slot.feature]] for slot in self._slots]
        output = pooled_output(self._dims, counts, False, [None] * len(counts))
        flat = self._flat(looked, output).to(self._dtype(self._first_leaves()))
        parts = flat.split([count * dim for count, dim in zip(counts, self._dims, strict=True)])
        results = {}
        for slot, part, count in zip(self._slots, parts, counts, strict=True):
            feature = features[slot.feature]
            results[slot.name] = JaggedTensor(
                part.view(count, slot.dim),
                feature.values() if self._need_indices else None,
                feature.lengths(),
                feature.offsets(),
            )
        return results


def _attached(table: ShardedTable, leaf: nn.Parameter) -> bool:
    """Return True if the backward updates the table. A weight swapped in by torch.func.functional_call has no sink."""
    return table.rows.takes_gradients and table.rows.leaf is leaf


def _wire_dtype(name: str) -> torch.dtype:
    """Return the dtype whose range limits the values that a wire format can carry."""
    dtype = codec(name).wire_dtype
    return dtype if dtype is not None and dtype.is_floating_point else torch.float32


def _is_elementwise(table: ShardedTable) -> bool:
    """Return True if the attached rule is element-wise: owners of a row's columns then exchange no sums."""
    spec = table.rows.spec
    return spec is not None and not spec.phases


def shard_collection(
    module: TableCollection, tilings: Mapping[str, Tiling], group: Group, route_group: Group, topology: Topology, *,
    device: torch.device | str | None = None, exact: bool = False, fan_in: Mapping[str, float] | None = None,
    wires: Mapping[str, Wire] | None = None, teams: ReplicaGroups | None = None,
    memory: dict[str, list[Tensor]] | None = None, caches: Mapping[str, RowCache] | None = None, name: str = "",
) -> None:  # fmt: skip
    """Convert a collection into this rank's part of a sharded one, in place.

    All ranks shard the collections of one `route_group` in the same order.

    Args:
        tilings: tiling of every table.
        group, route_group: two channels over the same ranks.
        device: device of the tiles of tables on meta; other tables stay on their device. None: CPU.
        exact: pool on the home rank and sum in fixed blocks, so that no bit depends on the tiling. Sends more bytes.
        fan_in: expected ids per bag, for tables where it is known; decides whether sums inside a host save bytes.
        wires: wire formats of tables' rows and gradients; default: the accumulation dtype. Sums inside a host are
            always sent in the accumulation dtype.
        teams: set if the ranks form several teams, each of which holds every table; None: one team.
        memory: result of `initialized_memory`; None: allocated here.
        caches: for tables whose tiles are in host memory: the cache that each of their tiles gets a copy of.
        name: path of the collection in the model, for errors; "": errors list its tables.

    Raises:
        ConfigError: `exact` with a wire that rounds.
    """
    tables = module._tables
    names = list(tables)
    for table_name, wire in (wires or {}).items():
        if exact and wire != Wire():
            raise ConfigError(
                f"Table '{table_name}': exact=True needs the same bits under every plan, and its wire {wire} rounds; "
                "leave out one of them."
            )
    each_id = isinstance(module, EmbeddingCollection)
    # An unpooled id has one owner, so there is nothing to add up inside a host.
    bags = {} if each_id or exact else dict(fan_in or {})
    likely = 1.0 if each_id or exact else 2.0
    layouts = [
        TableLayout(own, tilings[own], bags.get(own, likely), (wires or {}).get(own, Wire())) for own in names
    ]
    exchange = Exchange(
        group, route_group, topology, layouts,
        [SlotRead(names.index(slot.table), slot.feature) for slot in module._slots],
        weighted=getattr(module, "_is_weighted", False), each_id=each_id, exact=exact, teams=teams,
        name=_collection_name(name, names),
    )  # fmt: skip
    caches = caches or {}
    places = _memory(module, tilings, group.rank, device, hosted=set(caches)) if memory is None else memory
    for own, table in tables.items():
        if not isinstance(table, ShardedTable):
            written = memory is not None and has_pending_init(table)
            shard_table(table, tilings[own], group, topology, places[own], exact, teams, written=written)
            if own in caches:
                for rows in cast(ShardedTable, table).tile_rows:
                    rows.cache = copy.copy(caches[own])
        elif table.tiling != tilings[own]:
            raise ConfigError(
                f"Table '{own}' is sharded already, with another collection that it is tied to, and with another "
                "tiling; give both the same tiling."
            )
    module.__class__ = ShardedEmbeddingCollection if each_id else ShardedEmbeddingBagCollection
    cast(ShardedCollection, module).exchange = exchange
    exchange.enter()
    module._renew_sinks()


def _collection_name(name: str, tables: Sequence[str]) -> str:
    """Return the collection's name in errors: `name`, or a list of its tables."""
    if name:
        return f"'{name}'"
    return f"the collection of {', '.join(map(repr, tables[:3]))}{', …' if len(tables) > 3 else ''}"


def has_pending_init(table: Table) -> bool:
    """Return True if a user's `init_fn` has yet to fill the table's values."""
    return table.weight.is_meta and table.config.init_fn is not None


@torch.no_grad()
def initialized_memory(
    module: TableCollection, tilings: Mapping[str, Tiling], rank: int, device: torch.device | None, seen: Set[int],
    hosted: Set[str] = frozenset(),
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Return the memory of a rank's tiles by table, for `shard_collection`, filled where the user gave an `init_fn`.

    Args:
        seen: `id` of the rows of tables that an earlier collection shares: these get their memory there.
        hosted: tables in host memory.
    """
    memory = _memory(module, tilings, rank, device, seen, hosted)
    for name, table in module._tables.items():
        if has_pending_init(table) and name in memory:
            held = [tile for tile in rectangles(tilings[name]) if rank in tile.owners]
            for tile, own in zip(held, memory[name], strict=False):
                if own.numel():
                    fill_initial(own, table.config, table.rows.place.key, tile.r0, tile.c0)
    return memory


def _memory(
    module: TableCollection, tilings: Mapping[str, Tiling], rank: int, device: torch.device | str | None,
    seen: Set[int] = frozenset(), hosted: Set[str] = frozenset(),
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Return the memory of this rank's tiles, side by side in storages of one dtype and device.

    A large table has its own storage, so its memory is freed when it moves. Small tables share storages of a few MiB,
    each of which is freed when all its tables have moved.
    """
    shapes: dict[tuple[torch.dtype, torch.device, str], list[tuple[str, tuple[int, int]]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, table in module._tables.items():
        if (
            isinstance(table, ShardedTable) or id(table.rows) in seen
        ):  # another collection that shares the table provides the memory
            continue
        weight, tiling = table.weight, tilings[name]
        where = weight.device if not weight.is_meta else torch.device(device or "cpu")
        if name in hosted:
            where = torch.device("cpu")
        held = [(t.r1 - t.r0, t.c1 - t.c0) for t in rectangles(tiling) if rank in t.owners]
        own = held or [(0, tiling.dim)]
        size = sum(rows * width for rows, width in own) * weight.element_size()
        apart = size >= OWN_STORAGE_FROM_BYTES
        filled[weight.dtype, where] = filled.get((weight.dtype, where), 0) + size * (not apart)
        shared = f"\0{filled[weight.dtype, where] // SHARED_STORAGE_BYTES}"  # a name that no table has
        key = (weight.dtype, where, name if apart else shared)
        shapes.setdefault(key, []).extend((name, shape) for shape in own)
    places: dict[str, list[Tensor]] = {}
    for (dtype, where, _), group in shapes.items():
        try:
            memory = flat_memory([shape for _, shape in group], dtype, where)
        except RuntimeError as error:
            here = sorted({name for name, _ in group} & set(hosted))
            if not here:
                raise
            size = sum(rows * width for _, (rows, width) in group) * dtype.itemsize
            raise ConfigError(
                f"Table '{here[0]}': no host memory for {size / 2**30:.1f} GiB of this rank's rows of {here}, which "
                "the plan places there behind caches; place them on more hosts, or on fewer ranks of each."
            ) from error
        for (name, _), own_memory in zip(group, memory, strict=True):
            places.setdefault(name, []).append(own_memory)
    return places
