"""Whole cached tables: reads, writes, copies, resets and loads have the newest rows."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch

from tests.storage.cached_tables import (
    KEYS,
    assert_same,
    batch,
    ebc,
    goes_on_alike,
    output,
    step,
    trained,
)
from tilerec import (
    EmbeddingBagCollection,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
    uncache_tables,
)
from tilerec.modules.cached_tables import iter_table_rows
from tilerec.modules.row_reset import reset_rows
from tilerec.modules.table_resize import resize_table
from tilerec.spec.optimizer import (
    SGD,
    Adam,
    RowWiseAdagrad,
)


def test_reading_a_weight_by_its_name_shows_the_newest_rows() -> None:
    plain, other, rng = trained()
    kept = other.embedding_bags["a"].weight
    assert torch.equal(plain.embedding_bags["a"].weight, kept)
    kjt = batch(rng)
    step(plain, kjt)
    step(other, kjt)
    assert not torch.equal(plain.embedding_bags["a"].weight, kept)  # a kept one is of the last flush
    flush_caches(other)
    assert torch.equal(plain.embedding_bags["a"].weight, kept)


def test_writing_a_weight_by_its_name_is_seen_by_the_next_batch() -> None:
    plain, other, rng = trained()
    for module in (plain, other):
        with torch.no_grad():
            module.embedding_bags["a"].weight.mul_(0.5)
            module.embedding_bags["b"].weight.data[3] = 1.0
    goes_on_alike(plain, other, rng)


def test_state_dicts_midway_load_into_cached_and_uncached_modules() -> None:
    plain, other, rng = trained()
    saved = io.BytesIO()
    torch.save((other.state_dict(), other.fused_optimizer.state_dict()), saved)
    saved.seek(0)
    weights, state = torch.load(saved)
    for _ in range(3):
        step(other, batch(rng))  # goes astray
    fresh = ebc(Adam(0.1))
    for module in (other, fresh):
        module.load_state_dict(weights)
        module.fused_optimizer.load_state_dict(state)
        assert_same(plain, module)
    twin = copy.deepcopy(rng)
    goes_on_alike(plain, other, rng)
    assert_same(ebc(Adam(0.1)), ebc(Adam(0.1)))
    for _ in range(3):
        step(fresh, batch(twin))
    assert_same(fresh, other)


def test_loading_by_assignment_takes_the_new_memory() -> None:
    plain, other, rng = trained()
    weights = {name: value.clone() for name, value in ebc(None).state_dict().items()}
    plain.load_state_dict(weights)
    other.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
    goes_on_alike(plain, other, rng)


def test_a_face_that_was_made_before_the_cache_shows_the_newest_state() -> None:
    plain, other = ebc(Adam(0.1)), ebc(Adam(0.1))
    face = other.fused_optimizer
    cache_tables(other, 0.15)
    kjt = batch(random.Random(13))
    step(plain, kjt)
    step(other, kjt)
    other.state_dict()  # empties the cache
    step(plain, kjt)
    step(other, kjt)
    want = plain.fused_optimizer.state_dict()["state"]
    for name, state in face.state_dict()["state"].items():
        for slot, value in state.items():
            assert torch.equal(value, want[name][slot])
    saved = copy.deepcopy(face.state_dict())
    for module in (plain, other):
        step(module, kjt)
    face.load_state_dict(saved)
    plain.fused_optimizer.load_state_dict(saved)
    goes_on_alike(plain, other, random.Random(14))


def test_reading_one_slot_of_the_face_shows_the_newest_state() -> None:
    plain, other, _ = trained()
    name = "embedding_bags.a.weight"
    faces = [module.fused_optimizer for module in (plain, other)]
    slots = [face.state[face.params[name]]["exp_avg"] for face in faces]
    assert torch.equal(*slots)
    assert sorted(faces[1].state[faces[1].params[name]]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_written_rate_holds_from_the_next_backward() -> None:
    plain, other, rng = trained()
    for module in (plain, other):
        module.fused_optimizer.param_groups[0]["lr"] = 0.01
    goes_on_alike(plain, other, rng)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_the_newest_rows_and_a_cache_of_their_own(how: str) -> None:
    plain, other, rng = trained()
    twin = copy.deepcopy(other) if how == "deepcopy" else pickle.loads(pickle.dumps(other))
    assert twin.embedding_bags["a"].rows.cache is not other.embedding_bags["a"].rows.cache
    state = rng.getstate()
    goes_on_alike(plain, twin, rng)
    rng.setstate(state)
    for _ in range(3):
        step(other, batch(rng))
    assert_same(plain, other)


def test_rows_are_reset_with_their_state() -> None:
    plain, other, rng = trained()
    for module in (plain, other):
        reset_rows(module.embedding_bags["a"], torch.tensor([0, 1, 2, 250]))
    goes_on_alike(plain, other, rng)


def test_rows_of_a_prefetched_batch_are_reset_before_its_forward() -> None:
    plain, other, rng = trained()
    kjt = batch(rng)
    other.prefetch(kjt)
    for module in (plain, other):
        reset_rows(module.embedding_bags["a"], kjt["f"].values())
    assert torch.equal(step(plain, kjt), step(other, kjt))
    goes_on_alike(plain, other, rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_row_that_moves_from_a_spare_line_takes_its_last_update_along(dtype: torch.dtype) -> None:
    plain, other = ebc(SGD(0.1), dtype=dtype), cache_tables(ebc(SGD(0.1), dtype=dtype), 0.01)  # one set
    ids = torch.arange(40)  # 32 rows have a line of the set, 8 a spare one
    first = KeyedJaggedTensor.from_lengths_sync(KEYS, ids, torch.tensor([40, 0, 0]))
    assert torch.equal(step(plain, first), step(other, first))
    seat = other.embedding_bags["a"].rows.cache.tensors.sets.line_of_E
    assert int(seat[39]) >= 32
    last = KeyedJaggedTensor.from_lengths_sync(KEYS, ids[39:], torch.tensor([1, 0, 0]))
    with torch.no_grad():
        assert torch.equal(output(plain, last), output(other, last))
    assert int(seat[39]) < 32
    assert_same(plain, other)


def test_all_parameters_are_reset() -> None:
    plain, other, rng = trained()
    for module in (plain, other):
        module.reset_parameters()
    goes_on_alike(plain, other, rng)


def test_a_table_gets_more_rows() -> None:
    plain, other, rng = trained()
    for module in (plain, other):
        resize_table(module, "a", 400, torch.arange(300), torch.arange(300) + 50)
    assert torch.equal(plain.embedding_bags["a"].weight, other.embedding_bags["a"].weight)
    goes_on_alike(plain, other, rng)


def test_another_type_takes_the_newest_rows_along() -> None:
    plain, other, rng = trained()
    plain.to(torch.bfloat16)
    other.to(torch.bfloat16)
    assert other.cache_stats()
    goes_on_alike(plain, other, rng)


def test_another_optimizer_starts_with_fresh_state() -> None:
    plain, other, rng = trained()
    for module in (plain, other):
        apply_optimizer_in_backward(RowWiseAdagrad(0.1), module.parameters(), replace=True)
    goes_on_alike(plain, other, rng)


def test_caching_again_and_not_any_more_changes_no_bit() -> None:
    plain, other, rng = trained()
    cache_tables(other, 1.0, "lfu")
    goes_on_alike(plain, other, rng)
    assert uncache_tables(other).cache_stats() == {}
    goes_on_alike(plain, other, rng)


def test_a_module_on_meta_gets_its_rows_and_keeps_its_cache() -> None:
    plain, other = ebc(Adam(0.1)), EmbeddingBagCollection(ebc(None).embedding_bag_configs(), device="meta")
    other.seed = plain.seed
    apply_optimizer_in_backward(Adam(0.1), other.parameters())
    cache_tables(other, 0.15).to_empty(device="cpu")
    other.load_state_dict(plain.state_dict())
    goes_on_alike(plain, other, random.Random(14))
    assert other.cache_stats()["a"].rows


def test_what_is_written_behind_a_flush_stands_though_a_lookup_waits_for_its_backward() -> None:
    """Which copies its rows when the tables are flushed: no table is brought back by another one's copies."""
    outs, modules = [], [ebc(Adam(0.1), weighted=True), cache_tables(ebc(Adam(0.1), weighted=True), 0.3)]
    kjt = batch(random.Random(40), weighted=True)
    for module in modules:
        weights = kjt.weights().clone().requires_grad_()
        kept = [table.weight for table in module.embedding_bags.values()]
        out = output(module, KeyedJaggedTensor.from_lengths_sync(KEYS, kjt.values(), kjt.lengths(), weights))
        flush_caches(module)
        for weight in kept:
            weight.data.mul_(0.5)
        (out * out).sum().backward()
        outs.append(weights.grad)
    assert_same(*modules)


def test_an_evaluation_between_a_lookup_and_its_update_lets_go_of_nothing() -> None:
    module, kjt = cache_tables(ebc(Adam(0.1)), 0.15), batch(random.Random(41))
    out = output(module, kjt)
    with torch.no_grad():
        output(module, kjt)
    (out * out).sum().backward()
    assert module.cache_stats()["a"].requests == 1
    assert all(not rows.cache.in_flight for _, rows in iter_table_rows(module))
