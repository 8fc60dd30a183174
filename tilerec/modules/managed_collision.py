"""Managed collision: ids of any 64 bits get rows of a table, and no two live ids share one unless it is asked for.

Nouns
  id       any int64, negative ones and -1 included
  bucket   `rows / buckets` neighbouring rows; an id never leaves its bucket, so its row does not depend on the world
  live     an id that has a row of its own
  missed   an id that has none: not admitted yet, its bucket full, or never seen (in evaluation). It reads a row that
           its bucket keeps for such ids (`shares`), or is dropped from its bag
  step     a forward in training mode; a row that a step uses is not evicted in it

    training     found: a hit      not found: admitted -> empty slot -> evict by policy -> missed
    evaluation   found: its row    not found: missed                    and nothing changes

The map's meaning is sequential: ids take rows one after the other, feature by feature in the order of the table's
`feature_names`, and within a feature in the order of the global batch. `ops/hash/definition.py` has the exact rules.

On a device nobody waits for it: what the host would have to look at lies there. Rows that lost their id come beside the
batch's ids, -1 where none did, and the step and the time are tensors, so that a CUDA graph goes on counting when it is
replayed. Where the ids are on the CPU the host looks, and rows that lost their id are a list of those alone.

Legend: N ids, E rows with own ids (places), B buckets that are here, C admission counters, F features.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.buckets import Buckets
from tilerec.modules.evict import Evicting
from tilerec.modules.id_counts import KINDS, IdStats, Summary, add_counts, stats_of
from tilerec.modules.id_place import IdPlace, place_of
from tilerec.modules.id_resize import Resized, resized_buckets, resized_map
from tilerec.modules.id_state import HASH_NAMES, StateView, misfit, zeros
from tilerec.modules.kept_bags import jagged_with_rows
from tilerec.ops.hash.checks import LONGEST
from tilerec.ops.hash.definition import (
    HashRange,
    HashState,
    Outcome,
    Policy,
    empty_state,
    zch_assign_,
    zch_assign_each_,
    zch_buckets,
    zch_find,
)
from tilerec.ops.hash.state import Assigned, AssignedEach
from tilerec.ops.runtime.upload import capturing, constants, upload
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.torch_private import buffers

ANY_ID = 2**63 - 1


def hours() -> int:
    """Hours since 1970: the clock of times to live, unless a module has another."""
    return int(time.time()) // 3600


class Mapped(NamedTuple):
    """What a table made of ids: a row for each (-1: dropped), and rows that lost their old id (-1: none)."""

    rows_N: Tensor
    evicted_M: Tensor


class ManagedCollisionModule(nn.Module):
    """The ids of one table (abstract: see `HashZchManagedCollisionModule` and `MCHManagedCollisionModule`).

    Everything it keeps is bucket by bucket: `ids`, `used`, `since`, `last`, `hits` (and `expires`) per row, `admission`
    and `counts` per bucket; and `step`. A state dict has these names.
    """

    counts: Tensor
    _reads_F2: Tensor
    _clock_2: Tensor

    def __init__(
        self, who: str, buckets: Buckets, device: torch.device | str | None, *, evicting: Evicting | None, shares: bool,
        max_probe: int, interval: int = 1, threshold: int = 1, read_only: bool = False,
        read_only_suffix: str = "_readonly", input_hash: Callable[[Tensor, int], Tensor] | None = None,
        input_size: int = ANY_ID, clock: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (
            ("max_probe", max_probe),
            ("eviction_interval", interval),
            ("admission_threshold", threshold),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(f"{who}: {name} is {value!r}; it must be a whole number of at least 1.")
        self._who = who
        self._buckets = buckets
        self._evicting, self._shares, self._max_probe = evicting, shares, max_probe
        self._interval, self._threshold = interval, threshold
        self._read_only, self._suffix = read_only, read_only_suffix
        self._input_hash, self._input_size = input_hash, input_size
        self._clock = clock or hours
        self._features: tuple[str, ...] = ()
        self._view: StateView | None = None
        self._evicted: list[Tensor] = []
        # Grows when the map becomes another one: rows that ids were given before are not theirs any more.
        self.version = 0
        # On the CPU whatever the rest is on; the truth where the rest is, too. Elsewhere `_clock_2` has it.
        self._step = torch.zeros((), dtype=torch.int64, device="cpu")
        self._put(self._empty(buckets, device))
        self._put_counts(device)

    def _empty(self, buckets: Buckets, device: torch.device | str | None) -> HashState:
        shapes = empty_state(
            buckets.held,
            buckets.slots,
            expires=self._policy is Policy.TTL,
            counters=2 * buckets.slots if self._threshold > 1 else 0,
            device="meta",
        )
        return HashState(*(zeros(like.shape, like.dtype, device) for like in shapes))

    def _put(self, state: HashState) -> None:
        for name, tensor in zip(HASH_NAMES, state, strict=True):
            self.register_buffer(name, tensor, persistent=False)  # `_save_to_state_dict` writes them

    def _put_counts(self, device: torch.device | str | None) -> None:
        """What is counted, from zero on; and the step and the time where the ids are."""
        names = len(self._features)
        shapes = {
            "counts": (self._buckets.held, names * len(KINDS)),
            "_reads_F2": (names, 2),
            "_clock_2": (2,),
        }
        with torch.inference_mode(False):  # an evaluation may come first, and training adds to them
            for name, shape in shapes.items():
                self.register_buffer(
                    name, torch.zeros(shape, dtype=torch.int64, device=device), persistent=False
                )

    # ------------------------------------------------------------------------------------------------------ facts

    @property
    def device(self) -> torch.device:
        """Where the state is."""
        return self._state.ids_E.device

    @property
    def shares(self) -> bool:
        """Whether ids without a row share one; otherwise they are dropped."""
        return self._shares

    @property
    def step(self) -> int:
        """Training steps so far. Waits for the device that the ids are on."""
        return int(self._step if self.host_looks or self.ids.is_meta else self._clock_2[0])

    @step.setter
    def step(self, step: int) -> None:
        self._step.fill_(step)
        self._clock_2[0].fill_(step)

    @property
    def host_looks(self) -> bool:
        """Whether the host may look at what is kept: on a device it would wait for everything before."""
        return self.ids.device.type == "cpu"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ManagedCollisionModule:
        step = self.step
        super()._apply(fn, recurse)
        self.step = step  # where it is read from now on
        return self

    @property
    def _policy(self) -> Policy | None:
        return None if self._evicting is None else self._evicting.policy

    @property
    def _state(self) -> HashState:
        own = buffers(self)
        return HashState(*(own[name] for name in HASH_NAMES))  # type: ignore[arg-type]

    @property
    def _range(self) -> HashRange:
        own = self._buckets
        return HashRange(own.count, own.slots, self._max_probe, own.first)

    def output_size(self) -> int:
        """Rows of the table."""
        return self._buckets.rows

    def input_size(self) -> int:
        """What a user's `input_hash_func` is told; ids themselves may be any int64."""
        return self._input_size

    def buckets(self) -> int:
        """How many buckets the table has."""
        return self._buckets.count

    def open_slots(self) -> Tensor:
        """int64 [1]: rows that are here and have no id yet."""
        used_E = self._state.used_E
        return (used_E.numel() - used_E.sum()).view(1)

    def validate_state(self) -> None:
        """Check that every id lies where it would be looked for.

        Raises:
            InputError: one does not: the state was written for other buckets, or damaged.
        """
        state, table = self._state, self._range
        places = state.used_E.nonzero().squeeze(1)
        ids_U = state.ids_E[places]
        bucket_U = zch_buckets(ids_U, table.buckets)
        wrong = bucket_U != places // table.slots + table.first
        if not bool(wrong.any()):
            wrong = zch_find(ids_U, state, table).rows_N != places + table.first * table.slots
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise InputError(
                f"{self._who}: id {int(ids_U[at])} lies at place {int(places[at])} of the buckets [{table.first}, "
                f"{self._buckets.last}), where it would not be found; the state is of other buckets, or damaged."
            )

    # ------------------------------------------------------------------------------------------------------ mapping

    def bind(self, table: str, features: Sequence[str]) -> None:
        """Name the table and its features, in the order in which their ids take rows; once."""
        if self._features:
            if self._features != tuple(features):
                raise ConfigError(
                    f"{self._who}: it maps the features {list(self._features)} and cannot map {list(features)} "
                    "as well; give every table a module of its own."
                )
            return
        self._who = f"Table '{table}'"
        self._features = tuple(features)
        unknown = [name for name, _ in (self._evicting.ttl_of if self._evicting else ())]
        if unknown and sorted(unknown) != sorted(features):
            raise ConfigError(
                f"{self._who}: per_feature_ttl is of {unknown}, and its features are {list(features)}; name each once."
            )
        step = self.step
        self._put_counts(self.device)
        self.step = step

    def now(self) -> int:
        """The time of expiry; 0 where nothing expires.

        Raises:
            ConfigError: the clock does not give whole numbers.
        """
        if self._policy is not Policy.TTL:
            return 0
        time_ = self._clock()
        if isinstance(time_, bool) or not hasattr(time_, "__index__") or not -LONGEST <= time_ <= LONGEST:
            raise ConfigError(
                f"{self._who}: its clock says {time_!r}; wanted a whole number from -2**61 to 2**61, such as "
                "clock=lambda: int(time.time())."
            )
        return operator.index(time_)

    def hashed(self, ids_N: Tensor) -> Tensor:
        """Ids as they are kept: int64, through the user's `input_hash_func` if there is one."""
        if ids_N.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"{self._who}: ids have dtype {ids_N.dtype}, wanted int32 or int64; cast the batch's values."
            )
        ids_N = ids_N.to(torch.int64)
        if self._input_hash is None:
            return ids_N
        hashed_N = self._input_hash(ids_N, self._input_size)
        if hashed_N.shape != ids_N.shape or hashed_N.dtype != torch.int64:
            raise InputError(
                f"{self._who}: input_hash_func made {hashed_N.dtype} {tuple(hashed_N.shape)} of ids of shape "
                f"{tuple(ids_N.shape)}; wanted int64 of the same shape."
            )
        return hashed_N

    @property
    def writes(self) -> bool:
        """Whether the next batch may change the map."""
        return self.training and not self._read_only

    def reset_inference_mode(self) -> None:
        """Never change from now on, in training mode either; on all ranks alike."""
        self._read_only = True

    def reset_training_mode(self) -> None:
        """Change in training mode again."""
        self._read_only = False

    @torch.no_grad()
    def map(self, ids_N: Tensor, sizes: Sequence[int], now: int) -> Mapped:
        """Rows of a batch's ids; in training mode they take rows where they have none.

        Args:
            ids_N: int64, feature by feature; of buckets that are here.
            sizes: ids of each feature.
            now: by the clock.
        """
        self._refuse_meta()
        if not self.writes:
            return self._read(ids_N, sizes)
        feature_N = self._feature_of(sizes, ids_N.device) if len(self._features) > 1 else None
        evicting = self._evicting or Evicting(Policy.LRU)
        ttl: int | Tensor = evicting.ttl
        if evicting.ttl_of:
            ttls = evicting.ttls(self._features)
            ttl = ttls[0] if feature_N is None else constants(ttls, ids_N.device)[feature_N]
        may_insert = None
        if any(feature.endswith(self._suffix) for feature in self._features):
            inserts = [int(not feature.endswith(self._suffix)) for feature in self._features]
            inserts_F = constants(inserts, ids_N.device).to(torch.bool)
            may_insert = (
                inserts_F.expand(ids_N.shape).contiguous() if feature_N is None else inserts_F[feature_N]
            )
        step, now_ = self._count(now)
        made, evicted_M = self._assign(
            ids_N, step=step, policy=evicting.policy, exponent=evicting.exponent, now=now_, ttl=ttl,
            evict=0 if self._evicting is None else self._interval, threshold=self._threshold, may_insert_N=may_insert,
        )  # fmt: skip
        bucket_N = zch_buckets(ids_N, self._buckets.count)
        here_N = bucket_N - self._buckets.first if self._buckets.first else bucket_N
        add_counts(
            self.counts, len(self._features), here_N, feature_N, made.outcomes_N, made.probes_N, shares=self._shares
        )  # fmt: skip
        rows_N = self._rows(ids_N, bucket_N, made.rows_N)
        return Mapped(rows_N, self._buckets.rows_of(evicted_M))

    def _refuse_meta(self) -> None:
        if self.ids.is_meta:
            raise ConfigError(
                f"{self._who}: its ids are on meta; shard the model, or call to_empty(device=...), reset_parameters()."
            )

    def _count(self, now: int) -> tuple[int | Tensor, int | Tensor]:
        """The next step and its time: numbers, or where the ids are on a device what it reads at its turn."""
        if self.host_looks:
            self._step += 1
            return int(self._step), now
        step, now_there = self._clock_2.unbind()
        step += 1
        if self._policy is not Policy.TTL:
            return step, 0
        if not capturing():  # a graph reads what `tick` has written
            now_there.fill_(now)
        return step, now_there

    def tick(self) -> None:
        """Tell the device what the clock says: before a CUDA graph of training steps is replayed, which asks nobody.

        Without effect where nothing expires, or where the ids are on the CPU.
        """
        if not self.host_looks and self._policy is Policy.TTL:
            self._clock_2[1].fill_(self.now())

    def _assign(self, ids_N: Tensor, **options: Any) -> tuple[Assigned | AssignedEach, Tensor]:
        """What became of the ids, and places that lost theirs."""
        if self.host_looks:
            listed = zch_assign_(ids_N, self._state, self._range, **options)
            return listed, listed.evicted_rows_M
        each = zch_assign_each_(ids_N, self._state, self._range, **options)
        if not options["evict"]:
            return each, ids_N.new_empty(0)
        return each, torch.where(each.outcomes_N == Outcome.EVICTED, each.rows_N, -1)

    def _read(self, ids_N: Tensor, sizes: Sequence[int]) -> Mapped:
        rows_N = zch_find(ids_N, self._state, self._range).rows_N
        if sizes:
            missed_F = torch.stack([part.sum() for part in (rows_N < 0).split(list(sizes))])
            self._reads_F2 += torch.stack([upload(list(sizes), ids_N.device), missed_F], 1)
        return Mapped(self._rows(ids_N, zch_buckets(ids_N, self._buckets.count), rows_N), ids_N.new_empty(0))

    def exported_rows(self, ids_N: Tensor) -> Tensor:
        """Rows of ids in a program of `torch.export`, which counts nothing and looks at no number.

        Raises:
            ConfigError: in training mode; a table that drops ids, whose bags would have other lengths.
        """
        if self.writes or not self._shares:
            raise ConfigError(
                f"{self._who}: torch.export of a module that "
                + (
                    "trains; call eval() before."
                    if self.writes
                    else "drops ids without a row; let them share one."
                )
            )
        own = self._buckets
        places_N = zch_find(ids_N, self._state, self._range).rows_N
        return torch.where(places_N < 0, own.shared_rows(ids_N), own.rows_of(places_N))

    def _rows(self, ids_N: Tensor, bucket_N: Tensor, places_N: Tensor) -> Tensor:
        """Rows of places; of ids that have none, those that they share (-1: none)."""
        own = self._buckets
        if not self._shares:
            return own.rows_of(places_N)
        # An id's place lies in its own bucket: no need to find out which one that is.
        rows_N = torch.add(places_N, bucket_N, alpha=own.shared)
        missed_N = places_N < 0
        if missed_N.device.type == "cpu" and not bool(missed_N.any()):
            return rows_N
        return torch.where(missed_N, own.shared_rows(ids_N, bucket_N), rows_N)

    def _feature_of(self, sizes: Sequence[int], device: torch.device) -> Tensor:
        return torch.repeat_interleave(upload(list(sizes), device), output_size=sum(sizes))

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Ids become rows; in training mode new ids take rows. See `ManagedCollisionCollection.forward`.

        Args:
            features: of this table, all of them, in one order.
            mutate_miss_lengths: see `ManagedCollisionCollection.forward`.
        """
        return self._map_dict(features, mutate_miss_lengths, self.training)

    def remap(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Ids become rows, as in evaluation: nothing changes."""
        return self._map_dict(features, mutate_miss_lengths, False)

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Let ids take rows, in training mode, and give the features back as they are."""
        self._map_dict(features, True, self.training)
        return features

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Ids through the user's `input_hash_func`."""
        if self._input_hash is None:
            return features
        return {
            name: JaggedTensor(self.hashed(part.values()), part.weights_or_none(), part.lengths())
            for name, part in features.items()
        }

    def _map_dict(
        self, features: dict[str, JaggedTensor], mutate: bool, training: bool
    ) -> dict[str, JaggedTensor]:
        self.bind(self._who, list(features))
        self.check_lengths(mutate)
        before, self.training = self.training, training
        try:
            parts = [part.values().to(torch.int64) for part in features.values()]
            sizes = [part.numel() for part in parts]
            mapped = self.map(torch.cat(parts), sizes, self.now())
        finally:
            self.training = before
        self.keep_evicted(mapped.evicted_M)
        return {
            name: jagged_with_rows(part, rows, not self._shares)
            for (name, part), rows in zip(features.items(), mapped.rows_N.split(sizes), strict=True)
        }

    def check_lengths(self, mutate: bool) -> None:
        """Refuse to keep the lengths of bags that lose ids."""
        if not mutate and not self._shares:
            raise ConfigError(
                f"{self._who}: mutate_miss_lengths=False keeps bags as long as they came, and this table drops ids "
                "without a row; let such ids share one (when_full='fallback', disable_fallback=False)."
            )

    def keep_evicted(self, rows_M: Tensor) -> None:
        """Remember rows (-1: none) for the next `evict`."""
        if rows_M.numel():
            self._evicted.append(rows_M)
        rows = self._buckets.rows
        if not self.host_looks and sum(part.numel() for part in self._evicted) > 2 * rows + rows_M.numel():
            # Nobody asks, and most entries are none: every row is remembered once.
            lost_E = torch.zeros(rows + 1, dtype=torch.bool, device=rows_M.device)
            lost_E.index_fill_(0, torch.cat(self._evicted) % (rows + 1), True)
            every_E = torch.arange(rows, device=rows_M.device)
            self._evicted = [torch.where(lost_E[:rows], every_E, -1)]

    def lost_rows(self) -> Tensor | None:
        """As `evict`, without waiting for a device: entries of -1 are none, and there may be no others."""
        if not self._evicted:
            return None
        rows_M, self._evicted = torch.cat(self._evicted), []
        return rows_M

    def evict(self) -> Tensor | None:
        """Rows that lost their id since this was last asked (int64 [M]); None if none did. Waits for their device.

        They hold what the old id learned: reset them, and their optimizer state, before they are read
        (`ManagedCollisionEmbeddingBagCollection` does).
        """
        rows_M = self.lost_rows()
        if rows_M is None or self.host_looks:
            return rows_M
        rows_M = rows_M[rows_M >= 0]
        return rows_M if rows_M.numel() else None

    # ------------------------------------------------------------------------------------------------------ asking

    def summary(self) -> Summary:
        """This rank's part of `stats`."""
        state, table = self._state, self._range
        ids_U = state.ids_E[state.used_E]
        probes_U = zch_find(ids_U, state, table).probes_N
        per_bucket = state.used_E.view(-1, table.slots).sum(1)
        return Summary(
            self.counts.sum(0).view(-1, len(KINDS)).cpu(),
            self._reads_F2.cpu(),
            int(ids_U.numel()),
            torch.bincount(probes_U.to(torch.int64))[1:].cpu(),
            int(per_bucket.max()),
        )

    def stats(self) -> IdStats:
        """What this module has counted, for the buckets that are here."""
        return self.stats_of([self.summary()])

    def stats_of(self, parts: Sequence[Summary]) -> IdStats:
        """The record of what several ranks know of this table."""
        own = self._buckets
        return stats_of(self._features, parts, own.count * own.slots, own.count * own.shared, own.slots)

    def holds(self, id_: int) -> bool:
        """Whether the id's bucket is here."""
        bucket = int(zch_buckets(torch.tensor([self._hashed_one(id_)]), self._buckets.count))
        return self._buckets.first <= bucket < self._buckets.last

    def _hashed_one(self, id_: int) -> int:
        if isinstance(id_, bool) or not hasattr(id_, "__index__"):
            raise InputError(f"{self._who}: id {id_!r} is a {type(id_).__name__}, wanted a whole number.")
        number = operator.index(id_)
        if not -(2**63) <= number < 2**63:
            raise InputError(f"{self._who}: id {number} is no int64.")
        return int(self.hashed(torch.tensor([number], dtype=torch.int64))[0])

    @torch.no_grad()
    def inspect(self, feature: str, id_: int) -> IdPlace:
        """Where an id lives, since when, when it was last used, and how it would be evicted. Changes nothing."""
        if feature not in self._features:
            raise InputError(
                f"{self._who}: no feature '{feature}'; its features are {list(self._features)[:20]}."
            )
        return place_of(
            self._who.removeprefix("Table '").removesuffix("'"), feature, id_, self._hashed_one(id_), self._state,
            self._range, self._buckets, self._evicting, shares=self._shares, step=self.step, now=self.now,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- capacity

    @torch.no_grad()
    def resize(self, zch_size: int | None = None, total_num_buckets: int | None = None) -> Resized:
        """Change the number of rows, or of buckets, and keep the ids.

        Args:
            zch_size: the new number of rows; None: as many rows per bucket as now.
            total_num_buckets: the new number; a multiple of the present one (each bucket splits) or a divisor of it.
                None: as many as now.

        Where ids find no place any more (less room, or a window that is full), those that the policy would evict first
        are dropped, and counted as evictions of the table's first feature. This moves ids only; a table's rows move
        with them in `ManagedCollisionEmbeddingBagCollection.resize`.

        Raises:
            ConfigError: sizes that do not fill the buckets, or numbers of buckets of which none divides the other; the
                map is then as it was.
        """
        old = self._buckets
        if old.held != old.count:
            raise ConfigError(
                f"{self._who}: only buckets [{old.first}, {old.last}) of {old.count} are here; resize the collection, "
                "on all ranks."
            )
        whole = self.resized(zch_size, total_num_buckets)
        made = resized_map(self._state, self.counts, old, whole, self._max_probe, self.step, self._evicting)
        self.become(
            made.buckets, {**dict(zip(HASH_NAMES, made.state, strict=True)), "counts": made.counts_BC}
        )
        return made.moved

    def resized(self, zch_size: int | None, total_num_buckets: int | None) -> Buckets:
        """The buckets that `resize` would make."""
        return resized_buckets(self._who, self._buckets, zch_size, total_num_buckets, shares=self._shares)

    def reset_parameters(self) -> None:
        """Forget all ids and counts."""
        for name in (*HASH_NAMES, "counts", "_reads_F2", "_clock_2"):
            tensor = getattr(self, name)
            if not tensor.is_meta:
                tensor.zero_()
        self._step.zero_()
        self.version += 1

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """An empty module of the same settings that holds the buckets of these rows only.

        Raises:
            ConfigError: the range cuts a bucket.
        """
        own = self._buckets
        if any(row % own.size for row in output_id_range):
            raise ConfigError(
                f"{self._who}: rows {list(output_id_range)} cut a bucket; buckets have {own.size} rows, so use "
                f"multiples of {own.size}."
            )
        first, last = (row // own.size for row in output_id_range)
        twin = copy.deepcopy(self)
        twin._buckets = own.checked_cut(self._who, first, last)
        twin._view = None
        where = device or self.device
        twin._put(twin._empty(twin._buckets, where))
        twin._put_counts(where)
        twin.reset_parameters()
        return twin

    def parts(self) -> dict[str, tuple[Tensor, int]]:
        """Everything that is kept bucket by bucket, by name, with entries of the first dimension per bucket."""
        held = self._buckets.held
        own = {name: cast(Tensor, buffers(self)[name]) for name in (*HASH_NAMES, "counts")}
        return {name: (tensor, tensor.shape[0] // held) for name, tensor in own.items()}

    def become(self, buckets: Buckets, parts: Mapping[str, Tensor], view: StateView | None = None) -> None:
        """Hold these buckets from now on, with what `parts` is of them. Nothing is copied."""
        for name, tensor in parts.items():
            self.register_buffer(name, tensor, persistent=False)
        self._buckets, self._view = buckets, view
        self.version += 1

    def hold(self, first: int, last: int, view: StateView, device: torch.device | str | None) -> None:
        """Keep these buckets only; others hold the rest, and `view` says how all of them look in a state dict.

        Args:
            device: for a module on meta, whose buckets begin empty.
        """
        old = self._buckets
        new = old.cut(first, last)
        if self.ids.is_meta:
            step, self._buckets = self.step, new
            self._put(self._empty(new, device or "cpu"))
            self._put_counts(device or "cpu")
            self.step = step
        else:
            own = slice(first - old.first, last - old.first)
            parts = {}
            for name, (tensor, per_bucket) in self.parts().items():
                part = tensor[own.start * per_bucket : own.stop * per_bucket]
                parts[name] = zeros(part.shape, part.dtype, part.device).copy_(part)
            self.become(new, parts, view)
        self._buckets, self._view = new, view

    # ------------------------------------------------------------------------------------------------------- state

    def state_tensors(self) -> dict[str, tuple[Tensor, int]]:
        """What a checkpoint holds of the buckets, by name, with entries of the first dimension per bucket."""
        slots = self._buckets.slots
        found = {name: (tensor, slots) for name, tensor in zip(HASH_NAMES, self._state, strict=True)}
        if not self._state.expires_E.numel():
            del found["expires"]
        found["admission"] = (self._state.counters_BC, 1)
        if self._threshold == 1:
            del found["admission"]
        if self._features:
            found["counts"] = (self.counts, 1)
        return found

    def numbers(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the whole: step, and the cut of the rows (which a load compares)."""
        own = self._buckets
        cut = torch.tensor([own.count, own.size, own.shared, self._max_probe], device="cpu")
        if not self.host_looks:
            self._step.fill_(self.step)
        return {"step": self._step, "geometry": cut}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, (tensor, per_bucket) in self.state_tensors().items():
            destination[prefix + name] = tensor if self._view is None else self._view.show(tensor, per_bucket)
        for name, number in self.numbers().items():
            destination[prefix + name] = number

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """All or nothing: whatever does not fit is said, and then nothing of this table is loaded."""
        wanted = self.state_tensors()
        names = [*wanted, *self.numbers()]
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if strict:
            own = {prefix + name for name in names}
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in own and prefix
            )
        missing = [prefix + name for name in names if name not in found]
        if missing:
            if strict or found:
                missing_keys.extend(missing)
            return
        refused = self.misfit(found)
        if refused is not None:
            error_msgs.append(f"{prefix.removesuffix('.')}: {refused}")
            return
        for name, (tensor, per_bucket) in wanted.items():
            if self._view is None:
                tensor.copy_(found[name])
            else:
                self._view.take(tensor, per_bucket, found[name])
        self.step = int(found["step"])
        self.version += 1
        self._evicted.clear()

    def misfit(self, state: dict[str, Any]) -> str | None:
        """Why a saved state is not for this table, in words; None where it is."""
        whole = self._buckets.count if self._view is not None else self._buckets.held
        return misfit(self._who, self._buckets, self._max_probe, self.state_tensors(), whole, state)

    def described(self) -> dict[str, Any]:
        """The settings that ranks must share, as plain values."""
        own, evicting = self._buckets, self._evicting
        return {
            "rows": own.rows,
            "buckets": own.count,
            "shared": own.shared,
            "evicts": None if evicting is None else evicting.policy.name,
            "exponent": None if evicting is None else evicting.exponent,
            "ttl": None if evicting is None else [evicting.ttl, [list(pair) for pair in evicting.ttl_of]],
            "shares": self._shares,
            "max_probe": self._max_probe,
            "interval": self._interval,
            "admission_threshold": self._threshold,
            "read only": [self._read_only, self._suffix],
            "input_hash": getattr(self._input_hash, "__qualname__", None),
            "on meta": self.ids.is_meta,
        }

    def extra_repr(self) -> str:
        own = self._buckets
        here = "" if own.held == own.count else f", here: [{own.first}, {own.last})"
        policy = "no eviction" if self._evicting is None else self._evicting.policy.name
        missed = "share a row" if self._shares else "are dropped"
        return f"{own.rows} rows, {own.count} buckets{here}, {policy}, ids without a row {missed}"
