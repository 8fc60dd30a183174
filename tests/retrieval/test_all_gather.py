"""Rows of all ranks on every rank, with the gradients of all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilerec.comms.process import ProcessGroupComms
from tilerec.retrieval.all_gather import gather_rows, gather_sizes
from tilerec.testing import run_ranks


def _gathered(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    group = ProcessGroupComms()
    rows = torch.full((sizes[group.rank], 2), float(group.rank + 1), requires_grad=True)
    ids = torch.full((sizes[group.rank],), group.rank)
    found = gather_sizes(len(ids), group)
    every = gather_rows(rows, found, group, "rows")
    weight = torch.arange(every.numel()).view(every.shape) * (group.rank + 1)
    (every * weight).sum().backward()
    return every.detach(), gather_rows(ids, found, group, "ids"), rows.grad, found


@pytest.mark.parametrize("sizes", [[2, 1], [0, 3], [0, 0], [1, 0, 2]])
def test_rows_arrive_in_the_order_of_the_ranks_and_gradients_are_summed(sizes: list[int]) -> None:
    count, total = len(sizes), sum(sizes)
    expected = torch.tensor([rank + 1.0 for rank, size in enumerate(sizes) for _ in range(size)])
    factor = sum(range(1, count + 1))
    gradient = torch.arange(2 * total).view(total, 2).float() * factor
    for (every, ids, grad, found), own in zip(run_ranks(count, _gathered, sizes), gradient.split(sizes), strict=True):
        assert found == sizes
        assert torch.equal(every, expected[:, None].expand(total, 2))
        assert torch.equal(ids, expected.long() - 1)
        assert grad is not None
        assert torch.equal(grad, own)


def test_one_rank_keeps_its_rows() -> None:
    rows = torch.ones(2, 3)
    assert gather_rows(rows, gather_sizes(2, None), None, "rows") is rows
