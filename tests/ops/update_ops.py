"""The update ops as functions of their arguments: the references, and the ops of several tables applied to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops import backends as backends
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.rules import make_rule

OPS = torch.ops.tilerec
update_rows_reference_ = LIBRARY.references["update_rows_"]
sum_row_gradients_of_tables_reference = LIBRARY.references["sum_row_gradients_of_tables"]
rule_partials_of_tables_reference = LIBRARY.references["rule_partials_of_tables"]
rule_apply_to_tables_reference_ = LIBRARY.references["rule_apply_to_tables_"]


def _sum_row_gradients(of_tables: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def sums(
        grad: Tensor, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None, rows: int, dim: int,
        starts: Sequence[int], *per_feature: Sequence[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows_U, grads, _ = of_tables(
            grad, ids, offsets, sample_weights, [rows], [dim], [0] * len(starts), starts, *per_feature
        )
        return rows_U, grads.view(rows_U.numel(), dim)

    return sums


def _rule_partials(of_tables: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def partials(
        weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, scalars: Tensor, phase: int, dim: int,
        exact: bool, column_offset: int, rule: str, hyper: Sequence[float], step: int,
    ) -> Tensor:  # fmt: skip
        """`[U, K, 1]`, or `[U, K, blocks]` if exact."""
        flat = of_tables(
            [weight], slots, [rows], [grads], [scalars], phase, [dim], exact, False, [column_offset], rule, hyper,
            [step],
        )  # fmt: skip
        kinds = make_rule(rule, hyper).sums(phase)
        blocks = (column_offset % 8 + weight.shape[1] + 7) // 8 if exact else 1
        return flat.view(rows.numel(), kinds, blocks)

    return partials


def _rule_apply(to_tables: Callable[..., None]) -> Callable[..., None]:
    def apply(
        weight: Tensor, slots: Sequence[Tensor], rows: Tensor, grads: Tensor, scalars: Tensor, dim: int, rule: str,
        hyper: Sequence[float], step: int, seed: Sequence[int], row_offset: int, column_offset: int,
    ) -> None:  # fmt: skip
        to_tables(
            [weight], slots, [rows], [grads], [scalars], [dim], rule, hyper, [step], seed, [row_offset],
            [column_offset],
        )  # fmt: skip

    return apply


sum_row_gradients = _sum_row_gradients(OPS.sum_row_gradients_of_tables)
sum_row_gradients_reference = _sum_row_gradients(sum_row_gradients_of_tables_reference)
rule_partials = _rule_partials(OPS.rule_partials_of_tables)
rule_partials_reference = _rule_partials(rule_partials_of_tables_reference)
rule_apply_ = _rule_apply(OPS.rule_apply_to_tables_)
rule_apply_reference_ = _rule_apply(rule_apply_to_tables_reference_)
