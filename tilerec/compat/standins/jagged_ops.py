"""FBGEMM's operators on jagged tensors that programs call directly, computed by tilerec's jagged ops.

`OPERATORS` holds each operator's schema and its function. Gradients follow from the ops that a function calls.

Legend: N items, B bags, L items of a padded bag, D columns, T keys. A tensor of several jagged dimensions has one list
of offsets per dimension, the outermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.jagged.definition import (
    jagged_to_padded,
    offsets_from_lengths,
    padded_to_jagged,
    repeat_segments,
    segment_ids,
    segment_sum,
    select_jagged,
)

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Schema -> function."""


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[schema] = function
        return function

    return add


def _padded(values: Tensor, offsets: Sequence[Tensor], lengths: Sequence[int], padding: float = 0.0) -> Tensor:
    for level in reversed(range(len(offsets))):
        values = jagged_to_padded(values, offsets[level], int(lengths[level]), padding)
    return values


def _jagged(dense: Tensor, offsets: Sequence[Tensor], total: int | None = None) -> Tensor:
    for level, own in enumerate(offsets):
        dense = padded_to_jagged(dense, own, total if level == len(offsets) - 1 else None)
    return dense


def _widths(dense: Tensor, offsets: Sequence[Tensor]) -> list[int]:
    return list(dense.shape[1 : 1 + len(offsets)])


# ------------------------------------------------------------------------------------------------------------- offsets


@_operator("asynchronous_complete_cumsum(Tensor t_in) -> Tensor")
def _complete_cumsum(t_in: Tensor) -> Tensor:
    """lengths [2, 0, 1] -> [0, 2, 2, 3]; of a matrix, by row."""
    return torch.nn.functional.pad(t_in.cumsum(-1, dtype=t_in.dtype), (1, 0))


@_operator("asynchronous_inclusive_cumsum(Tensor t_in) -> Tensor")
def _inclusive_cumsum(t_in: Tensor) -> Tensor:
    return t_in.reshape(-1).cumsum(0, dtype=t_in.dtype).reshape(t_in.shape)


@_operator("asynchronous_exclusive_cumsum(Tensor t_in) -> Tensor")
def _exclusive_cumsum(t_in: Tensor) -> Tensor:
    return _inclusive_cumsum(t_in) - t_in


@_operator("offsets_range(Tensor offsets, SymInt range_size) -> Tensor")
def _offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """offsets [0, 2, 2] of bags without the end, size 3 -> [0, 1, 0]."""
    whole = torch.nn.functional.pad(offsets, (0, 1), value=range_size)
    first = offsets.index_select(0, segment_ids(whole, range_size))
    return torch.arange(range_size, dtype=offsets.dtype, device=offsets.device) - first


@_operator("repeat_arange(Tensor lengths) -> Tensor")
def _repeat_arange(lengths: Tensor) -> Tensor:
    offsets = _complete_cumsum(lengths)
    return _offsets_range(offsets[:-1], int(offsets[-1]))


