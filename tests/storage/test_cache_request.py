"""Requests of all cached tables of a batch at once."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.storage.cached_tables import (
    RaisesAfter,
    assert_same,
    batch,
    ebc,
    goes_on_alike,
    output,
    spare_only,
    step,
)
from tilerec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
)
from tilerec.modules.cached_tables import iter_table_rows
from tilerec.ops.cache.definition import MAX_COUNT
from tilerec.spec.optimizer import SGD, Adam
from tilerec.storage import batches_in_flight, cache_request, host_rows, row_cache
from tilerec.storage.row_cache import RowCache

OPS = torch.ops.tilerec


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each request, of how many caches it was, and whether the host had to hear numbers of it."""
    seen: list[int] = []
    real = cache_request._more

    def more(asks: Any, header: Any) -> bool:
        seen.append(len(asks) if all(ask.sure for ask in asks) else -len(asks))
        return real(asks, header)

    monkeypatch.setattr(cache_request, "_more", more)
    return seen


def test_a_batch_is_one_request_that_nobody_waits_for(asked: list[int]) -> None:
    module, rng = cache_tables(ebc(SGD(0.1)), 0.2), random.Random(1)
    for _ in range(4):
        kjt = batch(rng)
        module.prefetch(kjt)
        step(module, kjt)
    assert asked == [3] * 4


def test_where_spare_lines_cost_much_the_host_hears_how_many_are_needed(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "SPARE_BYTES_IN_ADVANCE", 0)
    plain, other = ebc(Adam(0.1)), spare_only(ebc(Adam(0.1)))
    rng = random.Random(2)
    for samples in (5, 9, 25):
        kjt = batch(rng, samples=samples)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)
    assert asked.count(-3) >= 4, "three requests, and plans that were made again"
    spare = [rows.cache.tensors.sets.spare for _, rows in iter_table_rows(other)]
    assert spare[2] <= 77, "no more than twice what was needed"


def one_table(ids: int) -> tuple[Any, KeyedJaggedTensor]:
    """A table of 200 rows of 4 numbers, and a batch of its first rows."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(200, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(SGD(0.1), module.parameters())
    return module, KeyedJaggedTensor(["f"], torch.arange(ids), lengths=torch.ones(ids, dtype=torch.int64))


def test_spare_lines_of_as_many_bytes_as_the_limit_are_made_without_asking(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 ids may need 40 lines of 16 bytes, more than the sets' 32."""
    for limit in (640, 639):
        monkeypatch.setattr(row_cache, "SPARE_BYTES_IN_ADVANCE", limit)
        module, kjt = one_table(40)
        step(cache_tables(module, 0.16), kjt)
    assert asked[:2] == [1, -1]


def test_as_many_spare_lines_as_the_sets_have_are_made_without_asking(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "SPARE_BYTES_IN_ADVANCE", 0)
    for ids in (32, 33):
        module, kjt = one_table(ids)
        step(cache_tables(module, 0.16), kjt)  # 32 lines
    assert asked[:2] == [1, -1]


def test_batches_in_flight_count_for_the_spare_lines(asked: list[int]) -> None:
    """Three batches of 20 ids, none of them done with: 20, 40 and 60 lines. There are 32, then twice as many."""
    module, _ = one_table(20)
    spare_only(module)
    spare = []
    for first in (0, 20, 40):
        module.prefetch(
            KeyedJaggedTensor(["f"], torch.arange(first, first + 20), lengths=torch.ones(20, dtype=torch.int64))
        )
        (cache,) = (rows.cache for _, rows in iter_table_rows(module))
        spare.append(cache.tensors.sets.spare)
    assert asked == [1, 1, 1]
    assert spare == [32, 64, 64]


def test_batches_of_as_many_ids_as_there_are_spare_lines_get_no_more(asked: list[int]) -> None:
    module, kjt = one_table(32)
    spare_only(module)
    for _ in range(3):
        step(module, kjt)
    (cache,) = (rows.cache for _, rows in iter_table_rows(module))
    assert cache.tensors.sets.spare == 32


def test_without_memory_beside_the_lines_the_request_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "SPARE_BYTES_IN_ADVANCE", 0)
    plain, other = ebc(Adam(0.1)), spare_only(ebc(Adam(0.1)))
    rng = random.Random(3)
    first, second = batch(rng, samples=2), batch(rng, samples=30)
    assert torch.equal(step(plain, first), step(other, first))
    real, failed = torch.cat, []

    def full(tensors: Any, *rest: Any) -> Any:
        if len(failed) < 1 and tensors[0].dim() == 2 and tensors[0].is_floating_point():
            failed.append(1)
            raise RuntimeError("out of memory")
        return real(tensors, *rest)

    monkeypatch.setattr(row_cache.torch, "cat", full)
    out = output(other, second)
    monkeypatch.undo()
    assert failed
    assert torch.equal(output(plain, second), out)
    goes_on_alike(plain, other, rng)


