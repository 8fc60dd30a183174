"""Small batches sorted in one launch or two: what the library's sort gives, number by number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.triton.gates import Gate, compiled
from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_sort import record_of, tables_of
from tests.ops.triton.test_update import RULES, Call, pooled
from tests.ops.triton.update_kernels import update_rows_
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.triton import small_sort
from tilerec.ops.update.triton.small_sort import is_small, rank_blocks
from tilerec.ops.update.triton.sort import Record, Sorted, key_type, sort_occurrences

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def both(record: Record, rows: list[int], block: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Sorted, Sorted]:
    """The batch as sorted in blocks of so many, and by the library; chunks are not summed."""

    def run(most: int) -> Sorted:
        monkeypatch.setattr(small_sort, "MOST", most)
        return sort_occurrences(record, tables_of(rows, 2), len(rows), sum(rows), [2] * len(rows))

    monkeypatch.setattr(small_sort, "BLOCK", block)
    return run(1 << 16), run(0)


def assert_same(got: Sorted, want: Sorted, sentinel: int) -> None:
    """All that is read later: what belongs to sentinels is not."""
    known = int((want.keys < sentinel).sum())
    assert torch.equal(got.keys, want.keys)
    for name in ("places", "scales"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine[:known], theirs[:known])


@pytest.mark.parametrize("block", [16, 64], ids=["blocks", "one block"])
@pytest.mark.parametrize("rows", [[5, 3, 4], [5, 2**20, 2**10], [2**33, 9, 2**40]], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_sort_as_the_library_does(
    block: int, rows: list[int], weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tables, bags of 0 to 9 ids, means, ids that are no rows, occurrences that no feature reads."""
    lengths = torch.tensor([2, 0, 9, 1, 0, 0, 7, 3, 3, 1, 0, 9, 2])
    offsets = torch.tensor([0, *lengths.cumsum(0).tolist()])
    total = int(offsets[-1])
    ids = torch.randint(0, 5, (total,))
    ids[3], ids[20], ids[30] = -1, 2**41, -(2**62)
    weights = torch.rand(total) if weighted else None
    record = record_of(ids, offsets, rows, [(8, 4), (0, 3), (3, 5)], total, weighted, weights)
    got, want = both(record, rows, block, monkeypatch)
    assert got.keys.dtype == key_type(sum(rows).bit_length())
    assert_same(got, want, sum(rows))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 48])
