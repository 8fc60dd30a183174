"""Coarse lists of an item index: centroids by k-means, and the list of each item.

    list of an item   the nearest centroid by distance:  argmax over c of <item, c> - |c|^2 / 2
    lists of a query  those with the largest  <query, probe of c>,  probe of c = c / |c| * mean norm of the list's items

A centroid is shorter than its items if they point in different directions. A probe has the length of an item in the
middle of the list. On 100,000 vectors with norms that differ (log-normal, sigma 0.4), 600 lists and 5 % of the
rows, recall@100 is 0.944 with probes. It is 0.835 with centroids of unit length, as in faiss.

Legend: N items, D dim, C centroids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops import backends as backends

_SAMPLES_PER_LIST = 64
"""Items per centroid that k-means reads: more change centroids little."""
_ROUNDS = 10
_ITEMS = 1 << 16
"""Items whose lists are found at a time."""


class Centroids(NamedTuple):
    """Centroids of lists.

    Attributes:
        center: float32 [C, D].
        probe: float32 [C, D].
    """

    center: Tensor
    probe: Tensor


def trained_centroids(vector_ND: Tensor, lists: int, seed: int) -> Centroids:
    """Return centroids by k-means (Lloyd) on a sample of the items. The same seed, the same result.

    Args:
        vector_ND: items, float32; at least `lists`.
        lists: C.
        seed: of the sample and of the first centroids.
    """
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(vector_ND.shape[0], generator=draw).to(vector_ND.device)
    sample_nD = vector_ND[order[: lists * _SAMPLES_PER_LIST]]
    center_CD, norm_n = sample_nD[:lists].clone(), sample_nD.norm(dim=1)
    reach_C = torch.ones_like(center_CD[:, 0])
    for _ in range(_ROUNDS):
        list_n = nearest_lists(sample_nD, center_CD)
        count_C = torch.bincount(list_n, minlength=lists)
        sum_CD = torch.zeros_like(center_CD).index_add_(0, list_n, sample_nD)
        center_CD = sum_CD / count_C.clamp(min=1)[:, None]
        empty = (count_C == 0).nonzero()[:, 0]
        # A centroid without items begins again at an item of a large list.
        crowded = count_C[list_n].argsort(descending=True, stable=True)[: empty.numel()]
        center_CD[empty] = sample_nD[crowded]
        norm_C = torch.zeros_like(reach_C).index_add_(0, list_n, norm_n) / count_C.clamp(min=1)
        length_C = center_CD.norm(dim=1)
        reach_C = torch.where((count_C > 0) & (length_C > 0), norm_C / length_C, 1.0)
    return Centroids(center_CD, center_CD * reach_C[:, None])


def nearest_lists(vector_ND: Tensor, center_CD: Tensor) -> Tensor:
    """Return the nearest centroid of each item, int64 [N]; of equal ones the lower."""
    half_C1 = center_CD.square().sum(1, keepdim=True) / 2
    rows_CE = torch.cat([center_CD, -half_C1], 1)
    found = [
        best_lists(torch.cat([part, torch.ones_like(part[:, :1])], 1), rows_CE, 1)[:, 0]
        for part in vector_ND.split(_ITEMS)
    ]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=center_CD.device)


def best_lists(query_BD: Tensor, probe_CD: Tensor, count: int) -> Tensor:
    """Return the lists with the largest inner products of query and probe, int64 [B, count], best first."""
    lists = probe_CD.shape[0]
    zero_B = torch.zeros(query_BD.shape[0], dtype=torch.int64, device=query_BD.device)
    return torch.ops.tilerec.best_rows(
        query_BD, probe_CD, probe_CD.new_zeros(0), zero_B.new_zeros(lists), zero_B[:, None], zero_B[:, None] + lists,
        zero_B, zero_B, count,
    )[1]  # fmt: skip