def test_where_the_device_cannot_read_host_rows_they_are_moved_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_rows.HostRows, "here", None)
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15, "lfu")
    rng = random.Random(4)
    for _ in range(6):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


def test_bits_of_batches_and_serials_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they run out: 31 bits, of which up to 16 fly, and serials, which the op takes up to 2^31 - 2."""
    serials = []
    real = cache_request._request_of

    def ask(own: Any, ids: Any) -> Any:
        got = real(own, ids)
        serials.append(got.serial)
        return got

    monkeypatch.setattr(cache_request, "_request_of", ask)
    plain, other = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.15)
    rng = random.Random(5)
    for i in range(40):
        kjt = batch(rng, samples=2)
        if i % 3 == 0:
            other.prefetch(batch(rng, samples=1))  # never used
        assert torch.equal(step(plain, kjt), step(other, kjt))
        if i == 35:
            for _, rows in iter_table_rows(other):
                rows.cache.in_flight.last_serial = MAX_COUNT - 3
    assert all(rows.cache.in_flight.last_serial < 10 for _, rows in iter_table_rows(other))
    assert (min(serials), max(serials)) == (1, 2**31 - 2)
    assert_same(plain, other)


def test_a_batch_in_flight_has_a_bit_of_its_own_that_no_line_had_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 31, given again once no batch in flight has it: two of 70 batches fly at once."""
    given = []
    real = cache_request._request_of

    def ask(own: Any, ids: Any) -> Any:
        flying = [batch.bit for batch in own.cache.in_flight]
        got = real(own, ids)
        assert got.bit in [1 << k for k in range(31)]
        assert got.bit not in flying
        assert not bool((got.made.sets.flights_L & got.bit).any())
        given.append(got.bit)
        return got

    monkeypatch.setattr(cache_request, "_request_of", ask)
    module, rng = cache_tables(ebc(SGD(0.1)), 0.15), random.Random(7)
    for _ in range(35):
        ahead, now = batch(rng, samples=2), batch(rng, samples=1)
        module.prefetch(ahead)
        step(module, now)
        step(module, ahead)
    assert len(given) > len(set(given)) > 16


def test_an_interrupt_anywhere_in_a_request_loses_no_row() -> None:
    tables = [EmbeddingBagConfig(120, 4, name, feature_names=[name]) for name in ("f", "g")]

    def kjt(seed: int, ids: int) -> KeyedJaggedTensor:
        own = torch.randint(120, (2 * ids,), generator=torch.Generator().manual_seed(seed))
        return KeyedJaggedTensor.from_lengths_sync(["f", "g"], own, torch.tensor([ids, ids]))

    def trained() -> EmbeddingBagCollection:
        torch.manual_seed(3)
        module = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(SGD(0.1, momentum=0.9), module.parameters())
        return module

    plain, base = trained(), cache_tables(trained(), 0.2)
    for seed in range(3):
        step(plain, kjt(seed, 60))
    stopped = set()
    for calls in range(1, 400):
        other = copy.deepcopy(base)
        for seed in range(3):
            step(other, kjt(seed, 60))
        try:
            with RaisesAfter(calls) as mode:
                other.prefetch(kjt(3, 60))
                mode.left = 10**9
        except KeyboardInterrupt:
            assert_same(plain, other)
            copy.deepcopy(other)
            assert torch.equal(output(plain, kjt(4, 9)), output(other, kjt(4, 9)))
            stopped.add(calls)
        else:
            break
    assert 6 < len(stopped) < 399
    flush_caches(other)
    assert_same(plain, other)


