"""Search: the rows with the largest inner products with queries, among ranges of rows.

    float32 rows  score = <query, row>
    int8 rows     score = (<code of the query, row> * scale of the row) * scale of the query

A query's code is its numbers as int8: number / scale, rounded to nearest, ties to even, with scale = max|query| / 127.
The product of the codes is an integer, so scores of int8 rows are the same bits on every backend. Scores of float32
rows are sums in the backend's own order.

Each row has a word of 64 bits. A row takes part in a query if its word has all bits of the query's `required`, and none
of `forbidden`.

Legend: B queries, D dim, R rows, P ranges of a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops.runtime.library import LIBRARY

MOST_COLUMNS = 1 << 16
"""Larger sums of int8 products would not fit into int32."""
_EXACT_COLUMNS = 1024
"""Products of codes of so many columns sum to an integer below 2^24, which float32 holds exactly."""
_SCORES = 1 << 24
"""Scores that the reference computes at a time."""


def quantized(numbers_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [N, D] and float32 scales [N] of rows; scales of rows that are not finite are not finite."""
    largest_N = torch.linalg.vector_norm(numbers_ND.float(), ord=torch.inf, dim=1)
    scale_N = largest_N / 127.0
    # A row of zeros, or of numbers too small for a scale, has codes of 0.
    usable_N1 = ((scale_N > 0) & scale_N.isfinite())[:, None]
    code_ND = torch.where(usable_N1, numbers_ND.float() / scale_N[:, None], 0.0).round().clamp(-127, 127)
    return code_ND.to(torch.int8), scale_N


def _check(
    query: Tensor, rows: Tensor, scale: Tensor, words: Tensor, first: Tensor, last: Tensor, required: Tensor,
    forbidden: Tensor, k: int,
) -> None:  # fmt: skip
    count = rows.shape[0]
    int8 = rows.dtype == torch.int8
    if query.dim() != 2 or rows.dim() != 2 or query.shape[1] != rows.shape[1] or query.dtype != torch.float32:
        raise InputError(
            f"best_rows: got queries {query.dtype} {list(query.shape)} for rows {list(rows.shape)}; expected float32 "
            f"[B, {rows.shape[-1]}]. Use the tower of these rows."
        )
    if rows.dtype not in (torch.float32, torch.int8) or rows.shape[1] > MOST_COLUMNS:
        raise ConfigError(
            f"best_rows: got rows {rows.dtype} {list(rows.shape)}; expected float32 or int8 with at most "
            f"{MOST_COLUMNS} columns. Convert them."
        )
    if scale.shape != ((count,) if int8 else (0,)) or words.shape != (count,) or words.dtype != torch.int64:
        raise ConfigError(
            f"best_rows: got scales {list(scale.shape)} and words {words.dtype} {list(words.shape)} for {count} rows; "
            "expected a scale per row of int8, and a word (int64) per row. Pass them."
        )
    batch = query.shape[0]
    fit = first.shape == last.shape and first.dim() == 2 and first.shape[0] == batch
    if not fit or required.shape != (batch,) or forbidden.shape != (batch,) or k < 0:
        raise ConfigError(
            f"best_rows: got ranges {list(first.shape)} and {list(last.shape)}, required {list(required.shape)}, "
            f"forbidden {list(forbidden.shape)}, k={k} for {batch} queries; expected [B, P], [B, P], [B], [B] and k of "
            "at least 0. Correct them."
        )
    if not bool(query.isfinite().all()):
        bad = int((~query.isfinite().all(1)).nonzero()[0, 0])
        raise InputError(
            f"best_rows: got query {bad} with values that are not finite; expected numbers. Check the input of the "
            "query tower, and its weights."
        )


