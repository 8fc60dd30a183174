"""Interactions between the dense and sparse features of DLRM.

Nouns
  features of a sample  the embedded dense vector and F pooled embeddings, all of dim D: n = F + 1 vectors
  pair                  (i, j) with i < j; n (n - 1) / 2 of them, in row-major order (0,1), (0,2), …, (1,2), …

Legend of the shapes in names: B samples, F sparse features, D embedding dim, n = F + 1, P pairs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tilerec.errors import InputError
from tilerec.modules.utils import check_size
from tilerec.ops.backends import reused_empty
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.ops.runtime.library import LIBRARY
from tilerec.torch_private import BelowAutograd


def pair_count(vectors: int) -> int:
    """Return the number of pairs among n vectors, n (n - 1) / 2; 3 vectors have 3."""
    return vectors * (vectors - 1) // 2


def _pair_positions(vectors: int, device: torch.device) -> torch.Tensor:
    """Return each pair's position in a flattened n × n matrix, [P]; n = 3: [1, 2, 5]."""
    rows, columns = torch.triu_indices(vectors, vectors, offset=1, device=device)
    return rows * vectors + columns


def _pair_numbers(vectors: int, device: torch.device) -> torch.Tensor:
    """Return the pair number at each position of a flattened symmetric n × n matrix, [n·n]; the diagonal holds P.

    n = 3: [3, 0, 1, 0, 3, 2, 1, 2, 3].

    The numbers are written to memory: inductor would compute a formula of them again for each sample, with divisions.
    """
    rows, columns = torch.triu_indices(vectors, vectors, offset=1, device=device)
    pairs = pair_count(vectors)
    number = torch.arange(pairs, device=device)
    numbers = torch.full((vectors, vectors), pairs, device=device)
    numbers[rows, columns] = number
    numbers[columns, rows] = number
    return numbers.flatten()


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # else a backward could not save what a prediction made first
def _pairs_on_cpu(vectors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `_pair_positions` and `_pair_numbers` of n vectors. Made in each step, they take 27 us for n = 27."""
    device = torch.device("cpu")
    return _pair_positions(vectors, device), _pair_numbers(vectors, device)


def _is_plain(x_BnD: torch.Tensor) -> bool:
    return x_BnD.device.type == "cpu" and can_bypass_dispatcher((x_BnD,))


def _joined(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
    """Return `cat` of the vectors, [B, n, D], in memory that later steps use again. No gradient flows through it.

    Fresh pages of 14 MB cost more than the copy.
    """
    parts = [dense_BD.unsqueeze(1), sparse_BFD]
    if dense_BD.dtype != sparse_BFD.dtype or not can_bypass_dispatcher((dense_BD, sparse_BFD)):
        return torch.cat(parts, dim=1)
    batch, count, dim = sparse_BFD.shape
    out_BnD = reused_empty((batch, count + 1, dim), dense_BD.dtype, dense_BD.device)
    return torch.cat(parts, dim=1, out=out_BnD)


def _with_pair_dots(dense_BD: torch.Tensor, x_BnD: torch.Tensor) -> torch.Tensor:
    vectors = x_BnD.shape[1]
    positions = _pairs_on_cpu(vectors)[0] if _is_plain(x_BnD) else _pair_positions(vectors, x_BnD.device)
    dots_BP = torch.bmm(x_BnD, x_BnD.transpose(1, 2)).flatten(1).index_select(1, positions)
    return torch.cat([dense_BD, dots_BP], dim=1)


def _gradients(grad_BK: torch.Tensor, x_BnD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the dense and of the sparse vectors, rows of S X.

    S has each pair's gradient at (i, j) and (j, i). Autograd would scatter and compute two products. All operations are
    differentiable, so second derivatives work.
    """
    batch, vectors, dim = x_BnD.shape
    numbers = _pairs_on_cpu(vectors)[1] if _is_plain(x_BnD) else _pair_numbers(vectors, x_BnD.device)
    padded = torch.cat([grad_BK[:, dim:], grad_BK.new_zeros(batch, 1)], dim=1)
    s_Bnn = padded.index_select(1, numbers).view(batch, vectors, vectors).to(x_BnD.dtype)
    dense_BD = torch.bmm(s_Bnn[:, :1], x_BnD).squeeze(1) + grad_BK[:, :dim]
    return dense_BD, torch.bmm(s_Bnn[:, 1:], x_BnD)


def _interacted(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_BnD = _joined(dense_BD, sparse_BFD)
    return _with_pair_dots(dense_BD, x_BnD), x_BnD


class _DotInteraction(torch.autograd.Function):
    """Returns X, too: saved as an output it has a history, which second derivatives need."""

    @staticmethod
    def forward(ctx: Any, dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        out_BK, x_BnD = _interacted(dense_BD, sparse_BFD)
        ctx.save_for_backward(x_BnD)
        return out_BK, x_BnD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        of_out_BK, of_x_BnD = grads
        (x_BnD,) = ctx.saved_tensors
        if of_out_BK is None:
            return (None, None) if of_x_BnD is None else (of_x_BnD[:, 0], of_x_BnD[:, 1:])
        dense_BD, sparse_BFD = _gradients(of_out_BK, x_BnD)
        if of_x_BnD is not None:
            return dense_BD + of_x_BnD[:, 0], sparse_BFD + of_x_BnD[:, 1:]
        return dense_BD, sparse_BFD


def _fake_interacted(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, count, dim = sparse_BFD.shape
    dtype = torch.promote_types(dense_BD.dtype, sparse_BFD.dtype)
    out_BK = dense_BD.new_empty(batch, dim + pair_count(count + 1), dtype=dtype)
    return out_BK, dense_BD.new_empty(batch, count + 1, dim, dtype=dtype)


def _fake_gradients(grad_BK: torch.Tensor, x_BnD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, vectors, dim = x_BnD.shape
    return x_BnD.new_empty(batch, dim), x_BnD.new_empty(batch, vectors - 1, dim)


LIBRARY.op("dot_interaction(Tensor dense, Tensor sparse) -> (Tensor, Tensor)", _fake_interacted)(_interacted)
LIBRARY.op("dot_interaction_gradients(Tensor grad, Tensor x) -> (Tensor, Tensor)", _fake_gradients)(_gradients)


class _DotInteractionOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with BelowAutograd():
            out_BK, x_BnD = torch.ops.tilerec.dot_interaction.default(dense_BD, sparse_BFD)
        ctx.save_for_backward(x_BnD)
        ctx.mark_non_differentiable(x_BnD)
        return out_BK, x_BnD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BK: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.tilerec.dot_interaction_gradients.default(
            grad_BK, *ctx.saved_tensors
        )
        return found


LIBRARY.impl("dot_interaction", lambda dense, sparse: _DotInteractionOp.apply(dense, sparse), "Autograd")


def dot_interaction(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
    """Return the dense vector, then `<x[b, i], x[b, j]>` for every pair p = (i, j), i < j, in row-major order.

    Args:
        dense_BD: [B, D], any floating dtype; x[b, 0].
        sparse_BFD: [B, F, D]; x[b, 1] to x[b, F].

    Returns:
        [B, D + F (F + 1) / 2], of the wider dtype.

    In compiled programs on a CPU it is one op, which gives the sparse vectors a gradient of their own: as a slice of a
    larger one, torch would compile a second graph, for one sample. Traced, it also adds 42 lines of guards, and
    inductor gathers the pairs in a loop of its own: 637 us forward and 710 backward for 256 samples of 27 x 64, and 594
    and 480 with torch's kernel (Intel Xeon, one thread, medians). Exported programs run where this op is not
    registered, so they contain torch's ops.

    The vectors [1, 0], [2, 3], [4, 5] give [1, 0, 2, 4, 23].
    """
    if torch.compiler.is_exporting():
        return _interacted(dense_BD, sparse_BFD)[0]
    on_cpu = dense_BD.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if torch.compiler.is_compiling() and on_cpu:
        out_BK: torch.Tensor = torch.ops.tilerec.dot_interaction(dense_BD, sparse_BFD)[0]
    else:
        out_BK, _ = _DotInteraction.apply(dense_BD, sparse_BFD)
    return out_BK


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
        return _joined(dense_BD, sparse_BFD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0][:, 0], grads[0][:, 1:]


def _stacked(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
    """Return the dense and the sparse vectors of each sample, [B, n, D]."""
    if not can_bypass_dispatcher((dense_BD, sparse_BFD)):
        return torch.cat([dense_BD.unsqueeze(1), sparse_BFD], dim=1)
    stacked: torch.Tensor = _Stacked.apply(dense_BD, sparse_BFD)
    return stacked


def _check(what: str, sparse_count: int, dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> None:
    fits = dense_BD.dim() == 2 and tuple(sparse_BFD.shape[1:]) == (sparse_count, dense_BD.shape[1])
    # An exported program asserts that `cat` gets equal batch sizes; a question here would make torch warn.
    if fits and not torch.compiler.is_exporting():
        fits = sparse_BFD.shape[0] == dense_BD.shape[0]
    if not fits:
        raise InputError(
            f"{what}: got dense features of shape {list(dense_BD.shape)} and sparse features of shape "
            f"{list(sparse_BFD.shape)}; expected [B, D] and [B, {sparse_count}, D]. Set the dense arch's last layer "
            "size to the embedding dim, and pass as many sparse features as num_sparse_features."
        )


# `torch.fx.symbolic_trace` records their calls: they look at shapes.
torch.fx.wrap("_check")
torch.fx.wrap("_stacked")
torch.fx.wrap("dot_interaction")


class InteractionArch(nn.Module):
    """The dense vector, followed by dot products of all pairs of dense and sparse vectors (DLRM, 1906.00091).

    Args:
        num_sparse_features: F.

    Shape: dense `[B, D]` and sparse `[B, F, D]` to `[B, D + F + F (F - 1) / 2]`: the dense vector, then the
    pairs in row-major order with the dense vector as number 0.

    The module has no parameters.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = check_size("InteractionArch: num_sparse_features", num_sparse_features, least=0)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        _check("InteractionArch", self.F, dense_features, sparse_features)
        if self.F == 0:
            return dense_features
        return dot_interaction(dense_features, sparse_features)


class InteractionDCNArch(nn.Module):
    """A cross network over the concatenated features of a sample, instead of DLRM's dot products (DCN-V2, 2008.13535).

    Args:
        num_sparse_features: F.
        crossnet: maps [B, (F + 1) D] to [B, (F + 1) D], such as `LowRankCrossNet((F + 1) * D, num_layers,
            low_rank)`.

    Shape: dense `[B, D]` and sparse `[B, F, D]` to `[B, (F + 1) D]`. If F = 0, the output is the dense vector.

    State: `crossnet.*`.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = check_size("InteractionDCNArch: num_sparse_features", num_sparse_features, least=0)
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        _check("InteractionDCNArch", self.F, dense_features, sparse_features)
        if self.F == 0:
            return dense_features
        x_BnD = _stacked(dense_features, sparse_features)
        crossed: torch.Tensor = self.crossnet(x_BnD.flatten(1))
        return crossed


class InteractionProjectionArch(nn.Module):
    """The dense vector, followed by dot products between two learned sets of projected vectors.

    Each branch maps the concatenated features of a sample to a few vectors of dim D. Every vector of the first branch
    is multiplied with every vector of the second. F1 and F2 vectors give F1 · F2 products, independent of F;
    `InteractionArch` computes (F + 1) F / 2.

    Args:
        num_sparse_features: F.
        interaction_branch1: maps [B, (F + 1) D] to [B, F1 · D].
        interaction_branch2: maps [B, (F + 1) D] to [B, F2 · D].

    Shape: dense `[B, D]` and sparse `[B, F, D]` to `[B, D + F1 · F2]`.

    State: `interaction_branch1.*`, `interaction_branch2.*`.
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F = check_size("InteractionProjectionArch: num_sparse_features", num_sparse_features, least=0)
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        _check("InteractionProjectionArch", self.F, dense_features, sparse_features)
        if self.F == 0:
            return dense_features
        x_BnD = _stacked(dense_features, sparse_features)
        batch, _, dim = x_BnD.shape
        flat_BK = x_BnD.flatten(1)
        projected = []
        for number, branch in enumerate((self.interaction_branch1, self.interaction_branch2), start=1):
            branch_BK: torch.Tensor = branch(flat_BK)
            if branch_BK.shape[1] % dim:
                raise InputError(
                    f"InteractionProjectionArch: interaction_branch{number} returned {branch_BK.shape[1]} features; "
                    f"expected a multiple of the embedding dim {dim}. Change its last layer size."
                )
            projected.append((branch_BK, branch_BK.shape[1] // dim))
        (left_BK, left), (right_BK, right) = projected
        # The second branch's output is viewed as [B, D, F2], because existing checkpoints of this model use this order.
        products = torch.bmm(left_BK.view(batch, left, dim), right_BK.view(batch, dim, right))
        return torch.cat([dense_features, products.flatten(1)], dim=1)