class _Interrupted:
    """Ops, and Ctrl-C before the n-th call of one, or behind it."""

    def __init__(self, calls: int, behind: bool) -> None:
        self.left, self.behind = calls, behind

    def __getattr__(self, name: str) -> Any:
        def op(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.behind:
                raise KeyboardInterrupt
            out = getattr(OPS, name)(*args)
            if self.left == 0:
                raise KeyboardInterrupt
            return out

        return op


def test_an_interrupt_between_any_two_ops_of_a_request_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an op that was called, and behind one that has run; a table moves rows from spare lines to its sets."""
    for stops, behind in (((3, 4, 5), False), ((5,), True)):
        for stop in stops:
            plain, other = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.01)
            rng = random.Random(6)
            for _ in range(3):
                kjt = batch(rng, samples=20)
                assert torch.equal(step(plain, kjt), step(other, kjt))
            with monkeypatch.context() as patch:
                patch.setattr(cache_request, "OPS", _Interrupted(stop, behind))
                with pytest.raises(KeyboardInterrupt):
                    other.prefetch(batch(rng, samples=20))
            goes_on_alike(plain, other, rng)


def test_a_module_is_copied_right_after_an_interrupted_request(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, rng = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.15), random.Random(8)
    kjt = batch(rng)
    assert torch.equal(step(plain, kjt), step(other, kjt))
    with monkeypatch.context() as patch:
        patch.setattr(cache_request, "OPS", _Interrupted(3, behind=False))
        with pytest.raises(KeyboardInterrupt):
            other.prefetch(batch(rng))
    goes_on_alike(plain, copy.deepcopy(other), rng)


def test_ids_whose_writes_nobody_counts_are_asked_for_again() -> None:
    plain, other = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.15)
    with torch.inference_mode():
        kjt = KeyedJaggedTensor(["f", "g", "h"], torch.arange(12), lengths=torch.tensor([4, 4, 4]))
        other.prefetch(kjt)
        kjt.values().add_(40)
        assert torch.equal(output(plain, kjt), output(other, kjt))
    assert all(not rows.cache.in_flight for _, rows in iter_table_rows(other))


def test_two_tables_with_one_cache_ask_one_after_the_other(asked: list[int]) -> None:
    cache = RowCache("t", None)
    rows = torch.arange(20.0).view(10, 2)
    ids = torch.tensor([1, 2, 2, 7])
    wants = [cache_request.WantedRows(cache, [rows], own) for own in (((0, 2),), ((2, 4),))]
    lines = cache_request.lines_of_all(wants, ids, [(0, 2), (2, 4)], [0, 1], False)
    assert torch.equal(cache.tensors.lines[0][lines.long()], rows[ids])
    assert asked == [1, 1]
    assert (cache.stats.hits, cache.stats.misses) == (1, 3)


def _tied() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    names = ["a", "b"]
    tables = [EmbeddingBagConfig(640, 4, name, feature_names=[key]) for name, key in zip(names, "fg", strict=True)]
    module = EmbeddingBagCollection(tables)
    module.embedding_bags["b"].weight = module.embedding_bags["a"].weight
    apply_optimizer_in_backward(SGD(0.1), module.parameters())
    return module


def test_a_request_of_one_tied_table_keeps_the_lines_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where as many batches fly as may, and the oldest is the very one that is looked up."""
    monkeypatch.setattr(batches_in_flight, "MAX_BATCHES_IN_FLIGHT", 2)
    plain, other = _tied(), cache_tables(_tied(), 0.05)
    ids = torch.cat((torch.arange(100, 110), torch.arange(200, 220)))
    kjt = KeyedJaggedTensor(["f", "g"], ids, lengths=torch.tensor([10] + [0] * 9 + [20] + [0] * 9))
    other.prefetch(kjt)
    rows = other.embedding_bags["a"].rows
    other_rows = cache_request.WantedRows(rows.cache, rows.host(), ((0, 5),))
    cache_request.prefetch_all([other_rows], torch.arange(5))
    assert [b.segments for b in rows.cache.in_flight] == [((10, 30),), ((0, 5),)]
    assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


def test_ids_that_begin_where_others_do_are_others() -> None:
    plain, other = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.15)
    ids, lengths = torch.tensor([1, 50, 2, 51, 3, 52]), torch.ones(3, dtype=torch.int64)
    every = [KeyedJaggedTensor(["f", "g", "h"], own, lengths=lengths) for own in (ids[:3], ids[::2])]
    other.prefetch(every[0])
    assert torch.equal(step(plain, every[1]), step(other, every[1]))
    assert_same(plain, other)


def test_tables_that_count_requests_are_asked_together_up_to_a_billion_rows() -> None:
    """Keys of an LFU table take 31 bits beside the row's, and the keys of a request have 2^61 at most."""

    def ask(rows: int, counts: bool) -> Any:
        sets = SimpleNamespace(line_of_E=torch.empty(rows, device="meta"), count_E=torch.zeros(int(counts)))
        return SimpleNamespace(made=SimpleNamespace(sets=sets))

    def sizes(*asks: Any) -> list[int]:
        return [len(chunk) for chunk in cache_request.in_chunks(asks)]

    half = 1 << 29
    assert sizes() == []
    assert sizes(ask(half, True), ask(half, True)) == [2]
    assert sizes(ask(half, True), ask(half, True), ask(1, True), ask(1, True)) == [2, 2]
    assert sizes(*[ask(1 << 40, False)] * 9) == [9]
