"""Batches of cached tables in flight: prefetched, forgotten, interrupted, in other threads."""

from __future__ import annotations

import copy
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.storage.cached_tables import (
    KEYS,
    RaisesAfter,
    assert_same,
    batch,
    ebc,
    ec,
    goes_on_alike,
    output,
    parameter_name,
    spare_only,
    step,
)
from tilerec import (
    CacheAlgorithm,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    InputError,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
)
from tilerec.modules.cached_tables import iter_table_rows
from tilerec.spec.optimizer import (
    SGD,
    Adam,
)
from tilerec.storage import row_cache
from tilerec.storage.batches_in_flight import BatchesInFlight

BOTH = [CacheAlgorithm.LRU, CacheAlgorithm.LFU]


def _interleaved(rng: random.Random, depth: int, algorithm: CacheAlgorithm, make: Callable[..., Any]) -> None:
    """Batches are prefetched up to `depth` ahead of their forward, at random moments, and disturbed."""
    plain, factor = make(Adam(0.1)), rng.choice([0.0, 0.01, 0.15, 0.4])
    other = cache_tables(make(Adam(0.1)), factor, algorithm) if factor else spare_only(make(Adam(0.1)))
    batches = [batch(rng, samples=rng.choice([0, 1, 9, 25])) for _ in range(14)]
    ahead = 0

    def maybe_prefetch(at: int) -> int:
        nonlocal ahead
        ahead = max(ahead, at)
        while ahead < min(at + depth, len(batches)) and rng.random() < 0.7:
            if rng.random() < 0.8:  # some batches are forgotten
                other.prefetch(batches[ahead])
            ahead += 1
        return ahead

    at = 0
    while at < len(batches):
        maybe_prefetch(at)
        many = min(rng.choice([1, 1, 1, 2]), len(batches) - at)  # at times, two forwards come before any backward
        kjts = batches[at : at + many]
        wants, gots = [output(plain, k) for k in kjts], []
        for kjt in kjts:
            gots.append(output(other, kjt))
            maybe_prefetch(at + many)
        event = rng.random()
        if event < 0.1:
            flush_caches(other)
        elif event < 0.2:  # a batch is looked at and not trained on
            with torch.no_grad():
                assert torch.equal(output(plain, batches[0]), output(other, batches[0]))
        elif event < 0.25:  # a forward without a backward
            output(other, batches[rng.randrange(len(batches))])
        order = list(range(many))
        rng.shuffle(order)
        for i in order:
            assert torch.equal(wants[i], gots[i])
            (wants[i] * wants[i]).sum().backward()
            (gots[i] * gots[i]).sum().backward()
            maybe_prefetch(at + many)
        at += many
    assert_same(plain, other)


@pytest.mark.parametrize("make", [ebc, ec])
@pytest.mark.parametrize("algorithm", BOTH, ids=parameter_name)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetches_interleaved_at_random_change_no_bit(
    depth: int, algorithm: CacheAlgorithm, make: Callable[..., Any]
) -> None:
    for seed in range(int(os.environ.get("TILEREC_TEST_EXAMPLES", "30")) // 15):
        _interleaved(random.Random(100 * depth + seed), depth, algorithm, make)


def test_a_batch_prefetched_in_inference_mode_is_trained_on() -> None:
    plain, other, rng = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15), random.Random(43)
    kjt = batch(rng)
    with torch.inference_mode():
        other.prefetch(kjt)
    assert torch.equal(step(plain, kjt), step(other, kjt))
    goes_on_alike(plain, other, rng)


def test_a_prefetched_batch_is_asked_for_once() -> None:
    module, rng = cache_tables(ebc(SGD(0.1)), 0.2), random.Random(7)
    kjt = batch(rng)
    assert module.prefetch(kjt) is kjt
    step(module, kjt)
    assert module.cache_stats()["a"].requests == 1


def test_without_memory_beside_the_lines_for_more_of_them_the_cache_is_emptied_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.1)
    rng, cat = random.Random(23), torch.cat
    failed = []

    def full(tensors: Any, *rest: Any, **more: Any) -> Tensor:
        lines = other.embedding_bags["a"].rows.cache.tensors.lines
        if any(tensor is own for tensor in tensors for own in lines[1:]):  # the second one, when the first is longer
            failed.append(True)
            raise RuntimeError("out of memory")
        return cat(tensors, *rest, **more)

    kjt = batch(rng)
    other.prefetch(kjt)
    assert torch.equal(step(plain, kjt), step(other, kjt))
    monkeypatch.setattr(row_cache.torch, "cat", full)
    for _ in range(3):
        kjt = batch(rng, samples=30)
        other.prefetch(kjt)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert failed
    monkeypatch.undo()
    assert_same(plain, other)


