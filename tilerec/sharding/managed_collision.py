"""Managed collision over many ranks: ids travel to the owners of their buckets, and row numbers travel back.

Nouns
  owner    of a bucket: rank r has buckets [c_r, c_r+1) of a table, contiguous whole ones, as even as they come
  home     the rank whose batch it is
  holder   a rank that has a tile with some row: it is told when the row loses its id

    header   home -> owner    how many ids of each feature, the clock, and flags                 (the host waits)
    ids      home -> owner    feature by feature, in the order of the batch
             owner            puts them in the order (feature, home, position), that of the global batch, and maps them
    rows     owner -> home    row numbers, and to each holder how many rows lost their id        (the host waits)
    evicted  owner -> holder  those rows; left out where no rank evicted any

The map is the one that a single process makes of the global batch: no bit of it depends on the number of ranks. It does
not know how tables are cut, and tables do not know of it: row numbers go through their ordinary exchange.

Legend: W ranks, T tables, F features of all tables, N ids of this batch, R ids received.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, cast, final

import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.buckets import bucket_cuts
from tilerec.modules.id_counts import IdPlace, IdStats, Summary
from tilerec.modules.managed_collection import ManagedCollisionCollection, TableIds, with_rows
from tilerec.modules.managed_collision import ManagedCollisionModule, Resized, StateView
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddings,
)
from tilerec.modules.table import Table
from tilerec.ops.hash import zch_buckets
from tilerec.sharding.embedding import LookedUp, RoutedFeatures, ShardedCollection
from tilerec.sharding.logical import Cover, Logical, Piece
from tilerec.sharding.state import load, shown
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.tile import Rectangle, Tile, Tiling

_eager = torch._disable_dynamo

Ranges = tuple[tuple[int, int], ...]
"""Rows that a rank holds: ascending, apart from each other."""

_FLAGS = 2
_REFUSED = 1
_FAILED = -1


@final
class BucketsView(StateView):
    """The state of a table's buckets as logical tensors: rank r holds buckets [cuts[r], cuts[r + 1])."""

    def __init__(self, group: Group, cuts: Sequence[int]) -> None:
        self.group, self.cuts = group, tuple(cuts)

    def logical(self, own: Tensor, per_bucket: int) -> Logical:
        """Args: own: this rank's part, whole buckets."""
        width = own.shape[1] if own.dim() == 2 else 1
        tiles = [
            Tile(first * per_bucket, last * per_bucket, 0, width, (rank,))
            for rank, (first, last) in enumerate(itertools.pairwise(self.cuts))
        ]
        rows = self.cuts[-1] * per_bucket
        cover = Cover.of_cells((rows, width), tiles) if own.dim() == 2 else Cover.of_rows(rows, tiles)
        return Logical(cover, (Piece(self.group.rank, own),), self.group, own.new_empty(0))

    def show(self, own: Tensor, per_bucket: int) -> Tensor:
        return shown(self.logical(own, per_bucket))

    def take(self, own: Tensor, per_bucket: int, value: Tensor) -> None:
        load(self.logical(own, per_bucket), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> BucketsView:
        return self  # a copied module talks through the same group


class Sent(NamedTuple):
    """A batch's ids, in the order in which they travel."""

    order_N: Tensor  # of each id sent, its place among the batch's ids
    counts: list[list[int]]  # [W][F]
    heard: list[list[int]]  # [W], headers


class IdExchange:
    """What the ranks say to each other about the ids of one collection.

    Args:
        group: the ranks whose batches make the global batch; its calls are made in the order of `route`'s.
        modules: by table.
        features: of each table, in the order in which their ids take rows.
        tables: what holds the rows; their tilings say who is told of evictions, as they are at the time.
        member_of: of each rank of the group, its rank in these tilings.
    """

    def __init__(
        self, group: Group, modules: Mapping[str, ManagedCollisionModule], features: Mapping[str, Sequence[str]],
        tables: Mapping[str, Table], member_of: Callable[[int], int],
    ) -> None:  # fmt: skip
        self.group, self.modules, self.tables, self.member_of = group, dict(modules), dict(tables), member_of
        self.features = [(t, name) for t, table in enumerate(modules) for name in features[table]]
        self.spans: list[tuple[int, int]] = []  # of each table among the features
        at = 0
        for table in modules:
            self.spans.append((at, at + len(features[table])))
            at += len(features[table])
        self.cuts = [bucket_cuts(module.buckets(), group.size) for module in modules.values()]
        self._tilings: list[Tiling | None] = []
        self._holders: list[list[Ranges]] = []

    def holders(self) -> list[list[Ranges]]:
        """Per rank and table, the rows it holds; all of them where nobody says."""
        tilings = [getattr(self.tables.get(table), "tiling", None) for table in self.modules]
        if not self._holders or any(a is not b for a, b in zip(tilings, self._tilings, strict=True)):
            everything: Ranges = ((0, 2**62),)
            self._tilings = tilings
            self._holders = [
                [
                    everything if tiling is None else row_ranges(tiling.tiles_of(self.member_of(rank)))
                    for tiling in tilings
                ]
                for rank in range(self.group.size)
            ]
        return self._holders

    def recut(self, table: str, cuts: Sequence[int]) -> None:
        """Give ranks other buckets of a table; what is kept of them travels. All ranks call it."""
        module, t = self.modules[table], list(self.modules).index(table)
        before, after = BucketsView(self.group, self.cuts[t]), BucketsView(self.group, cuts)
        rank = self.group.rank
        moves = module.take_over(module._buckets.cut(cuts[rank], cuts[rank + 1]), after)
        for made, per_bucket, old in moves.values():
            # As 64-bit words: backends do not know every type of whole numbers.
            words = torch.zeros_like(made, dtype=torch.int64)
            source = before.logical(old.to(torch.int64), per_bucket)
            after.logical(words, per_bucket).load(source)
            made.copy_(words)
        self.cuts[t] = tuple(cuts)

    def refuse(self, failure: Exception) -> NoReturn:
        """Tell every rank that this one's batch cannot be mapped, then raise `failure`."""
        width = _FLAGS + len(self.modules) + len(self.features)
        header = torch.zeros(self.group.size * width, dtype=torch.int64, device=self.group.device)
        header[::width] = _REFUSED
        self._all_to_all("id header", header, [width] * self.group.size, [width] * self.group.size)
        raise failure

    def __call__(self, batch: TableIds) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows by feature (-1: dropped), and by table the rows held here that lost their id.

        Raises:
            InputError: another rank refused its batch, or trains where this one evaluates; nothing has changed.
        """
        sent, received = self._send(batch)
        received_counts = [header[_FLAGS + len(self.modules) :] for header in sent.heard]
        ordered = _reordered(received, received_counts)
        failure: Exception | None = None
        try:
            rows_R, evicted = self._map(ordered, received_counts, sent.heard[0])
        except Exception as error:  # the others wait for rows
            failure, rows_R = error, torch.full_like(ordered, -1)
            evicted = [ordered.new_empty(0)] * len(self.modules)
        turned = [list(column) for column in zip(*received_counts, strict=True)]
        home_rows = _reordered(rows_R, turned) if turned else rows_R
        return self._answer(batch, sent, home_rows, received_counts, evicted, failure)

    # ------------------------------------------------------------------------------------------------------- home

    def _send(self, batch: TableIds) -> tuple[Sent, Tensor]:
        """Ids to the owners of their buckets."""
        group, count = self.group, len(self.features)
        owners, ids = [], []
        for t, (table, module) in enumerate(self.modules.items()):
            cuts = torch.tensor(self.cuts[t][1:], device=batch[table].device)
            bucket_N = zch_buckets(batch[table], module.buckets())
            owners.append(torch.searchsorted(cuts, bucket_N, right=True))
            ids.append(batch[table])
        owner_N, ids_N = torch.cat(owners), torch.cat(ids)
        sizes = torch.tensor([batch.sizes[name] for _, name in self.features], device=ids_N.device)
        feature_N = torch.repeat_interleave(sizes, output_size=ids_N.numel())
        counts_WF = torch.bincount(owner_N * count + feature_N, minlength=group.size * count).view(
            group.size, count
        )
        writes = sum(module.writes << t for t, module in enumerate(self.modules.values()))
        said = [0, writes % (1 << 62), *(module.now() for module in self.modules.values())]
        head = torch.tensor(said, device=ids_N.device).expand(group.size, len(said))
        width = len(said) + count
        heard_WH = self._all_to_all(
            "id header", torch.cat([head, counts_WF], dim=1).view(-1), [width] * group.size, [width] * group.size
        )  # fmt: skip
        both = torch.cat([heard_WH.view(group.size, width), counts_WF], dim=1).tolist()
        heard, counts = [row[:width] for row in both], [row[width:] for row in both]
        self._check(heard)
        order_N = torch.sort(owner_N, stable=True).indices
        received = self._all_to_all(
            "ids to map", ids_N[order_N], [sum(row[len(said) :]) for row in heard], [sum(row) for row in counts]
        )  # fmt: skip
        return Sent(order_N, counts, heard), received

    def _check(self, heard: list[list[int]]) -> None:
        """Every rank hears every header, so all raise or none."""
        refused = [rank for rank, header in enumerate(heard) if header[0] & _REFUSED]
        if refused:
            raise InputError(
                f"Rank {refused[0]} refused its batch (its own error says why), so no rank maps this step; see the "
                "error of that rank."
            )
        modes = [header[1] for header in heard]
        if len(set(modes)) > 1:
            rank = next(rank for rank, mode in enumerate(modes) if mode != modes[0])
            t = next(t for t in range(len(self.modules)) if (modes[0] ^ modes[rank]) >> t & 1)
            words = ["trains" if modes[r] >> t & 1 else "evaluates" for r in (0, rank)]
            raise InputError(
                f"Table '{list(self.modules)[t]}': rank 0 {words[0]} and rank {rank} {words[1]}; call train() or "
                "eval() on all ranks alike."
            )

    def _answer(
        self, batch: TableIds, sent: Sent, home_rows: Tensor, received_counts: list[list[int]], evicted: list[Tensor],
        failure: Exception | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
        """Rows go home; rows that lost their id go to their holders."""
        group, tables = self.group, len(self.modules)
        told = [
            [_within(rows, ranges) for ranges, rows in zip(own, evicted, strict=True)]
            for own in self.holders()
        ]
        total = sum(rows.numel() for rows in evicted) if failure is None else _FAILED
        own = home_rows.split([sum(counts) for counts in received_counts])
        message = torch.cat(
            [
                part
                for rank in range(group.size)
                for part in (
                    own[rank],
                    home_rows.new_tensor([total, *(rows.numel() for rows in told[rank])]),
                )
            ]
        )
        tail = 1 + tables
        ins = [sum(counts) + tail for counts in sent.counts]
        parts = self._all_to_all(
            "mapped rows", message, ins, [sum(counts) + tail for counts in received_counts]
        ).split(ins)
        tails = torch.stack([part[-tail:] for part in parts]).tolist()
        if failure is not None:
            raise failure
        failed = [rank for rank, words in enumerate(tails) if words[0] == _FAILED]
        if failed:
            raise InputError(
                f"Rank {failed[0]} could not map the ids of its buckets (its own error says why), so no rank goes on "
                "with this batch; see the error of that rank."
            )
        back = torch.cat([part[: part.numel() - tail] for part in parts])
        rows_N = torch.empty_like(back)
        rows_N[sent.order_N] = back
        sizes = [batch.sizes[name] for _, name in self.features]
        rows = {name: part for (_, name), part in zip(self.features, rows_N.split(sizes), strict=True)}
        if not any(words[0] for words in tails):
            return rows, {}
        return rows, self._tell(told, tails, home_rows)

    def _tell(self, told: list[list[Tensor]], tails: list[list[int]], like: Tensor) -> dict[str, Tensor]:
        """Rows that lost their id, by table, of those held here."""
        outs = [sum(rows.numel() for rows in own) for own in told]
        heard = self._all_to_all(
            "evicted rows", torch.cat([rows for own in told for rows in own]), [sum(words[1:]) for words in tails], outs
        )  # fmt: skip
        pieces = heard.split([n for words in tails for n in words[1:]])
        tables = len(self.modules)
        return {table: torch.cat(pieces[t::tables]) for t, table in enumerate(self.modules)}

    # ------------------------------------------------------------------------------------------------------ owner

    def _map(self, ids_R: Tensor, counts: list[list[int]], first: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Rows of the ids received, in the order of the global batch; and per table the rows that lost their id."""
        sizes = [sum(column) for column in zip(*counts, strict=True)]
        rows, evicted, at = [], [], 0
        for t, module in enumerate(self.modules.values()):
            own = sizes[slice(*self.spans[t])]
            mapped = module.map(ids_R[at : at + sum(own)], own, first[_FLAGS + t])
            at += sum(own)
            rows.append(mapped.rows_N)
            evicted.append(mapped.evicted_M)
        return torch.cat(rows), evicted

    def _all_to_all(self, name: str, out: Tensor, ins: list[int], outs: list[int]) -> Tensor:
        into = torch.empty(sum(ins), dtype=out.dtype, device=out.device)
        return self.group.all_to_all(name, into, out.contiguous(), ins, outs).wait()


def _reordered(values: Tensor, counts: list[list[int]]) -> Tensor:
    """Pieces that lie [i][j] with sizes `counts[i][j]`, laid [j][i]."""
    pieces = values.split([n for row in counts for n in row])
    width = len(counts[0])
    if not pieces or not width:
        return values
    return torch.cat([piece for j in range(width) for piece in pieces[j::width]])


def _within(rows_M: Tensor, ranges: Ranges) -> Tensor:
    """Those of the rows that lie in the ranges."""
    if not rows_M.numel() or not ranges:
        return rows_M[:0]
    inside = torch.zeros_like(rows_M, dtype=torch.bool)
    for r0, r1 in ranges:
        inside |= (rows_M >= r0) & (rows_M < r1)
    return rows_M[inside]


def row_ranges(tiles: Sequence[Tile | Rectangle]) -> Ranges:
    """The rows of some rectangles, joined where they meet."""
    joined: list[tuple[int, int]] = []
    for r0, r1 in sorted((tile.r0, tile.r1) for tile in tiles if tile.r0 < tile.r1):
        if joined and r0 <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], r1)
        else:
            joined.append((r0, r1))
    return tuple(joined)


