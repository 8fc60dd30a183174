"""Managed collision: maps arbitrary int64 ids to rows of a table. Live ids never share a row.

Nouns
  id       any int64, including negative ones and -1
  bucket   `rows / buckets` neighbouring rows; an id never leaves its bucket, so its row does not depend on the world
  live     an id that has its own row
  missed   an id without its own row: not admitted yet, its bucket is full, or never seen (in evaluation). It reads a
           row that its bucket reserves for such ids (`shares`), or is dropped from its bag
  evicted  a row that a live id lost to another id
  step     a forward in training mode; rows that a step uses are not evicted in that step
  here     held by this rank

    training     found: a hit      not found: admitted -> empty slot -> evict by policy -> missed
    evaluation   found: its row    not found: missed                    and nothing changes

Rows are assigned sequentially: feature by feature in the order of the table's `feature_names`, and within a feature in
the order of the global batch. `ops/hash/definition.py` has the exact rules.

If the ids are on a GPU, the host never waits. Evicted rows are then an entry per id of the batch, -1 for none. Step and
time are device tensors, so a replayed CUDA graph keeps counting. If the ids are on the CPU, the host reads the results,
and evicted rows are a compact list.

Legend: N ids, E rows with own ids (places), B buckets held here, C admission counters, F features.
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
from tilerec.modules.id_resize import Resized, resize_id_map, resized_buckets
from tilerec.modules.id_state import HASH_NAMES, BucketStateView, mismatch_error, zeros
from tilerec.modules.remapped_bags import remapped_feature
from tilerec.ops.hash.checks import MAX_TIME
from tilerec.ops.hash.definition import (
    HashRange,
    HashState,
    IdOutcome,
    Policy,
    empty_state,
    zch_assign_,
    zch_assign_each_,
    zch_buckets,
    zch_find,
)
from tilerec.ops.hash.state import Assigned, AssignedEach, AssignOptions
from tilerec.ops.runtime.fetch import host_readable
from tilerec.ops.runtime.upload import capturing, constants, upload
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.torch_private import buffers

ANY_ID = 2**63 - 1


def hours() -> int:
    """Return hours since 1970, the default clock of times to live."""
    return int(time.time()) // 3600


class Mapped(NamedTuple):
    """Result of a mapping: a row per id (-1: dropped), and evicted rows (-1: none)."""

    rows_N: Tensor
    evicted_M: Tensor


class ManagedCollisionModule(nn.Module):
    """Id map of one table (abstract; see `HashZchManagedCollisionModule` and `MCHManagedCollisionModule`).

    The state is ordered by bucket. Per row: `ids`, `used`, `since`, `last`, `hits` (and `expires`). Per bucket:
    `admission` and `counts`. Per table: `step`. A state dict has these names.
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
                raise ConfigError(f"{who}: got {name}={value!r}; expected an integer from 1 to 2**31 - 1.")
        self._who = who
        self._buckets = buckets
        self._evicting, self._shares, self._max_probe = evicting, shares, max_probe
        self._interval, self._threshold = interval, threshold
        self._read_only, self._suffix = read_only, read_only_suffix
        self._input_hash, self._input_size = input_hash, input_size
        self._clock = clock or hours
        self._features: tuple[str, ...] = ()
        self._view: BucketStateView | None = None
        self._evicted: list[Tensor] = []
        # Incremented when the map is replaced; rows that were assigned earlier are then invalid.
        self.version = 0
        # Always on the CPU. Valid only if the ids are on the CPU too; on a device `_clock_2` holds the step.
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
            self.register_buffer(name, tensor, persistent=False)  # `_save_to_state_dict` saves them

    def _put_counts(self, device: torch.device | str | None) -> None:
        """Register zeroed counters, and the step and time, on the ids' device."""
        names = len(self._features)
        shapes = {
            "counts": (self._buckets.held, names * len(KINDS)),
            "_reads_F2": (names, 2),
            "_clock_2": (2,),
        }
        with torch.inference_mode(False):  # training adds to them, even if an evaluation runs first
            for name, shape in shapes.items():
                self.register_buffer(
                    name, torch.zeros(shape, dtype=torch.int64, device=device), persistent=False
                )

    # ------------------------------------------------------------------------------------------------------ facts

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self._state.ids_E.device

    @property
    def shares(self) -> bool:
        """True if ids without a row share one, False if they are dropped."""
        return self._shares

    @property
    def step(self) -> int:
        """Number of training steps so far. Reading it waits for the ids' device."""
        return int(self._step if self.host_looks or self.ids.is_meta else self._clock_2[0])

    @step.setter
    def step(self, step: int) -> None:
        self._step.fill_(step)
        self._clock_2[0].fill_(step)

    @property
    def host_looks(self) -> bool:
        """True if the host can read the state without waiting for a device, that is, if the ids are on the CPU."""
        return host_readable(self._state.ids_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ManagedCollisionModule:
        step = self.step
        super()._apply(fn, recurse)
        self.step = step  # write the copy that the new device reads
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
        """Return the number of rows of the table."""
        return self._buckets.rows

    def input_size(self) -> int:
        """Return the size argument of the user's `input_hash_func`; ids themselves may be any int64."""
        return self._input_size

    def buckets(self) -> int:
        """Return the number of buckets of the table."""
        return self._buckets.count

    def open_slots(self) -> Tensor:
        """Return the number of rows held here that have no id yet, int64 [1]."""
        used_E = self._state.used_E
        return (used_E.numel() - used_E.sum()).view(1)

    def validate_state(self) -> None:
        """Check that a lookup would find every stored id.

        Raises:
            InputError: an id is in a wrong place: the state was written for other buckets, or is damaged.
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
                f"{self._who}: id {int(ids_U[at])} is stored at place {int(places[at])} of the buckets "
                f"[{table.first}, {self._buckets.last}), where a lookup would not find it. The state belongs to other "
                "buckets, or is damaged."
            )

    # ------------------------------------------------------------------------------------------------------ mapping

    def bind(self, table: str, features: Sequence[str]) -> None:
        """Set the table's name and its features, in the order of row assignment. Later calls must repeat them."""
        if self._features:
            if self._features != tuple(features):
                raise ConfigError(
                    f"{self._who}: got features {list(features)}; expected {list(self._features)}, which the module "
                    "already maps. Give every table its own module."
                )
            return
        self._who = f"Table '{table}'"
        self._features = tuple(features)
        unknown = [name for name, _ in (self._evicting.ttl_of if self._evicting else ())]
        if unknown and sorted(unknown) != sorted(features):
            raise ConfigError(
                f"{self._who}: got per_feature_ttl of {unknown}; expected each of the features {list(features)} once."
            )
        step = self.step
        self._put_counts(self.device)
        self.step = step

    def now(self) -> int:
        """Return the clock's time, or 0 if nothing expires.

        Raises:
            ConfigError: the clock did not return an integer from -2**61 to 2**61.
        """
        if self._policy is not Policy.TTL:
            return 0
        time_ = self._clock()
        if isinstance(time_, bool) or not hasattr(time_, "__index__") or not -MAX_TIME <= time_ <= MAX_TIME:
            raise ConfigError(
                f"{self._who}: got {time_!r} from its clock; expected an integer from -2**61 to 2**61. Pass, for "
                "example, clock=lambda: int(time.time())."
            )
        return operator.index(time_)

    def hashed(self, ids_N: Tensor) -> Tensor:
        """Return the ids in stored form: int64, after the user's `input_hash_func` if there is one."""
        if ids_N.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"{self._who}: got ids of dtype {ids_N.dtype}; expected int32 or int64. Cast the batch's values."
            )
        ids_N = ids_N.to(torch.int64)
        if self._input_hash is None:
            return ids_N
        hashed_N = self._input_hash(ids_N, self._input_size)
        if hashed_N.shape != ids_N.shape or hashed_N.dtype != torch.int64:
            raise InputError(
                f"{self._who}: input_hash_func returned {hashed_N.dtype} of shape {tuple(hashed_N.shape)}; expected "
                f"int64 of the ids' shape {tuple(ids_N.shape)}."
            )
        return hashed_N

    @property
    def writes(self) -> bool:
        """True if the next batch may change the map."""
        return self.training and not self._read_only

    def reset_inference_mode(self) -> None:
        """Freeze the map, even in training mode. Call it on all ranks alike."""
        self._read_only = True

    def reset_training_mode(self) -> None:
        """Allow changes in training mode again."""
        self._read_only = False

    @torch.no_grad()
    def map(self, ids_N: Tensor, sizes: Sequence[int], now: int) -> Mapped:
        """Return the rows of a batch's ids; in training mode, assign rows to ids that have none.

        Args:
            ids_N: int64, concatenated in feature order; of buckets held here.
            sizes: number of ids of each feature.
            now: the clock's time.
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
        options = AssignOptions(
            step, evicting.policy, evicting.exponent, now_, ttl, 0 if self._evicting is None else self._interval,
            self._threshold, may_insert_N=may_insert,
        )  # fmt: skip
        made, evicted_M = self._assign(ids_N, options)
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
                f"{self._who}: its ids are on the meta device. Shard the model, or call to_empty(device=...) and then "
                "reset_parameters()."
            )

    def _count(self, now: int) -> tuple[int | Tensor, int | Tensor]:
        """Increment the step; return step and time, as device tensors if the ids are on a device, else as ints."""
        if self.host_looks:
            self._step += 1
            return int(self._step), now
        step, now_there = self._clock_2.unbind()
        step += 1
        if self._policy is not Policy.TTL:
            return step, 0
        if not capturing():  # a captured graph reads the time that `tick` writes
            now_there.fill_(now)
        return step, now_there

    def tick(self) -> None:
        """Copy the current time to the device before a replay; a captured CUDA graph cannot read the host clock.

        No effect if nothing expires, or if the ids are on the CPU.
        """
        if not self.host_looks and self._policy is Policy.TTL:
            self._clock_2[1].fill_(self.now())

    def _assign(self, ids_N: Tensor, options: AssignOptions) -> tuple[Assigned | AssignedEach, Tensor]:
        """Assign places to ids; return the outcomes and the evicted places."""
        if self.host_looks:
            listed = zch_assign_(ids_N, self._state, self._range, options)
            return listed, listed.evicted_rows_M
        each = zch_assign_each_(ids_N, self._state, self._range, options)
        if not options.evict:
            return each, ids_N.new_empty(0)
        return each, torch.where(each.outcomes_N == IdOutcome.EVICTED, each.rows_N, -1)

    def _read(self, ids_N: Tensor, sizes: Sequence[int]) -> Mapped:
        rows_N = zch_find(ids_N, self._state, self._range).rows_N
        if sizes:
            missed_F = torch.stack([part.sum() for part in (rows_N < 0).split(list(sizes))])
            self._reads_F2 += torch.stack([upload(list(sizes), ids_N.device), missed_F], 1)
        return Mapped(self._rows(ids_N, zch_buckets(ids_N, self._buckets.count), rows_N), ids_N.new_empty(0))

    def exported_rows(self, ids_N: Tensor) -> Tensor:
        """Return rows of ids in a `torch.export` program, without counting and without data-dependent control flow.

        Raises:
            ConfigError: the module is in training mode, or it drops ids, which would change the lengths of bags.
        """
        if self.writes or not self._shares:
            raise ConfigError(
                f"{self._who}: torch.export does not support a module that "
                + (
                    "is in training mode. Call eval() first."
                    if self.writes
                    else "drops ids without a row. Let them share one."
                )
            )
        own = self._buckets
        places_N = zch_find(ids_N, self._state, self._range).rows_N
        return torch.where(places_N < 0, own.shared_rows(ids_N), own.rows_of(places_N))

    def _rows(self, ids_N: Tensor, bucket_N: Tensor, places_N: Tensor) -> Tensor:
        """Return the rows of places; for ids without a place, their shared rows, or -1 if the table drops them."""
        own = self._buckets
        if not self._shares:
            return own.rows_of(places_N)
        # row = place + bucket * shared: an id's place lies in its own bucket, so no division as in `rows_of` is needed.
        rows_N = torch.add(places_N, bucket_N, alpha=own.shared)
        missed_N = places_N < 0
        if host_readable(missed_N) and not bool(missed_N.any()):
            return rows_N
        return torch.where(missed_N, own.shared_rows(ids_N, bucket_N), rows_N)

    def _feature_of(self, sizes: Sequence[int], device: torch.device) -> Tensor:
        return torch.repeat_interleave(upload(list(sizes), device), output_size=sum(sizes))

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Replace ids by rows; in training mode, assign rows to new ids. See `ManagedCollisionCollection.forward`.

        Args:
            features: all features of this table, in the same order in every call.
            mutate_miss_lengths: see `ManagedCollisionCollection.forward`.
        """
        return self._map_dict(features, mutate_miss_lengths, self.training)

    def remap(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Replace ids by rows as in evaluation mode; the map does not change."""
        return self._map_dict(features, mutate_miss_lengths, False)

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Assign rows to ids, in training mode, and return the features unchanged."""
        self._map_dict(features, True, self.training)
        return features

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the features with the user's `input_hash_func` applied to their ids."""
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
            name: remapped_feature(part, rows, not self._shares)
            for (name, part), rows in zip(features.items(), mapped.rows_N.split(sizes), strict=True)
        }

    def check_lengths(self, mutate: bool) -> None:
        """Raise a `ConfigError` if bags must keep their lengths (`mutate` False) and the table drops ids."""
        if not mutate and not self._shares:
            raise ConfigError(
                f"{self._who}: got mutate_miss_lengths=False, which keeps the lengths of bags, but this table drops "
                "ids without a row. Let such ids share one (when_full='fallback', disable_fallback=False)."
            )

    def keep_evicted(self, rows_M: Tensor) -> None:
        """Store evicted rows (-1: none) for the next `evict`."""
        if rows_M.numel():
            self._evicted.append(rows_M)
        rows = self._buckets.rows
        if not self.host_looks and sum(part.numel() for part in self._evicted) > 2 * rows + rows_M.numel():
            # Bound the memory if `evict` is never called: most entries are -1, so keep each evicted row once.
            lost_E = torch.zeros(rows + 1, dtype=torch.bool, device=rows_M.device)
            lost_E.index_fill_(0, torch.cat(self._evicted) % (rows + 1), True)
            every_E = torch.arange(rows, device=rows_M.device)
            self._evicted = [torch.where(lost_E[:rows], every_E, -1)]

    def lost_rows(self) -> Tensor | None:
        """Return the rows of `evict` without waiting for a device. Entries of -1 are no rows; all may be -1."""
        if not self._evicted:
            return None
        rows_M, self._evicted = torch.cat(self._evicted), []
        return rows_M

    def evict(self) -> Tensor | None:
        """Return the rows evicted since the last call (int64 [M]), or None if there are none. Waits for their device.

        They still hold the old ids' weights. Reset them and their optimizer state before the next read, as
        `ManagedCollisionEmbeddingBagCollection` does.
        """
        rows_M = self.lost_rows()
        if rows_M is None or self.host_looks:
            return rows_M
        rows_M = rows_M[rows_M >= 0]
        return rows_M if rows_M.numel() else None

    # -------------------------------------------------------------------------------------------------- statistics

    def summary(self) -> Summary:
        """Return this rank's part of `stats`."""
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
        """Return the counts of the buckets held here."""
        return self.stats_of([self.summary()])

    def stats_of(self, parts: Sequence[Summary]) -> IdStats:
        """Return the statistics of this table, summed over several ranks' summaries."""
        own = self._buckets
        return stats_of(self._features, parts, own.count * own.slots, own.count * own.shared, own.slots)

    def holds(self, id_: int) -> bool:
        """Return True if this rank holds the id's bucket."""
        bucket = int(zch_buckets(torch.tensor([self._hashed_one(id_)]), self._buckets.count))
        return self._buckets.first <= bucket < self._buckets.last

    def _hashed_one(self, id_: int) -> int:
        if isinstance(id_, bool) or not hasattr(id_, "__index__"):
            raise InputError(
                f"{self._who}: got id {id_!r} of type {type(id_).__name__}; expected an integer."
            )
        number = operator.index(id_)
        if not -(2**63) <= number < 2**63:
            raise InputError(f"{self._who}: got id {number}; expected an int64.")
        return int(self.hashed(torch.tensor([number], dtype=torch.int64))[0])

    @torch.no_grad()
    def inspect(self, feature: str, id_: int) -> IdPlace:
        """Return an id's row, insertion step, last use, and place in the order of eviction. Read-only."""
        if feature not in self._features:
            raise InputError(
                f"{self._who}: got feature '{feature}'; expected one of {list(self._features)[:20]}."
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
            zch_size: the new number of rows; None keeps the rows per bucket.
            total_num_buckets: the new number of buckets, a multiple of the current number (each bucket splits) or a
                divisor of it (buckets merge). None keeps it.

        Ids that no longer fit (fewer rows, or a full probe window) are dropped in the policy's order of eviction. They
        count as evictions of the table's first feature. This method moves only ids; to move the table's rows with them,
        call `ManagedCollisionEmbeddingBagCollection.resize`.

        Raises:
            ConfigError: the rows do not fill the buckets equally, or neither bucket count divides the other. The map is
                then unchanged.
        """
        old = self._buckets
        if old.held != old.count:
            raise ConfigError(
                f"{self._who}: this rank holds only buckets [{old.first}, {old.last}) of {old.count}. Resize the "
                "collection, on all ranks."
            )
        whole = self.resized(zch_size, total_num_buckets)
        made = resize_id_map(self._state, self.counts, old, whole, self._max_probe, self.step, self._evicting)
        self.become(
            made.buckets, {**dict(zip(HASH_NAMES, made.state, strict=True)), "counts": made.counts_BC}
        )
        return made.moved

    def resized(self, zch_size: int | None, total_num_buckets: int | None) -> Buckets:
        """Return the buckets that `resize` would make."""
        return resized_buckets(self._who, self._buckets, zch_size, total_num_buckets, shares=self._shares)

    def reset_parameters(self) -> None:
        """Clear all ids and counts."""
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
        """Return an empty module of the same settings that holds only the buckets of these rows.

        Raises:
            ConfigError: the range splits a bucket.
        """
        own = self._buckets
        if any(row % own.size for row in output_id_range):
            raise ConfigError(
                f"{self._who}: got output_id_range={list(output_id_range)}; expected multiples of {own.size}, the rows "
                "of a bucket."
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
        """Return the tensors ordered by bucket: name to (tensor, entries of its first dimension per bucket)."""
        held = self._buckets.held
        own = {name: cast(Tensor, buffers(self)[name]) for name in (*HASH_NAMES, "counts")}
        return {name: (tensor, tensor.shape[0] // held) for name, tensor in own.items()}

    def become(
        self, buckets: Buckets, parts: Mapping[str, Tensor], view: BucketStateView | None = None
    ) -> None:
        """Replace the buckets held here and their state by `buckets` and `parts`, without a copy."""
        for name, tensor in parts.items():
            self.register_buffer(name, tensor, persistent=False)
        self._buckets, self._view = buckets, view
        self.version += 1

    def hold(self, first: int, last: int, view: BucketStateView, device: torch.device | str | None) -> None:
        """Keep only the buckets `[first, last)`; other ranks hold the rest.

        Args:
            view: how the state of all buckets appears in a state dict.
            device: for a module on meta, whose buckets start empty.
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
        """Return the bucket state of a checkpoint: name to (tensor, entries of its first dimension per bucket)."""
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
        """Return the per-table state of a checkpoint: the step, and the bucket layout, which a load compares."""
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
        """Load the table's whole state; if a tensor is missing or does not match, report it and load nothing."""
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
        refused = self.mismatch_error(found)
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

    def mismatch_error(self, state: dict[str, Any]) -> str | None:
        """Return an error message if a saved state does not fit this table, else None."""
        whole = self._buckets.count if self._view is not None else self._buckets.held
        return mismatch_error(self._who, self._buckets, self._max_probe, self.state_tensors(), whole, state)

    def described(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, as plain values."""
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
