"""Row sums of gradient records: the plain-PyTorch reference. Terms as in `definition.py`.

Legend: T tables, U distinct rows, D columns of a table, n occurrences of a feature, N of a table, B bags.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.ops.update.calls import Gradients, SumCall
from tilerec.ops.update.checks import UNKNOWN_ROWS, check_ids, check_reach, check_record, check_sums


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_row_gradients_reference(call: SumCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows of T tables, and their summed gradients.

    Returns:
        rows (int64, ascending in each table) and gradients (flat), table after table, and the number of distinct rows
        per table (int64 `[T]`, on the CPU).

    Example: tables of 1 and 2 columns, each with one bag, ids (3, 3 | 0), gradient row (1, 5, 7) -> rows (3, 0),
    gradients (2, 5, 7), counts (1, 1).
    """
    op, record = "sum_row_gradients", call.gradients
    check_sums(call)
    check_record(op, record)
    check_reach(op, record.sizes, call.dims, record.features)
    check_ids(op, record, [own or UNKNOWN_ROWS for own in call.rows])
    sums = [sum_rows(record, t, dim) for t, dim in enumerate(call.dims)]
    rows_U = torch.cat([own for own, _ in sums]) if sums else record.ids.new_zeros(0, dtype=torch.int64)
    grads = torch.cat([own.reshape(-1) for _, own in sums]) if sums else record.grad.new_zeros(0)
    return rows_U, grads, torch.tensor([own.numel() for own, _ in sums], dtype=torch.int64)


def sum_rows(record: Gradients, table: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return one table's distinct rows `[U]` and their summed gradients `[U, D]`, from a record that was checked."""
    grad, ids, offsets, sample_weights, features = record
    dtype = accum_dtype(grad.dtype)
    flat = grad.contiguous().view(-1)  # `reshape` may return a strided view
    all_ids, all_rows = [], []
    for _, first, count, place, stride, mean in zip(*features.of_table(table), strict=True):
        if count == 0:  # its place may be out of bounds
            continue
        grad_BD = flat.as_strided((count, dim), (stride, 1), place + flat.storage_offset()).to(dtype)
        if offsets is None:
            begin, end = first, first + count
            rows_nD = grad_BD
        else:
            bounds = offsets[first : first + count + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            lengths_B = bounds[1:] - bounds[:-1]
            if mean:
                grad_BD = grad_BD / lengths_B.clamp(min=1).to(dtype)[:, None]
            rows_nD = torch.repeat_interleave(grad_BD, lengths_B, dim=0)
        if sample_weights is not None:
            rows_nD = rows_nD * sample_weights[begin:end].to(dtype)[:, None]
        all_ids.append(ids[begin:end].to(torch.int64))
        all_rows.append(rows_nD)
    if not all_ids:
        return ids.new_zeros(0, dtype=torch.int64), grad.new_zeros((0, dim), dtype=dtype)
    rows_U, inverse_N = torch.unique(torch.cat(all_ids), return_inverse=True)
    grads_ND = torch.cat(all_rows)
    # index_add_ adds in occurrence order on the CPU, so equal inputs give equal bits.
    return rows_U, grads_ND.new_zeros((rows_U.numel(), dim)).index_add_(0, inverse_N, grads_ND)
