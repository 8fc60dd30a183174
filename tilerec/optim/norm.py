"""The norm of a model's gradients where tables lie in tiles: over the tables, not over what one rank holds of them.

    every cell of a table counts once: at the lowest rank that holds it
    replicated parameters count once:  at rank 0
    one small all-to-all tells every rank's share to all, so all ranks have the same bits and scale alike

Legend: W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from tilerec.errors import CommsError, ConfigError
from tilerec.optim.tiled import TiledTable, tiled_table_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also for models with sharded tables: equal to it on the unsharded model.

    Every rank calls it with `model.parameters()`, unfiltered: a rank on which a list of the parameters with a `.grad`
    names no sharded table would make no call, and the others wait for it. A table with an attached optimizer has no
    `.grad` by then: the backward pass has updated it, unclipped.

    Args:
        parameters: one or several; those without `.grad` count 0. Of sparse gradients the touched rows are read.
        max_norm: the largest total norm.
        norm_type: p of the p-norm, > 0; `float("inf")` or "inf" for the largest absolute value.
        error_if_nonfinite: raise (RuntimeError, on every rank) if the norm is infinite or NaN.
        foreach: as torch's.

    Raises:
        CommsError: another rank did not call it, or named no sharded table.

    Returns:
        The norm before (0-d), the same bits on every rank.

    Sharded, rank 0 holding a tile with gradients [3, 0] and rank 1 one with [0, 4]: the norm is 5 on both, and with
    `max_norm` 1 both scale by 1 / 5.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = total_norm(params, norm_type, error_if_nonfinite, foreach)
    scale_grads_(grads_of(params), max_norm, total)
    return total


def scale_grads_(grads: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients of total norm `total` to `max_norm`, where they exceed it."""
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there, each once; of a sparse one its coalesced values."""
    return [grad for _, grad in _with_grads(params)]


def _with_grads(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for parameter in dict.fromkeys(params):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            # Duplicate entries are one element of the gradient: add them before looking at sizes.
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
    """The norm of all gradients together (0-d). Every rank calls it where tables are sharded."""
    p = float(norm_type)
    tables = {
        id(parameter): table for parameter in params if (table := tiled_table_of(parameter)) is not None
    }
    worlds: dict[Hashable, tuple[TiledTable, list[Tensor]]] = {}
    for parameter in params:  # also of tables that have no gradient here: all ranks meet
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
        raise ConfigError(f"clip_grad_norm_: norm_type is {norm_type!r}, wanted a number > 0 or 'inf'.")
    if not worlds:
        return torch.nn.utils.get_total_norm(_not_empty(replicated), p, error_if_nonfinite, foreach)
    device = params[0].device
    dense = _norm(replicated, p, foreach, device)
    norms: list[Tensor] = []
    for table, grads in worlds.values():
        heard_W2 = _heard(table, torch.stack([_norm(grads, p, foreach, device), dense]))
        norms += [*heard_W2[:, 0], *(() if norms else (heard_W2[0, 1],))]
    dtype = functools.reduce(torch.promote_types, [parameter.dtype for parameter in params])
    return torch.nn.utils.get_total_norm(norms, p, error_if_nonfinite).to(dtype)


def _heard(table: TiledTable, own: Tensor) -> Tensor:
    try:
        return table.of_all_ranks(own)
    except CommsError as error:
        # A rank whose list names no sharded table makes no call, and the others wait for it.
        raise CommsError(
            f"{str(error).rstrip('. ')}. Here every rank tells its part of the norm: pass model.parameters(), "
            "unfiltered, on every rank; a list without parameters whose .grad is None may name no sharded table on "
            "some."
        ) from error


def _norm(grads: Sequence[Tensor], p: float, foreach: bool | None, device: torch.device) -> Tensor:
    norm = torch.nn.utils.get_total_norm(_not_empty(grads), p, foreach=foreach)
    if hasattr(norm, "full_tensor"):  # of parameters that are DTensors
        norm = norm.full_tensor()
    return norm.to(device, torch.float64)


def _not_empty(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad for grad in grads if grad.numel()]  # they have no largest element