# ------------------------------------------------------------------------------------------------------- the modules


class ShardedManagedCollisionCollection(ManagedCollisionCollection):
    """A `ManagedCollisionCollection` whose buckets lie on many ranks. Made in place by `shard_managed_collision`."""

    exchange: IdExchange

    @_eager
    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """As the unsharded one's of the global batch, for this rank's part of it. All ranks call it.

        `evict()` afterwards has the rows that are held here.
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
        return with_rows(features, rows)

    def stats(self) -> dict[str, IdStats]:
        own = {table: module.summary() for table, module in self.modules_by_table.items()}
        heard = cast("list[dict[str, Summary]]", self.exchange.group.all_gather_object(own))
        return {
            table: module.stats_of([parts[table] for parts in heard])
            for table, module in self.modules_by_table.items()
        }

    def inspect(self, feature: str, id_: int) -> IdPlace:
        group, failure, place = self.exchange.group, None, None
        try:
            module = self.modules_by_table[self.table_of(feature)]
            if module.holds(id_):
                place = replace(module.inspect(feature, id_), rank=group.rank)
        except InputError as error:
            failure = error
        places = cast("list[IdPlace | None]", group.all_gather_object(place))
        if failure is not None:
            raise failure
        return next(found for found in places if found is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedManagedCollisionCollection:
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        kept = {name: value for name, value in self.__dict__.items() if name != "exchange"}
        twin.__dict__.update(copy.deepcopy(kept, memo))
        own = self.exchange
        tables = {name: copy.deepcopy(table, memo) for name, table in own.tables.items()}
        twin.exchange = IdExchange(
            own.group, twin.modules_by_table, twin._table_features, tables, own.member_of
        )
        return twin


@dataclass(frozen=True)
class RoutedManaged:
    """A batch whose ids are rows, on their way. `number` counts the batches of its module."""

    number: int
    remapped: KeyedJaggedTensor
    routed: RoutedFeatures

    def wait(self) -> RoutedManaged:
        """Rows have arrived at their holders."""
        self.routed.wait()
        return self


@dataclass(frozen=True)
class LookedUpManaged:
    """A batch whose rows are on their way home."""

    remapped: KeyedJaggedTensor
    looked: LookedUp


class ShardedManagedCollisionEmbeddings(ManagedCollisionEmbeddings):
    """What the two sharded modules share.

    Ids are mapped when a batch is routed, which may be early; rows that lose their id by it are reset when that batch
    is looked up, so that the backward of the batch before still meets the old id's row.
    """

    _routed: int
    _resets: deque[tuple[int, dict[str, Tensor | None]]]

    @_eager
    def route(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> RoutedManaged:
        """Map the ids and send the rows on their way. A collective; see `ShardedCollection.route`."""
        collection = self._managed_collision_collection
        remapped = collection(features, mutate_miss_lengths)
        self._routed += 1
        # Kept also where routing fails: whoever looks up next must not read what an old id learned.
        self._resets.append((self._routed, collection.evict()))
        routed = cast(ShardedCollection, self._embedding_module).route(remapped)
        return RoutedManaged(self._routed, remapped, routed)

    @_eager
    def lookup(self, routed: RoutedManaged) -> LookedUpManaged:
        """Reset the rows that this batch, or one before it, took from others; then look up."""
        while self._resets and self._resets[0][0] <= routed.number:
            self._reset(self._resets.popleft()[1])
        looked = cast(ShardedCollection, self._embedding_module).lookup(routed.routed)
        return LookedUpManaged(routed.remapped, looked)

    def resize(
        self, table: str, zch_size: int | None = None, total_num_buckets: int | None = None
    ) -> Resized:
        """Refused: the plan must know."""
        raise ConfigError(
            f"Table '{table}' is sharded: call tilerec.parallel.resize_ids(model, '{table}', ...) on all ranks, "
            "with the model that was sharded; its plan changes with it."
        )

    def settle(self) -> None:
        """Reset rows that batches took which were routed and never looked up."""
        while self._resets:
            self._reset(self._resets.popleft()[1])

    def _combined(self, looked: LookedUpManaged) -> tuple[Any, KeyedJaggedTensor | None]:
        tables = cast(Any, self._embedding_module)
        return tables.combine(looked.looked), looked.remapped if self._return_remapped_features else None

    def _forward(self, features: Any, mutate: bool) -> tuple[Any, KeyedJaggedTensor | None]:
        routed = features if isinstance(features, RoutedManaged) else self.route(features, mutate)
        return self._combined(self.lookup(routed))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resets": deque(self._resets)}


class ShardedManagedCollisionEmbeddingBagCollection(
    ShardedManagedCollisionEmbeddings, ManagedCollisionEmbeddingBagCollection
):
    """A `ManagedCollisionEmbeddingBagCollection` over many ranks."""

    @_eager
    def forward(
        self, features: KeyedJaggedTensor | RoutedManaged, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor, KeyedJaggedTensor | None]:
        """As the unsharded module's of the global batch; `features` may be routed already. All ranks call it."""
        return self._forward(features, mutate_miss_lengths)

    def combine(self, looked: LookedUpManaged) -> tuple[KeyedTensor, KeyedJaggedTensor | None]:
        """The unsharded module's output for this rank's batch."""
        return self._combined(looked)


