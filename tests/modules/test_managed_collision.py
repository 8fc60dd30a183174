"""The id map of one table, one process: rows, policies, counts, inspection, capacity, state."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.modules.evict import (
    DistanceLFU_EvictionPolicy,
    HashZchEvictionConfig,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
)
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.ops.hash.definition import zch_buckets
from tilerec.sparse.jagged_tensor import JaggedTensor

ANY = st.integers(-(2**63), 2**63 - 1)
EXTREMES = [-(2**63), -2, -1, 0, 1, 2**31, 2**32, 2**63 - 1]


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        return self.time


def made(rows: int = 24, buckets: int = 4, features: tuple[str, ...] = ("a",), **options: Any) -> Any:
    module = HashZchManagedCollisionModule(rows, "cpu", buckets, **options)
    module.bind("t", features)
    return module


def map_(module: ManagedCollisionModule, ids: list[int], *others: list[int]) -> list[int]:
    """Rows of the ids of each feature, one list after the other."""
    sizes = [len(ids), *map(len, others)]
    every = [*ids, *(id_ for own in others for id_ in own)]
    return module.map(torch.tensor(every, dtype=torch.int64), sizes, module.now()).rows_N.tolist()


def ids_of_bucket(bucket: int, buckets: int, count: int) -> list[int]:
    candidates = torch.arange(count * buckets * 8)
    return candidates[zch_buckets(candidates, buckets) == bucket][:count].tolist()


# -------------------------------------------------------------------------------------------------------- mapping


@given(st.lists(ANY, max_size=40), st.booleans())
def test_live_ids_never_share_a_row_and_keep_theirs(ids: list[int], shares: bool) -> None:
    module = made(48, 4, disable_fallback=not shares)
    first = map_(module, ids)
    again = map_(module, ids)
    own: dict[int, int] = {}
    shared = {b * 12 + 11 for b in range(4)} if shares else {-1}
    for id_, row, later in zip(ids, first, again, strict=True):
        assert row == later
        assert row // 12 == int(zch_buckets(torch.tensor([id_]), 4)) or row == -1
        if row not in shared:
            assert own.setdefault(row, id_) == id_
    assert module.stats().live == len(own)


def test_every_int64_is_an_id() -> None:
    module = made(768 * 8, 768)
    rows = map_(module, EXTREMES)
    assert len(set(rows)) == len(EXTREMES)
    assert map_(module.eval(), EXTREMES) == rows


def test_rows_do_not_depend_on_the_order_of_buckets_only_on_the_order_within() -> None:
    """Buckets share nothing: batches that keep each bucket's order give the same rows."""
    one, other = made(), made()
    ids = torch.randint(-(2**62), 2**62, (40,)).tolist()
    by_bucket = sorted(ids, key=lambda id_: int(zch_buckets(torch.tensor([id_]), 4)))
    rows = dict(zip(ids, map_(one, ids), strict=True))
    assert dict(zip(by_bucket, map_(other, by_bucket), strict=True)) == rows


def test_evaluation_reads_and_changes_nothing() -> None:
    module = made(admission_threshold=2, eviction_policy_name="LRU_EVICTION")
    map_(module, [1, 1, 2, 3, 3])
    before = copy.deepcopy(module.state_dict())
    module.eval()
    live = map_(module, [1, 3])
    assert map_(module, [2, 4, 1])[2] == live[0]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert module.stats().features["a"].reads == 5
    assert module.stats().features["a"].misses == 2


def test_an_inference_module_never_changes() -> None:
    module = made(is_inference=True)
    assert map_(module, [5, 6]) == module._buckets.shared_rows(torch.tensor([5, 6])).tolist()
    assert module.stats().live == 0


def test_an_evaluation_in_inference_mode_may_come_before_training() -> None:
    module = HashZchManagedCollisionModule(8, "cpu", 2)  # which learns its features from its first batch
    batch = {"a": JaggedTensor(torch.arange(6), None, torch.tensor([2, 4]))}
    with torch.inference_mode():
        module.eval()(batch)
    module.train()(batch)
    assert module.step == 1


def test_inference_mode_comes_and_goes() -> None:
    module = made()
    map_(module, [1])
    module.reset_inference_mode()
    map_(module, [2])
    assert module.stats().live == 1
    module.reset_training_mode()
    map_(module, [2])
    assert module.stats().live == 2


