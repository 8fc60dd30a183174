"""`located`: where a batch's rows are, with and without caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilerec.storage.located_batch import FeatureBatch, _RowsInLines, located
from tilerec.storage.row_cache import RowCache


class _Source:
    """Rows of a table, behind a cache or not."""

    trained, slots = False, ()

    def __init__(self, leaf: torch.Tensor, cache: RowCache | None) -> None:
        self.leaf, self.cache, self.names = leaf, cache, None

    def host(self) -> list[torch.Tensor]:
        return [self.leaf]

    def arrive(self) -> None: ...


def _batch(
    sources: list[Any], ids: torch.Tensor, offsets: torch.Tensor | None, starts: list[int], bags: list[int]
) -> FeatureBatch:
    """One feature per source."""
    return FeatureBatch(
        sources,
        [own.leaf for own in sources],
        ids,
        offsets,
        None,
        range(len(sources)),
        starts,
        bags,
    )


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
def test_features_line_up_if_their_ids_and_bags_cover_the_batch(
    segments: list[tuple[int, int]], starts: list[int], bags: list[int], total: int, expected: bool
) -> None:
    ids, offsets = torch.zeros(total, dtype=torch.int64), torch.zeros(sum(bags) + 1, dtype=torch.int64)
    batch = FeatureBatch([], [], ids, offsets, None, [], starts, bags, "", segments)
    assert _RowsInLines._lines_up(batch, offsets) is expected


def test_bags_that_no_feature_reads_are_left_out_though_they_have_no_ids() -> None:
    """Two bags of ids, and one of another key: lookups take as many offsets as they have bags."""
    source = _Source(torch.arange(8.0).view(4, 2), RowCache("t", None))
    ids, offsets = torch.tensor([3, 1]), torch.tensor([0, 1, 2, 2])
    with located(_batch([source], ids, offsets, [0], [2])) as rows:
        assert rows.offsets is not None
        assert rows.offsets.tolist() == [0, 1, 2]
        assert torch.equal(rows.weights[0][rows.ids.long()], source.leaf[ids])


def test_without_caches_rows_are_in_the_leaves() -> None:
    source = _Source(torch.arange(8.0).view(4, 2), None)
    batch = _batch([source], torch.tensor([3, 1]), torch.tensor([0, 1, 2, 2]), [0], [2])
    with located(batch, writes=True) as rows:
        assert (rows.weights[0], rows.ids, rows.offsets) == (source.leaf, batch.ids, batch.offsets)
        assert rows.row_names is None
        assert rows.bag_layout([1], [2, 1]) == ([1], [2, 1])
        assert torch.equal(rows.copies()[0], source.leaf[batch.ids])


def test_ids_of_tables_without_a_cache_stay_what_they_are() -> None:
    """Beside those of a cached table, in one batch: line numbers, and row numbers."""
    tables = [torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)]
    sources = [_Source(own, cache) for own, cache in zip(tables, (RowCache("t", None), None), strict=True)]
    ids = torch.tensor([3, 1, 2, 3])
    with located(_batch(sources, ids, torch.tensor([0, 2, 4]), [0, 1], [1, 1])) as found:
        lines, rows = found.ids.long().split(2)
        assert rows.tolist() == [2, 3]
        assert torch.equal(found.weights[0][lines], tables[0][ids[:2]])
        assert torch.equal(found.weights[1][rows], tables[1][ids[2:]])
        assert found.row_names is not None
        assert found.row_names[0][lines].tolist() == ids[:2].tolist()
        assert not found.row_names[1].numel()
        copies = found.copies()
        positions = found.positions_in_copies().split(2)
    for own, at, table, part in zip(copies, positions, tables, ids.split(2), strict=True):
        assert torch.equal(own[at], table[part])
