"""`IdPlace`: row, history and eviction order of one id.

Legend: E rows with own ids (places) held by this rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilerec.modules.buckets import Buckets
from tilerec.modules.evict import Evicting
from tilerec.ops.hash.definition import HashRange, HashState, Policy, score, zch_buckets, zch_find


@dataclass(frozen=True)
class IdPlace:
    """Place of an id in a table; `row` is None if the id has none.

    Args:
        row: of the table. An id without a row reads `shared_row`; if that is None too, the id is dropped.
        since, last: training steps of the id's insertion and of its last use.
        hits: uses since the insertion.
        expires: by the table's clock; None if nothing expires.
        probes: slots read to find the id, or to find that it is absent.
        sooner: number of ids of the bucket that the policy would evict before this one; None without a policy.
        how: the eviction rule and `sooner` in words.
        rank: the rank that holds the bucket.
    """

    table: str
    feature: str
    id: int
    bucket: int
    row: int | None
    shared_row: int | None
    since: int | None
    last: int | None
    hits: int | None
    expires: int | None
    probes: int
    sooner: int | None
    how: str
    rank: int = 0


def place_of(
    table_name: str, feature: str, id_: int, key: int, state: HashState, table: HashRange, buckets: Buckets,
    evicting: Evicting | None, *, shares: bool, step: int, now: Callable[[], int],
) -> IdPlace:  # fmt: skip
    """Return the record of an id whose bucket is held here; read-only.

    Args:
        key: the id in stored form.
        now: the clock; called only if ids expire.
    """
    id_ = operator.index(id_)
    ids_N = torch.tensor([key], device=state.ids_E.device)
    bucket = int(zch_buckets(ids_N, table.buckets)[0])
    found = zch_find(ids_N, state, table)
    probes, place = int(found.probes_N[0]), int(found.rows_N[0])
    shared = int(buckets.shared_rows(ids_N)[0]) if shares else None
    if place < 0:
        how = f"it has no row, and {'shares one' if shares else 'is dropped'}"
        return IdPlace(
            table_name, feature, id_, bucket, None, shared, None, None, None, None, probes, None, how
        )
    at = place - table.first * table.slots
    row = int(buckets.rows_of(found.rows_N)[0])
    since, last, hits = (int(t[at]) for t in (state.since_E, state.last_E, state.hits_E))
    expires = int(state.expires_E[at]) if state.expires_E.numel() else None
    if evicting is None:
        sooner, how = None, "never: this table does not evict"
    else:
        sooner, how = _sooner(state, at, table.slots, evicting, step, now)
    return IdPlace(
        table_name, feature, id_, bucket, row, shared, since, last, hits, expires, probes, sooner, how
    )


def _sooner(
    state: HashState, at: int, slots: int, evicting: Evicting, step: int, now: Callable[[], int]
) -> tuple[int, str]:
    """Return how many ids of the bucket would be evicted before the one at this place, and the rule in words."""
    policy, exponent = evicting.policy, evicting.exponent
    first = at // slots * slots
    here = slice(first, first + slots)
    ends = state.expires_E[here].tolist() if state.expires_E.numel() else [0] * slots
    used, last, hits = (t[here].tolist() for t in (state.used_E, state.last_E, state.hits_E))
    scores = [
        score(policy, step=step + 1, last=last[i], hits=hits[i], expires=ends[i], exponent=exponent)
        for i in range(slots)
        if used[i]
    ]
    i = at - first
    own = score(policy, step=step + 1, last=last[i], hits=hits[i], expires=ends[i], exponent=exponent)
    sooner = sum(other < own for other in scores)
    if policy is Policy.TTL:
        how = f"by a new id of its window, once the clock (now {now()}) reaches {ends[i]}"
    else:
        words = {
            Policy.LRU: f"least recently used first: last used in step {last[i]} of {step}",
            Policy.LFU: f"least frequently used first: {hits[i]} uses, the last in step {last[i]}",
            Policy.DISTANCE_LFU: f"lowest uses / age^{exponent:g} first: {own[0]:.3g}",
        }
        how = words[policy]
    return sooner, f"{how}; {sooner} of the {len(scores)} ids of its bucket would be evicted before it"
