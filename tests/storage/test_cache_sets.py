from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from tests.storage.cache_model import ModelCache
from tilerec.spec.cache import CacheAlgorithm
from tilerec.storage.cache_sets import CacheSets, LineMoves, SpareLinesNeeded

CPU = torch.device("cpu")
BOTH = [CacheAlgorithm.LRU, CacheAlgorithm.LFU]


def _zipf(rng: random.Random, rows: int, count: int) -> set[int]:
    return {min(int(rng.paretovariate(0.6)) - 1, rows - 1) for _ in range(count)}


def _check_books(sets: CacheSets) -> None:
    """Every line's row has that line, and nobody else has one."""
    lines = (sets.row_in_L >= 0).nonzero()[:, 0]
    assert torch.equal(sets.line_of_E[sets.row_in_L[lines]].long(), lines)
    assert int((sets.line_of_E >= 0).sum()) == lines.numel()


def _asked(
    sets: CacheSets, rows: Iterable[int], serial: int, *flying: Iterable[int]
) -> LineMoves | SpareLinesNeeded:
    """Rows that are asked for get their lines, while batches of other rows fly."""
    moves = sets.request(_rows(rows), serial, [_rows(own) for own in flying])
    if isinstance(moves, LineMoves):
        sets.seat(moves)
    return moves


def _rows(rows: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int64)


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize(("set_count", "ways"), [(1, 4), (3, 2), (5, 8), (0, 4)])
@pytest.mark.parametrize("ahead", [0, 2])
def test_hits_misses_and_evictions_are_those_of_a_cache_in_plain_python(
    algorithm: CacheAlgorithm, set_count: int, ways: int, ahead: int
) -> None:
    rng = random.Random(set_count * 100 + ways + ahead)
    rows = 60
    sets = CacheSets(rows, set_count, ways, 200, algorithm, CPU)
    model = ModelCache(set_count, ways, algorithm)
    misses = conflicts = evictions = 0
    flown: list[set[int]] = []
    for serial in range(1, 80):
        wanted = _zipf(rng, rows, 12) if serial % 3 else set(rng.sample(range(rows), 9))
        flown = [*flown, wanted][-ahead - 1 :]
        moves = _asked(sets, sorted(wanted), serial, *flown)
        assert isinstance(moves, LineMoves)
        model.request(wanted, max(1, serial - ahead))
        _check_books(sets)
        assert set(sets.row_in_L[sets.row_in_L >= 0].tolist()) == model.resident()
        misses += moves.loaded_rows.numel()
        conflicts += moves.conflicts
        evictions += moves.evictions
        assert (misses, conflicts, evictions) == (model.misses, model.conflicts, model.evictions)


@pytest.mark.parametrize("algorithm", BOTH)
def test_a_cache_of_as_many_lines_as_rows_loads_each_row_once(algorithm: CacheAlgorithm) -> None:
    sets = CacheSets(64, 2, 32, 0, algorithm, CPU)
    rng, loaded = random.Random(0), 0
    for serial in range(1, 40):
        moves = _asked(sets, sorted(_zipf(rng, 64, 30)), serial, range(64))
        assert isinstance(moves, LineMoves)
        loaded += moves.loaded_rows.numel()
        assert moves.conflicts == moves.evictions == 0
    assert loaded == int((sets.line_of_E >= 0).sum())


def test_the_example_of_the_file() -> None:
    sets = CacheSets(9, 2, 2, 0, CacheAlgorithm.LRU, CPU)
    for serial, row in enumerate([4, 6, 1], start=1):
        _asked(sets, [row], serial)
    assert sets.line_of_E[[4, 6, 1]].tolist() == [0, 1, 2]
    moves = _asked(sets, [6, 8], 4)
    assert isinstance(moves, LineMoves)
    assert (moves.leaving_rows.tolist(), moves.leaving_lines.tolist()) == ([4], [0])
    assert (moves.loaded_rows.tolist(), moves.loaded_lines.tolist()) == ([8], [0])


