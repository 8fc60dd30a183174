"""`updated_hot_rows` and `copy_rows_`: every backend finds and copies the same rows of copies of hot rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tilerec.errors import ConfigError
from tilerec.ops import backends as backends
from tilerec.ops.cache.definition import indexable
from tilerec.ops.runtime.library import LIBRARY

OPS = torch.ops.tilerec
TYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def both(op: str) -> list[Any]:
    return [LIBRARY.references[op], getattr(OPS, op)]


def found(*arguments: Any) -> list[list[list[int]]]:
    return [[part.tolist() for part in call(*arguments)] for call in both("updated_hot_rows")]


def test_it_gives_the_worked_example() -> None:
    for got in found(torch.tensor([2, 0, 2]), [0], [0], [3], [torch.tensor([3, 7, 8])], [0], [6], [10]):
        assert got == [[2], [2], [1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_updated_row_is_found_once_in_each_tile_that_has_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    names = [torch.randperm(500, generator=generator)[:count].sort()[0] for count in (90, 0, 1, 300)]
    ids = torch.randint(0, 300, (400,), generator=generator).to(dtype)
    ids[100:110] = 0
    heads, begins, ends = [3, 0, 3, 2, 1], [0, 100, 200, 100, 50], [100, 140, 230, 110, 60]
    tiles, first_rows, end_rows = [3, 3, 0, 2, 2, 1, 3], [0, 250, 20, 0, 0, 0, 77], [250, 500, 480, 250, 500, 500, 77]
    want: list[list[int]] = [[], [], []]
    for h, first, end in zip(tiles, first_rows, end_rows, strict=True):
        changed = {k for own, b, e in zip(heads, begins, ends, strict=True) if own == h for k in ids[b:e].tolist()}
        own = names[h].tolist()
        rows = [k for k in sorted(changed) if k < len(own) and first <= own[k] < end]
        want[0] += rows
        want[1] += [own[k] - first for k in rows]
        want[2].append(len(rows))
    assert all(want[2][:3]), "the tiles of the head of 300 rows, and that of 90"
    for got in found(ids, heads, begins, ends, names, tiles, first_rows, end_rows):
        assert got == want


@pytest.mark.parametrize("ids", [[], [-1, 3, 1 << 20], [-(1 << 31), (1 << 31) - 1]])
def test_numbers_outside_of_a_head_are_skipped(ids: list[int]) -> None:
    for dtype in (torch.int32, torch.int64):
        own = torch.tensor(ids, dtype=dtype)
        for got in found(own, [0], [0], [len(ids)], [torch.tensor([3, 7, 8])], [0], [0], [10]):
            assert got == [[], [], [0]]


def test_no_heads_and_no_tiles_give_nothing() -> None:
    for got in found(torch.tensor([1]), [], [], [], [], [], [], []):
        assert got == [[], [], []]
    for got in found(torch.tensor([0]), [0], [0], [1], [torch.tensor([5])], [], [], []):
        assert got == [[], [], []]


def test_ranges_and_tiles_that_do_not_fit_are_refused() -> None:
    ids, names = torch.tensor([0]), [torch.tensor([5])]
    for call in both("updated_hot_rows"):
        with pytest.raises(ConfigError, match=r"got ids torch\.float32"):
            call(torch.zeros(1), [0], [0], [1], names, [0], [0], [9])
        with pytest.raises(ConfigError, match="expected int64"):
            call(ids, [0], [0], [1], [torch.zeros(1, dtype=torch.int32)], [0], [0], [9])
        with pytest.raises(ConfigError, match="one of each per range and tile"):
            call(ids, [0], [0], [], names, [0], [0], [9])
        for begin, end in ((0, 2), (-1, 1), (1, 0)):
            with pytest.raises(ConfigError, match=r"expected ranges of \[0, 1\]"):
                call(ids, [0], [begin], [end], names, [0], [0], [9])
        for head, tile in ((1, 0), (0, -1)):
            with pytest.raises(ConfigError, match=r"expected numbers in \[0, 1\)"):
                call(ids, [head], [0], [1], names, [tile], [0], [9])


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(torch.float32).to(dtype)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_of_all_types_are_copied_bit_by_bit(dtype: torch.dtype, contiguous: bool) -> None:
    shapes = [((9, 3), (7, 5), 2), ((9,), (7,), 0), ((4, 130), (7, 130), 0), ((9, 1), (7, 4), 3), ((5, 0), (7, 2), 1)]
    sources = [random_rows(own, dtype, seed) for seed, (_, own, _) in enumerate(shapes)]
    targets_U, sources_U = torch.tensor([8, 0, 3, 2, 3, 0]), torch.tensor([6, 6, 0, 5, 1, 1])
    ranges = [(0, 3), (0, 4), (3, 6), (2, 2), (4, 6)]
    results = []
    for call in both("copy_rows_"):
        targets = [random_rows(own, dtype, 10 + seed) for seed, (own, _, _) in enumerate(shapes)]
        if not contiguous:
            targets = [indexable(own).repeat_interleave(2, 0).view(own.dtype)[::2] for own in targets]
        before = [own.clone() for own in targets]
        call(
            targets, sources, targets_U, sources_U, [b for b, _ in ranges], [e for _, e in ranges],
            [column for *_, column in shapes],
        )  # fmt: skip
        for target, source, old, (b, e), (_, _, column) in zip(targets, sources, before, ranges, shapes, strict=True):
            for to, own in zip(targets_U[b:e].tolist(), sources_U[b:e].tolist(), strict=True):
                old[to] = source[own] if old.dim() == 1 else source[own, column : column + old.shape[1]]
            assert torch.equal(indexable(target), indexable(old))
        results.append(targets)
    assert all(torch.equal(indexable(a), indexable(b)) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_are_shared_by_threads(threads: int) -> None:
    sources = [random_rows((400, 12), torch.float32, seed) for seed in range(6)]
    rows = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    targets = [torch.zeros(400, 12) for _ in sources]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        OPS.copy_rows_(targets, sources, rows, rows, [0] * 6, [400] * 6, [0] * 6)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize(("to", "own"), [(9, 0), (-1, 0), (0, 7), (0, -1), (1 << 40, 0)])
@pytest.mark.skipif(not backends.NATIVE_CPU, reason="the native library does not serve")
def test_a_row_outside_of_its_tensor_is_refused(to: int, own: int) -> None:
    target = torch.zeros(9, 2)
    with pytest.raises(IndexError, match=f"got row {to} from {own}"):
        OPS.copy_rows_([target], [torch.ones(7, 2)], torch.tensor([to]), torch.tensor([own]), [0], [1], [0])
    assert not target.any()


def test_pairs_that_do_not_fit_are_refused() -> None:
    rows = torch.tensor([0])
    pairs = [
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64), 0, 1, 0),
        (torch.zeros(2, 3), torch.zeros(2, 2), 0, 1, 0),
        (torch.zeros(2, 3), torch.zeros(2, 4), 0, 1, 2),
        (torch.zeros(2, 3), torch.zeros(2, 4), 0, 1, -1),
        (torch.zeros(2), torch.zeros(2, 1), 0, 1, 0),
        (torch.zeros(2, 3), torch.zeros(2, 3), 0, 2, 0),
        (torch.zeros(2, 3), torch.zeros(2, 3), 1, 0, 0),
    ]
    for call in both("copy_rows_"):
        for target, source, begin, end, column in pairs:
            with pytest.raises(ConfigError, match="expected one dtype"):
                call([target], [source], rows, rows, [begin], [end], [column])
        with pytest.raises(ConfigError, match="one of each per pair"):
            call([torch.zeros(2, 3)], [], rows, rows, [0], [1], [0])
        with pytest.raises(ConfigError, match="expected int64"):
            call([torch.zeros(2, 3)], [torch.zeros(2, 3)], rows.int(), rows, [0], [1], [0])


def test_they_pass_torch_s_checks() -> None:
    names = [torch.tensor([3, 7, 8])]
    opcheck(OPS.updated_hot_rows.default, (torch.tensor([2, 0, 2]), [0], [0], [3], names, [0], [6], [10]))
    rows = torch.tensor([1])
    opcheck(OPS.copy_rows_.default, ([torch.zeros(2, 3)], [torch.ones(2, 4)], rows, rows, [0], [1], [1]))