def test_read_only_features_are_looked_up_and_not_inserted() -> None:
    module = made(features=("a", "b_readonly"))
    rows = map_(module, [7], [7, 8])
    assert rows[1] == rows[0]
    assert rows[2] in (5, 11, 17, 23)
    counts = module.stats().features["b_readonly"]
    assert (counts.hits, counts.inserts, counts.collisions, counts.not_admitted) == (1, 0, 1, 0)


def test_ids_of_32_bits_are_widened_and_others_refused() -> None:
    module = made()
    assert module.id_map.hashed(torch.tensor([-1], dtype=torch.int32)).tolist() == [-1]
    with pytest.raises(InputError, match="float32"):
        module.id_map.hashed(torch.tensor([1.0]))


# ---------------------------------------------------------------------------------------------------- full buckets


def test_a_full_bucket_falls_back_to_its_shared_row_and_counts_it() -> None:
    module = made(4, 1, features=("a", "b"))
    rows = map_(module, [10, 11], [12, 13, 14, 10])
    assert sorted(rows[:3]) == [0, 1, 2]
    assert rows[3:] == [3, 3, rows[0]]
    a, b = module.stats().features.values()
    assert (a.inserts, a.collisions, b.inserts, b.collisions, b.hits) == (2, 0, 1, 2, 1)
    assert (a.rejections, b.rejections, b.evictions) == (0, 0, 0)


def test_a_full_bucket_rejects_and_counts_it() -> None:
    module = made(3, 1, when_full="reject")
    rows = map_(module, [10, 11, 12, 13])
    assert rows[3] == -1
    assert module.stats().features["a"].rejections == 1


def test_the_longest_unused_id_goes_first() -> None:
    module = made(3, 1, eviction_policy_name="LRU_EVICTION", disable_fallback=True)
    rows = dict(zip([10, 11, 12], map_(module, [10, 11, 12]), strict=True))
    map_(module, [10, 12])
    mapped = module.map(torch.tensor([13]), [1], 0)
    assert mapped.rows_N.tolist() == [rows[11]]
    assert mapped.evicted_M.tolist() == [rows[11]]
    assert module.stats().features["a"].evictions == 1
    assert module.inspect("a", 11).row is None


def test_the_least_used_id_goes_first() -> None:
    module = MCHManagedCollisionModule(4, "cpu", LFU_EvictionPolicy(), 1, buckets=1)
    module.bind("t", ["a"])
    rows = dict(zip([10, 11, 12], map_(module, [10, 11, 12]), strict=True))
    map_(module, [10, 10, 12])
    map_(module, [12])
    map_(module, [11])
    assert map_(module, [13]) == [rows[11]]


def test_uses_over_age_decide_with_distance_lfu() -> None:
    module = MCHManagedCollisionModule(3, "cpu", DistanceLFU_EvictionPolicy(1.0), 1, buckets=1)
    module.bind("t", ["a"])
    rows = dict(zip([10, 11], map_(module, [10] * 6 + [11])[::6], strict=True))
    for _ in range(9):
        map_(module, [])
    map_(module, [11, 11])  # 3 uses, 1 step ago, against 6 uses 11 steps ago
    assert map_(module, [12]) == [rows[10]]


def test_evictions_wait_for_their_interval() -> None:
    module = MCHManagedCollisionModule(3, "cpu", LRU_EvictionPolicy(), 3, buckets=1)
    module.bind("t", ["a"])
    map_(module, [10, 11])
    assert map_(module, [12]) == [2]  # step 2: shares a row
    assert map_(module, [12]) != [2]  # step 3: evicts
    counts = module.stats().features["a"]
    assert (counts.collisions, counts.evictions) == (1, 1)


def test_a_row_of_this_step_is_never_evicted_in_it() -> None:
    module = made(3, 1, eviction_policy_name="LRU_EVICTION", disable_fallback=True)
    assert sorted(map_(module, [10, 11, 12, 13])) == [-1, 0, 1, 2]
    assert module.stats().features["a"].rejections == 1


