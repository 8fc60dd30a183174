"""The hash ops: worked examples, a dictionary as the oracle, cuts into ranks, resizing, bad input."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from tests.ops.hash_pair import REFERENCE, assign_call, flat, resize_call
from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.hash.definition import (
    Assigned,
    AssignOptions,
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
    zch_resize,
)

OPS = torch.ops.tilerec
EXTREMES = [-(2**63), -(2**63) + 1, -(2**32), -2, -1, 0, 1, 2**31, 2**63 - 1]
ONE = HashRange(1, 2)


def _both(name: str) -> dict[str, Callable[..., Any]]:
    return {"op": flat({name: getattr(OPS, name)})[name], "reference": REFERENCE[name]}


BOTH = pytest.mark.parametrize("which", ["op", "reference"])


def _filled(table: HashRange, held: int, count: int, seed: int = 0, **options: Any) -> HashState:
    state = empty_state(held, table.slots, **options)
    ids = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))
    zch_assign_(_own(ids, table, held), state, table, AssignOptions(step=1, ttl=5))
    return state


def _own(ids_N: Tensor, table: HashRange, held: int) -> Tensor:
    """The ids whose buckets are held."""
    bucket_N = zch_buckets(ids_N, table.buckets)
    return ids_N[(bucket_N >= table.first) & (bucket_N < table.first + held)]


def _mixed(id_: int) -> int:
    """The finaliser of splitmix64 as published, on Python's integers."""
    x = id_ % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


# ---------------------------------------------------------------------------------------------------------------
# from ids to buckets


@BOTH
def test_buckets_give_the_worked_example(which: str) -> None:
    buckets = _both("zch_buckets")[which]
    assert buckets(torch.tensor([0, 1, -1]), 768).tolist() == [0, 259, 542]
    assert _mixed(1) == 0x5692161D100B05E5


@BOTH
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EXTREMES)),
    count=st.sampled_from([1, 2, 3, 768, 2**31]),
)
def test_buckets_are_the_high_half_of_the_mixed_id(which: str, ids: list[int], count: int) -> None:
    got = _both("zch_buckets")[which](torch.tensor(ids, dtype=torch.int64), count)
    assert got.tolist() == [((_mixed(id_) >> 32) * count) >> 32 for id_ in ids]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 1000), st.integers(1, 9))