def test_empty_batches_and_many_forwards_without_backward() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    rng = random.Random(19)
    for _ in range(20):
        output(other, batch(rng))
    for kjt in (batch(rng, samples=0), batch(rng, most=1)):
        assert torch.equal(step(plain, kjt), step(other, kjt))
    goes_on_alike(plain, other, rng)


def test_a_prefetched_batch_that_is_never_used_holds_its_own_rows_and_no_others() -> None:
    plain, other, rng = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15), random.Random(30)
    other.prefetch(batch(rng))
    for _ in range(40):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert [own.conflict_misses for own in other.cache_stats().values()] == [0, 0, 0]
    assert_same(plain, other)


def test_weights_of_samples_of_frozen_tables_leave_no_batch_in_flight() -> None:
    module, rng = cache_tables(ebc(None, weighted=True), 0.15), random.Random(31)
    module.requires_grad_(False)
    for _ in range(3):
        kjt = batch(rng, weighted=True)
        kjt.weights().requires_grad_()
        step(module, kjt)
    assert all(not rows.cache.in_flight for _, rows in iter_table_rows(module))


def test_ids_that_an_array_changes_after_the_prefetch_are_asked_for_anew() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    array = torch.tensor([1, 2, 3] * 7).numpy()

    def kjt() -> KeyedJaggedTensor:
        return KeyedJaggedTensor.from_lengths_sync(KEYS, torch.from_numpy(array), torch.ones(21).long())

    ahead = kjt()
    other.prefetch(ahead)
    array[:] = 70
    assert torch.equal(step(plain, kjt()), step(other, ahead))
    assert_same(plain, other)
    ahead = kjt()
    other.prefetch(ahead)
    array[2] = 300
    with pytest.raises(InputError, match=r"Table 'a': got id 300 of feature 'f' \(position 2"):
        other(ahead)
    goes_on_alike(plain, other, random.Random(32))


def test_lines_that_an_evaluation_adds_for_ids_that_an_array_changed_are_trained_on() -> None:
    plain, other = ebc(Adam(0.1)), spare_only(ebc(Adam(0.1)))
    array = torch.arange(40).remainder(3).numpy()
    kjt = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.from_numpy(array), torch.tensor([40, 0, 0]))
    other.prefetch(kjt)
    array[:] = range(40)  # more rows than there are lines
    with torch.inference_mode():
        assert torch.equal(output(plain, kjt), output(other, kjt))
    assert torch.equal(step(plain, kjt), step(other, kjt))
    goes_on_alike(plain, other, random.Random(45))


def test_an_interrupt_anywhere_in_a_prefetch_loses_no_row() -> None:
    tables = [EmbeddingBagConfig(120, 4, "t", feature_names=["f"])]

    def kjt(seed: int, ids: int) -> KeyedJaggedTensor:
        own = torch.randint(120, (ids,), generator=torch.Generator().manual_seed(seed))
        return KeyedJaggedTensor.from_lengths_sync(["f"], own, torch.tensor([ids]))

    def trained() -> EmbeddingBagCollection:
        torch.manual_seed(3)
        module = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(SGD(0.1, momentum=0.9), module.parameters())
        return module

    plain, base = trained(), cache_tables(trained(), 0.2)
    for seed in range(3):
        step(plain, kjt(seed, 60))
    for calls in range(1, 1000):
        other = copy.deepcopy(base)
        for seed in range(3):
            step(other, kjt(seed, 60))
        try:
            with RaisesAfter(calls):
                other.prefetch(kjt(3, 60))
                flush_caches(other)
        except KeyboardInterrupt:
            assert_same(plain, other)
            copy.deepcopy(other)
            assert torch.equal(output(plain, kjt(4, 9)), output(other, kjt(4, 9)))
        else:
            break
    assert 20 < calls < 999


def test_an_interrupt_after_the_update_leaves_no_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, rng = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15), random.Random(33)
    kjt = batch(rng)
    step(plain, kjt)
    out = output(other, kjt)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BatchesInFlight, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (out * out).sum().backward()
    assert torch.equal(plain.embedding_bags["a"].weight, other.embedding_bags["a"].weight)


@pytest.mark.parametrize("load_factor", [0.05, 0.5])
def test_another_thread_may_prefetch_meanwhile(load_factor: float) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), load_factor)
    rng, failed = random.Random(34), []
    batches = [batch(rng, samples=40) for _ in range(60)]

    def loader() -> None:
        try:
            for kjt in batches:
                other.prefetch(kjt)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=loader)
    thread.start()
    outs = [step(other, kjt) for kjt in batches]
    thread.join()
    assert not failed
    for kjt, out in zip(batches, outs, strict=True):
        assert torch.equal(step(plain, kjt), out)
    assert_same(plain, other)
