"""Order of an update: a step's occurrences sorted by row. It depends only on ids, so it can be computed in advance.

Terms
  occurrence   one id that one feature reads; occurrence q of N, ordered by (feature, position of the id)
  key          number of the row: the first key of its table + the id
  sentinel     the key after the last row: for ids that no feature reads, and bad ids; sorted last
  place        element of the output gradient at which the occurrence's gradient row begins
  scale        factor of that row: sample weight * (mean pooling) 1 / length of the bag

Backends that sort occurrences (the Triton kernels) accept an order computed earlier, at the forward or during the
preceding step: `update_rows_(..., ordered=order_rows(...))`, with bitwise equal results. Other backends find the rows
in their own way and ignore it.

Legend: T tables, F features, N occurrences (upper bound).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.update.calls import Features, OrderCall
from tilerec.ops.update.checks import check_reach, check_record

TENSORS = 4
_INT16, _INT32 = 15, 31


def key_type(bits: int) -> torch.dtype:
    """Return the narrowest signed dtype for keys of so many bits."""
    return torch.int16 if bits <= _INT16 else torch.int32 if bits <= _INT32 else torch.int64


def layers(features: Features) -> int:
    """Return the largest number of features that read one bag. Example: bags [0, 4), [4, 8), [0, 4) -> 2."""
    edges: list[tuple[int, int]] = []
    for start, count in zip(features.starts, features.bags, strict=True):
        if count:
            edges += [(start, 1), (start + count, -1)]
    most = now = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most


def reach(dims: Sequence[int], features: Features) -> int:
    """Return the minimum number of elements of an output gradient that contains all features' rows."""
    ends = [
        max(place, place + (count - 1) * stride) + dims[t]
        for t, _, count, place, stride, _ in zip(*features, strict=True)
        if count
    ]
    return max(ends, default=0)


class OrderSizes(NamedTuple):
    """Sizes of an order's tensors."""

    total: int  # occurrences
    least: int  # `reach`
    scaled: bool  # True if some scales are not 1

    @staticmethod
    def of(call: OrderCall) -> OrderSizes:
        _, ids, offsets, sample_weights, features = call.gradients
        total = sum(features.bags) if offsets is None else layers(features) * ids.shape[0]
        scaled = sample_weights is not None or (any(features.means) and offsets is not None)
        return OrderSizes(total, reach([w.shape[1] for w in call.weights], features), scaled)

    @property
    def places(self) -> torch.dtype:
        return torch.int32 if self.least < 1 << 31 else torch.int64


def order_rows_reference(call: OrderCall) -> list[Tensor]:
    """Sort occurrences by row, for `update_rows_` with the same tables, ids and lists per feature.

    Args: as in `update_rows_`; only shapes, dtypes and addresses of the weights matter.

    Returns:
        keys `[N]`, ascending.
        places `[N]` and scales (fp32 `[N]`, or `[0]` if all are 1) of the keys' occurrences; equal keys keep the order
            of occurrences.
        int64 `[T + 1]` on the CPU: the first key of each table and the sentinel. An update uses them to check that the
            layout of its tables is unchanged.

        N is the number of ids times the largest number of features that read one bag, or, without offsets, the sum of
        `bags`. Entries behind the last occurrence have the sentinel as key, and undefined places and scales.

    Example: tables of 5 and 3 rows and 2 columns, one bag each, ids (4, 1 | 2), gradient rows at 0 and 2 -> keys
    (1, 4, 7), places (0, 0, 2), no scales, first keys and sentinel (0, 5, 8).
    """
    op, record = "order_rows", call.gradients
    _, ids, offsets, sample_weights, features = record
    check_record(op, record)
    sizes = OrderSizes.of(call)
    check_reach(op, record.sizes._replace(grad=sizes.least), [w.shape[1] for w in call.weights], features)
    rows = [w.shape[0] for w in call.weights]
    first_keys = list(itertools.accumulate(rows, initial=0))
    sentinel, device = first_keys[-1], ids.device
    keys: list[Tensor] = []
    places: list[Tensor] = []
    scales: list[Tensor] = []
    for t, start, count, place, stride, mean in zip(*features, strict=True):
        if offsets is None:
            begin, end = start, start + count
            bag_n = torch.arange(count, device=device)
            lengths_n = torch.ones_like(bag_n)
        else:
            bounds = offsets[start : start + count + 1].to(torch.int64)
            begin, end = (int(bounds[0]), int(bounds[-1])) if count else (0, 0)
            lengths_B = bounds.diff()
            bag_n = torch.repeat_interleave(torch.arange(count, device=device), lengths_B)
            lengths_n = torch.repeat_interleave(lengths_B, lengths_B)
        own = ids[begin:end].to(torch.int64)
        keys.append(torch.where((own >= 0) & (own < rows[t]), own + first_keys[t], sentinel))
        places.append(place + bag_n * stride)
        scale = torch.ones_like(own, dtype=torch.float32)
        if sample_weights is not None:
            scale = sample_weights[begin:end].to(torch.float32)
        scales.append(scale * lengths_n.float().reciprocal() if mean else scale)  # as the native library does
    rest = sizes.total - sum(own.numel() for own in keys)
    keys.append(torch.full((rest,), sentinel, device=device))
    nothing = torch.zeros(rest, dtype=torch.int64, device=device)
    keys_N, occurrences_N = torch.sort(torch.cat(keys), stable=True)
    return [
        keys_N.to(key_type(sentinel.bit_length())),
        torch.cat([*places, nothing])[occurrences_N].to(sizes.places),
        torch.cat([*scales, nothing.float()])[occurrences_N]
        if sizes.scaled
        else torch.empty(0, dtype=torch.float32, device=device),
        torch.tensor(first_keys, dtype=torch.int64, device="cpu"),
    ]


def fake_order_rows(call: OrderCall) -> list[Tensor]:
    """Return tensors of an order's sizes."""
    ids, sizes = call.gradients.ids, OrderSizes.of(call)
    bits = sum(w.shape[0] for w in call.weights).bit_length()
    return [
        ids.new_empty(sizes.total, dtype=key_type(bits)),
        ids.new_empty(sizes.total, dtype=sizes.places),
        ids.new_empty(sizes.total if sizes.scaled else 0, dtype=torch.float32),
        torch.empty(len(call.weights) + 1, dtype=torch.int64, device="cpu"),
    ]
