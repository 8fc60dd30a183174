"""Softmax losses over candidates, with bounded memory.

    s_pc = <query_p, candidate_c> + bias_c          scores
    lse_p = log sum over c of exp s_pc              without candidates that are the positive itself
    loss_p = log(1 + exp(lse_p - s_p))              = -log softmax of the positive, whose score is s_p

The positive's score is passed separately, so one function serves the full softmax (candidates: all items), sampled
softmax (candidates: the negatives) and in-batch softmax (candidates: the items of the batch). A bias of -log q_c
corrects for candidates that are drawn with probability q_c (Bengio and Senecal, 2008).

Memory: scores are computed for a chunk of queries at a time, in the forward and again in the backward.

Worked example: a query [1], candidates [0], [log 2] with bias 0 give lse = log(1 + 2) = 1.099; with s_p = 0 the loss is
log(1 + 3) = 1.386.

Legend: P queries, C candidates, D dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

CHUNK_SCORES = 1 << 22
"""Scores of a chunk: 16 MB in float32, with two such tensors alive at a time."""


def softmax_losses(
    query_PD: Tensor,
    positive_P: Tensor,
    candidate_CD: Tensor,
    bias_C: Tensor | None = None,
    *,
    target_P: Tensor | None = None,
    candidate_C: Tensor | None = None,
    chunk_scores: int = CHUNK_SCORES,
) -> Tensor:
    """Return the loss of each query [P], float32; differentiable in queries, positive scores and candidates.

    Args:
        query_PD, candidate_CD: vectors.
        positive_P: scores of the positives, their bias included.
        bias_C: added to the scores of candidates; None for 0.
        target_P, candidate_C: ids of the positives and of the candidates. A candidate with the id of the query's
            positive is left out: it is the positive itself, or an accidental hit. None: no candidate is left out.
        chunk_scores: scores that are computed at a time.
    """
    if not candidate_CD.shape[0]:
        return positive_P.float() * 0.0
    lse_P = _MaskedLogSumExp.apply(query_PD, candidate_CD, bias_C, target_P, candidate_C, chunk_scores)
    return softplus(lse_P - positive_P.float())


class _MaskedLogSumExp(torch.autograd.Function):
    """log sum exp over candidates that are not the query's target; -inf for a query without such candidates."""

    @staticmethod
    def forward(
        ctx: Any,
        query_PD: Tensor,
        candidate_CD: Tensor,
        bias_C: Tensor | None,
        target_P: Tensor | None,
        candidate_C: Tensor | None,
        chunk_scores: int,
    ) -> Tensor:
        ctx.chunk = max(1, chunk_scores // candidate_CD.shape[0])
        lse_P = query_PD.new_empty(query_PD.shape[0], dtype=torch.float32)
        for part in _chunks(query_PD.shape[0], ctx.chunk):
            scores_pC = _scores(query_PD[part], candidate_CD, bias_C, None if target_P is None else target_P[part],
                                candidate_C)  # fmt: skip
            lse_P[part] = torch.logsumexp(scores_pC, dim=1)
        ctx.save_for_backward(query_PD, candidate_CD, bias_C, target_P, candidate_C, lse_P)
        return lse_P

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor | None, ...]:
        query_PD, candidate_CD, bias_C, target_P, candidate_C, lse_P = ctx.saved_tensors
        grad_query_PD = torch.zeros_like(query_PD)
        grad_candidate_CD = torch.zeros_like(candidate_CD, dtype=torch.float32)
        # A query whose candidates are all left out has lse = -inf and no gradient.
        safe_P = torch.where(lse_P.isfinite(), lse_P, torch.zeros_like(lse_P))
        for part in _chunks(query_PD.shape[0], ctx.chunk):
            own_target = None if target_P is None else target_P[part]
            scores_pC = _scores(query_PD[part], candidate_CD, bias_C, own_target, candidate_C)
            grad_pC = scores_pC.sub_(safe_P[part, None]).exp_().mul_(grad_P[part, None])
            grad_query_PD[part] = (grad_pC @ candidate_CD.float()).to(query_PD.dtype)
            grad_candidate_CD.addmm_(grad_pC.t(), query_PD[part].float())
        return grad_query_PD, grad_candidate_CD.to(candidate_CD.dtype), None, None, None, None


def _scores(
    query_pD: Tensor, candidate_CD: Tensor, bias_C: Tensor | None, target_p: Tensor | None, candidate_C: Tensor | None
) -> Tensor:
    scores_pC = query_pD.float() @ candidate_CD.float().t()
    if bias_C is not None:
        scores_pC += bias_C
    if target_p is not None and candidate_C is not None:
        scores_pC.masked_fill_(target_p[:, None] == candidate_C, -torch.inf)
    return scores_pC


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]
