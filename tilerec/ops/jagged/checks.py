"""Argument checks of the jagged ops, for every backend: wrong numbers of dimensions, lists that are too short.

Shapes and dtypes only, so no check synchronizes with a device. Kernels that read offsets on the CPU check their values.

Legend: as in `definition.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from tilerec.errors import InputError

_INDEX_TYPES = (torch.int64, torch.int32)


def _flat(op: str, name: str, values: Tensor, least: int = 0) -> None:
    if values.dim() == 1 and values.dtype in _INDEX_TYPES and values.shape[0] >= least:
        return
    dtype = values.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InputError(f"{op}: {name} are {dtype}; expected integers. Convert them with .long().")
    if values.dim() != 1 or values.shape[0] < least:
        raise InputError(
            f"{op}: {name} have shape {list(values.shape)}; expected a flat list of {least} or more. "
            f"{'Offsets begin with 0, even without segments' if least == 1 else 'Flatten them'}."
        )


def _items(op: str, name: str, values: Tensor, leading: int = 1) -> None:
    if values.dim() < leading:
        raise InputError(
            f"{op}: {name} have shape {list(values.shape)}; expected {leading} or more dimensions: "
            f"{'[bags, length, ...]' if leading == 2 else '[items, ...]'}."
        )


def _count(op: str, name: str, count: int) -> None:
    if count < 0:
        raise InputError(f"{op}: {name} is {count}; expected 0 or more. Take it from the last offset.")


def _segments(op: str, name: str, segments: int, offsets: Tensor) -> None:
    if offsets.shape[0] != segments + 1:
        raise InputError(
            f"{op}: {offsets.shape[0]} offsets for {segments} {name}; expected {segments + 1}. Make them with "
            "offsets_from_lengths()."
        )


def _offsets_from_lengths(lengths_S: Tensor) -> None:
    _flat("offsets_from_lengths", "lengths", lengths_S)


def _segment_ids(offsets_S1: Tensor, total: int) -> None:
    _flat("segment_ids", "offsets", offsets_S1, 1)
    _count("segment_ids", "total", total)


def _select(op: str) -> Callable[[Tensor, Tensor, Tensor, Tensor, int], None]:
    def check(values: Tensor, offsets_S1: Tensor, order_P: Tensor, out_offsets_P1: Tensor, total: int) -> None:
        _items(op, "values", values)
        _flat(op, "offsets", offsets_S1, 1)
        _flat(op, "order", order_P)
        _flat(op, "out offsets", out_offsets_P1, 1)
        _segments(op, "selected segments", order_P.shape[0], out_offsets_P1)
        _count(op, "total", total)

    return check


def _take_segments_(
    values: list[Tensor], offsets: list[Tensor], orders: list[Tensor], outs: list[Tensor], lengths: list[Tensor]
) -> None:
    op = "take_segments_"
    if not len(values) == len(offsets) > 0:
        raise InputError(
            f"{op}: got {len(values)} lists of values and {len(offsets)} of offsets; expected one of each per source. "
            "Pass at least one source."
        )
    values_N = values[0]
    for own_N, offsets_S1 in zip(values, offsets, strict=True):
        _items(op, "values", own_N)
        _flat(op, "offsets", offsets_S1, 1)
        if own_N.dtype != values_N.dtype or own_N.shape[1:] != values_N.shape[1:]:
            raise InputError(
                f"{op}: got values {list(own_N.shape)} of {own_N.dtype} and {list(values_N.shape)} of "
                f"{values_N.dtype}; expected items of one type and shape. Convert them."
            )
    if not len(orders) == len(outs) == len(lengths):
        raise InputError(
            f"{op}: got {len(orders)} orders, {len(outs)} outs and {len(lengths)} lengths; expected one of each per "
            "selection. Pass lists of one length."
        )
    for order_P, out_M, lengths_P in zip(orders, outs, lengths, strict=True):
        for name, tensor, dtype in (("order", order_P, torch.int64), ("lengths", lengths_P, torch.int32)):
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise InputError(
                    f"{op}: got {name} {list(tensor.shape)} of {tensor.dtype}; expected a contiguous flat list of "
                    f"{dtype}. Convert it."
                )
        if lengths_P.shape != order_P.shape:
            raise InputError(
                f"{op}: got lengths of {lengths_P.shape[0]} for an order of {order_P.shape[0]} segments; expected as "
                "many. Pass memory for one number per segment."
            )
        if out_M.dtype != values_N.dtype or out_M.shape[1:] != values_N.shape[1:] or not out_M.is_contiguous():
            raise InputError(
                f"{op}: got out {list(out_M.shape)} of {out_M.dtype}; expected contiguous items like the values, "
                f"{['M', *values_N.shape[1:]]} of {values_N.dtype}. Allocate it with values.new_empty()."
            )


def _bucketize_by_cuts(ids_N: Tensor, lengths_S: Tensor, cuts_C1: Tensor) -> None:
    _flat("bucketize_by_cuts", "ids", ids_N)
    _flat("bucketize_by_cuts", "lengths", lengths_S)
    _flat("bucketize_by_cuts", "cuts", cuts_C1, 2)


def _jagged_to_padded(values_N: Tensor, offsets_B1: Tensor, length: int, padding: float) -> None:
    _items("jagged_to_padded", "values", values_N)
    _flat("jagged_to_padded", "offsets", offsets_B1, 1)
    _count("jagged_to_padded", "length", length)


def _padded_to_jagged(padded_BL: Tensor, offsets_B1: Tensor, total: int) -> None:
    _items("padded_to_jagged", "padded bags", padded_BL, 2)
    _flat("padded_to_jagged", "offsets", offsets_B1, 1)
    _segments("padded_to_jagged", "bags", padded_BL.shape[0], offsets_B1)
    _count("padded_to_jagged", "total", total)


def _segment_sum(values_N: Tensor, offsets_S1: Tensor) -> None:
    _items("segment_sum", "values", values_N)
    _flat("segment_sum", "offsets", offsets_S1, 1)


def _repeat_segments(rows_S: Tensor, offsets_S1: Tensor, total: int) -> None:
    _items("repeat_segments", "rows", rows_S)
    _flat("repeat_segments", "offsets", offsets_S1, 1)
    _segments("repeat_segments", "rows", rows_S.shape[0], offsets_S1)
    _count("repeat_segments", "total", total)


CHECKS: dict[str, Callable[..., None]] = {
    "offsets_from_lengths": _offsets_from_lengths,
    "segment_ids": _segment_ids,
    "unbacked_rows": lambda items_N, parts: _items("unbacked_rows", "items", items_N),
    "select_segments": _select("select_segments"),
    "select_segments_backward": _select("select_segments_backward"),
    "take_segments_": _take_segments_,
    "bucketize_by_cuts": _bucketize_by_cuts,
    "jagged_to_padded": _jagged_to_padded,
    "padded_to_jagged": _padded_to_jagged,
    "segment_sum": _segment_sum,
    "repeat_segments": _repeat_segments,
}
"""Checks by op name: they raise an `InputError` for invalid arguments, given as the op takes them."""


def raise_bad_offsets(op: str, segment: int, offset: int) -> NoReturn:
    """Raise the `InputError` for the offset after a segment: it descends or does not fit the number of items."""
    raise InputError(
        f"{op}: offset {offset} after segment {segment} descends or does not fit the number of items; expected "
        f"non-negative lengths that sum to it. validate_keyed_jagged_tensor() names the feature and the bag."
    )


def raise_bad_order(op: str, position: int, segment: int) -> NoReturn:
    """Raise the `InputError` for a selected segment that does not exist, or is shorter than its copy."""
    raise InputError(
        f"{op}: order[{position}] is segment {segment}, which does not exist or has fewer items than the output's "
        f"offsets require."
    )