def test_ids_expire_by_the_clock_and_by_their_latest_use() -> None:
    clock = Clock()
    config = HashZchEvictionConfig(["a"], single_ttl=10)
    module = made(3, 1, eviction_policy_name="SINGLE_TTL_EVICTION", eviction_config=config, clock=clock)
    rows = dict(zip([10, 11], map_(module, [10, 11]), strict=True))
    clock.time = 6
    map_(module, [10])
    clock.time = 9
    assert map_(module, [12]) == [2]  # nobody has expired
    clock.time = 10
    assert map_(module, [12]) == [rows[11]]
    assert module.inspect("a", 10).expires == 16


def test_features_keep_their_ids_for_times_of_their_own() -> None:
    clock = Clock()
    config = HashZchEvictionConfig(["b", "a"], per_feature_ttl=[100, 1])
    module = made(
        3, 1, ("a", "b"), eviction_policy_name="PER_FEATURE_TTL_EVICTION", eviction_config=config, clock=clock,
    )  # fmt: skip
    rows = dict(zip([10, 11], map_(module, [10], [11]), strict=True))
    assert (module.inspect("a", 10).expires, module.inspect("a", 11).expires) == (1, 100)
    clock.time = 50
    assert map_(module, [12], []) == [rows[10]]


def test_times_for_other_features_are_refused() -> None:
    config = HashZchEvictionConfig(["a", "z"], per_feature_ttl=[1, 2])
    module = HashZchManagedCollisionModule(
        8, "cpu", 2, eviction_policy_name="PER_FEATURE_TTL_EVICTION", eviction_config=config
    )
    with pytest.raises(
        ConfigError, match=r"per_feature_ttl of \['a', 'z'\]; expected each of the features \['a'\] once"
    ):
        module.bind("t", ["a"])


def test_an_id_is_admitted_when_it_has_come_often_enough() -> None:
    module = made(768 * 8, 768, admission_threshold=3)
    assert map_(module, [5, 5]) == module._buckets.shared_rows(torch.tensor([5, 5])).tolist()
    row = map_(module, [5])[0]
    assert module.inspect("a", 5).row == row
    counts = module.stats().features["a"]
    assert (counts.not_admitted, counts.collisions, counts.inserts) == (2, 2, 1)


def test_several_shared_rows_spread_the_ids_without_a_row() -> None:
    module = made(100, 1, percent_reserved_slots=20)
    rows = map_(module, list(range(1000)))
    assert set(rows[200:]) - set(range(80)) == set(range(80, 100))


# ---------------------------------------------------------------------------------------------------------- asking


def test_inspect_says_where_since_when_and_how() -> None:
    module = made(3, 1, eviction_policy_name="LRU_EVICTION", disable_fallback=True)
    rows = map_(module, [10, 11])
    map_(module, [11, 11])
    old, young, absent = (module.inspect("a", id_) for id_ in (10, 11, 99))
    assert (old.row, old.since, old.last, old.hits, old.sooner) == (rows[0], 1, 1, 1, 0)
    assert (young.row, young.since, young.last, young.hits, young.sooner) == (rows[1], 1, 2, 3, 1)
    assert "least recently used first: last used in step 2 of 2" in young.how
    assert "1 of the 2 ids of its bucket would be evicted before it" in young.how
    assert absent.row is None
    assert absent.shared_row is None
    assert "dropped" in absent.how
    with pytest.raises(InputError, match="got feature 'z'; expected one of"):
        module.inspect("z", 1)
    with pytest.raises(InputError, match="expected an int64"):
        module.inspect("a", 2**63)


def test_stats_add_up_and_print() -> None:
    module = made(24, 4, ("a", "b"), eviction_policy_name="LFU_EVICTION")
    for step in range(5):
        ids = torch.randint(0, 60, (20,), generator=torch.Generator().manual_seed(step)).tolist()
        map_(module, ids[:15], ids[15:])
    stats = module.stats()
    total = stats.total
    assert total.lookups == 100
    assert total.inserts - total.evictions == stats.live == sum(stats.probe_lengths)
    assert stats.features["a"].lookups == 75
    assert stats.occupancy == stats.live / 20
    assert stats.shared_rows == 4
    assert module.open_slots().item() == 20 - stats.live
    assert total.probes_per_lookup >= 1
    assert "of 20 rows taken" in str(stats)


# -------------------------------------------------------------------------------------------------------- capacity


