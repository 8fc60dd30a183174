"""Softmax losses against naive loops, forward and gradients, with masks, biases and any size of a chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilerec.retrieval.softmax import softmax_losses


def _naive(
    query: Tensor, positive: Tensor, candidate: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor
) -> Tensor:
    losses = []
    for p in range(query.shape[0]):
        terms = [positive[p].exp()]
        for c in range(candidate.shape[0]):
            if ids[c] != target[p]:
                score = (query[p] * candidate[c]).sum()
                terms.append((score if bias is None else score + bias[c]).exp())
        losses.append(torch.stack(terms).sum().log() - positive[p])
    return torch.stack(losses) if losses else query.new_zeros(0)


@pytest.mark.parametrize("queries", [0, 1, 7])
@pytest.mark.parametrize("candidates", [1, 5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 11, 1 << 20])
def test_losses_and_gradients_are_those_of_a_loop(queries: int, candidates: int, biased: bool, chunk: int) -> None:
    target, ids = torch.randint(4, (queries,)), torch.randint(4, (candidates,))
    bias = torch.randn(candidates) if biased else None
    weight = torch.rand(queries)
    found, expected = [], []
    data = torch.randn(queries, 3), torch.randn(queries), torch.randn(candidates, 3)
    for out, function in ((found, None), (expected, _naive)):
        query, positive, candidate = (one.clone().requires_grad_() for one in data)
        if function is None:
            loss = softmax_losses(
                query, positive, candidate, bias, target_P=target, candidate_C=ids, chunk_scores=chunk
            )
        else:
            loss = function(query, positive, candidate, bias, target, ids)
        (loss * weight + 0 * positive).sum().backward()
        out += [loss.detach(), query.grad, positive.grad, candidate.grad]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-4, atol=1e-6)


def test_all_items_as_candidates_give_cross_entropy() -> None:
    query, table, target = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    loss = softmax_losses(query, (query * table[target]).sum(1), table, target_P=target, candidate_C=torch.arange(9))
    expected = torch.nn.functional.cross_entropy(query @ table.t(), target, reduction="none")
    torch.testing.assert_close(loss, expected)


def test_the_worked_example() -> None:
    loss = softmax_losses(torch.ones(1, 1), torch.zeros(1), torch.tensor([[0.0], [math.log(2)]]))
    assert loss.item() == pytest.approx(math.log(4), abs=1e-6)


def test_a_query_without_negatives_has_no_loss_and_no_gradient() -> None:
    query = torch.randn(2, 3, requires_grad=True)
    candidate = torch.randn(1, 3, requires_grad=True)
    target, ids = torch.tensor([5, 6]), torch.tensor([5])
    loss = softmax_losses(query, torch.zeros(2), candidate, target_P=target, candidate_C=ids)
    assert loss[0] == 0
    loss.sum().backward()
    assert query.grad is not None
    assert candidate.grad is not None
    assert not query.grad[0].any()
    assert query.grad[1].any()
    assert candidate.grad.isfinite().all()
    assert softmax_losses(query, torch.zeros(2), candidate[:0]).tolist() == [0, 0]


def test_large_scores_do_not_overflow() -> None:
    query = torch.tensor([[300.0]], requires_grad=True)
    loss = softmax_losses(query, torch.tensor([0.0]), torch.tensor([[1.0], [-1.0]]))
    assert loss.item() == pytest.approx(300)
    loss.sum().backward()
    assert query.grad is not None
    assert query.grad.item() == pytest.approx(1)