def _fake(
    query: Tensor, rows: Tensor, scale: Tensor, words: Tensor, first: Tensor, last: Tensor, required: Tensor,
    forbidden: Tensor, k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (query.shape[0], k)
    return query.new_empty(shape), query.new_empty(shape, dtype=torch.int64)


@LIBRARY.op(
    "best_rows(Tensor query, Tensor rows, Tensor scale, Tensor words, Tensor first, Tensor last, Tensor required, "
    "Tensor forbidden, SymInt k) -> (Tensor, Tensor)",
    _fake,
    check=_check,
)
def best_rows_reference(
    query: Tensor, rows: Tensor, scale: Tensor, words: Tensor, first: Tensor, last: Tensor, required: Tensor,
    forbidden: Tensor, k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the k best rows of each query: scores float32 [B, k] and places int64 [B, k], best first.

    Of equal scores the lower place is first. A query with fewer rows has scores of -inf and places of -1 at the end. A
    score that is not a number, or is -inf, takes no part.

    Args:
        query: float32 [B, D], finite.
        rows: float32 or int8 [R, D].
        scale: of int8 rows, float32 [R]; else [0].
        words: int64 [R].
        first, last: ranges [first, last) of rows, int64 [B, P]; those of a query do not overlap. They are clipped to
            [0, R].
        required, forbidden: int64 [B].
        k: number of rows, may be more than R.

    Rows [[1], [3], [2], [3]] and a query [2] with the range [0, 4) and k = 3: scores [6, 6, 4], places [1, 3, 2].
    """
    scores, places = [query.new_empty(0, k)], [first.new_empty(0, k)]
    first, last = first.clamp(0, rows.shape[0]), last.clamp(0, rows.shape[0])
    step = max(1, _SCORES // max(1, rows.shape[0]))
    code, query_scale = quantized(query) if rows.dtype == torch.int8 else (query, query[:, 0])
    same = first.shape[1] == 1 and bool((first == first[:1]).all()) and bool((last == last[:1]).all())
    for q in range(0, query.shape[0], step if same else 1):
        part = slice(q, q + (step if same else 1))
        bounds = zip(first[q].tolist(), last[q].tolist(), strict=True)
        ranges = [slice(low, high) for low, high in sorted(bounds) if high > low] or [slice(0, 0)]
        score = torch.cat([_products(code[part], rows[own]) for own in ranges], 1)
        place = torch.cat([torch.arange(own.start, own.stop, device=rows.device) for own in ranges])
        if rows.dtype == torch.int8:
            score = score * torch.cat([scale[own] for own in ranges]) * query_scale[part, None]
        word = torch.cat([words[own] for own in ranges])
        need, avoid = required[part, None], forbidden[part, None]
        taken = ((word & need) == need) & ((word & avoid) == 0) & ~score.isnan()
        score = score.masked_fill(~taken, -torch.inf)
        score, order = _first_k(score, k)
        score = torch.nn.functional.pad(score, (0, k - score.shape[1]), value=-torch.inf)
        own_place = torch.nn.functional.pad(place[order], (0, k - order.shape[1]), value=-1)
        scores.append(score)
        places.append(own_place.masked_fill(score == -torch.inf, -1))
    return torch.cat(scores), torch.cat(places)


def _first_k(score_bn: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row, or all, and their columns; of equal scores the lower column is first."""
    k = min(k, score_bn.shape[1])
    column_bk = score_bn.topk(k, dim=1)[1].sort(dim=1)[0]
    best_bk, order_bk = score_bn.gather(1, column_bk).sort(dim=1, descending=True, stable=True)
    column_bk = column_bk.gather(1, order_bk)
    if k:
        # `topk` keeps any of the scores that equal the last one. A sort is slow, so only such rows are sorted.
        tied = ((score_bn >= best_bk[:, -1:]).sum(1) > k).nonzero()[:, 0]
        every, order = score_bn[tied].sort(dim=1, descending=True, stable=True)
        best_bk[tied], column_bk[tied] = every[:, :k], order[:, :k]
    return best_bk, column_bk


def _products(query_bD: Tensor, rows_nD: Tensor) -> Tensor:
    """Return inner products, float32 [b, n]; of int8 numbers exact before they are rounded to float32."""
    if rows_nD.dtype == torch.int8 and rows_nD.shape[1] > _EXACT_COLUMNS:
        return (query_bD.double() @ rows_nD.double().t()).float()
    return query_bD.float() @ rows_nD.float().t()
