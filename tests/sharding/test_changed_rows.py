"""`ChangedRows`: marks of rows, and which rows have them."""

from __future__ import annotations

import torch

from tilerec.sharding.changed_rows import SLOTS, WEIGHTS, ChangedRows, changed_rows_of


def touched(rows: int, *named: int) -> ChangedRows:
    own = ChangedRows(rows, torch.device("cpu"))
    own.mark(torch.tensor(named, dtype=torch.int64))
    return own


def test_rows_are_those_that_have_any_of_the_marks_in_ascending_order() -> None:
    own = touched(6, 4, 1, 4)
    own.agreed(WEIGHTS)
    own.mark(torch.tensor([0], dtype=torch.int32))
    assert own.rows(WEIGHTS).tolist() == [0]
    assert own.rows(SLOTS).tolist() == own.rows().tolist() == [0, 1, 4]
    assert own.rows().dtype == torch.int64
    assert int(own.count_rows(SLOTS)) == 3
    assert touched(0).rows().tolist() == []


def test_rows_of_several_tiles_come_with_the_numbers_beside_them() -> None:
    rows, beside = changed_rows_of([touched(3, 2), touched(5), touched(4, 0, 3)], WEIGHTS, [torch.tensor(8)])
    assert [own.tolist() for own in rows] == [[2], [], [0, 3]]
    assert beside == [8]
