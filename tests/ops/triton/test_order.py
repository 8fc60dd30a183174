"""Orders made ahead: by kernels as by the reference, and updates have the same bits with and without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_update import RULES, Call, pooled, single
from tests.ops.triton.update_kernels import order_rows, sum_row_gradients_of_tables, update_rows_
from tests.ops.update_ops import update_rows_reference_
from tilerec.errors import InputError
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.triton import backend as update

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")
RECORDS = {
    "plain": lambda: pooled([4, 4], [3, 0, 1, 2, 2, 7], 6, 3),
    "weights and means": lambda: pooled([4, 4], [3, 0, 1, 2, 2, 7], 6, 3, weighted=True, means=[1, 0]),
    "int32": lambda: pooled([4, 4], [1] * 6, 6, 3, index=torch.int32),
    "every id its own bag": lambda: single(torch.randint(0, 6, (9,)), torch.randn(9, 4)),
    "bags that two features read": lambda: (
        torch.randn(2, 12), torch.randint(0, 4, (12,)), torch.tensor([0, 2, 4, 5, 5, 8, 9, 9, 12]), None, [0, 0, 1],
        [6, 2, 2], [2, 2, 2], [0, 4, 8], [12, 12, 12], [0, 1, 0],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.mark.parametrize("name", RECORDS)
def test_kernels_order_as_the_reference(name: str) -> None:
    """Tables of one group, so keys go by the tables' order; sentinels' places mean nothing."""
    record = RECORDS[name]()
    weights = [torch.randn(6, 4), torch.randn(6, 4)][: max(record[4]) + 1]
    got, want = (function(weights, *record[1:]) for function in (order_rows, LIBRARY.references["order_rows"]))
    known = int((want[0] < want[3][-1]).sum())
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1][:known], want[1][:known])
    assert torch.equal(got[2][:known], want[2][:known])
    assert torch.equal(got[3], want[3])


@pytest.mark.parametrize("name", RECORDS)
def test_an_update_has_the_same_bits_with_an_order_and_sorts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RECORDS[name]()
    weights = [torch.randn(6, 4), torch.randn(6, 4).bfloat16()][: max(record[4]) + 1]
    call = Call(weights, RULES["rowwise-l2"], record)

    def run(function: Any, ahead: bool) -> list[Any]:
        own, slots = [w.clone() for w in weights], [s.clone() for s in call.slots]
        ordered: list[Any] = []
        if ahead:
            ordered = [None, None, order_rows(own, *record[1:])]
            monkeypatch.setattr("tilerec.ops.update.triton.sort.order_occurrences", None)  # not called again
        return [function(own, slots, *record, *call.rest, *ordered).tolist(), *own, *slots]

    plain = run(update_rows_, False)
    ahead = run(update_rows_, True)
    assert plain[0] == ahead[0]
    for a, b in zip(plain[1:], ahead[1:], strict=True):
        assert torch.equal(a, b)


def test_row_sums_have_the_same_bits_with_an_order_of_tables_of_one_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the tables' own widths are."""
    dims = [4, 9, 3]
    record = pooled(dims, [2, 0, 5, 1, 3, 3, 0, 0, 0], 6, 3, weighted=True, means=[1, 0, 0])
    plain = sum_row_gradients_of_tables(*record[:4], [6] * 3, dims, *record[4:])
    narrow = [torch.randn(6, dim).as_strided((6, 1), (0, 1)) for dim in dims]
    ordered = order_rows(narrow, *record[1:])
    others = sum_row_gradients_of_tables(*record[:4], [7, 6, 6], dims, *record[4:], ordered)  # of other rows: not read
    monkeypatch.setattr("tilerec.ops.update.triton.sort.order_occurrences", None)
    monkeypatch.setattr("tilerec.ops.update.triton.sort.sort_small", None)
    ahead = sum_row_gradients_of_tables(*record[:4], [6] * 3, dims, *record[4:], ordered)
    for got in (ahead, others):
        for a, b in zip(got, plain, strict=True):
            assert torch.equal(a, b)


def test_an_order_of_tables_that_lie_otherwise_now_is_not_read() -> None:
    """Two tables of one group; then the first has other columns, and the second's keys come first."""
    record = pooled([4, 4], [2, 1, 1, 2], 6, 2)
    ahead = order_rows([torch.randn(6, 4), torch.randn(6, 4)], *record[1:])
    grown = [torch.randn(8, 4), torch.randn(6, 4)]
    for ordered in (ahead, None):
        weights = [w.clone() for w in grown]
        update_rows_(weights, [], *record, "store", [], [0, 0], [0] * 4, [0, 0], [0, 0], None, None, None, ordered)
        want = [w.clone() for w in grown]
        update_rows_reference_(want, [], *record, "store", [], [0, 0], [0] * 4, [0, 0], [0, 0])
        torch.testing.assert_close(weights, want)
    assert update.reuse_order(None, None, None) is None  # type: ignore[arg-type]


def test_what_is_no_order_is_refused() -> None:
    record = single(torch.tensor([1]), torch.ones(1, 2))
    with pytest.raises(InputError, match="ordered has 1 tensors, expected 4; pass the result of order_rows"):
        update_rows_([torch.ones(3, 2)], [], *record, "store", [], [0], [0, 0], [0], [0], None, None, None, [record[1]])


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no bags", "no ids"])
def test_nothing_is_in_order(lengths: list[int]) -> None:
    record = pooled([4], lengths, 3, len(lengths))
    weights = [torch.randn(3, 4)]
    made = order_rows(weights, *record[1:])
    assert made[0].numel() == 0
    update_rows_(weights, [], *record, *RULES["sgd"][:2], [1], [0, 0], [0], [0], None, None, None, made)
