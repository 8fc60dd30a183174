"""Cached tables on a GPU: rows in pinned host memory, lines on the device; the same results as without a cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.cuda.sizes import size
from tests.storage.cached_tables import batch, ebc, everything, output, step
from tilerec import (
    CacheParams,
    ConfigError,
    InputError,
    KeyedJaggedTensor,
    cache_tables,
    flush_caches,
    uncache_tables,
)
from tilerec.modules.cached_tables import iter_table_rows, set_cache
from tilerec.ops.runtime.triton.reports import raise_all
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.storage import host_rows
from tilerec.storage.row_file import file_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return kjt.to(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load_factor", [None, 0.15, 1.0])
@pytest.mark.parametrize("spec", [SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)], ids=lambda s: type(s).__name__)
def test_rows_in_host_memory_train_as_rows_on_the_device(
    spec: OptimizerSpec, load_factor: float | None, dtype: torch.dtype
) -> None:
    plain, other = ebc(spec, dtype=dtype).cuda(), ebc(spec, dtype=dtype)
    params = None if load_factor is None else CacheParams(load_factor=load_factor)
    for table, rows in list(iter_table_rows(other)):
        set_cache(table, rows, params, torch.device("cuda"))
    rng = random.Random(1)
    ahead = None
    for _ in range(size(12, 5)):
        kjt = on_gpu(batch(rng)) if ahead is None else ahead
        ahead = on_gpu(batch(rng))
        want, got = output(plain, kjt), output(other, kjt)
        other.prefetch(ahead)
        assert torch.equal(want, got)
        (want * want).sum().backward()
        (got * got).sum().backward()
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert b.device.type == "cpu"
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("load_factor", [None, 0.15])
@pytest.mark.parametrize("spec", [SGD(0.1), Adam(0.1)], ids=lambda s: type(s).__name__)
def test_rows_in_files_train_as_rows_on_the_device(
    tmp_path: Path, spec: OptimizerSpec, load_factor: float | None
) -> None:
    plain, other = ebc(spec).cuda(), ebc(spec)
    params = None if load_factor is None else CacheParams(load_factor=load_factor)
    for table, rows in list(iter_table_rows(other)):
        set_cache(table, rows, params, torch.device("cuda"), str(tmp_path))
    rng = random.Random(1)
    for _ in range(size(12, 4)):
        kjt, ahead = on_gpu(batch(rng)), on_gpu(batch(rng))
        other.prefetch(ahead)
        for one in (kjt, ahead):
            assert torch.equal(step(plain, one), step(other, one))
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert torch.equal(a.cpu(), b)
    assert all(file_of(leaf) is not None for leaf in other.parameters())


def test_a_prefetched_batch_is_looked_up_and_updated_without_waiting_for_the_device() -> None:
    module = cache_tables(ebc(Adam(0.1)), 0.3, device="cuda")
    rng = random.Random(2)
    for _ in range(3):
        step(module, on_gpu(batch(rng)))
    kjt = on_gpu(batch(rng))
    kjt.length_per_key()
    module.prefetch(kjt)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = output(module, kjt)
        (out * out).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_prefetch_on_another_stream_is_waited_for() -> None:
    plain, other = ebc(Adam(0.1)).cuda(), cache_tables(ebc(Adam(0.1)), 0.15, device="cuda")
    rng, side = random.Random(3), torch.cuda.Stream()
    batches = [on_gpu(batch(rng, samples=size(200, 50))) for _ in range(size(8, 4))]
    torch.cuda.synchronize()
    for i, kjt in enumerate(batches):
        got = output(other, kjt)
        if i + 1 < len(batches):
            with torch.cuda.stream(side):
                other.prefetch(batches[i + 1])
        (got * got).sum().backward()
        step(plain, kjt)
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert torch.equal(a.cpu(), b)


def test_the_first_batch_may_be_prefetched_on_another_stream_and_longer_lines_made_there() -> None:
    plain, other = ebc(Adam(0.1)).cuda(), cache_tables(ebc(Adam(0.1)), 0.05, device="cuda")
    rng, side = random.Random(5), torch.cuda.Stream()
    batches = [on_gpu(batch(rng, samples=20 * (i + 1))) for i in range(8)]
    torch.cuda.synchronize()
    for i, kjt in enumerate(batches):
        with torch.cuda.stream(side):
            if not i:
                torch.cuda._sleep(50_000_000)  # lines are filled late
            other.prefetch(kjt)
            torch.cuda._sleep(5_000_000)
        # Takes the memory that the shorter lines had, if that is free too early.
        waste = [torch.full((32 * k, 8), float("nan"), device="cuda") for k in range(1, 20)]
        assert torch.equal(step(plain, kjt), step(other, kjt))
        del waste
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert torch.equal(a.cpu(), b)


def test_moving_a_cached_module_moves_its_caches_only() -> None:
    module = cache_tables(ebc(Adam(0.1)), 0.2).cuda()
    assert all(p.device.type == "cpu" for p in module.parameters())
    assert module.device.type == "cuda"
    step(module, on_gpu(batch(random.Random(4))))
    flush_caches(module)
    assert all(p.device.type == "cpu" for p in module.parameters())
    uncache_tables(module)
    assert all(p.device.type == "cuda" for p in module.parameters())
    assert output(module, on_gpu(batch(random.Random(4)))).device.type == "cuda"


def test_a_prefetch_of_all_tables_waits_for_nothing_and_counts_as_on_the_host() -> None:
    module, twin = (cache_tables(ebc(SGD(0.1)), 0.15, "lfu", device=d) for d in ("cuda", None))
    rng = random.Random(6)
    for i in range(5):
        kjt = batch(rng)
        step(twin, kjt)
        there = on_gpu(kjt)
        there.length_per_key()
        torch.cuda.set_sync_debug_mode("error" if i else "default")  # the first makes the caches
        try:
            module.prefetch(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step(module, there)
    assert module.cache_stats() == twin.cache_stats()


def test_a_bad_id_of_a_prefetch_is_told_by_a_later_op_and_the_module_goes_on() -> None:
    plain, module = ebc(SGD(0.1)).cuda(), cache_tables(ebc(SGD(0.1)), 0.15, device="cuda")
    ids = torch.tensor([7, 300, 5])
    bad = on_gpu(KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], ids, torch.tensor([2, 1, 0])))

    def looked_up() -> None:
        module.prefetch(bad)
        with torch.no_grad():
            module(bad)
        raise_all(torch.device("cuda"))

    with pytest.raises(InputError, match=r"Table 'a': got id 300 of feature 'f' \(position 1 of"):
        looked_up()
    raise_all(torch.device("cuda"))  # told once
    kjt = on_gpu(batch(random.Random(7)))
    assert torch.equal(step(plain, kjt), step(module, kjt))


def test_where_host_memory_cannot_be_pinned_rows_are_moved_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_rows, "_over_pinned", lambda *_: None)
    plain, module = ebc(SGD(0.1)).cuda(), cache_tables(ebc(SGD(0.1)), 0.15, device="cuda")
    rng = random.Random(8)
    for _ in range(3):
        kjt = on_gpu(batch(rng))
        assert torch.equal(step(plain, kjt), step(module, kjt))
    for a, b in zip(everything(plain), everything(module), strict=True):
        assert torch.equal(a.cpu(), b)


def test_the_same_ids_cut_by_other_lengths_are_updated_as_they_were_looked_up() -> None:
    """Backwards run in the other order: the first is in flight when the second's update asks where its ids lie."""
    plain, other = ebc(SGD(0.1)).cuda(), cache_tables(ebc(SGD(0.1)), 0.15, device="cuda")
    ids = torch.arange(10, device="cuda")
    for module in (plain, other):
        outs = [
            output(module, KeyedJaggedTensor(["f", "g", "h"], ids, lengths=torch.tensor(own, device="cuda")))
            for own in ([3, 0, 7, 0, 0, 0], [6, 0, 3, 0, 1, 0])
        ]
        for out in reversed(outs):
            (out * out).sum().backward()
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert torch.equal(a.cpu(), b)


# The capture ends at the error, before its first kernel.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_cached_tables_are_not_captured() -> None:
    module = cache_tables(ebc(SGD(0.1)), 0.15, device="cuda")
    kjt = on_gpu(batch(random.Random(9)))
    with torch.no_grad():
        want = output(module, kjt)
        with (
            pytest.raises(ConfigError, match="'a': a batch of this cached table is captured in a CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            output(module, kjt)
        assert torch.equal(output(module, kjt), want)


def test_rows_that_were_skipped_are_counted_where_their_lines_are() -> None:
    module = cache_tables(ebc(SGD(0.1, non_finite="skip")), 0.15, device="cuda")
    ids = torch.tensor([250, 40, 7])
    out = output(module, on_gpu(KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], ids, torch.tensor([2, 0, 1]))))
    grad = torch.ones_like(out)
    grad[0, 0] = float("nan")
    out.backward(grad)
    assert module.embedding_bags["a"].rows.skipped_rows == 2
