"""`RoutesAhead`: routes batches ahead of their forward, without changes to the model.

    first forward    each sharded collection reports the features that it receives; their place in the batch is found
                     by object identity and learned: (collection, `.sparse_features`)
    later batches    the features at the learned places are routed ahead: `begin`, then `finish`
    their forwards   a collection that receives those very features takes the result; others are routed then

Unsharded collections have no routes. If the pipeline prefetches, their features are learned in the same way, and the
rows of later batches are prefetched by `collection.prefetch`.

A forward is ordinary Python code: it may branch, call a collection twice, or build features itself. Features that are
not in the batch are routed in the forward, as without a pipeline. `report` counts both.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, final

from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.collection import TableCollection
from tilerec.pipelines.batch_in_flight import BatchInFlight
from tilerec.pipelines.batch_structure import (
    Marks,
    Path,
    mapped,
    original_of,
    part_at,
    path_of,
    path_text,
    tensors_of,
)
from tilerec.pipelines.released_ids import ReleasedIds, without_ids
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.exchange import RouteInFlight
from tilerec.sharding.header import header_sizes_of
from tilerec.sharding.managed_collision import ShardedManagedCollisionEmbeddings
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

Collection = ShardedCollection | ShardedManagedCollisionEmbeddings


@dataclass(frozen=True, eq=False)
class LearnedRoute:
    """A call that forwards make: a collection, and the place of its features in the batch."""

    collection: Collection
    path: Path
    options: tuple[Any, ...]  # further arguments of the collection's forward
    rebuilt: bool = False  # the call passes the features' tensors in another object, as a compiled program does


@dataclass(frozen=True)
class RouteReport:
    """Routes of one collection so far.

    Attributes:
        collection: its name in the model.
        paths: places of its features in a batch, as Python writes them.
        ahead: forwards that found their features routed.
        in_forward: forwards that routed their features themselves: the first ones, and those whose features are not
            part of the batch.
        built: of these, the number whose features the model had built itself.
    """

    collection: str
    paths: tuple[str, ...]
    ahead: int
    in_forward: int
    built: int


@dataclass(eq=False)
class _Begun:
    """One route of a batch in flight."""

    learned: LearnedRoute
    features: Any = None
    marks: Marks | None = None
    flight: Any = None  # between `begin_route` and `finish`
    routed: Any = None
    prefetched: bool = False


@final
class RoutesAhead:
    """The learned routes of a model, and the routes of the batches in flight.

    All ranks learn the same routes in the same order, because their forwards make the same calls.
    """

    def __init__(
        self, model: nn.Module, who: str, *, prefetches: bool = False, group: Group | None = None,
        releases_ids: bool = False,
    ) -> None:  # fmt: skip
        """Args:
        prefetches: `prefetch` is called for every batch.
        group: the ranks that exchange the numbers of batches; a batch's first route over these ranks carries its own.
        releases_ids: after `begin`, a batch holds no ids of the features whose routes have begun.
        """
        self._group, self._releases_ids = group, releases_ids
        self._model, self._who, self._prefetches = model, who, prefetches
        self._unsharded: list[TableCollection] = []
        self._prefetched: list[tuple[TableCollection, Path]] = []
        self._learned: list[LearnedRoute] = []
        self._counts: Counter[tuple[int, str]] = Counter()
        self._collections: list[tuple[str, Collection]] = []
        self.find_collections()

    def find_collections(self) -> None:
        """Find the model's sharded collections; called at the start of every pass, as a model may be sharded later."""
        kinds = (ShardedCollection, ShardedManagedCollisionEmbeddings)
        self._collections = [(name, m) for name, m in self._model.named_modules() if isinstance(m, kinds)]
        for _, collection in self._collections:
            if self._shares_ranks(collection):
                header_sizes_of(collection.exchange.route_group).carry_notes()
        known = {id(collection) for _, collection in self._collections}
        if any(id(learned.collection) not in known for learned in self._learned):
            self._learned = []
        if self._prefetches:
            modules = list(self._model.modules())
            self._unsharded = [m for m in modules if isinstance(m, TableCollection) and not isinstance(m, kinds)]
            self._prefetched = [pair for pair in self._prefetched if any(pair[0] is m for m in self._unsharded)]

    # -- stages ------------------------------------------------------------------------------------------------

    def begin(self, batch: BatchInFlight) -> None:
        """Post the headers of the batch's routes. Collective."""
        for learned in self._learned[len(batch.begun) :]:
            if batch.error is not None:
                batch.begun.append(_Begun(learned, flight=self._refused(learned.collection, batch, batch.error)))
                continue
            features = part_at(batch.batch, learned.path)
            begun = _Begun(learned, features)
            batch.begun.append(begun)
            if isinstance(features, KeyedJaggedTensor):  # otherwise the forward decides
                begun.marks = Marks.of(tensors_of(features))
                begun.flight = self._begun(learned.collection, batch, features, learned.options)
        if self._releases_ids and batch.error is None:
            self._release_ids(batch)

    def _release_ids(self, batch: BatchInFlight) -> None:
        """Replace the features of the batch's routes by equal ones without ids. The caller's batch stays as it is."""
        kept = {id(begun.features) for begun in batch.begun if _needs_ids(begun)}
        routes = [begun for begun in batch.begun if id(begun.features) not in kept]
        if not routes:
            return
        without = {id(begun.features): without_ids(begun.features) for begun in routes}
        ids = [begun.features.values() for begun in routes]
        for begun in routes:
            begun.features = without[id(begun.features)]
            begun.flight = replace(begun.flight, features=begun.features)
            begun.marks = None if begun.marks is None else begun.marks.without(ids)
        batch.batch = mapped(batch.batch, lambda leaf: without.get(id(leaf), leaf))
        batch.marks = None if batch.marks is None else batch.marks.without(ids)

    def _carries(self, collection: Collection, batch: BatchInFlight) -> bool:
        """Return True if a route of this collection carries the batch's number to the other ranks."""
        # Ids of managed collision are mapped when a route begins, which takes the number already.
        return batch.unsent and not self.maps_ids and self._shares_ranks(collection)

    def _shares_ranks(self, collection: Collection) -> TypeGuard[ShardedCollection]:
        """Return True if the routes of a collection are over the ranks that exchange the numbers of batches."""
        if self._group is None or not isinstance(collection, ShardedCollection):
            return False
        exchange = collection.exchange
        ranks = exchange.route_group
        return exchange.teams is None and (ranks.size, ranks.rank) == (self._group.size, self._group.rank)

    def _begun(self, collection: Collection, batch: BatchInFlight, features: Any, options: tuple[Any, ...]) -> Any:
        """Begin a route; it carries the number of `batch`, if that is possible and necessary."""
        if not self._carries(collection, batch):
            return collection.begin_route(features, *options)
        assert isinstance(collection, ShardedCollection)
        assert batch.number is not None
        flight = collection.begin_route(features, batch.number)
        batch.carrier = flight.headers
        return flight

    def _refused(self, collection: Collection, batch: BatchInFlight, failure: Exception) -> Any:
        """Refuse to route a batch; as `_begun`."""
        if not self._carries(collection, batch):
            return collection.begin_refused(failure)
        assert isinstance(collection, ShardedCollection)
        assert batch.number is not None
        flight = collection.begin_refused(failure, batch.number)
        batch.carrier = flight.headers
        return flight

    def finish(self, batch: BatchInFlight) -> None:
        """Send the ids of the batch's routes, after `begin` for those that have none yet. Collective."""
        try:
            self.begin(batch)
        except Exception as error:
            batch.error = batch.error or error
        for begun in batch.begun:
            if begun.flight is None:
                continue
            flight, begun.flight = begun.flight, None
            try:
                begun.routed = flight.finish()
            except Exception as error:  # every rank raises; the other routes must end on all of them, too
                batch.error = batch.error or error
                continue
            key = id(begun.learned.collection), id(begun.features)
            batch.routed.setdefault(key, deque()).append(begun)

    def receive(self, batch: BatchInFlight) -> None:
        """Unpack ids of the batch that have arrived, which frees their messages; never blocks."""
        for begun in batch.begun:
            if begun.routed is not None:
                try:
                    begun.routed.receive()
                except Exception as error:
                    batch.error = batch.error or error

    def prefetch(self, batch: BatchInFlight) -> None:
        """Load rows of cached tables, and sort rows for the update, for the batch's lookups. Collective."""
        if batch.error is not None:
            return
        for begun in batch.begun:
            if begun.routed is not None and not begun.prefetched:
                begun.prefetched = True
                begun.routed = begun.learned.collection.prefetch(begun.routed)
        for collection, path in self._prefetched[batch.prefetched :]:
            batch.prefetched += 1
            features = part_at(batch.batch, path)
            if isinstance(features, KeyedJaggedTensor):
                collection.prefetch(features)

    # -- the forward -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def carry(self, following: BatchInFlight | None) -> Iterator[None]:
        """Let the first route of a forward carry the number of the next batch, for pipelines without routes ahead."""

        def route(collection: Collection, features: Any, *options: Any) -> Any:
            if following is None or not self._carries(collection, following):
                return None
            return self._begun(collection, following, features, options).finish()

        try:
            if following is not None and following.unsent:
                for _, collection in self._collections:
                    collection.__dict__["routed_ahead"] = route
            yield
        finally:
            for _, collection in self._collections:
                collection.__dict__.pop("routed_ahead", None)

    @contextlib.contextmanager
    def serve(self, batch: BatchInFlight) -> Iterator[None]:
        """Serve the collections of a forward with the batch's routes, and learn new ones from its calls."""
        calls: list[LearnedRoute] = []

        def routed_ahead(collection: Collection, features: Any, *options: Any) -> Any:
            return self._take(batch, calls, collection, features, options)

        def note(collection: nn.Module, arguments: tuple[Any, ...]) -> None:
            path = path_of(batch.batch, arguments[0]) if arguments else None
            if path is not None and isinstance(collection, TableCollection):
                self._prefetched.append((collection, path))

        noted = [collection for collection, _ in self._prefetched]
        new = [collection for collection in self._unsharded if not any(collection is one for one in noted)]
        hooks = [collection.register_forward_pre_hook(note) for collection in new]
        try:
            for _, collection in self._collections:
                collection.__dict__["routed_ahead"] = routed_ahead
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for _, collection in self._collections:
                collection.__dict__.pop("routed_ahead", None)
            batch.begun.clear()
            batch.routed.clear()
        self._learn(calls)

    def _take(
        self, batch: BatchInFlight, calls: list[LearnedRoute], collection: Collection, features: Any, options: Any
    ) -> Any:  # fmt: skip
        """Return the features as routed, or None."""
        given, features = features, original_of(batch.batch, features)
        waiting = batch.routed.get((id(collection), id(features)))
        if waiting and waiting[0].learned.options == options:
            begun = waiting.popleft()
            if begun.marks is not None and begun.marks.changed():
                raise InputError(
                    f"{self._who}: the features at {path_text(begun.learned.path)} were written to after they were "
                    "routed, which happens before their step; expected features that stay as they are. Write to a "
                    "clone, or prepare the features in the iterator."
                )
            calls.append(begun.learned)
            self._counts[id(collection), "ahead"] += 1
            return begun.routed
        self._counts[id(collection), "in_forward"] += 1
        path = path_of(batch.batch, features)
        if path is None:
            self._counts[id(collection), "built"] += 1
        else:
            calls.append(LearnedRoute(collection, path, options, rebuilt=features is not given))
        return None

    def _learn(self, calls: list[LearnedRoute]) -> None:
        """Add the calls of a forward that exceed the learned ones."""
        if not calls:
            return
        known = Counter((id(one.collection), one.path, one.options) for one in self._learned)
        for call in calls:
            key = id(call.collection), call.path, call.options
            known[key] -= 1
            if known[key] < 0:
                self._learned.append(call)

    @property
    def maps_ids(self) -> bool:
        """True if a learned route maps ids: it changes the maps, for a batch without samples, too."""
        return any(isinstance(one.collection, ShardedManagedCollisionEmbeddings) for one in self._learned)

    @property
    def learned(self) -> int:
        """Number of learned calls; it only grows during a pass."""
        return len(self._learned) + len(self._prefetched)

    def report(self) -> list[RouteReport]:
        """Return the routes of each collection that a forward has called."""
        found = []
        for name, collection in self._collections:
            ahead, late, built = (self._counts[id(collection), kind] for kind in ("ahead", "in_forward", "built"))
            if ahead + late:
                paths = [path_text(one.path) for one in self._learned if one.collection is collection]
                found.append(RouteReport(name, tuple(paths), ahead, late, built))
        return found


def _needs_ids(begun: _Begun) -> bool:
    """Return True if features keep their ids after `begin`.

    Managed collision maps them again, outputs contain them (`need_indices`), and graphs of compiled programs take them.
    Features without ids, and those of a route that has not begun or has ended, stay as they are.
    """
    return (
        not isinstance(begun.flight, RouteInFlight)
        or begun.learned.rebuilt
        or isinstance(begun.features.values(), ReleasedIds)
        or bool(getattr(begun.learned.collection, "_need_indices", False))
    )