@given(st.lists(ANY, min_size=1, max_size=60, unique=True), st.sampled_from([(3, 1), (1, 2), (2, 3), (1, 1)]))
def test_growing_keeps_every_id_and_counts_it(ids: list[int], factors: tuple[int, int]) -> None:
    rows, buckets = factors
    module = made(60, 4, eviction_policy_name="LRU_EVICTION")
    map_(module, ids)
    known = {id_: module.inspect("a", id_) for id_ in ids}
    live = {id_: place for id_, place in known.items() if place.row is not None}
    counts = module.stats().total
    moved = module.resize(60 * rows * buckets, 4 * buckets)
    assert moved.kept == len(live) == module.stats().live
    assert moved.dropped_ids.numel() == 0
    module.validate_state()
    follows = dict(zip(moved.old_rows.tolist(), moved.new_rows.tolist(), strict=True))
    for id_, old in live.items():
        new = module.inspect("a", id_)
        assert new.row == follows[old.row]
        assert (new.since, new.last, new.hits) == (old.since, old.last, old.hits)
    assert module.stats().total == counts
    # And it is a module like one that was made of this size.
    assert module.id_map.mismatch_error(made(60 * rows * buckets, 4 * buckets).state_dict(), None) is None


@pytest.mark.parametrize(("rows", "buckets"), [(16, 4), (32, 2), (16, 2), (4, 4)])
def test_shrinking_keeps_those_that_would_be_evicted_last(rows: int, buckets: int) -> None:
    module = made(32, 4, eviction_policy_name="LFU_EVICTION", disable_fallback=True)
    ids = list(range(32))
    for id_ in ids:
        map_(module, [id_] * (id_ + 1))
    live = {id_ for id_ in ids if module.inspect("a", id_).row is not None}
    before = module.stats().total.evictions
    moved = module.resize(rows, buckets)
    kept = {id_ for id_ in ids if module.inspect("a", id_).row is not None}
    assert kept | set(moved.dropped_ids.tolist()) == live
    assert len(kept) == moved.kept
    assert module.stats().total.evictions - before == len(live) - len(kept)
    for id_ in live - kept:
        bucket = module.inspect("a", id_).bucket
        rivals = [other for other in kept if module.inspect("a", other).bucket == bucket]
        assert all(other > id_ for other in rivals)
        assert len(rivals) == rows // buckets
    module.validate_state()


def test_growing_and_shrinking_back_is_where_it_was() -> None:
    module = made(48, 4)
    ids = list(range(30))
    map_(module, ids)
    live = [id_ for id_ in ids if module.inspect("a", id_).row is not None]
    module.resize(48 * 6, 8)
    module.resize(48, 4)
    assert [id_ for id_ in ids if module.inspect("a", id_).row is not None] == live


def test_sizes_that_do_not_fit_leave_everything_as_it_was() -> None:
    module = made(24, 4)
    map_(module, [1, 2, 3])
    before = copy.deepcopy(module.state_dict())
    for size, buckets, words in (
        (25, None, "got 25 rows in"),
        (None, 6, "total_num_buckets=6 for a map of 4 buckets"),
    ):
        with pytest.raises(ConfigError, match=words):
            module.resize(size, buckets)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_part_of_the_buckets_is_a_slice_of_the_whole() -> None:
    whole = made(48, 4)
    part = whole.rebuild_with_output_id_range((12, 36))
    ids = torch.arange(40)
    own = ids[(zch_buckets(ids, 4) == 1) | (zch_buckets(ids, 4) == 2)]
    map_(whole, own.tolist())
    map_(part, own.tolist())
    assert torch.equal(whole.ids[11:33], part.ids)
    assert torch.equal(whole.counts[1:3], part.counts)
    with pytest.raises(InputError, match="belongs to bucket"):
        map_(part, ids[zch_buckets(ids, 4) == 0][:1].tolist())
    with pytest.raises(ConfigError, match="expected multiples of 12, the rows of a bucket"):
        whole.rebuild_with_output_id_range((0, 13))


# ----------------------------------------------------------------------------------------------------------- state