@_operator("lengths_range(Tensor t_in, SymInt[]? shape=None) -> Tensor")
def _lengths_range(t_in: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    out = _repeat_arange(t_in)
    return out if shape is None else out[: torch.Size(shape).numel()].reshape(list(shape))


@_operator("invert_permute(Tensor permute) -> Tensor")
def _invert_permute(permute: Tensor) -> Tensor:
    return torch.argsort(permute).to(permute.dtype)


@_operator("expand_into_jagged_permute(Tensor permute, Tensor input_offset, Tensor output_offset, SymInt output_size)"
           " -> Tensor")  # fmt: skip
def _expand_permute(permute: Tensor, input_offset: Tensor, output_offset: Tensor, output_size: int) -> Tensor:
    """permute [1, 0], input offsets [0, 2, 3], output offsets [0, 1, 3] -> [2, 0, 1]."""
    inside = _offsets_range(output_offset[:-1], output_size)
    first = input_offset.index_select(0, permute)
    return inside + repeat_segments(first, output_offset, output_size)


# ---------------------------------------------------------------------------------------------------- padded and back


@_operator("jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0.)"
           " -> Tensor")  # fmt: skip
def _to_padded(values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0) -> Tensor:
    return _padded(values, offsets, max_lengths, padding_value)


@_operator("jagged_2d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length) -> Tensor")
def _to_dense_2d(values: Tensor, offsets: Tensor, max_sequence_length: int) -> Tensor:
    return _padded(values, [offsets], [max_sequence_length])


@_operator("jagged_1d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length, int padding_value) -> Tensor")
def _to_dense_1d(values: Tensor, offsets: Tensor, max_sequence_length: int, padding_value: int) -> Tensor:
    return _padded(values, [offsets], [max_sequence_length], float(padding_value))


@_operator("dense_to_jagged(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) -> (Tensor, Tensor[])")
def _from_padded(dense: Tensor, x_offsets: list[Tensor], total_L: int | None = None) -> tuple[Tensor, list[Tensor]]:
    return _jagged(dense, x_offsets, total_L), x_offsets


def _of_keys(
    values: Tensor, lengths: Tensor, offset_per_key: list[int], max_lengths: list[int], padding: float
) -> list[Tensor]:
    out = []
    for key, most in enumerate(max_lengths):
        own = values[offset_per_key[key] : offset_per_key[key + 1]]
        out.append(jagged_to_padded(own, offsets_from_lengths(lengths[key]), most, padding))
    return out


@_operator("stacked_jagged_2d_to_dense(Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key,"
           " int padding_value=0) -> Tensor[]")  # fmt: skip
def _stacked_2d(
    values: Tensor, lengths: Tensor, offset_per_key: list[int], max_lengths_per_key: list[int], padding_value: int = 0
) -> list[Tensor]:
    return _of_keys(values, lengths, offset_per_key, max_lengths_per_key, float(padding_value))


@_operator("stacked_jagged_1d_to_dense(Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key,"
           " int padding_value) -> Tensor[]")  # fmt: skip
def _stacked_1d(
    values: Tensor, lengths: Tensor, offset_per_key: list[int], max_lengths_per_key: list[int], padding_value: int
) -> list[Tensor]:
    return _of_keys(values, lengths, offset_per_key, max_lengths_per_key, float(padding_value))


# ---------------------------------------------------------------------------------------------------------- arithmetic


@_operator("jagged_dense_elementwise_add(Tensor x_values, Tensor[] x_offsets, Tensor y) -> Tensor")
def _add(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> Tensor:
    return _padded(x_values, x_offsets, _widths(y, x_offsets)) + y


@_operator("jagged_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y)"
           " -> (Tensor, Tensor[])")  # fmt: skip
def _add_jagged(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x_values + _jagged(y, x_offsets, len(x_values)), x_offsets


@_operator("jagged_dense_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y_0,"
           " Tensor y_1) -> (Tensor, Tensor[])")  # fmt: skip
def _add_two(x_values: Tensor, x_offsets: list[Tensor], y_0: Tensor, y_1: Tensor) -> tuple[Tensor, list[Tensor]]:
    return _add_jagged(x_values, x_offsets, y_0 + y_1)


@_operator("jagged_dense_elementwise_mul(Tensor x_values, Tensor[] x_offsets, Tensor y) -> (Tensor, Tensor[])")
def _mul(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x_values * _jagged(y, x_offsets, len(x_values)), x_offsets


@_operator("batched_dense_vec_jagged_2d_mul(Tensor v, Tensor a_values, Tensor a_offsets) -> Tensor")
def _vector_times_bags(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """v [B H, L], a [N, H D] -> [B H, D]: the sum of a bag's rows, weighted by v."""
    bags = len(a_offsets) - 1
    heads = len(v) // max(bags, 1)
    padded = jagged_to_padded(a_values, a_offsets, v.shape[1]).reshape(bags, v.shape[1], heads, -1)
    return torch.einsum("bhl,blhd->bhd", v.reshape(bags, heads, -1), padded).reshape(len(v), -1)


@_operator("jagged_dense_bmm(Tensor x_values, Tensor x_offsets, Tensor y, int max_L) -> (Tensor, Tensor)")
def _bags_times_matrix(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    return padded_to_jagged(jagged_to_padded(x_values, x_offsets, max_L) @ y, x_offsets, len(x_values)), x_offsets


@_operator("jagged_jagged_bmm(Tensor x_values, Tensor y_values, Tensor x_offsets, int max_L) -> Tensor")
def _bags_times_bags(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    x, y = (jagged_to_padded(values, x_offsets, max_L) for values in (x_values, y_values))
    return x.transpose(1, 2) @ y


@_operator("jagged_softmax(Tensor values, Tensor x_offsets, int max_L) -> (Tensor, Tensor)")
def _softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    padded = jagged_to_padded(values, x_offsets, max_L, float("-inf"))
    share = torch.nan_to_num(torch.softmax(padded, dim=1))  # empty bags
    return padded_to_jagged(share, x_offsets, len(values)), x_offsets


@_operator("segment_sum_csr(SymInt batch_size, Tensor csr_seg, Tensor values) -> Tensor")
def _segment_sum(batch_size: int, csr_seg: Tensor, values: Tensor) -> Tensor:
    """Sum over bags of `batch_size` items per unit of the offsets."""
    return segment_sum(values, csr_seg * batch_size)


# ----------------------------------------------------------------------------------------------------------- selection


@_operator("jagged_index_select(Tensor values, Tensor lengths, Tensor indices, int? num_dense_output_rows=None)"
           " -> Tensor[]")  # fmt: skip
def _index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, num_dense_output_rows: int | None = None
) -> list[Tensor]:
    found = select_jagged(indices.long(), lengths, values, total=num_dense_output_rows)
    return [found.values_M, found.lengths_P]


def _permuted(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, total: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    found = select_jagged(permute, lengths, values, weights, total=total)
    return found.lengths_P, found.values_M, found.weights_M


@_operator("permute_1D_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None,"
           " SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)")  # fmt: skip
def _permute_1d(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    return _permuted(permute.long(), lengths, values, weights, permuted_lengths_sum)


@_operator("permute_2D_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None,"
           " SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)")  # fmt: skip
def _permute_2d(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    bags = lengths.shape[1]
    order = (permute.long()[:, None] * bags + torch.arange(bags, device=permute.device)).reshape(-1)
    new, values, weights = _permuted(order, lengths.reshape(-1), values, weights, permuted_lengths_sum)
    return new.reshape(len(permute), bags), values, weights


@_operator("permute_pooled_embs_auto_grad(Tensor pooled_embs, Tensor offset_dim_list, Tensor permute_list,"
           " Tensor inv_offset_dim_list, Tensor inv_permute_list) -> Tensor")  # fmt: skip
def _permute_columns(
    pooled_embs: Tensor, offset_dim_list: Tensor, permute_list: Tensor, inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:  # fmt: skip
    starts = offset_dim_list.tolist()
    return torch.cat([pooled_embs[:, starts[i] : starts[i + 1]] for i in permute_list.tolist()], dim=1)
