"""`placed`: whether a batch's ids are read where they lie, or put one after another first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilerec.storage import cached
from tilerec.storage.cached import RowCache
from tilerec.storage.line_batch import _line_up, place


@pytest.mark.parametrize(
    ("segments", "starts", "bags", "total", "expected"),
    [
        ([(0, 2), (2, 5)], [0, 1], [1, 2], 5, True),
        ([], [], [], 0, True),
        ([(0, 2), (2, 5)], [0, 1], [1, 2], 6, False),  # an id behind
        ([(0, 2), (3, 5)], [0, 1], [1, 2], 5, False),  # an id between
        ([(1, 2), (2, 5)], [0, 1], [1, 2], 5, False),  # an id before
        ([(0, 2), (2, 5)], [0, 2], [1, 2], 5, False),  # a bag between
        ([(2, 5), (0, 2)], [1, 0], [2, 1], 5, False),  # in another order
    ],
)
def test_features_line_up_where_their_ids_and_bags_are_all_there_is(
    segments: list[tuple[int, int]], starts: list[int], bags: list[int], total: int, expected: bool
) -> None:
    assert _line_up(segments, starts, bags, total) is expected


def test_bags_that_no_feature_reads_are_left_out_though_they_have_no_ids() -> None:
    """Two bags of ids, and one of another key: lookups take as many offsets as they have bags."""
    rows = torch.arange(8.0).view(4, 2)
    holder: Any = SimpleNamespace(cache=None, host=lambda: [rows])
    ids, offsets = torch.tensor([3, 1]), torch.tensor([0, 1, 2, 2])
    placed = place([holder], [0], ids, offsets, None, [0], [2], lambda *_: None)
    assert placed.offsets is not None
    assert placed.offsets.tolist() == [0, 1, 2]
    assert placed.ids.tolist() == [3, 1]


@pytest.mark.parametrize("together", [False, True])
def test_ids_of_tables_without_a_cache_stay_what_they_are(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those of a cached table, in one batch: line numbers, and row numbers."""
    monkeypatch.setattr(cached, "_has_kernels", lambda device: together)
    tables = [torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)]
    holders: list[Any] = [
        SimpleNamespace(cache=cache, host=lambda own=own: [own])
        for cache, own in zip((RowCache("t", None), None), tables, strict=True)
    ]
    ids = torch.tensor([3, 1, 2, 3])
    placed = place(holders, [0, 1], ids, torch.tensor([0, 2, 4]), None, [0, 1], [1, 1], lambda *_: None)
    lines, rows = placed.ids.long().split(2)
    assert rows.tolist() == [2, 3]
    assert torch.equal(placed.weights[0][lines], tables[0][ids[:2]])
    assert torch.equal(placed.weights[1][rows], tables[1][ids[2:]])