def test_state_goes_on_bit_for_bit() -> None:
    def options() -> dict[str, Any]:
        return {"eviction_policy_name": "LRU_EVICTION", "admission_threshold": 2}

    one, other = made(**options()), made(**options())
    batches = [torch.randint(0, 50, (25,), generator=torch.Generator().manual_seed(s)).tolist() for s in range(6)]
    for batch in batches[:3]:
        map_(one, batch)
    buffer = io.BytesIO()
    torch.save(one.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for batch in batches[3:]:
        assert map_(one, batch) == map_(other, batch)
    assert one.stats() == other.stats()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"rows": 48, "buckets": 8}, "of 8 buckets of 6 rows .* expected 4 of 6"),
        ({"rows": 24, "buckets": 2}, "of 2 buckets of 12 rows"),
        ({"disable_fallback": True}, r"\(0 of them shared\)"),
        ({"features": ("a", "b")}, "size mismatch for 'counts'.*other features"),
        ({"max_probe": 500}, "max_probe=500"),
    ],
)
def test_state_that_is_not_for_this_table_is_refused_whole(saved: dict[str, Any], words: str) -> None:
    state = made(**saved).state_dict()
    module = made()
    map_(module, [1, 2, 3])
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=words):
        module.load_state_dict(state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_state_cut_short_is_refused_whole() -> None:
    state = made().state_dict()
    del state["hits"]
    with pytest.raises(RuntimeError, match="hits"):
        made().load_state_dict(state)


def test_damage_is_found() -> None:
    module = made(eviction_policy_name="LRU_EVICTION")
    map_(module, [1, 2, 3])
    module.validate_state()
    module.ids[module.used] += 1
    with pytest.raises(InputError, match="a lookup would not find it"):
        module.validate_state()


def test_a_part_with_the_later_buckets_is_valid_until_an_id_is_out_of_place() -> None:
    """Rows [12, 24) of 24 are buckets 2 and 3 of 4."""
    part = made().rebuild_with_output_id_range((12, 24))
    ids = [*ids_of_bucket(2, 4, 3), *ids_of_bucket(3, 4, 2)]
    map_(part, ids)
    part.validate_state()
    first, second, free = *part.used.nonzero().squeeze(1)[:2].tolist(), int((~part.used).nonzero()[-1])
    assert first < 6 <= free
    part.ids[first], part.ids[second] = part.ids[second].clone(), part.ids[first].clone()
    with pytest.raises(InputError, match=r"buckets \[2, 4\), where a lookup would not find it"):
        part.validate_state()


def test_on_meta_it_says_so_and_begins_empty_on_a_device() -> None:
    module = HashZchManagedCollisionModule(24, "meta", 4)
    module.bind("t", ["a"])
    with pytest.raises(ConfigError, match="on the meta device"):
        map_(module, [1])
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert map_(module, [1, 1]) == map_(made(), [1, 1])


def test_halving_the_model_leaves_ids_whole() -> None:
    module = made().to(torch.bfloat16)
    assert module.ids.dtype == torch.int64
    assert map_(module, [2**60 + 1]) == map_(made(), [2**60 + 1])


# ------------------------------------------------------------------------------------------------------ on its own


def jagged(ids: list[int], lengths: list[int], weights: Tensor | None = None) -> JaggedTensor:
    return JaggedTensor(torch.tensor(ids), weights, torch.tensor(lengths))


def test_alone_it_maps_a_dict_of_features_and_tells_who_was_evicted() -> None:
    module = HashZchManagedCollisionModule(3, "cpu", 1, eviction_policy_name="LRU_EVICTION", disable_fallback=True)
    out = module({"a": jagged([10, 11], [1, 1]), "b": jagged([12, 13], [0, 2])})
    assert (
        out["a"].values().tolist()
        == module.remap({"a": jagged([10, 11], [1, 1]), "b": jagged([], [0, 0])})["a"].values().tolist()
    )
    assert out["b"].lengths().tolist() == [0, 1]  # 13 found no row in this step
    assert module.evict() is None
    module.profile({"a": jagged([14], [1, 0]), "b": jagged([], [0, 0])})
    evicted = module.evict()
    assert evicted is not None
    assert evicted.numel() == 1
    assert module.evict() is None
    with pytest.raises(ConfigError, match="mutate_miss_lengths=False"):
        module({"a": jagged([1], [1]), "b": jagged([], [0])}, mutate_miss_lengths=False)


def test_one_module_serves_one_table() -> None:
    module = made()
    with pytest.raises(ConfigError, match="already maps"):
        module.bind("other", ["b"])