def test_a_frequent_row_keeps_its_line_and_the_rare_one_has_a_spare_line() -> None:
    sets = CacheSets(10, 1, 1, 1, CacheAlgorithm.LFU, CPU)
    for serial in (1, 2, 3):
        _asked(sets, [5], serial)
    for serial in (
        4,
        5,
    ):  # row 7 was named less often than row 5; the second time, its spare line still has it
        moves = _asked(sets, [7], serial)
        assert isinstance(moves, LineMoves)
        assert (moves.conflicts, moves.evictions, sets.line_of_E[7].item()) == (serial == 4, 0, 1)
    moves = _asked(sets, [7], 6)  # as often: it comes in
    assert isinstance(moves, LineMoves)
    assert (moves.conflicts, moves.evictions, sets.line_of_E[7].item()) == (0, 1, 0)
    assert moves.old_lines.tolist() == [1]


def test_a_row_leaves_its_spare_line_for_one_of_its_set_as_soon_as_there_is_one() -> None:
    sets = CacheSets(10, 1, 1, 2, CacheAlgorithm.LRU, CPU)
    _asked(sets, [1, 2], 1)
    assert sets.line_of_E[[1, 2]].tolist() == [0, 1]
    moves = _asked(sets, [2], 2)
    assert isinstance(moves, LineMoves)
    assert (moves.old_lines.tolist(), moves.new_lines.tolist()) == ([1], [0])
    assert moves.loaded_rows.numel() == 0
    _asked(sets, [3, 2], 3, [2])  # batch 2 is in flight: 2 holds its line, 3 gets a spare one
    moves = _asked(sets, [3], 4, [3, 2])
    assert isinstance(moves, LineMoves)
    assert sets.line_of_E[3].item() == 1  # row 2 was named by batch 3 and is held
    moves = _asked(sets, [3], 5, [3])
    assert isinstance(moves, LineMoves)
    assert (moves.old_lines.tolist(), moves.new_lines.tolist()) == ([1], [0])
    assert moves.leaving_rows.tolist() == [2]
    _check_books(sets)


def test_a_request_that_lacks_spare_lines_says_how_many_and_changes_nothing() -> None:
    sets = CacheSets(20, 1, 2, 1, CacheAlgorithm.LFU, CPU)
    _asked(sets, [0, 1, 2], 1)
    before = (sets.line_of_E.clone(), sets.row_in_L.clone(), sets.count_E.clone())
    answer = _asked(sets, [3, 4, 5], 2, [0, 1, 2])
    assert answer == SpareLinesNeeded(4)
    for now, then in zip((sets.line_of_E, sets.row_in_L, sets.count_E), before, strict=True):
        assert torch.equal(now, then)
    sets.grow(4)
    assert isinstance(_asked(sets, [3, 4, 5], 2), LineMoves)
    _check_books(sets)


def test_no_rows_and_no_table() -> None:
    for rows in (0, 5):
        sets = CacheSets(rows, 0 if not rows else 1, 2, 0, CacheAlgorithm.LRU, CPU)
        moves = _asked(sets, [], 1)
        assert isinstance(moves, LineMoves)
        assert moves.loaded_rows.numel() == 0


def test_counts_of_requests_end_at_the_largest_number() -> None:
    """And do not begin again below all others, where the most wanted row would be the first to go."""
    sets = CacheSets(6, 1, 1, 1, CacheAlgorithm.LFU, CPU)
    most = 2**31 - 1
    _asked(sets, [3], 1)
    sets.count_E[[3, 4]] = torch.tensor([most - 1, most], dtype=torch.int32)
    for serial in (2, 3):
        _asked(sets, [3], serial)
        assert sets.count_E[3] == most
    assert sets.line_of_E[3] == 0
    _asked(sets, [5], 4)
    assert sets.line_of_E[3] == 0, "a row that was named once is not wanted more"
    _asked(sets, [4], 5)
    assert sets.line_of_E[4] == 0, "one that was named as often comes in"
    assert sets.count_E[[3, 4]].tolist() == [most, most]
