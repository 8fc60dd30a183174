"""Total norm of a model's gradients with sharded tables: over the whole tables, not over one rank's tiles.

    every cell of a table counts once: at the lowest rank that holds it
    replicated parameters count once:  at rank 0
    one small all-to-all sends each rank's norms to all ranks, so all ranks compute the same bits and the same scale

Legend: W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from tilerec.errors import CommsError, ConfigError
from tilerec.optim.sharded_state import TiledTable, tiled_table_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip like `torch.nn.utils.clip_grad_norm_`, also with sharded tables; results are those of the unsharded model.

    Call it on every rank with `model.parameters()`, unfiltered. A list of only the parameters with a `.grad` may
    contain no sharded table on some rank; that rank would skip the collective, and the others would wait for it. A
    table with an attached optimizer has no `.grad`: the backward pass has already updated it, unclipped.

    Args:
        parameters: one or several; those without `.grad` count as 0. Of sparse gradients the stored rows are read.
        max_norm: the largest total norm.
        norm_type: p of the p-norm, > 0; `float("inf")` or "inf" for the largest absolute value.
        error_if_nonfinite: raise (RuntimeError, on every rank) if the norm is infinite or NaN.
        foreach: as in torch.

    Raises:
        CommsError: another rank did not call it, or passed no sharded table.

    Returns:
        The norm before clipping (0-d), the same bits on every rank.

    Example: rank 0 has a tile with gradients [3, 0], rank 1 a tile with [0, 4]. The norm is 5 on both ranks, and with
    `max_norm` 1 both scale by 1 / 5.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = total_norm(params, norm_type, error_if_nonfinite, foreach)
    scale_grads_(grads_of(params), max_norm, total)
    return total


def scale_grads_(grads: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients of total norm `total` to `max_norm`, if they exceed it."""
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return all existing gradients, each once; of a sparse gradient its coalesced values."""
    return [grad for _, grad in _with_grads(params)]


def _with_grads(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for parameter in dict.fromkeys(params):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            # Duplicate entries are one element of the gradient: add them up before the norm.
            parameter.grad = grad.coalesce()
            grad = parameter.grad._values()
        found.append((parameter, grad.detach()))
    return found


@torch.no_grad()
def total_norm(
    params: Sequence[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of all gradients together (0-d). With sharded tables every rank must call it."""
    p = float(norm_type)
    tables = {id(parameter): table for parameter in params if (table := tiled_table_of(parameter)) is not None}
    worlds: dict[Hashable, tuple[TiledTable, list[Tensor]]] = {}
    for parameter in params:  # include tables without a gradient here: the exchange is a collective
        if id(parameter) in tables:
            worlds.setdefault(tables[id(parameter)].ranks, (tables[id(parameter)], []))
    replicated: list[Tensor] = []
    for parameter, grad in _with_grads(params):
        table = tables.get(id(parameter))
        if table is None:
            replicated.append(grad)
        elif table.counts(next(i for i, leaf in enumerate(table.leaves()) if leaf is parameter)):
            worlds[table.ranks][1].append(grad)
    if worlds and not p > 0:
        raise ConfigError(
            f"clip_grad_norm_: got norm_type={norm_type!r}; expected a number > 0 or 'inf'. Pass 2.0 for the Euclidean "
            "norm."
        )
    if not worlds:
        return torch.nn.utils.get_total_norm(_not_empty(replicated), p, error_if_nonfinite, foreach)
    device = params[0].device
    dense = _norm(replicated, p, foreach, device)
    norms: list[Tensor] = []
    for table, grads in worlds.values():
        norms_W2 = _gather_norms(table, torch.stack([_norm(grads, p, foreach, device), dense]))
        norms += [*norms_W2[:, 0], *(() if norms else (norms_W2[0, 1],))]
    dtype = functools.reduce(torch.promote_types, [parameter.dtype for parameter in params])
    return torch.nn.utils.get_total_norm(norms, p, error_if_nonfinite).to(dtype)


def _gather_norms(table: TiledTable, own: Tensor) -> Tensor:
    try:
        return table.of_all_ranks(own)
    except CommsError as error:
        # A rank without sharded tables in its list skips the collective, and the others wait for it.
        raise CommsError(
            f"{str(error).rstrip('. ')}. Every rank must send its part of the norm: pass model.parameters(), "
            "unfiltered, on every rank. A list without the parameters whose .grad is None may contain no sharded table "
            "on some ranks."
        ) from error


def _norm(grads: Sequence[Tensor], p: float, foreach: bool | None, device: torch.device) -> Tensor:
    norm = torch.nn.utils.get_total_norm(_not_empty(grads), p, foreach=foreach)
    if hasattr(norm, "full_tensor"):  # the norm of DTensor parameters
        norm = norm.full_tensor()
    return norm.to(device, torch.float64)


def _not_empty(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad for grad in grads if grad.numel()]  # empty gradients have no largest element