class ShardedManagedCollisionEmbeddingCollection(
    ShardedManagedCollisionEmbeddings, ManagedCollisionEmbeddingCollection
):
    """A `ManagedCollisionEmbeddingCollection` over many ranks."""

    @_eager
    def forward(
        self, features: KeyedJaggedTensor | RoutedManaged, mutate_miss_lengths: bool = True
    ) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """As the unsharded module's of the global batch; `features` may be routed already. All ranks call it."""
        return self._forward(features, mutate_miss_lengths)

    def combine(self, looked: LookedUpManaged) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """The unsharded module's output for this rank's batch."""
        return self._combined(looked)


# ---------------------------------------------------------------------------------------------------------- sharding


class IdRanks(NamedTuple):
    """The ranks whose batches make the global batch, where they are more than hold the tables once.

    Args:
        group: all of them; ids are spread over them, and their calls come before those of `route`, in one order.
        member_of: the rank of each of them in the tilings of its tables.
    """

    group: Group
    member_of: Callable[[int], int]


class IdsBelow(NamedTuple):
    """A collection of ids below a module, and what reads its rows; None where it stands alone."""

    collection: ManagedCollisionCollection
    reader: ManagedCollisionEmbeddings | None


def ids_below(module: nn.Module, tables: Collection[nn.Module] | None = None) -> dict[str, IdsBelow]:
    """Every collection of ids below a module, by path.

    Args:
        tables: only those whose tables are among these. None: all.
    """
    readers = {
        id(part.managed_collision_collection): part
        for part in module.modules()
        if isinstance(part, ManagedCollisionEmbeddings)
    }
    found = {
        path: IdsBelow(part, readers.get(id(part)))
        for path, part in module.named_modules()
        if isinstance(part, ManagedCollisionCollection)
    }
    if tables is None:
        return found
    chosen = set(map(id, tables))
    return {
        path: own
        for path, own in found.items()
        if own.reader is not None and id(own.reader.embedding_module) in chosen
    }


