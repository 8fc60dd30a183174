"""`IdMap`: the ids of the buckets held here, as one call reads them.

Legend: N ids, M evicted rows, E rows with own ids (places), U live ids, B buckets held here, F features.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.modules.buckets import Buckets
from tilerec.modules.evict import Evicting
from tilerec.modules.id_counts import KINDS, IdPlace, IdStats, Summary, add_counts, stats_of
from tilerec.modules.id_map_settings import IdMapSettings
from tilerec.modules.id_resize import ResizedIdMap, resize_id_map, resized_buckets
from tilerec.modules.id_state import HASH_NAMES, BucketStateView, mismatch_error, zeros
from tilerec.ops.hash.definition import (
    HashRange,
    HashState,
    IdOutcome,
    Policy,
    empty_state,
    score,
    zch_assign_,
    zch_assign_each_,
    zch_buckets,
    zch_find,
)
from tilerec.ops.hash.state import Assigned, AssignedEach, AssignOptions
from tilerec.ops.runtime.fetch import host_readable
from tilerec.ops.runtime.upload import constants, upload


class Mapped(NamedTuple):
    """Result of a mapping: a row per id (-1: dropped), and evicted rows (-1: none)."""

    rows_N: Tensor
    evicted_M: Tensor


def empty_id_state(buckets: Buckets, settings: IdMapSettings, device: torch.device | str | None) -> dict[str, Tensor]:
    """Return the state of buckets without ids, by name."""
    shapes = empty_state(
        buckets.held,
        buckets.slots,
        expires=settings.policy is Policy.TTL,
        counters=2 * buckets.slots if settings.threshold > 1 else 0,
        device="meta",
    )
    return {name: zeros(like.shape, like.dtype, device) for name, like in zip(HASH_NAMES, shapes, strict=True)}


@dataclass(frozen=True)
class IdMap:
    """The current tensors of a `ManagedCollisionModule`, with its buckets and settings.

    Args:
        who: the table, for messages.
        buckets: those held here.
        features: names, in the order of row assignment.
        state: ids, uses and times, ordered by bucket.
        counts: admission and eviction counts, int64 [B, F * kinds].
        reads_F2: ids of evaluation batches, and those without a row.
        compact: the host reads results, so evicted rows are a list without -1.
    """

    who: str
    settings: IdMapSettings
    buckets: Buckets
    features: tuple[str, ...]
    state: HashState
    counts: Tensor
    reads_F2: Tensor
    compact: bool

    @property
    def range(self) -> HashRange:
        """Buckets held here, as the hash ops take them."""
        own = self.buckets
        return HashRange(own.count, own.slots, self.settings.max_probe, own.first)

    # ------------------------------------------------------------------------------------------------------ mapping

    def hashed(self, ids_N: Tensor) -> Tensor:
        """Return the ids in stored form: int64, after the user's `input_hash_func` if there is one."""
        return self.settings.hashed(self.who, ids_N)

    def assign(
        self, ids_N: Tensor, sizes: Sequence[int], step: int | Tensor, now: int | Tensor,
        admitted_N: Tensor | None = None,
    ) -> Mapped:  # fmt: skip
        """Return the rows of a batch's ids, and assign rows to ids that have none; see `ManagedCollisionModule.map`.

        Args:
            admitted_N: bool, ids that may get a row; None: all.
        """
        settings, features = self.settings, self.features
        feature_N = self._feature_of(sizes, ids_N.device) if len(features) > 1 else None
        evicting = settings.evicting or Evicting(Policy.LRU)
        ttl: int | Tensor = evicting.ttl
        if evicting.ttl_of:
            ttls = evicting.ttls(features)
            ttl = ttls[0] if feature_N is None else constants(ttls, ids_N.device)[feature_N]
        may_insert = admitted_N
        if any(feature.endswith(settings.read_only_suffix) for feature in features):
            inserts = [int(not feature.endswith(settings.read_only_suffix)) for feature in features]
            inserts_F = constants(inserts, ids_N.device).to(torch.bool)
            inserts_N = inserts_F.expand(ids_N.shape).contiguous() if feature_N is None else inserts_F[feature_N]
            may_insert = inserts_N if admitted_N is None else inserts_N & admitted_N
        options = AssignOptions(
            step, evicting.policy, evicting.exponent, now, ttl, 0 if settings.evicting is None else settings.interval,
            settings.threshold, may_insert_N=may_insert,
        )  # fmt: skip
        made, evicted_M = self._assign(ids_N, options)
        bucket_N = zch_buckets(ids_N, self.buckets.count)
        here_N = bucket_N - self.buckets.first if self.buckets.first else bucket_N
        add_counts(
            self.counts, len(features), here_N, feature_N, made.outcomes_N, made.probes_N, shares=settings.shares
        )  # fmt: skip
        return Mapped(self._rows(ids_N, bucket_N, made.rows_N), self.buckets.rows_of(evicted_M))

    def _assign(self, ids_N: Tensor, options: AssignOptions) -> tuple[Assigned | AssignedEach, Tensor]:
        """Assign places to ids; return the outcomes and the evicted places."""
        if self.compact:
            listed = zch_assign_(ids_N, self.state, self.range, options)
            return listed, listed.evicted_rows_M
        each = zch_assign_each_(ids_N, self.state, self.range, options)
        if not options.evict:
            return each, ids_N.new_empty(0)
        return each, torch.where(each.outcomes_N == IdOutcome.EVICTED, each.rows_N, -1)

    def read(self, ids_N: Tensor, sizes: Sequence[int]) -> Mapped:
        """Return the rows of a batch's ids without a change of the map, and count reads and misses."""
        rows_N = zch_find(ids_N, self.state, self.range).rows_N
        if sizes:
            missed_F = torch.stack([part.sum() for part in (rows_N < 0).split(list(sizes))])
            self.reads_F2.add_(torch.stack([upload(list(sizes), ids_N.device), missed_F], 1))
        return Mapped(self._rows(ids_N, zch_buckets(ids_N, self.buckets.count), rows_N), ids_N.new_empty(0))

    def exported_rows(self, ids_N: Tensor, writes: bool) -> Tensor:
        """Return rows of ids in a `torch.export` program, without counting and without data-dependent control flow.

        Args:
            writes: the module is in training mode and not frozen.

        Raises:
            ConfigError: the module is in training mode, or it drops ids, which would change the lengths of bags.
        """
        if writes or not self.settings.shares:
            raise ConfigError(
                f"{self.who}: torch.export does not support a module that "
                + (
                    "is in training mode. Call eval() first."
                    if writes
                    else "drops ids without a row. Let them share one."
                )
            )
        places_N = zch_find(ids_N, self.state, self.range).rows_N
        return torch.where(places_N < 0, self.buckets.shared_rows(ids_N), self.buckets.rows_of(places_N))

    def _rows(self, ids_N: Tensor, bucket_N: Tensor, places_N: Tensor) -> Tensor:
        """Return the rows of places; for ids without a place, their shared rows, or -1 if the table drops them."""
        own = self.buckets
        if not self.settings.shares:
            return own.rows_of(places_N)
        # row = place + bucket * shared: an id's place lies in its own bucket, so no division as in `rows_of` is needed.
        rows_N = torch.add(places_N, bucket_N, alpha=own.shared)
        missed_N = places_N < 0
        if host_readable(missed_N) and not bool(missed_N.any()):
            return rows_N
        return torch.where(missed_N, own.shared_rows(ids_N, bucket_N), rows_N)

    def _feature_of(self, sizes: Sequence[int], device: torch.device) -> Tensor:
        return torch.repeat_interleave(upload(list(sizes), device), output_size=sum(sizes))

    # ------------------------------------------------------------------------------------------------------- checks

    def refuse_meta(self) -> None:
        """Raise a `ConfigError` if the ids are on the meta device."""
        if self.state.ids_E.is_meta:
            raise ConfigError(
                f"{self.who}: its ids are on the meta device. Shard the model, or call to_empty(device=...) and then "
                "reset_parameters()."
            )

    def check_lengths(self, mutate: bool) -> None:
        """Raise a `ConfigError` if bags must keep their lengths (`mutate` False) and the table drops ids."""
        if not mutate and not self.settings.shares:
            raise ConfigError(
                f"{self.who}: got mutate_miss_lengths=False, which keeps the lengths of bags, but this table drops "
                "ids without a row. Let such ids share one (when_full='fallback', disable_fallback=False)."
            )

    def check_places(self) -> None:
        """Raise an `InputError` for a stored id that a lookup would not find."""
        state, table = self.state, self.range
        places = state.used_E.nonzero().squeeze(1)
        ids_U = state.ids_E[places]
        bucket_U = zch_buckets(ids_U, table.buckets)
        wrong = bucket_U != places // table.slots + table.first
        if not bool(wrong.any()):
            wrong = zch_find(ids_U, state, table).rows_N != places + table.first * table.slots
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise InputError(
                f"{self.who}: id {int(ids_U[at])} is stored at place {int(places[at])} of the buckets "
                f"[{table.first}, {self.buckets.last}), where a lookup would not find it. The state belongs to other "
                "buckets, or is damaged."
            )

    def mismatch_error(self, state: Mapping[str, Any], view: BucketStateView | None) -> str | None:
        """Return an error message if a saved state does not fit this table, else None.

        Args:
            view: the state is of the buckets of all ranks; None: of those held here.
        """
        whole = self.buckets.count if view is not None else self.buckets.held
        wanted = self.state_tensors()
        return mismatch_error(self.who, self.buckets, self.settings.max_probe, wanted, whole, state)

    # --------------------------------------------------------------------------------------------------- statistics

    def summary(self) -> Summary:
        """Return this rank's part of `stats`."""
        state, table = self.state, self.range
        ids_U = state.ids_E[state.used_E]
        probes_U = zch_find(ids_U, state, table).probes_N
        per_bucket = state.used_E.view(-1, table.slots).sum(1)
        return Summary(
            self.counts.sum(0).view(-1, len(KINDS)).cpu(),
            self.reads_F2.cpu(),
            int(ids_U.numel()),
            torch.bincount(probes_U.to(torch.int64))[1:].cpu(),
            int(per_bucket.max()),
        )

    def stats_of(self, parts: Sequence[Summary]) -> IdStats:
        """Return the statistics of this table, summed over several ranks' summaries."""
        own = self.buckets
        return stats_of(self.features, parts, own.count * own.slots, own.count * own.shared, own.slots)

    def holds(self, id_: int) -> bool:
        """Return True if this rank holds the id's bucket."""
        key = torch.tensor([self.settings.key_of(self.who, id_)])
        return self.buckets.first <= int(zch_buckets(key, self.buckets.count)) < self.buckets.last

    def place_of(self, feature: str, id_: int, step: int, now: Callable[[], int]) -> IdPlace:
        """Return an id's row, insertion step, last use, and place in the order of eviction."""
        if feature not in self.features:
            raise InputError(f"{self.who}: got feature '{feature}'; expected one of {list(self.features)[:20]}.")
        buckets, state, shares = self.buckets, self.state, self.settings.shares
        key = self.settings.key_of(self.who, id_)
        ids_N = torch.tensor([key], device=state.ids_E.device)
        found = zch_find(ids_N, state, self.range)
        place = int(found.rows_N[0])
        row = since = last = hits = expires = sooner = None
        if place < 0:
            how = f"it has no row, and {'shares one' if shares else 'is dropped'}"
        else:
            at = place - buckets.first * buckets.slots
            row = int(buckets.rows_of(found.rows_N)[0])
            since, last, hits = (int(t[at]) for t in (state.since_E, state.last_E, state.hits_E))
            expires = int(state.expires_E[at]) if state.expires_E.numel() else None
            sooner, how = self._sooner(at, step, now)
        return IdPlace(
            self.who.removeprefix("Table '").removesuffix("'"), feature, operator.index(id_),
            int(zch_buckets(ids_N, buckets.count)[0]), row, int(buckets.shared_rows(ids_N)[0]) if shares else None,
            since, last, hits, expires, int(found.probes_N[0]), sooner, how,
        )  # fmt: skip

    def _sooner(self, at: int, step: int, now: Callable[[], int]) -> tuple[int | None, str]:
        """Return how many ids of the bucket would be evicted before the one at this place, and the rule in words.

        Args:
            now: the clock; called only if ids expire.
        """
        evicting, state, slots = self.settings.evicting, self.state, self.buckets.slots
        if evicting is None:
            return None, "never: this table does not evict"
        policy, exponent = evicting.policy, evicting.exponent
        first = at // slots * slots
        here = slice(first, first + slots)
        ends = state.expires_E[here].tolist() if state.expires_E.numel() else [0] * slots
        used, last, hits = (t[here].tolist() for t in (state.used_E, state.last_E, state.hits_E))
        scores = {
            i: score(policy, step=step + 1, last=last[i], hits=hits[i], expires=ends[i], exponent=exponent)
            for i in range(slots)
            if used[i]
        }
        i = at - first
        sooner = sum(other < scores[i] for other in scores.values())
        if policy is Policy.TTL:
            how = f"by a new id of its window, once the clock (now {now()}) reaches {ends[i]}"
        else:
            how = {
                Policy.LRU: f"least recently used first: last used in step {last[i]} of {step}",
                Policy.LFU: f"least frequently used first: {hits[i]} uses, the last in step {last[i]}",
                Policy.DISTANCE_LFU: f"lowest uses / age^{exponent:g} first: {scores[i][0]:.3g}",
            }[policy]
        return sooner, f"{how}; {sooner} of the {len(scores)} ids of its bucket would be evicted before it"

    # -------------------------------------------------------------------------------------------------------- state

    def resized(self, zch_size: int | None, total_num_buckets: int | None) -> Buckets:
        """Return the buckets that `ManagedCollisionModule.resize` would make."""
        return resized_buckets(self.who, self.buckets, zch_size, total_num_buckets, shares=self.settings.shares)

    def resize(self, zch_size: int | None, total_num_buckets: int | None, step: int) -> ResizedIdMap:
        """Return the map of another capacity; see `ManagedCollisionModule.resize`. This map stays unchanged."""
        old, settings = self.buckets, self.settings
        if old.held != old.count:
            raise ConfigError(
                f"{self.who}: this rank holds only buckets [{old.first}, {old.last}) of {old.count}. Resize the "
                "collection, on all ranks."
            )
        whole = self.resized(zch_size, total_num_buckets)
        return resize_id_map(self.state, self.counts, old, whole, settings.max_probe, step, settings.evicting)

    def parts(self) -> dict[str, tuple[Tensor, int]]:
        """Return the tensors ordered by bucket: name to (tensor, entries of its first dimension per bucket)."""
        own = {**dict(zip(HASH_NAMES, self.state, strict=True)), "counts": self.counts}
        return {name: (tensor, tensor.shape[0] // self.buckets.held) for name, tensor in own.items()}

    def copied_parts(self, first: int, last: int) -> dict[str, Tensor]:
        """Return copies of `parts` for the buckets `[first, last)` alone."""
        parts = {}
        for name, (tensor, per_bucket) in self.parts().items():
            part = tensor[(first - self.buckets.first) * per_bucket : (last - self.buckets.first) * per_bucket]
            parts[name] = zeros(part.shape, part.dtype, part.device).copy_(part)
        return parts

    def state_tensors(self) -> dict[str, tuple[Tensor, int]]:
        """Return the bucket state of a checkpoint: name to (tensor, entries of its first dimension per bucket)."""
        slots = self.buckets.slots
        found = {name: (tensor, slots) for name, tensor in zip(HASH_NAMES, self.state, strict=True)}
        if not self.state.expires_E.numel():
            del found["expires"]
        found["admission"] = (self.state.counters_BC, 1)
        if self.settings.threshold == 1:
            del found["admission"]
        if self.features:
            found["counts"] = (self.counts, 1)
        return found