def test_more_buckets_split_the_old_ones(ids: list[int], count: int, factor: int) -> None:
    ids_N = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(zch_buckets(ids_N, count * factor) // factor, zch_buckets(ids_N, count))


def test_buckets_are_even_for_neighbouring_ids() -> None:
    counts = torch.bincount(zch_buckets(torch.arange(-50_000, 50_000), 100), minlength=100)
    assert counts.min() > 850
    assert counts.max() < 1150


# ---------------------------------------------------------------------------------------------------------------
# find and assign


@BOTH
def test_find_gives_the_worked_example(which: str) -> None:
    find = _both("zch_find")[which]
    ids_E, used_E = torch.tensor([1, 99, 8, 3]), torch.tensor([True, False, True, True])
    rows_N, probes_N = find(torch.tensor([8, 2, 5]), ids_E, used_E, 0, 1, 4, 3)
    assert rows_N.tolist() == [2, -1, -1]
    assert probes_N.tolist() == [1, 2, 3]
    assert probes_N.dtype == torch.int32
    # The second of two buckets, whose rows are counted over the whole table.
    assert find(torch.tensor([-1]), torch.tensor([-1] * 4), used_E | True, 1, 2, 4, 3)[0].item() // 4 == 1


@BOTH
def test_assign_gives_the_worked_example(which: str) -> None:
    state = empty_state(1, 2)
    state.ids_E.copy_(torch.tensor([5, 6]))
    state.used_E.fill_(True)
    state.last_E.copy_(torch.tensor([3, 9]))
    result = Assigned(
        *_both("zch_assign_")[which](
            torch.tensor([7, 8]), None, None, None, *state, 0, 1, 2, 128, 9, 0, 0, 1.0, 0, True, 1
        )
    )
    assert result.rows_N.tolist() == [0, -1]
    assert result.outcomes_N.tolist() == [IdOutcome.EVICTED, IdOutcome.REJECTED]
    assert result.probes_N.tolist() == [2, 2]
    assert result.evicted_rows_M.tolist() == [0]
    assert result.evicted_ids_M.tolist() == [5]
    assert state.ids_E.tolist() == [7, 6]
    assert state.last_E.tolist() == [9, 9]
    assert state.since_E.tolist() == [9, 0]
    assert state.hits_E.tolist() == [1, 0]


@pytest.mark.parametrize("slots", [1, 2, 9])
@pytest.mark.parametrize("id_", EXTREMES)
def test_any_int64_is_an_id(slots: int, id_: int) -> None:
    table, state = HashRange(3, slots), empty_state(3, slots)
    ids = torch.tensor([id_])
    assert zch_find(ids, state, table).rows_N.tolist() == [-1]
    row = zch_assign_(ids, state, table, AssignOptions(step=0)).rows_N
    assert zch_find(ids, state, table).rows_N.tolist() == row.tolist()
    assert row.item() // slots == zch_buckets(ids, 3).item()


def test_no_ids_change_nothing() -> None:
    table, state = HashRange(2, 3), empty_state(2, 3)
    result = zch_assign_(torch.empty(0, dtype=torch.int64), state, table, AssignOptions(step=1))
    assert [values.shape[0] for values in result] == [0] * 5
    assert [values.shape[0] for values in zch_find(result.rows_N, state, table)] == [0, 0]
    assert not state.used_E.any()


def test_a_rank_without_buckets_takes_no_ids() -> None:
    state = empty_state(0, 3, counters=2, expires=True)
    none = torch.empty(0, dtype=torch.int64)
    assert (
        zch_assign_(
            none, state, HashRange(2, 3, first=2), AssignOptions(step=1, policy=Policy.TTL, threshold=2)
        ).rows_N.numel()
        == 0
    )
    with pytest.raises(InputError, match=r"holds buckets \[2, 2\)"):
        zch_find(torch.tensor([1]), state, HashRange(2, 3, first=2))


def test_equal_ids_share_a_row_and_count() -> None:
    table, state = HashRange(7, 3), empty_state(7, 3)
    result = zch_assign_(torch.full((50,), -1), state, table, AssignOptions(step=4))
    assert result.rows_N.unique().numel() == 1
    assert result.outcomes_N.tolist() == [IdOutcome.INSERTED] + [IdOutcome.HIT] * 49
    assert state.hits_E.sum() == 50
    assert state.used_E.sum() == 1


def test_counts_stand_for_repeated_ids() -> None:
    table, one, other = HashRange(5, 4), empty_state(5, 4), empty_state(5, 4)
    ids = torch.arange(12)
    zch_assign_(ids.repeat_interleave(3), one, table, AssignOptions(step=2))
    zch_assign_(ids, other, table, AssignOptions(step=2, counts_N=torch.full((12,), 3)))
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def test_rows_used_in_this_step_are_not_evicted() -> None:
    table, state = HashRange(1, 4), empty_state(1, 4)
    first = zch_assign_(torch.arange(6), state, table, AssignOptions(step=3))
    assert first.outcomes_N.tolist() == [IdOutcome.INSERTED] * 4 + [IdOutcome.REJECTED] * 2
    again = zch_assign_(torch.arange(100, 105), state, table, AssignOptions(step=3))
    assert again.outcomes_N.tolist() == [IdOutcome.REJECTED] * 5
    assert again.rows_N.tolist() == [-1] * 5
    later = zch_assign_(torch.tensor([2, 100, 101, 102, 103]), state, table, AssignOptions(step=4))
    assert later.outcomes_N.tolist() == [IdOutcome.HIT] + [IdOutcome.EVICTED] * 3 + [IdOutcome.REJECTED]
    assert sorted(later.evicted_ids_M.tolist()) == [0, 1, 3]


def test_rejecting_keeps_who_is_there() -> None:
    table, state = HashRange(1, 4), empty_state(1, 4)
    zch_assign_(torch.arange(4), state, table, AssignOptions(step=1))
    before = [values.clone() for values in state]
    result = zch_assign_(torch.tensor([9]), state, table, AssignOptions(step=5, evict=False))
    assert result.outcomes_N.tolist() == [IdOutcome.REJECTED]
    assert all(torch.equal(mine, old) for mine, old in zip(state, before, strict=True))


def test_missing_ids_are_only_looked_up() -> None:
    table, state = HashRange(2, 4), empty_state(2, 4, counters=3)
    inserts = torch.tensor([True, False, False, True])
    ids = torch.tensor([5, 5, 6, 6])
    result = zch_assign_(ids, state, table, AssignOptions(step=1, may_insert_N=inserts))
    assert result.outcomes_N.tolist() == [
        IdOutcome.INSERTED,
        IdOutcome.HIT,
        IdOutcome.MISSING,
        IdOutcome.INSERTED,
    ]
    result = zch_assign_(torch.tensor([8]), state, table, AssignOptions(step=1, may_insert_N=inserts[1:2], threshold=2))
    assert result.outcomes_N.tolist() == [IdOutcome.MISSING]
    assert not state.counters_BC.any()


# Three ids in a bucket of 3 slots: last 4, 6, 5; hits 7, 2, 2; expires 20, 15, 30. Step 10, now 18.
@pytest.mark.parametrize(
    ("policy", "exponent", "goes"),
    [
        (Policy.LRU, 1.0, 0),
        (Policy.LFU, 1.0, 2),  # hits 2 and 2; 5 is before 6
        (Policy.DISTANCE_LFU, 1.0, 2),  # 7 / 6, 2 / 4, 2 / 5
        (Policy.DISTANCE_LFU, 0.0, None),  # hits alone: 2 and 2, the first in the order of probing
        (Policy.DISTANCE_LFU, 16.0, 0),
        (Policy.TTL, 1.0, 1),
    ],
)
def test_policies_choose_whom_to_evict(policy: Policy, exponent: float, goes: int | None) -> None:
    for newcomer in range(20, 40):
        state = empty_state(1, 3, expires=True)
        state.used_E.fill_(True)
        state.ids_E.copy_(torch.tensor([10, 11, 12]))
        state.last_E.copy_(torch.tensor([4, 6, 5]))
        state.hits_E.copy_(torch.tensor([7, 2, 2]))
        state.expires_E.copy_(torch.tensor([20, 15, 30]))
        start = ((_mixed(newcomer) & 0xFFFFFFFF) * 3) >> 32
        expected = goes if goes is not None else min((1, 2), key=lambda slot, start=start: (slot - start) % 3)  # type: ignore[misc]
        result = zch_assign_(
            torch.tensor([newcomer]),
            state,
            HashRange(1, 3),
            AssignOptions(step=10, now=18, ttl=9, policy=policy, exponent=exponent),
        )
        assert result.evicted_ids_M.tolist() == [10 + expected]
        assert result.rows_N.tolist() == [expected]
        assert state.expires_E[expected] == 27


def test_only_expired_ids_give_way_under_ttl_and_hits_renew_them() -> None:
    table, state = HashRange(1, 2), empty_state(1, 2, expires=True)
    policy = {"policy": Policy.TTL}
    zch_assign_(
        torch.tensor([1, 2]),
        state,
        table,
        AssignOptions(step=1, now=100, ttl=torch.tensor([10, 3]), **policy),
    )  # type: ignore[arg-type]
    assert (
        zch_assign_(torch.tensor([3]), state, table, AssignOptions(step=2, now=102, ttl=9, **policy)).outcomes_N.item()
        == IdOutcome.REJECTED
    )  # type: ignore[arg-type]
    zch_assign_(torch.tensor([1]), state, table, AssignOptions(step=3, now=103, ttl=2, **policy))  # type: ignore[arg-type]
    assert zch_find(torch.tensor([1]), state, table).rows_N.item() >= 0
    assert sorted(state.expires_E.tolist()) == [103, 110]  # the later of 110 and 105
    result = zch_assign_(torch.tensor([3, 4]), state, table, AssignOptions(step=4, now=103, ttl=9, **policy))  # type: ignore[arg-type]
    assert result.outcomes_N.tolist() == [IdOutcome.EVICTED, IdOutcome.REJECTED]
    assert result.evicted_ids_M.tolist() == [2]


def test_without_a_time_to_live_an_id_may_go_at_once() -> None:
    table, state = HashRange(1, 1), empty_state(1, 1, expires=True)
    zch_assign_(torch.tensor([1]), state, table, AssignOptions(step=1, now=7, policy=Policy.TTL))
    assert state.expires_E is not None
    assert state.expires_E.tolist() == [7]
    later = zch_assign_(torch.tensor([2]), state, table, AssignOptions(step=2, now=7, policy=Policy.TTL))
    assert later.evicted_ids_M.tolist() == [1]


def test_an_id_is_admitted_when_it_was_seen_often_enough() -> None:
    table, state = HashRange(2, 8), empty_state(2, 8, counters=64)
    result = zch_assign_(torch.tensor([5, 6, 5, 5, 5, 6]), state, table, AssignOptions(step=1, threshold=3))
    assert result.outcomes_N.tolist() == [4, 4, 4, 1, 0, 4]
    assert result.rows_N.tolist()[3] == result.rows_N.tolist()[4] >= 0
    result = zch_assign_(
        torch.tensor([6, 7]), state, table, AssignOptions(step=2, threshold=3, counts_N=torch.tensor([1, 3]))
    )
    assert result.outcomes_N.tolist() == [1, 1]


def test_counters_stop_at_their_limit() -> None:
    table, state = HashRange(1, 2), empty_state(1, 2, counters=1)
    for _ in range(3):
        most = torch.tensor([2**31 - 1])
        zch_assign_(torch.tensor([5]), state, table, AssignOptions(step=1, threshold=2, counts_N=most))
        zch_assign_(torch.arange(3), state, table, AssignOptions(step=1, threshold=2**31 - 1, counts_N=most.expand(3)))
    assert state.counters_BC.tolist() == [[2**31 - 1]]


def test_assigning_each_says_whom_each_evicted() -> None:
    table, one = HashRange(2, 3), empty_state(2, 3)
    other = HashState(*(values.clone() for values in one))
    evictions = 0
    for step in range(1, 4):
        ids = torch.arange(7 * step, 7 * step + 9)
        listed = zch_assign_(ids, one, table, AssignOptions(step=step))
        each = zch_assign_each_(ids, other, table, AssignOptions(step=step))
        for mine, expected in zip(each[:3], listed[:3], strict=True):
            assert torch.equal(mine, expected)
        evicts = each.outcomes_N == IdOutcome.EVICTED
        assert torch.equal(each.rows_N[evicts], listed.evicted_rows_M)
        assert torch.equal(each.evicted_ids_N[evicts], listed.evicted_ids_M)
        assert not each.evicted_ids_N[~evicts].any()
        evictions += int(evicts.sum())
    assert evictions > 3
    for mine, expected in zip(other, one, strict=True):
        assert torch.equal(mine, expected)


def test_tensors_that_count_are_numbers_that_are_given() -> None:
    """What a CUDA graph does: the same call again, of the step and the time that its tensors say by then."""
    table, mine = HashRange(2, 3), empty_state(2, 3, expires=True)
    theirs = HashState(*(values.clone() for values in mine))
    step_there, now_there = torch.tensor([0, 3]).unbind()
    seen = []
    for step in range(1, 5):
        step_there += 1
        now_there += 5
        ids = torch.arange(7 * step, 7 * step + 9)
        options: dict[str, Any] = {"policy": Policy.TTL, "ttl": 4, "evict": 2}
        there = zch_assign_each_(ids, mine, table, AssignOptions(step=step_there, now=now_there, **options))
        here = zch_assign_each_(ids, theirs, table, AssignOptions(step=step, now=3 + 5 * step, **options))
        for one, other in zip((*there, *mine), (*here, *theirs), strict=True):
            assert torch.equal(one, other)
        seen.append(bool((here.outcomes_N == IdOutcome.EVICTED).any()))
    assert [step_there.item(), now_there.item()] == [4, 23]  # read, not written
    assert seen == [False, True, False, True]


@st.composite
def histories(draw: st.DrawFn) -> tuple[HashRange, int, list[Tensor], dict[str, Any]]:
    buckets, slots = draw(st.sampled_from([(1, 1), (1, 8), (3, 1), (2, 3), (5, 9), (16, 17)]))
    first = draw(st.integers(0, buckets - 1))
    held = draw(st.integers(1, buckets - first))
    table = HashRange(buckets, slots, draw(st.sampled_from([1, 2, 5, 128])), first)
    ids = st.integers(-2 * held * slots, 2 * held * slots) | st.sampled_from(EXTREMES)
    batches = draw(st.lists(st.lists(ids, max_size=40), min_size=1, max_size=5))
    threshold = draw(st.sampled_from([1, 1, 2]))
    options = {
        "policy": draw(st.sampled_from(list(Policy))),
        "exponent": draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        "ttl": draw(st.integers(0, 3)),
        "evict": draw(st.booleans()),
        "threshold": threshold,
    }
    return (
        table,
        held,
        [_own(torch.tensor(batch, dtype=torch.int64), table, held) for batch in batches],
        options,
    )


@given(histories())
def test_nobody_loses_a_row_in_silence(history: tuple[HashRange, int, list[Tensor], dict[str, Any]]) -> None:
    """A dictionary that hears only the results knows where everybody is, who came and who was evicted."""
    table, held, batches, options = history
    state = empty_state(held, table.slots, expires=True, counters=4)
    rows: dict[int, int] = {}
    for step, ids_N in enumerate(batches):
        result = zch_assign_(ids_N, state, table, AssignOptions(step=step, now=step, **options))
        evicted = dict(zip(result.evicted_ids_M.tolist(), result.evicted_rows_M.tolist(), strict=True))
        assert len(evicted) == result.evicted_rows_M.numel() == (result.outcomes_N == IdOutcome.EVICTED).sum()
        touched = set()
        evictors = iter(result.evicted_rows_M.tolist())
        for id_, row, outcome in zip(ids_N.tolist(), result.rows_N.tolist(), result.outcomes_N.tolist(), strict=True):
            if outcome == IdOutcome.HIT:
                assert rows[id_] == row
            else:
                assert id_ not in rows
            if outcome == IdOutcome.EVICTED:
                assert next(evictors) == row
                old = next(id_ for id_, held_row in rows.items() if held_row == row)
                assert evicted[old] == row
                assert row not in touched
                del rows[old]
            if outcome <= IdOutcome.EVICTED:
                assert outcome == IdOutcome.HIT or row not in rows.values()
                rows[id_] = row
                touched.add(row)
            else:
                assert row == -1
        found = zch_find(torch.tensor(list(rows), dtype=torch.int64), state, table)
        assert found.rows_N.tolist() == list(rows.values())
        assert (found.probes_N <= min(table.max_probe, table.slots)).all()
        assert state.used_E.sum() == len(rows)
        here = table.first * table.slots
        assert all(0 <= row - here < held * table.slots for row in rows.values())
        assert all(
            row // table.slots == zch_buckets(torch.tensor([id_]), table.buckets).item() for id_, row in rows.items()
        )


@pytest.mark.parametrize("cuts", [[0, 4, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 7]])
def test_ranks_that_hold_slices_do_what_one_rank_does(cuts: list[int]) -> None:
    table = HashRange(7, 16, 8)
    whole = empty_state(7, 16, expires=True, counters=5)
    parts = [empty_state(end - begin, 16, expires=True, counters=5) for begin, end in itertools.pairwise(cuts)]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        ids_N = torch.randint(-90, 90, (200,), generator=generator)
        options: dict[str, Any] = {
            "step": step,
            "policy": Policy(step),
            "threshold": 2,
            "now": step,
            "ttl": 1,
        }
        expected = zch_assign_(ids_N, whole, table, AssignOptions(**options))
        rows_N, bucket_N = torch.full_like(ids_N, -7), zch_buckets(ids_N, 7)
        for (begin, end), state in zip(itertools.pairwise(cuts), parts, strict=True):
            mine = (bucket_N >= begin) & (bucket_N < end)
            rows_N[mine] = zch_assign_(ids_N[mine], state, table._replace(first=begin), AssignOptions(**options)).rows_N
        assert torch.equal(rows_N, expected.rows_N)
    for values, slices in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(values, torch.cat(slices))


# ---------------------------------------------------------------------------------------------------------------
# resize


@BOTH
def test_resizing_gives_the_worked_example(which: str) -> None:
    state = empty_state(1, 2)
    state.ids_E.copy_(torch.tensor([5, 6]))
    state.used_E.fill_(True)
    state.last_E.copy_(torch.tensor([3, 9]))
    ids_E, used_E, _, last_E, _, expires_E, moved_E = _both("zch_resize")[which](
        *state[:6], 0, 1, 2, 1, 1, 128, 9, 0, 1.0
    )
    assert (ids_E.tolist(), used_E.tolist(), last_E.tolist(), moved_E.tolist()) == ([6], [True], [9], [-2, 0])
    assert expires_E.numel() == 0


@given(
    old=st.tuples(st.sampled_from([1, 2, 6]), st.sampled_from([1, 3, 16])),
    factor=st.sampled_from([1, 2, 3]),
    slots=st.sampled_from([1, 3, 8, 40]),
    merges=st.booleans(),
    policy=st.sampled_from(list(Policy)),
    max_probe=st.sampled_from([1, 4, 128]),
    seed=st.integers(0, 3),
)
def test_resizing_moves_every_id_or_says_that_it_was_dropped(
    old: tuple[int, int], factor: int, slots: int, merges: bool, policy: Policy, max_probe: int, seed: int
) -> None:
    buckets = old[0] * (factor if merges else 1)
    new_buckets = old[0] * (1 if merges else factor)
    table = HashRange(buckets, old[1], max_probe)
    state = _filled(table, buckets, 2 * buckets * old[1], seed, expires=True, counters=3)
    before = [values.clone() for values in state]
    resized, moved_E = zch_resize(state, table, new_buckets, slots, step=4, policy=policy)
    assert all(torch.equal(mine, kept) for mine, kept in zip(state, before, strict=True))
    assert torch.equal(moved_E == -1, ~state.used_E)
    kept = moved_E >= 0
    assert resized.used_E.sum() == kept.sum()
    for values, now in zip(state[:6], resized[:6], strict=True):
        assert torch.equal(now[moved_E[kept]], values[kept])
        assert not now[~resized.used_E].any()
    new = HashRange(new_buckets, slots, max_probe)
    assert torch.equal(zch_find(state.ids_E[kept], resized, new).rows_N, moved_E[kept])
    assert (zch_find(state.ids_E[moved_E == -2], resized, new).rows_N == -1).all()
    # Whoever was dropped found only ids in its window that go later than it.
    for row in (moved_E == -2).nonzero().flatten().tolist():
        mixed = _mixed(int(state.ids_E[row]))
        base = (((mixed >> 32) * new_buckets) >> 32) * slots
        start = ((mixed & 0xFFFFFFFF) * slots) >> 32
        window = [base + (start + i) % slots for i in range(min(max_probe, slots))]
        assert all(resized.used_E[window])
        at = {"policy": policy, "step": 4}
        mine = score(last=int(state.last_E[row]), hits=int(state.hits_E[row]), expires=int(state.expires_E[row]), **at)  # type: ignore[arg-type]
        for there in window:
            theirs = score(
                last=int(resized.last_E[there]), hits=int(resized.hits_E[there]), expires=int(resized.expires_E[there]),
                **at,  # type: ignore[arg-type]
            )  # fmt: skip
            assert theirs >= mine


def test_resizing_slices_is_resizing_the_whole() -> None:
    table = HashRange(6, 10)
    state = _filled(table, 6, 50)
    whole = zch_resize(state, table, 3, 12, step=2)
    halves = []
    for begin, end in ((0, 2), (2, 6)):
        part = HashState(*[values[begin * 10 : end * 10] for values in state[:5]], *state[5:])  # type: ignore[arg-type]
        part = part._replace(counters_BC=state.counters_BC[begin:end])
        halves.append(zch_resize(part, table._replace(first=begin), 3, 12, step=2))
    assert torch.equal(torch.cat([half.moved_E for half in halves]), whole.moved_E)
    for mine, one, other in zip(whole.state, halves[0].state, halves[1].state, strict=True):
        assert torch.equal(mine, torch.cat([one, other]))


@pytest.mark.parametrize(("slots", "max_probe"), [(64, 128), (64, 8), (33, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("factor", [1, 2, 8])
def test_splitting_buckets_keeps_everybody(factor: int, slots: int, max_probe: int) -> None:
    table = HashRange(12, slots, max_probe)
    state = empty_state(12, slots)
    generator = torch.Generator().manual_seed(slots)
    for step in range(6):  # later ids evict earlier ones, whose places no order of insertion would give
        ids = torch.randint(-(2**62), 2**62, (12 * slots,), generator=generator)
        zch_assign_(ids, state, table, AssignOptions(step=step))
    assert state.used_E.float().mean() > 0.8
    assert (zch_resize(state, table, 12 * factor, slots, step=9, policy=Policy.LFU).moved_E[state.used_E] >= 0).all()


def test_more_slots_keep_everybody_whose_window_is_the_bucket() -> None:
    state = _filled(HashRange(12, 64), 12, 4000)
    assert state.used_E.all()
    for slots in (64, 65, 128):
        assert (zch_resize(state, HashRange(12, 64), 12, slots, step=2).moved_E >= 0).all()


def _all_fit(starts: list[int], slots: int, max_probe: int) -> bool:
    """Whether some arrangement gives each a slot of its window: augmenting paths."""
    owner: dict[int, int] = {}

    def place(one: int, seen: set[int]) -> bool:
        for slot in ((starts[one] + i) % slots for i in range(min(max_probe, slots))):
            if slot not in seen:
                seen.add(slot)
                if slot not in owner or place(owner[slot], seen):
                    owner[slot] = one
                    return True
        return False

    return all(place(one, set()) for one in range(len(starts)))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9, unique=True), st.integers(1, 9), st.integers(1, 9))
def test_nobody_is_dropped_whom_some_arrangement_would_keep(ids: list[int], slots: int, max_probe: int) -> None:
    table = HashRange(1, 16, 16)
    state = empty_state(1, 16)
    zch_assign_(torch.tensor(ids, dtype=torch.int64), state, table, AssignOptions(step=1))
    starts = [((_mixed(id_) & 0xFFFFFFFF) * slots) >> 32 for id_ in ids]
    moved_E = zch_resize(state, table._replace(max_probe=max_probe), 1, slots, step=2).moved_E
    assert bool((moved_E != -2).all()) == _all_fit(starts, slots, max_probe)


def test_admission_still_holds_after_buckets_split_and_merge() -> None:
    table, state = HashRange(4, 8), empty_state(4, 8, counters=16)
    seen = torch.arange(-20, 20)
    zch_assign_(seen, state, table, AssignOptions(step=1, threshold=3))
    zch_assign_(seen, state, table, AssignOptions(step=1, threshold=3, may_insert_N=torch.ones(40, dtype=torch.bool)))
    for buckets in (8, 2, 1):
        resized = zch_resize(state, table, buckets, 64, step=2).state
        third = zch_assign_(seen, resized, HashRange(buckets, 64), AssignOptions(step=2, threshold=3))
        assert set(third.outcomes_N.tolist()) <= {IdOutcome.HIT, IdOutcome.INSERTED}
    full = state._replace(counters_BC=torch.full((4, 16), 2**31 - 1, dtype=torch.int32))
    assert zch_resize(full, table, 1, 8, step=1).state.counters_BC.unique().tolist() == [2**31 - 1]


# ---------------------------------------------------------------------------------------------------------------
# bad input


def _assign(state: HashState, table: HashRange = ONE, ids: Any = (1,), **options: Any) -> Any:
    ids_N = torch.tensor(ids) if not isinstance(ids, Tensor) else ids
    return zch_assign_(ids_N, state, table, AssignOptions(**{"step": 1, **options}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids_E": torch.zeros(3, dtype=torch.int64)}, "3 rows, which are not whole buckets of 2 slots"),
        ({"ids_E": torch.zeros(2, dtype=torch.int32)}, "ids is torch.int32; expected torch.int64"),
        ({"used_E": torch.zeros(2, dtype=torch.uint8)}, "used is torch.uint8; expected torch.bool"),
        ({"used_E": torch.zeros(4, dtype=torch.bool)}, r"used has shape \[4\]; expected \[2\]"),
        ({"last_E": torch.zeros(2)}, "last is torch.float32"),
        ({"hits_E": torch.zeros(1, 2, dtype=torch.int64)}, r"hits has shape \[1, 2\]; expected \[2\]"),
        ({"since_E": torch.zeros(4, dtype=torch.int64)[::2]}, "since is not contiguous"),
        ({"expires_E": torch.zeros(1, dtype=torch.int64)}, r"expires has shape \[1\]; expected \[2\]"),
        ({"expires_E": torch.zeros(0)}, "expires is torch.float32"),
        ({"counters_BC": torch.zeros(2, 1, dtype=torch.int32)}, r"expected int32 of shape \[1, counters"),
        ({"counters_BC": torch.zeros(1, 2, dtype=torch.int64)}, "counters are torch.int64"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _assign(empty_state(1, 2)._replace(**change))


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (HashRange(0, 2), {}, "number of buckets is 0; expected 1 to"),
        (HashRange(1, 0), {}, "slots per bucket is 0"),
        (HashRange(2**31 + 1, 2), {}, "number of buckets is 2147483649"),
        (HashRange(1, 2, 0), {}, "max_probe is 0"),
        (
            HashRange(1, 2, first=1),
            {},
            r"holds buckets \[1, 2\) \(2 rows of 2 a bucket\); expected a range within \[0, 1\)",
        ),
        (HashRange(1, 2, first=-1), {}, r"buckets \[-1, 0\)"),
        (ONE, {"step": -1}, "step is -1"),
        (ONE, {"now": 2**62}, "now is"),
        (ONE, {"ttl": -1}, "ttl is -1"),
        (ONE, {"evict": -1}, "evict is -1"),
        (ONE, {"threshold": 0}, "threshold is 0"),
        (ONE, {"threshold": 2**31}, "threshold is 2147483648"),
        (ONE, {"threshold": 2}, "threshold 2 needs counters"),
        (ONE, {"policy": 4}, "policy 4 is none of"),
        (ONE, {"policy": Policy.TTL}, "TTL needs `expires`"),
        (ONE, {"exponent": float("nan")}, "exponent is nan"),
        (ONE, {"exponent": -0.5}, "exponent is -0.5"),
    ],
)
def test_numbers_out_of_range_are_refused(table: HashRange, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _assign(empty_state(1, 2), table, **options)


def test_clocks_and_times_to_live_reach_to_2_to_the_61() -> None:
    """Both at once: an expiry is their sum, which int64 holds."""
    state = empty_state(1, 2, expires=True)
    _assign(state, policy=Policy.TTL, step=2**61, now=2**61, ttl=2**61)
    assert state.expires_E is not None
    assert state.expires_E.max() == 2**62
    for name in ("step", "now", "ttl"):
        with pytest.raises(ConfigError, match=rf"{name} is {2**61 + 1}; expected"):
            _assign(empty_state(1, 2), **{name: 2**61 + 1})


@BOTH
def test_finding_probes_one_slot_at_least(which: str) -> None:
    state = empty_state(1, 2)
    find = _both("zch_find")[which]
    with pytest.raises(ConfigError, match="max_probe is 0"):
        find(torch.tensor([1]), state.ids_E, state.used_E, 0, 1, 2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ids": torch.tensor([1], dtype=torch.int32)},
            r"ids are torch.int32 of shape \[1\]; expected a flat list of int64",
        ),
        ({"ids": torch.zeros(1, 1, dtype=torch.int64)}, r"shape \[1, 1\]"),
        ({"counts_N": torch.tensor([1, 1])}, r"counts has shape \[2\]; expected \[1\] \(one per id\)"),
        ({"counts_N": torch.tensor([0])}, r"counts\[0\] is 0; expected 1"),
        ({"counts_N": torch.tensor([2**31])}, r"counts\[0\] is 2147483648"),
        ({"may_insert_N": torch.tensor([1])}, "may_insert is torch.int64; expected torch.bool"),
        ({"ttl": torch.tensor([-1])}, r"time to live of ids\[0\] is -1"),
        ({"ttl": torch.tensor([1.0])}, "ttl is torch.float32"),
        (
            {"step": torch.tensor([1])},
            r"step is torch.int64 of shape \[1\] on cpu; expected int64 of no dimension on cpu",
        ),
        ({"now": torch.tensor(1.0)}, r"now is torch.float32 of shape \[\]"),
    ],
)
def test_entries_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    state = empty_state(1, 2)
    with pytest.raises(InputError, match=message):
        _assign(state, **options)
    assert not state.used_E.any()


@BOTH
def test_an_id_of_another_rank_is_refused_before_anything_changes(which: str) -> None:
    state = empty_state(2, 4)
    ids = torch.arange(100)
    position = int((~((zch_buckets(ids, 6) == 2) | (zch_buckets(ids, 6) == 3))).nonzero()[0])
    message = rf"id {position} \(position {position}\) belongs to bucket \d of 6, but this state holds buckets \[2, 4\)"
    with pytest.raises(InputError, match=message):
        _both("zch_assign_")[which](ids, None, None, None, *state, 2, 6, 4, 9, 1, 0, 0, 1.0, 0, True, 1)
    with pytest.raises(InputError, match=message):
        _both("zch_find")[which](ids, state.ids_E, state.used_E, 2, 6, 4, 9)
    assert not state.used_E.any()


@BOTH
def test_resizing_refuses_what_cannot_be(which: str) -> None:
    resize = _both("zch_resize")[which]
    state = _filled(HashRange(6, 4), 6, 40)

    def call(first: int, buckets: int, held: int, new: int, take: int = 24, **options: int) -> Any:
        numbers = {"slots": 4, "max_probe": 128, "step": 1, **options}
        return resize(*[v[:take] for v in state[:6]], first, buckets, held, new, *numbers.values(), 0, 1.0)

    with pytest.raises(ConfigError, match="6 buckets cannot become 4; expected a multiple or a divisor"):
        call(0, 6, 4, 4)
    with pytest.raises(ConfigError, match=r"buckets \[0, 3\) do not merge 2 by 2"):
        call(0, 6, 4, 3, 12)
    with pytest.raises(ConfigError, match="new number of buckets is 0"):
        call(0, 6, 4, 0)
    for option, message in (
        ({"slots": 0}, "new number of slots per bucket is 0"),
        ({"max_probe": 0}, "max_probe is 0"),
        ({"step": -1}, "step is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(0, 6, 4, 6, 24, **option)
    wrong = state.ids_E.clone()
    wrong[0] = int(torch.arange(100)[zch_buckets(torch.arange(100), 12) > 0][0])
    message = r"row 0 \(bucket 0\) holds id \d+, which belongs to bucket [1-9]\d* of 12"
    with pytest.raises(InputError, match=message):
        resize(wrong, *state[1:6], 0, 12, 2, 12, 2, 128, 1, 0, 1.0)


# ---------------------------------------------------------------------------------------------------------------
# as torch programs


@pytest.mark.parametrize("extras", [False, True])
def test_ops_are_well_formed(extras: bool) -> None:
    table = HashRange(5, 4, 3, 1)
    state = _filled(table, 3, 30, expires=extras, counters=2 if extras else 0)
    ids = _own(torch.arange(40), table, 3)
    more = (torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))
    entries = (ids, *(more if extras else (None, None, None)))
    opcheck(OPS.zch_buckets.default, (ids, 7))
    opcheck(OPS.zch_find.default, (ids, state.ids_E, state.used_E, 1, 5, 4, 3))
    opcheck(
        OPS.zch_assign_.default,
        assign_call(*entries, *state, 1, 5, 4, 3, 2, 0, 1, 1.0, 0, True, 2 if extras else 1).packed(),
    )
    clocks = (torch.tensor(2), torch.tensor(0)) if extras else ()
    opcheck(
        OPS.zch_assign_each_.default,
        assign_call(*entries, *state, 1, 5, 4, 3, 2, 0, 1, 1.0, 0, 1, 1, *clocks).packed(),
    )
    opcheck(OPS.zch_resize.default, resize_call(*state[:6], 1, 5, 4, 10, 3, 3, 2, 0, 1.0).packed())


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        table, state = HashRange(5, 4), empty_state(5, 4, expires=True)
        ids = torch.empty(9, dtype=torch.int64)
        result = zch_assign_(ids, state, table, AssignOptions(step=1))
        assert [values.dtype for values in result] == [
            torch.int64,
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.int64,
        ]
        assert [values.shape for values in result[:3]] == [(9,)] * 3
        resized = zch_resize(state, table, 10, 3, step=1)
        assert [values.shape for values in resized.state[:6]] == [(30,)] * 6
        assert resized.moved_E.shape == (20,)
        with pytest.raises(InputError, match="not whole buckets of 3 slots"):
            zch_find(ids, state, HashRange(5, 3))
        assert mode is not None


def test_assigning_compiles_without_a_break_and_without_recompiling_for_steps() -> None:
    table = HashRange(3, 8)

    def assign(ids_N: Tensor, state: HashState, step: int) -> tuple[Tensor, Tensor]:
        result = zch_assign_(ids_N, state, table, AssignOptions(step=step))
        return result.rows_N * 2, result.evicted_ids_M

    graphs = 0

    def backend(module: Any, examples: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(module, examples)

    compiled = torch.compile(assign, backend=backend, fullgraph=True)
    one, other = empty_state(3, 8), empty_state(3, 8)
    for step in range(5):
        ids = torch.arange(step * 7, step * 7 + 12)
        for mine, expected in zip(compiled(ids, one, step + 2), assign(ids, other, step + 2), strict=True):
            assert torch.equal(mine, expected)
    for mine, expected in zip(one, other, strict=True):
        assert torch.equal(mine, expected)
    assert graphs <= 2
