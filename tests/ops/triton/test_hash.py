"""The hash kernels of Triton against the reference, bit for bit; the reference's own cases with these kernels."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops import test_hash
from tests.ops.hash_pair import PACKED, REFERENCE, Pair, copy_of, equal, flat

# With these kernels behind the ops (`_served_by_triton`). Left out: cases of thousands of insertions, and random ones.
from tests.ops.test_hash import (  # noqa: F401
    test_a_rank_without_buckets_takes_no_ids,
    test_a_state_that_does_not_fit_is_refused,
    test_an_id_is_admitted_when_it_was_seen_often_enough,
    test_an_id_of_another_rank_is_refused_before_anything_changes,
    test_any_int64_is_an_id,
    test_assign_gives_the_worked_example,
    test_assigning_each_says_whom_each_evicted,
    test_buckets_are_even_for_neighbouring_ids,
    test_buckets_give_the_worked_example,
    test_counters_stop_at_their_limit,
    test_counts_stand_for_repeated_ids,
    test_entries_that_do_not_fit_are_refused,
    test_equal_ids_share_a_row_and_count,
    test_find_gives_the_worked_example,
    test_missing_ids_are_only_looked_up,
    test_no_ids_change_nothing,
    test_numbers_out_of_range_are_refused,
    test_only_expired_ids_give_way_under_ttl_and_hits_renew_them,
    test_rejecting_keeps_who_is_there,
    test_resizing_gives_the_worked_example,
    test_resizing_refuses_what_cannot_be,
    test_resizing_slices_is_resizing_the_whole,
    test_rows_used_in_this_step_are_not_evicted,
    test_tensors_that_count_are_numbers_that_are_given,
)
from tests.ops.triton.gates import Gate, aside, compiled, nightly
from tests.ops.triton.interpreter import quick
from tilerec.modules import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
)
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.hash.definition import IdOutcome, Policy, empty_state
from tilerec.ops.hash.place import high, low, mixed
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

pytest.importorskip("triton")

from tilerec.ops.hash.triton import assign as hash_assign
from tilerec.ops.hash.triton import backend as hash_backend
from tilerec.ops.hash.triton import resize as hash_resize
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels are compiled here: tests/cuda")
TAKING_ARGUMENTS = LIBRARY.taking_arguments(hash_backend.KERNELS)
KERNELS: dict[str, Callable[..., Any]] = flat(TAKING_ARGUMENTS)


@contextlib.contextmanager
def served_by(kernels_: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """The ops are these kernels."""
    served = torch.library.Library("tilerec", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that a kernel is replaced
        for name, kernel in kernels_.items():
            served.impl(name, kernel, "CPU", allow_override=True)
    yield
    served._destroy()


@pytest.fixture(autouse=True)
def _served_by_triton() -> Iterator[None]:
    with served_by(TAKING_ARGUMENTS), quick():
        yield


def ids_of_bucket(bucket: int, buckets: int, count: int) -> torch.Tensor:
    """The first non-negative ids of a bucket."""
    ids = torch.arange(count * buckets * 2 + 100)
    return ids[high(mixed(ids), buckets) == bucket][:count]


# ---------------------------------------------------------------------------------------------------------------
# against the reference

SHAPES = [(1, 1, 1), (1, 7, 1), (1, 9, 128), (3, 1, 128), (768, 2, 128), (5, 9, 2), (1, 150, 128)]
EXTREMES = [-(2**63), -1, 0, 2**63 - 1, -(2**63), 1]


@pytest.mark.parametrize(("buckets", "slots", "max_probe"), SHAPES)
def test_triton_equals_reference_for_hostile_shapes(buckets: int, slots: int, max_probe: int) -> None:
    pair = Pair(KERNELS, buckets, slots, 0, buckets)
    extremes, same = torch.tensor(EXTREMES), torch.full((140,), -1)
    none, many = torch.empty(0, dtype=torch.int64), torch.arange(-6, 7)
    for step, ids in enumerate([none, extremes, same, many, many + 3]):
        for again in range(2):  # the second time everything is touched
            pair.assign(
                (ids, None, None, None),
                max_probe,
                step // 2 + again,
                0,
                step % 2,
                1.0,
                0,
                step < 4 or again == 0,
                1,
            )
        pair.find(ids + 1, max_probe)


POLICIES = [(0, 1.0), (1, 1.0), (2, 0.0), (2, 1.0), (2, 2.4), (3, 1.0)]


@settings(max_examples=max(settings.default.max_examples // 2, 1))
@given(
    shape=st.sampled_from([(1, 8), (2, 3), (5, 9), (7, 16)]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    policy=st.sampled_from(POLICIES),
    max_probe=st.sampled_from([1, 2, 8, 128]),
    threshold=st.sampled_from([1, 3]),
    batches=st.lists(
        st.tuples(st.sampled_from([1, 2, 12, 40]), st.sampled_from([2, 40, 2**62])), min_size=1, max_size=4
    ),
    seed=st.integers(0, 9),
)
def test_triton_equals_reference_on_random_histories(
    shape: tuple[int, int],
    cut: tuple[float, float],
    policy: tuple[int, float],
    max_probe: int,
    threshold: int,
    batches: list[tuple[int, int]],
    seed: int,
) -> None:
    buckets, slots = shape
    begin, end = sorted(round(part * buckets) for part in cut)
    pair = Pair(KERNELS, buckets, slots, begin, end - begin, expires=True, counters=5)
    generator = torch.Generator().manual_seed(seed)
    for step, (count, space) in enumerate(batches):
        ids = pair.own(torch.randint(-space, space, (count,), generator=generator))
        extras = [torch.randint(1, 3, ids.shape, generator=generator) for _ in range(2)]
        entries = (ids, extras[0], extras[0] != extras[1], extras[1]) if step % 2 else (ids, None, None, None)
        pair.assign(entries, max_probe, step, 2 * step, *policy, seed % 3, seed % 4 > 0, threshold)
        pair.find(pair.own(ids + 1), max_probe)
    pair.resize(buckets * 2, slots + 1, max_probe, 9, *policy)
    pair.resize(buckets, slots // 2 + 1, max_probe, 9, *policy)


@pytest.mark.parametrize(("policy", "exponent"), [(0, 1.0), (2, 2.4), (3, 1.0)])
def test_a_walk_over_many_chunks_evicts_whom_the_reference_evicts(policy: int, exponent: float) -> None:
    """A bucket of 150 slots: windows of two blocks, hits between evictions, ids evicted before their turn and again."""
    pair = Pair(KERNELS, 2, 150, 0, 2, expires=True)
    generator = torch.Generator().manual_seed(policy)
    old = torch.randint(-(2**62), 2**62, (600,), generator=generator)
    for values in (pair.mine, pair.theirs):  # as if many steps had gone by
        filled = empty_state(2, 150, expires=True)
        REFERENCE["zch_assign_"](old, None, None, None, *filled, 0, 2, 150, 150, 1, 1, 0, 1.0, 5, False, 1)
        for mine, made in zip(values, filled, strict=True):
            mine.copy_(made)
        spread = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(5))
        values.last_E.add_(spread)
        values.hits_E.add_(spread.flip(0) // 2)
        values.expires_E.sub_(spread)
    here = old[pair.theirs.ids_E.eq(old[:, None]).any(1)]
    # New ids among hits, and a long run of hits at each chunk's end: all their rows are touched for the next chunk.
    parts = []
    for turn in range(5):
        hits = here[torch.randint(0, len(here), (90,), generator=generator)]
        parts += [torch.arange(6) + 10 * turn, hits]
    result = pair.assign((torch.cat(parts), None, None, None), 150, 7, 8, policy, exponent, 3, True, 1)
    outcomes = result[1].tolist()
    assert outcomes.count(IdOutcome.EVICTED) > 30  # more than the new ids: who was evicted came back
    assert outcomes.count(IdOutcome.HIT) > 300


def test_an_id_that_is_evicted_before_its_turn_is_a_newcomer() -> None:
    """The worked example of tilerec/ops/hash/triton/backend.py."""
    pair = Pair(KERNELS, 1, 2, 0, 1)
    for state in (pair.mine, pair.theirs):
        state.ids_E.copy_(torch.tensor([5, 6]))
        state.used_E.fill_(True)
        state.last_E.copy_(torch.tensor([3, 4]))
    rows_N, outcomes_N, *_ = pair.assign((torch.tensor([6, 7, 5]), None, None, None), 2, 9, 0, 0, 1.0, 0, True, 1)
    assert rows_N.tolist() == [1, 0, -1]
    assert outcomes_N.tolist() == [IdOutcome.HIT, IdOutcome.EVICTED, IdOutcome.REJECTED]


def test_one_id_a_thousand_times_counts_each() -> None:
    pair = Pair(KERNELS, 3, 5, 0, 3, expires=True)
    ids = torch.full((1000,), 2**63 - 1)
    counts, ttl = torch.arange(1, 1001), torch.arange(1000).flip(0)
    for step in range(2):
        pair.assign((ids, counts, None, ttl), 5, step, 10, 1, 1.0, 0, True, 1)
    assert pair.mine.hits_E.sum() == 1001 * 1000
    assert pair.mine.expires_E.max() == 1009


def test_a_read_only_batch_walks_nowhere_and_changes_hits_alone() -> None:
    pair = Pair(KERNELS, 4, 6, 0, 4)
    ids = torch.arange(12)
    pair.assign((ids[:6], None, None, None), 6, 1, 0, 0, 1.0, 0, True, 1)
    used = pair.mine.used_E.clone()
    reads = torch.zeros(12, dtype=torch.bool)
    result = pair.assign((ids, None, reads, None), 6, 2, 0, 0, 1.0, 0, True, 1)
    assert result[1].tolist() == [IdOutcome.HIT] * 6 + [IdOutcome.MISSING] * 6
    assert torch.equal(pair.mine.used_E, used)


def test_keys_are_as_narrow_as_the_buckets_allow() -> None:
    for held, kind in (
        (1, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
        (2**31, torch.int32),
    ):
        assert hash_assign.key_type(held) == kind
        assert held - 1 <= torch.iinfo(kind).max


def test_keys_of_either_width_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_assign, "key_type", lambda held: torch.int32)
    pair = Pair(KERNELS, 100, 1, 0, 100)
    pair.assign((torch.tensor(EXTREMES * 2), None, None, None), 1, 1, 0, 0, 1.0, 0, True, 1)


def test_a_new_id_that_comes_often_takes_turns_once_a_chunk() -> None:
    """Its row is known after the first: the others hit it, whatever comes between."""
    pair = Pair(KERNELS, 1, 6, 0, 1, expires=True, counters=3)
    generator = torch.Generator().manual_seed(0)
    for step, threshold in ((1, 1), (2, 3), (3, 1)):
        ids = torch.randint(0, 5 + 3 * step, (150,), generator=generator)
        inserts = torch.rand(150, generator=generator) < 0.7
        ttl = torch.randint(0, 9, (150,), generator=generator)
        pair.assign((ids, None, inserts, ttl), 6, step, step, 1, 1.0, 0, True, threshold)


@pytest.mark.parametrize("slots", [8, 130])
def test_resizing_in_turn_and_in_parts_is_the_reference(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids whose scores are in the worst order for their windows, so that only the order of starts keeps everybody."""
    buckets = 4 if slots == 8 else 2
    pair = Pair(KERNELS, buckets, slots, 0, buckets)
    generator = torch.Generator().manual_seed(slots)
    for bucket, state in itertools.product(range(buckets), (pair.mine, pair.theirs)):
        ids = ids_of_bucket(bucket, buckets, slots)
        here = slice(bucket * slots, (bucket + 1) * slots)
        state.ids_E[here] = ids[low(mixed(ids), slots).argsort(descending=True)]
        state.used_E[here] = True
        state.last_E[here] = torch.arange(slots) // 2
        state.hits_E[here] = torch.randint(0, 3, (slots,), generator=generator.manual_seed(bucket))
    for policy, max_probe, (new_buckets, new_slots) in itertools.product(
        (0, 1),
        (2, 5, 40)[: 3 if slots == 8 else 1],
        ((buckets, slots), (2 * buckets, slots // 2), (1, buckets * slots)),
    ):
        monkeypatch.setattr(hash_resize, "_RESIZED_ROWS", 1 if policy else 2**24)
        pair.resize(new_buckets, new_slots, max_probe, 99, policy, 1.0)


def test_assigning_in_place_and_listing_are_one() -> None:
    one, generator = empty_state(3, 4, expires=True, counters=3), torch.Generator().manual_seed(2)
    other = copy_of(one)
    for step in range(1, 4):
        ids = torch.randint(-20, 20, (25,), generator=generator)
        rest = (0, 3, 4, 128, step, step, 0, 1.0, 2, True, 1)
        each = KERNELS["zch_assign_each_"](ids, None, None, None, *one, *rest)
        equal(each, REFERENCE["zch_assign_each_"](ids, None, None, None, *other, *rest))
        equal(one, other)
    assert (each[1] == IdOutcome.EVICTED).any()


@pytest.mark.parametrize(("policy", "exponent", "goes"), [(Policy.LFU, 1.0, 2), (Policy.DISTANCE_LFU, 16.0, 0)])
def test_policies_choose_whom_to_evict_with_these_kernels(policy: Policy, exponent: float, goes: int) -> None:
    test_hash.test_policies_choose_whom_to_evict(policy, exponent, goes)


def trained_with_managed_collision() -> list[torch.Tensor]:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(24, 4, "user", feature_names=["user"])
    ids = HashZchManagedCollisionModule(24, "cpu", 4, eviction_policy_name="LRU_EVICTION")
    users = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection([table]),
        ManagedCollisionCollection({"user": ids}, [table]),
        return_remapped_features=True,
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, users.parameters(), {"lr": 0.1})
    seen = []
    for step in range(3):
        values = torch.arange(12) * (step + 3) - 9
        batch = KeyedJaggedTensor.from_lengths_sync(["user"], values, torch.full((4,), 3))
        pooled, remapped = users(batch)
        assert remapped is not None
        seen += [pooled.values().detach(), remapped.values()]
        pooled.values().square().sum().backward()
    return seen + [value.detach() for value in users.state_dict().values() if isinstance(value, torch.Tensor)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # few rows a bucket
def test_managed_collision_over_these_kernels_trains_the_same() -> None:
    mine = trained_with_managed_collision()
    with served_by(PACKED):
        equal(mine, trained_with_managed_collision())


def test_ops_are_well_formed_with_these_kernels() -> None:
    test_hash.test_ops_are_well_formed(extras=True)


# ---------------------------------------------------------------------------------------------------------------
# bad input


def test_the_first_bad_entry_is_told_and_nothing_changes() -> None:
    ids, counts, ttl = torch.arange(40), torch.ones(40, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    bad_counts, bad_ttl = counts.clone(), ttl.clone()
    bad_counts[[7, 9]] = torch.tensor([0, 2**31])
    bad_ttl[[8, 30]] = torch.tensor([-1, 2**62])
    stray = int((high(mixed(ids), 6) < 2).nonzero()[0])
    for entries, first, message in (
        ((ids, bad_counts, None, bad_ttl), 0, r"counts\[7\] is 0"),
        ((ids, counts, None, bad_ttl), 0, r"time to live of ids\[8\] is -1"),
        ((ids, bad_counts, None, None), 2, rf"id {stray} \(position {stray}\) belongs to bucket"),
    ):
        for which in (KERNELS, REFERENCE):
            state = empty_state(6 - first, 4, expires=True)
            with pytest.raises(ValueError, match=message):
                which["zch_assign_"](*entries, *state, first, 6, 4, 4, 1, 0, 0, 1.0, 0, True, 1)
            assert not any(values.any() for values in state)


def test_the_lowest_row_that_holds_a_stranger_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_resize, "_RESIZED_ROWS", 1)
    state = empty_state(6, 4)
    ids = torch.arange(12)
    REFERENCE["zch_assign_"](ids, None, None, None, *state, 0, 6, 4, 4, 1, 0, 0, 1.0, 0, True, 1)
    strangers = state.used_E.nonzero().flatten()[[2, 5]]
    for row in strangers.tolist():
        state.ids_E[row] = int(ids_of_bucket((row // 4 + 1) % 6, 6, 1))
    for which in (KERNELS, REFERENCE):
        with pytest.raises(ValueError, match=rf"row {strangers[0]} \(bucket {strangers[0] // 4}\) holds id"):
            which["zch_resize"](*state[:6], 0, 6, 4, 12, 4, 4, 1, 0, 1.0)


def test_entries_and_ids_may_be_strided() -> None:
    pair = Pair(KERNELS, 5, 9, 0, 5)
    ids = torch.arange(60).view(20, 3)[:, 1]
    inserts = (torch.arange(40) % 3 > 0)[::2]
    pair.assign((ids, (ids + 1), inserts, None), 9, 1, 0, 0, 1.0, 0, True, 1)
    pair.find(ids, 4)


def test_bools_of_any_bits_are_read_as_true() -> None:
    ids = torch.arange(16)
    used = torch.full((16,), 2, dtype=torch.uint8).view(torch.bool)
    assert KERNELS["zch_find"](ids, ids.clone(), used, 0, 1, 16, 16)[0].tolist() == list(range(16))


# ---------------------------------------------------------------------------------------------------------------
# what the compiler makes of them for Hopper

_TYPES = {"key_N": "*i16", "probes_N": "*i32", "counters_BC": "*i32", "report": "*i64", "step_there": "*i64",
          "now_there": "*i64"}  # fmt: skip
_BYTES = ("used", "may_insert", "outcomes", "new_used")


def gate(name: str, place: str, constants: dict[str, Any], warps: int) -> Gate:
    module, _, function = place.partition(":")
    names = _arguments(f"tilerec.ops.hash.triton.{module}", function)
    types = {}
    for argument in names:
        if argument in constants:
            continue
        if argument in _TYPES:
            types[argument] = _TYPES[argument]
        elif argument.startswith(_BYTES):
            types[argument] = "*u8"
        else:
            types[argument] = "*i64" if argument[-2:] in ("_N", "_E", "_B") else "i32"
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return Gate(name, f"tilerec.ops.hash.triton.{module}:{function}", types, constants, options=options)


def _arguments(module: str, function: str) -> list[str]:
    return list(getattr(importlib.import_module(module), function).arg_names)


def walk(name: str, policy: Policy, exponent: int = 0, extras: bool = True) -> Gate:
    constants = {"POLICY": int(policy), "EXPONENT": exponent, "EVICT": True, "EXPIRING": extras, "ADMITS": extras,
                 "COUNTS": extras, "INSERTS": extras, "TTLS": extras, "STEPS": extras, "NOWS": extras, "WIDTH": 128,
                 "CHUNK": 128}  # fmt: skip
    return gate(name, "assign:walk_kernel", constants, 1)


def find(name: str, assigns: bool) -> Gate:
    constants = {"ASSIGNS": assigns, "COUNTS": assigns, "INSERTS": assigns, "TTLS": assigns}
    return gate(name, "find:find_kernel", {**constants, "ENTRIES": 16, "PROBES": 8}, 1)


def renew(name: str, dtype: str, columns: int) -> Gate:
    """Rows that begin anew, when ids take those of others."""
    types = {"rows_N": "*i64", "count": "i32", "row_offset": "i64", "held": "i32", "width": "i32"}
    if name == "values":
        more = {
            "tile": dtype,
            "column_offset": "i32",
            "k0": "i64",
            "k1": "i64",
            "low": "fp32",
            "high": "fp32",
        }
    else:
        more = {"beside": dtype, "number": "fp32"}
    constants = {"ENTRIES": 64, "ROWS": min(64, 512 // columns), "COLUMNS": columns}
    place = f"tilerec.ops.random.triton.renew:{name}_kernel"
    return Gate(f"renew {name}, {dtype} x {columns}", place, {**types, **more}, constants)


GATES = [
    find("find", False),
    find("find to assign", True),
    walk("walk, LRU", Policy.LRU),
    walk("walk, LFU, ids alone", Policy.LFU, extras=False),
    walk("walk, distance LFU", Policy.DISTANCE_LFU, 179),
    walk("walk, TTL", Policy.TTL),
    gate(
        "hit",
        "assign:hit_kernel",
        {"COUNTS": True, "TTLS": True, "EXPIRING": True, "STEPS": True, "NOWS": True, "BLOCK": 128},
        4,
    ),
    gate("live", "resize:live_kernel", {"POLICY": 2, "EXPONENT": 256, "BLOCK": 128}, 4),
    gate("place", "resize:place_kernel", {"WIDTH": 128, "CHUNK": 128}, 1),
    gate("carry", "resize:carry_kernel", {"EXPIRING": True, "BLOCK": 128}, 4),
    renew("values", "*fp32", 128),
    renew("values", "*bf16", 256),
    renew("number", "*fp32", 1),
    renew("number", "*fp32", 128),
]


@nightly
def test_kernels_compile_for_hopper_without_spills_and_locks() -> None:
    results = compiled(GATES)
    for name, result in results.items():
        assert result.spilled <= aside(), name
        # A walk is one warp a bucket, so few warps share a processor's registers.
        assert result.registers <= (192 if name.startswith("walk") else 128), name
        # 32 lanes look at 128 slots: four loads a lane of each of the state's columns, one of them per search.
        assert result.shared <= 1024, name
        assert result.count("atom.global.cas", "atom.cas", "atom.global.exch") == 0, name
    # Ids are compared 128 at a time, four in each lane; no load stands there slot by slot.
    assert results["walk, LFU, ids alone"].count("ld.global") <= 48
    # A batch's ids ask for 8 neighbouring slots with 8 lanes; sums and maxima of integers wait for no answer (which
    # Triton 3.6 leaves to the assembler).
    assert results["find"].count("ld.global") <= 16
    assert (
        results["hit"].count(
            "red.global.gpu.relaxed.add.u64",
            "red.relaxed.gpu.global.add.u64",
            "atom.global.gpu.relaxed.add.u64",
        )
        == 1
    )