def check_ids(found: Mapping[str, IdsBelow], world_size: int) -> None:
    """Raise a `ConfigError` for ids that this many ranks cannot share, or that are shared already."""
    for path, (collection, _) in found.items():
        if isinstance(collection, ShardedManagedCollisionCollection):
            raise ConfigError(f"shard: module '{path}' is sharded already; shard a model once, as a whole.")
        for table, part in collection.modules_by_table.items():
            own = part._buckets
            if own.held != own.count:
                raise ConfigError(
                    f"Table '{table}': its module holds buckets [{own.first}, {own.last}) of {own.count} only; leave "
                    "start_bucket and end_bucket out, sharding cuts them."
                )
            if world_size > own.count:
                raise ConfigError(
                    f"Table '{table}': {own.count} buckets cannot be shared by {world_size} ranks, which hold whole "
                    f"ones; use at least {world_size} buckets (rows a multiple of that), or at most {own.count} ranks."
                )


def described_ids(found: Mapping[str, IdsBelow]) -> dict[str, Any]:
    """What must be the same on every rank, in words."""
    return {
        path: {
            table: {**part.described(), "features": list(collection._table_features[table])}
            for table, part in collection.modules_by_table.items()
        }
        for path, (collection, _) in found.items()
    }


def shard_ids(found: Mapping[str, IdsBelow], over: IdRanks, device: torch.device | str | None = None) -> None:
    """Spread ids over the ranks, in place; the tables they are rows of are in tiles already.

    Args:
        device: of modules on meta.
    """
    group, member_of = over
    for collection, reader in found.values():
        tables = {} if reader is None else reader.embedding_module._tables
        own = {name: tables[name] for name in collection.modules_by_table if name in tables}
        _take_from_rank_0(group, collection)
        for part in collection.modules_by_table.values():
            cuts = bucket_cuts(part.buckets(), group.size)
            part.hold(cuts[group.rank], cuts[group.rank + 1], BucketsView(group, cuts), device)
        collection.__class__ = ShardedManagedCollisionCollection
        cast(ShardedManagedCollisionCollection, collection).exchange = IdExchange(
            group, collection.modules_by_table, collection._table_features, own, member_of
        )
        if reader is None:
            continue
        bags = isinstance(reader, ManagedCollisionEmbeddingBagCollection)
        reader.__class__ = (
            ShardedManagedCollisionEmbeddingBagCollection
            if bags
            else ShardedManagedCollisionEmbeddingCollection
        )
        sharded = cast(ShardedManagedCollisionEmbeddings, reader)
        sharded._routed, sharded._resets = 0, deque()


