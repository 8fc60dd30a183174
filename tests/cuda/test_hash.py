"""The hash ops on a GPU: the reference's bits, twice the same, no waiting, graphs, errors, and rows beyond 2**31."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import real, size
from tests.ops.hash_pair import REFERENCE, Pair, equal, flat
from tilerec.errors import InputError
from tilerec.ops.hash.definition import HashState, IdOutcome, Policy, empty_state
from tilerec.ops.hash.place import high, low, mixed

pytest.importorskip("triton")

from tilerec.ops.hash.triton import backend as hash_backend
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.reports import raise_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KERNELS: dict[str, Callable[..., Any]] = flat(LIBRARY.taking_arguments(hash_backend.KERNELS))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Puts back what the test sets: that waiting for the device is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def filled(buckets: int, slots: int, count: int) -> HashState:
    state = empty_state(buckets, slots, expires=True, counters=8)
    ids = torch.arange(count) * 0x9E3779B97F4A7C1
    REFERENCE["zch_assign_"](ids, None, None, None, *state, 0, buckets, slots, 128, 1, 0, 0, 1.0, 5, False, 1)
    return state


def on_gpu(state: HashState) -> HashState:
    return HashState(*(values.cuda() for values in state))


@pytest.mark.parametrize(("policy", "exponent"), [(0, 1.0), (1, 1.0), (2, 0.0), (2, 1.0), (2, 2.4), (3, 1.0)])
@pytest.mark.parametrize(
    ("buckets", "slots", "max_probe"), [(48, 100, 24), (1, 700, 300), (3, 1, 1), (size(40_000, 100), 3, 2)]
)
def test_a_gpu_gives_the_bits_of_the_reference(
    buckets: int, slots: int, max_probe: int, policy: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(policy)
    pair = Pair(KERNELS, buckets, slots, 0, buckets, device="cuda", expires=policy == Policy.TTL, counters=16)
    rows, seen = buckets * slots, set()
    for step in range(1, 6):
        ids = (torch.rand(size(6000, 100), generator=generator) ** 6 * 6 * rows).long() * -7046029254386353131
        counts = torch.randint(1, 4, ids.shape, generator=generator) if step == 2 else None
        inserts = torch.rand(ids.shape, generator=generator) < 0.9 if step == 3 else None
        ttl = torch.randint(0, 3, ids.shape, generator=generator) if step % 2 else None
        result = pair.assign(
            (ids, counts, inserts, ttl),
            max_probe,
            step,
            step,
            policy,
            exponent,
            1,
            True,
            2 if step > 3 else 1,
        )
        seen |= set(result[1].tolist())
    assert {IdOutcome.HIT, IdOutcome.INSERTED, IdOutcome.NOT_ADMITTED} <= seen
    pair.find(torch.cat([ids, ids + 1]), max_probe)
    for new_buckets, new_slots in ((buckets, slots + 3), (2 * buckets, slots // 2 + 1), (1, 2 * slots)):
        if new_buckets * new_slots < 300_000:
            pair.resize(new_buckets, new_slots, max_probe, 7, policy, exponent)


def test_a_slice_of_the_buckets_is_enough() -> None:
    pair = Pair(KERNELS, 768, 20, 100, 333, device="cuda")
    ids = pair.own(torch.randint(-(2**62), 2**62, (size(30_000, 200),)))
    for step in range(3):
        pair.assign((ids[step * size(3000, 20) :], None, None, None), 128, step, 0, 1, 1.0, 0, True, 1)
        pair.find(ids, 128)


def test_a_batch_gives_the_same_bits_every_time() -> None:
    """Races would show here: hot ids, full windows, many walks at once."""
    state = filled(size(768, 4), 64, size(60_000, 300))
    ids = (torch.rand(size(200_000, 300)) ** 8 * size(90_000, 500)).long().cuda() * 0x9E3779B97F4A7C1
    rest = (0, size(768, 4), 64, 128, 2, 3, 1, 1.0, 2, True, 1)
    first: tuple[Tensor, ...] | None = None
    for _ in range(10):
        own = on_gpu(state)
        result = (*KERNELS["zch_assign_each_"](ids, None, None, None, *own, *rest), *own)
        first = first or result
        for one, other in zip(result, first, strict=True):
            assert torch.equal(one, other)


def test_nothing_waits_but_the_list_of_evictions(no_waiting: None) -> None:
    state, ids = on_gpu(filled(16, 32, 500)), torch.arange(size(4000, 100), device="cuda")
    rest = (0, 16, 32, 128, 2, 3, 0, 1.0, 2, True, 1)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        KERNELS["zch_buckets"](ids, 768)
        KERNELS["zch_find"](ids, state.ids_E, state.used_E, 0, 16, 32, 128)
        KERNELS["zch_assign_each_"](ids, None, None, None, *state, *rest)
    with pytest.raises(RuntimeError, match="synchroniz"):
        KERNELS["zch_assign_"](ids, None, None, None, *state, *rest)


def test_a_captured_batch_is_replayed() -> None:
    state, ids = filled(16, 32, 500), torch.zeros(size(3000, 100), dtype=torch.int64)
    rest = (0, 16, 32, 128, 2, 3, 0, 1.0, 2, True, 1)
    own, place = on_gpu(state), ids.cuda()
    KERNELS["zch_assign_each_"](place, None, None, None, *on_gpu(state), *rest)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = KERNELS["zch_assign_each_"](place, None, None, None, *own, *rest)
    equal(own, state)  # capturing does nothing
    for seed in range(2):
        ids = torch.randint(0, 900, ids.shape, generator=torch.Generator().manual_seed(seed))
        place.copy_(ids)
        graph.replay()
        equal(result, REFERENCE["zch_assign_each_"](ids, None, None, None, *state, *rest))
        equal(own, state)
    raise_all(place.device)


def test_what_a_replay_refuses_does_not_keep_the_next_from_its_work() -> None:
    state, ids = empty_state(4, 8), torch.arange(5)
    rest = (0, 4, 8, 8, 1, 0, 0, 1.0, 0, True, 1)
    own, place, counts = on_gpu(state), ids.cuda(), torch.ones(5, dtype=torch.int64).cuda()
    KERNELS["zch_assign_each_"](place, counts, None, None, *on_gpu(state), *rest)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNELS["zch_assign_each_"](place, counts, None, None, *own, *rest)
    raise_all(place.device)  # nothing was replayed, nothing is told
    counts[2] = 0
    graph.replay()
    equal(own, state)
    counts[2] = 1
    graph.replay()
    REFERENCE["zch_assign_each_"](ids, torch.ones_like(ids), None, None, *state, *rest)
    equal(own, state)
    raise_all(place.device)


def test_bad_entries_are_told_as_on_the_cpu_and_change_nothing() -> None:
    ids = torch.arange(size(5000, 100))
    bucket_N = high(mixed(ids), 6)
    stray = int((bucket_N < 2).nonzero()[0])
    message = rf"id {stray} \(position {stray}\) belongs to bucket {bucket_N[stray]} of 6"
    state = on_gpu(empty_state(4, 8))
    with pytest.raises(InputError, match=message):
        KERNELS["zch_assign_"](ids.cuda(), None, None, None, *state, 2, 6, 8, 8, 1, 0, 0, 1.0, 0, True, 1)
    KERNELS["zch_find"](ids.cuda(), state.ids_E, state.used_E, 2, 6, 8, 8)
    with pytest.raises(InputError, match=message):
        raise_all(state.ids_E.device)
    counts = torch.ones(ids.shape, dtype=torch.int64)
    first = size(4000, 80)
    counts[first:] = 0
    state = on_gpu(empty_state(6, 8))
    KERNELS["zch_assign_each_"](ids.cuda(), counts.cuda(), None, None, *state, 0, 6, 8, 8, 1, 0, 0, 1.0, 0, True, 1)
    with pytest.raises(InputError, match=rf"counts\[{first}\] is 0"):
        raise_all(state.ids_E.device)
    assert not any(values.any() for values in state)
    KERNELS["zch_buckets"](ids.cuda(), 6)  # the device is well


@real
def test_batches_of_other_sizes_compile_nothing_anew() -> None:
    from tilerec.ops.hash.triton.assign import walk_kernel

    state = on_gpu(empty_state(16, 32))
    rest = (0, 16, 32, 128)
    for step, count in enumerate((1, 16, 1000, 17, 2**15), 1):
        ids = torch.arange(count, device="cuda")
        KERNELS["zch_assign_each_"](ids, None, None, None, *state, *rest, step, step * 10**10, 0, 1.0, 0, True, 1)
        compiled = sum(len(kernels_of[0]) for kernels_of in walk_kernel.device_caches.values())
        if step == 2:
            before = compiled
    assert compiled == before


@real
def test_rows_beyond_two_to_the_31_are_found() -> None:
    buckets, slots = 2**20 + 64, 2048
    if torch.cuda.mem_get_info()[0] < 25 * 2**30:
        pytest.skip("needs 25 GiB of device memory")
    ids_E = torch.empty(buckets * slots, dtype=torch.int64, device="cuda")
    used_E = torch.zeros(buckets * slots, dtype=torch.bool, device="cuda")
    ids = torch.arange(-500_000, 500_000)
    bucket_N, start_N = high(mixed(ids), buckets), low(mixed(ids), slots)
    late = bucket_N * slots + start_N > 2**31
    assert late.sum() > 10
    rows_N = (bucket_N * slots + start_N)[late]
    ids_E[rows_N.cuda()] = ids[late].cuda()
    used_E[rows_N.cuda()] = True
    found_N, probes_N = KERNELS["zch_find"](ids[late].cuda(), ids_E, used_E, 0, buckets, slots, 8)
    assert torch.equal(found_N.cpu(), rows_N)
    assert (probes_N == 1).all()