def test_every_size_of_the_last_block(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every id its own bag, one key for all: the order is that of the occurrences."""
    record = record_of(torch.full((n,), 2, dtype=torch.int32), None, [7], [(0, n)], n)  # type: ignore[arg-type]
    got, want = both(record, [7], 16, monkeypatch)
    assert got.places.tolist() == [2 * occurrence for occurrence in range(n)]
    assert_same(got, want, 7)


def test_features_without_bags_and_more_than_a_program_counts_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bags = [(min(f, 40), 1 if f < 40 else 0) for f in range(70)]
    record = record_of(torch.arange(40) % 3, torch.arange(41), [4] * 70, bags, 40)
    got, want = both(record, [4] * 70, 32, monkeypatch)
    assert_same(got, want, 280)
    empty = record_of(torch.arange(5), torch.tensor([0, 5]), [4, 4], [(0, 0), (0, 0)], 5)
    got, want = both(empty, [4, 4], 32, monkeypatch)
    assert got.keys.tolist() == want.keys.tolist() == [8] * 5


def test_offsets_that_lie_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = torch.tensor([-3, 7, 2, 99, 4])
    record = record_of(torch.tensor([1, 2, 3]), offsets, [5, 5], [(0, 3), (2, 2)], 6)
    got, _ = both(record, [5, 5], 16, monkeypatch)
    assert got.keys.tolist() == sorted(got.keys.tolist())


def test_blocks_of_real_size_and_ranks_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 keys in registers; then 12 blocks of 16, three steps of searches."""
    keys = torch.randint(0, 1000, (2048,))
    record = record_of(keys, None, [1000], [(0, 2048)], 2048)  # type: ignore[arg-type]
    got, want = both(record, [1000], 2048, monkeypatch)
    assert_same(got, want, 1000)
    blocks = torch.randint(0, 50, (12, 16), dtype=torch.int32)
    blocks[-1, 9:] = 50
    ordered, order = blocks.sort(dim=1, stable=True)
    places = (order + torch.arange(12)[:, None] * 16).reshape(-1)
    scales = places.float() / 3
    total = 12 * 16 - 7
    out = torch.empty(total, dtype=torch.int32)
    out_places, out_scales = torch.empty(total, dtype=torch.int64), torch.empty(total)
    rank_blocks[(12,)](
        ordered.reshape(-1), places, scales, out, out_places, out_scales, total, SCALED=True, BLOCK=16, BITS=4,
        RANKED=16, AT_ONCE=4,
    )  # fmt: skip
    want_keys, want_places = blocks.reshape(-1)[:total].sort(stable=True)
    assert torch.equal(out, want_keys)
    assert torch.equal(out_places, want_places)
    assert torch.equal(out_scales, want_places.float() / 3)


@pytest.mark.parametrize("name", ["rowwise-l2", "adam"])
def test_updates_have_the_same_bits_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = pooled([4, 9], [3, 0, 1, 2, 2, 7, 11, 3], 6, 4, weighted=True, means=[1, 0])
    call = Call([torch.randn(6, 4), torch.randn(6, 9)], RULES[name], record)
    results: list[Any] = []
    for most in (0, 1 << 16):
        monkeypatch.setattr(small_sort, "MOST", most)
        monkeypatch.setattr(small_sort, "BLOCK", 16)
        results.append(call.run(update_rows_))
    (told, *tensors), (want_told, *want) = results
    assert told == want_told
    for own, other in zip(tensors, want, strict=True):
        for a, b in zip(own, other, strict=True):
            assert torch.equal(a, b)


def test_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_sort, "MOST", 65_536)
    assert is_small(65_536, 1024, 31)
    assert not is_small(65_537, 1, 31)
    assert not is_small(100, 1025, 31)  # their ends do not fit a program
    assert is_small(100, 1, 51)
    assert not is_small(100, 1, 52)  # a key and its lane do not fit 63 bits


def gate(name: str, wide: bool, **other: Any) -> Gate:
    signature = {
        "ids": "*i64", "offsets": "*i64", "sample_weights": "*fp32", "meta": "*i64", "keys": "*i32",
        "places": "*i32", "scales": "*fp32", "status": "*i64",
        **dict.fromkeys(["features", "ids_count", "total", "sentinel", "status_count"], "i32"),
    }  # fmt: skip
    constants = {
        "JAGGED": True, "WEIGHTED": True, "MEANS": True, "WIDE": wide, "FEATURES": 32, "HALVINGS": 5,
        "BLOCK": small_sort.BLOCK, "BITS": 11, **other,
    }  # fmt: skip
    options = {"num_warps": small_sort.WARPS, "enable_fp_fusion": False}
    return Gate(name, "tilerec.ops.update.triton.small_sort:sort_blocks", signature, constants, options=options)


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="compiles for half a minute: nightly")
def test_blocks_are_sorted_in_registers() -> None:
    """512 threads of a program: each may have 128 registers, and spills none."""
    ranks = Gate(
        "ranks", "tilerec.ops.update.triton.small_sort:rank_blocks",
        {
            "keys": "*i32", "places": "*i32", "scales": "*fp32", "sorted_keys": "*i32", "sorted_places": "*i32",
            "sorted_scales": "*fp32", "total": "i32",
        },
        {"SCALED": True, "BLOCK": small_sort.BLOCK, "BITS": 11, "RANKED": 128, "AT_ONCE": 8}, options={"num_warps": 4},
    )  # fmt: skip
    made = compiled([gate("narrow", False), gate("wide", True), ranks])
    for name, result in made.items():
        assert result.spilled == 0, name
        assert result.registers <= 128, name
        assert result.shared <= 32_768, name
        assert result.count("ld.local", "st.local", "atom") == 0, name