def full_state_of(module: ManagedCollisionModule, destination: dict[str, Any], prefix: str) -> None:
    """What `state_dict` has of a table's ids, as whole plain tensors. All ranks call it."""
    view = module._view
    for name, (tensor, per_bucket) in module.state_tensors().items():
        whole = view.logical(tensor, per_bucket).full() if isinstance(view, BucketsView) else tensor
        destination[prefix + name] = whole
    destination.update({prefix + name: number for name, number in module.numbers().items()})


def _take_from_rank_0(group: Group, collection: ManagedCollisionCollection) -> None:
    """Where ranks built the model with different ids in it, rank 0's count."""
    if group.size == 1:
        return
    tensors = [
        tensor
        for module in collection.modules_by_table.values()
        if not module.ids.is_meta
        for tensor in (*(found for found, _ in module.state_tensors().values()), module._step)
    ]
    weights = [_digest(tensor) for tensor in tensors]
    digests = group.all_gather_object(weights)
    if all(digest == digests[0] for digest in digests):
        return
    for tensor in tensors:
        if not tensor.numel():
            continue
        # As 64-bit words: backends do not know every type of whole numbers.
        words = tensor.detach().to(torch.int64).contiguous().view(-1)
        if group.rank:
            group.exchange("initial ids", {0: words}, {}).wait()
            tensor.copy_(words.view(tensor.shape).to(tensor.dtype))
        else:
            group.exchange("initial ids", {}, dict.fromkeys(range(1, group.size), words)).wait()


def _digest(tensor: Tensor) -> tuple[int, int]:
    words = tensor.detach().to(torch.int64).reshape(-1)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return int(words.sum()), int((words * (places * 2654435761 | 1)).sum())
