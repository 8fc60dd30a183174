"""The two halves of DeepFM (Guo et al., 1703.04247): a deep net and a factorization machine over the same embeddings.

Legend of the shapes in names: B samples, N embeddings, D embedding dim, K all embedding elements of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tilerec.errors import InputError


def _flatten(what: str, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenated embeddings of each sample, [B, K]."""
    if len(embeddings) == 0:
        raise InputError(f"{what}: the list of embeddings is empty; pass at least one tensor.")
    if any(e.dim() < 2 or e.shape[0] != embeddings[0].shape[0] for e in embeddings):
        raise InputError(
            f"{what}: got embeddings of shapes {[list(e.shape) for e in embeddings]}; expected [B, D] or [B, N, D] "
            "with one batch size B."
        )
    return torch.cat([e.flatten(1) for e in embeddings], dim=1)


class DeepFM(nn.Module):
    """The deep half: `dense_module` applied to the concatenated embeddings of each sample.

    Args:
        dense_module: maps [B, K] to anything; K is the sum of all embedding dimensions.

    Shape: a list of `[B, D]` or `[B, N, D]` (dims may differ) to the output of `dense_module`.

    State: `dense_module.*`.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.dense_module(_flatten("DeepFM", embeddings))
        return output


class FactorizationMachine(nn.Module):
    """The sum of products of all pairs, in linear time: `Σ_{i<j} <v_i, v_j> = ½ (‖Σ v_i‖² - Σ ‖v_i‖²)`.

    By default the v_i are the *elements* of all concatenated embeddings of a sample, as in TorchRec. Embeddings may
    then differ in dim, and elements of one embedding are paired too. With `per_embedding=True` the v_i are the
    embeddings themselves: the second-order term of Rendle (2010) and of DeepFM (1703.04247, eq. 2).

    Args:
        per_embedding: pair embeddings instead of elements; all must have the same dim.

    Shape: a list of `[B, D]` or `[B, N, D]` to `[B, 1]`.

    Embeddings [1, 2] and [3, 4] give 1·2 + 1·3 + 1·4 + 2·3 + 2·4 + 3·4 = 35. With `per_embedding=True` they give
    1·3 + 2·4 = 11.
    """

    def __init__(self, *, per_embedding: bool = False) -> None:
        super().__init__()
        self._per_embedding = per_embedding

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        flat_BK = _flatten("FactorizationMachine", embeddings)
        squares_B1 = flat_BK.square().sum(dim=1, keepdim=True)
        if not self._per_embedding:
            return 0.5 * (flat_BK.sum(dim=1, keepdim=True).square() - squares_B1)
        dim = embeddings[0].shape[-1]
        if any(e.shape[-1] != dim for e in embeddings):
            raise InputError(
                f"FactorizationMachine: got embeddings of dims {[e.shape[-1] for e in embeddings]}; expected one dim "
                "with per_embedding=True. Make the dims equal, or leave per_embedding=False."
            )
        count = flat_BK.shape[1] // dim if dim else 0
        sum_BD = flat_BK.view(flat_BK.shape[0], count, dim).sum(dim=1)
        return 0.5 * (sum_BD.square().sum(dim=1, keepdim=True) - squares_B1)

    def extra_repr(self) -> str:
        return f"per_embedding={self._per_embedding}"
