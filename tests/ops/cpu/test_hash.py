"""The native hash kernels against the reference: same bits for any number of threads and every instruction set."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.hash_pair import REFERENCE, Pair, flat
from tilerec.ops.hash.cpu import kernels
from tilerec.ops.hash.definition import IdOutcome, Policy, empty_state
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.library import LIBRARY as OPS

LIBRARY = library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native CPU library is not built")


@pytest.fixture(scope="module")
def native() -> dict[str, Callable[..., Any]]:
    assert LIBRARY is not None
    return flat(OPS.taking_arguments(kernels(LIBRARY)))


@pytest.fixture
def isa() -> Iterator[Callable[[int], int]]:
    """A way to choose an instruction set for one test."""
    lib = LIBRARY
    assert isinstance(lib, ctypes.CDLL)
    before = lib.tr_isa()
    yield lib.tr_isa_choose
    lib.tr_isa_choose(before)


@pytest.mark.parametrize(("threads", "level"), [(1, 0), (2, 1), (5, 2)])
@pytest.mark.parametrize(("policy", "exponent"), [(0, 1.0), (1, 1.0), (2, 1.0), (2, 0.7), (3, 1.0)])
def test_native_equals_reference_over_steps_of_thousands_of_ids(
    native: dict[str, Callable[..., Any]],
    policy: int,
    exponent: float,
    threads: int,
    level: int,
    isa: Callable[[int], int],
) -> None:
    isa(level)
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(policy)
    pair = Pair(native, 48, 100, 0, 48, expires=policy == Policy.TTL, counters=16)
    seen: set[int] = set()
    for step in range(1, 5):
        ids = (torch.rand(9000, generator=generator) ** 6 * 30_000).long() * -7046029254386353131
        counts = torch.randint(1, 4, ids.shape, generator=generator) if step == 2 else None
        inserts = torch.rand(9000, generator=generator) < 0.9 if step == 3 else None
        ttl = torch.randint(0, 3, ids.shape, generator=generator) if step % 2 else None
        result = pair.assign(
            (ids, counts, inserts, ttl), 24, step, step, policy, exponent, 1, True, 2 if step > 2 else 1
        )
        seen |= set(result[1].tolist())
    assert {IdOutcome.HIT, IdOutcome.INSERTED, IdOutcome.EVICTED, IdOutcome.NOT_ADMITTED} <= seen
    pair.find(torch.cat([ids, ids + 1]), 24)
    for new_buckets, new_slots in ((48, 77), (96, 60), (16, 300), (48, 1)):
        pair.resize(new_buckets, new_slots, 24, 7, policy, exponent)


SHAPES = [(1, 1), (1, 7), (1, 8), (1, 9), (2, 64), (3, 1), (768, 2), (1500, 3)]


@pytest.mark.parametrize(("buckets", "slots"), SHAPES)
@pytest.mark.parametrize("max_probe", [1, 3, 128])
@pytest.mark.parametrize("evict", [False, True])
def test_native_equals_reference_for_hostile_shapes(
    native: dict[str, Callable[..., Any]], buckets: int, slots: int, max_probe: int, evict: bool
) -> None:
    pair = Pair(native, buckets, slots, 0, buckets)
    extremes = torch.tensor([-(2**63), -1, 0, 2**63 - 1, -(2**63), 1])
    same = torch.full((2500,), -1)
    none = torch.empty(0, dtype=torch.int64)
    many = torch.arange(-1300, 1300)
    for step, ids in enumerate([none, extremes, same, many, many + 1, extremes]):
        for again in range(2):  # the second time everything is touched
            pair.assign((ids, None, None, None), max_probe, step // 2 + again, 0, step % 2, 1.0, 0, evict, 1)
        pair.find(ids + 1, max_probe)


@given(
    shape=st.sampled_from(SHAPES),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    policy=st.sampled_from([(0, 1.0), (1, 1.0), (2, 0.0), (2, 1.0), (2, 2.4), (3, 1.0)]),
    max_probe=st.sampled_from([1, 2, 8, 128]),
    threshold=st.sampled_from([1, 3]),
    threads=st.sampled_from([1, 2]),
    batches=st.lists(st.tuples(st.sampled_from([0, 1, 2, 50, 2500]), st.sampled_from([2, 300, 2**62])), max_size=4),
    seed=st.integers(0, 9),
)
def test_native_equals_reference_on_random_histories(
    shape: tuple[int, int],
    cut: tuple[float, float],
    policy: tuple[int, float],
    max_probe: int,
    threshold: int,
    threads: int,
    batches: list[tuple[int, int]],
    seed: int,
) -> None:
    assert LIBRARY is not None
    torch.set_num_threads(threads)
    buckets, slots = shape
    begin, end = sorted(round(part * buckets) for part in cut)
    pair = Pair(
        flat(OPS.taking_arguments(kernels(LIBRARY))),
        buckets,
        slots,
        begin,
        end - begin,
        expires=True,
        counters=5,
    )
    generator = torch.Generator().manual_seed(seed)
    for step, (count, space) in enumerate(batches):
        ids = pair.own(torch.randint(-space, space, (count,), generator=generator))
        extras = [torch.randint(1, 3, ids.shape, generator=generator) for _ in range(2)]
        entries = (ids, extras[0], extras[0] != extras[1], extras[1]) if step % 2 else (ids, None, None, None)
        pair.assign(entries, max_probe, step, 2 * step, *policy, seed % 3, seed % 4 > 0, threshold)
        pair.find(pair.own(ids + 1), max_probe)
    pair.resize(buckets * 2, slots + 1, max_probe, 9, *policy)
    pair.resize(buckets, slots // 2 + 1, max_probe, 9, *policy)


def test_ids_may_be_strided(native: dict[str, Callable[..., Any]]) -> None:
    pair = Pair(native, 5, 9, 0, 5)
    ids = torch.arange(60).view(20, 3)[:, 1]
    pair.assign((ids, ids + 1, ids % 2 == 0, None), 9, 1, 0, 0, 1.0, 0, True, 1)
    pair.find(ids, 4)


def test_bools_of_any_bits_are_read_as_true(native: dict[str, Callable[..., Any]]) -> None:
    state = empty_state(1, 16)
    ids = torch.arange(16)
    for kernel in (native, REFERENCE):
        used = torch.full((16,), 2, dtype=torch.uint8).view(torch.bool)
        rows_N, _ = kernel["zch_find"](ids, ids.clone(), used, 0, 1, 16, 16)
        assert rows_N.tolist() == list(range(16))
    assert state.used_E.sum() == 0


def test_errors_name_the_same_id_as_the_reference(native: dict[str, Callable[..., Any]]) -> None:
    ids = torch.arange(5000)
    for first, kernel in itertools.product((0, 3), (native, REFERENCE)):
        state = empty_state(2, 4)
        bucket_N = REFERENCE["zch_buckets"](ids, 6)
        stray = int(((bucket_N < first) | (bucket_N >= first + 2)).nonzero()[0])
        with pytest.raises(ValueError, match=rf"id {stray} \(position {stray}\) belongs to bucket {bucket_N[stray]} "):
            kernel["zch_find"](ids, state.ids_E, state.used_E, first, 6, 4, 4)
