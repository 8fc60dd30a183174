"""A gradient record as kernel arguments: checked, contiguous, its features' numbers on the device.

Example: two features of batches of 4 bags, tables 0 and 0, gradients of 8 and 8 columns in rows of 16:
(first key, rows, first bag, bags, gradient start, gradient stride, mean, bits of bags) are (0, 10, 0, 4, 0, 16, 0, 1)
and (0, 10, 4, 4, 8, 16, 0, 1).

Legend: F features.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.ops.runtime.triton.addresses import cached_per_stream, constants, power_of_two, upload
from tilerec.ops.update.calls import Features, Gradients, RecordSizes
from tilerec.ops.update.checks import check_reach, check_record
from tilerec.ops.update.order import layers
from tilerec.ops.update.triton.sort import Record
from tilerec.ops.update.triton.tables import KernelTables

_INDEX = (torch.int64, torch.int32)


@dataclass(frozen=True)
class KernelFeatures:
    """Features of a record, as kernel arguments."""

    numbers: Tensor  # int64 [F, PER_FEATURE]
    layers: int
    count: int  # of their bags
    vec: int
    means: bool


def _describe_features(
    op: str, sizes: RecordSizes, tables: tuple[tuple[int, ...], ...], features: Features, device: torch.device,
    cached: bool,
) -> KernelFeatures:  # fmt: skip
    """Return the features as kernel arguments. tables: dims, first keys and rows per table."""
    dims, first_keys, rows = tables
    check_reach(op, sizes, dims, features)
    numbers: list[int] = []
    for t, *own in zip(*features, strict=True):
        numbers += [first_keys[t], rows[t], *own, max(own[1] - 1, 1).bit_length() - 1]
    some = [(start, stride) for _, _, count, start, stride, _ in zip(*features, strict=True) if count]
    vec = power_of_two(list(itertools.chain.from_iterable(some)), 8)
    put = constants(tuple(numbers), device) if cached else upload(numbers, device)
    averaged = any(features.means) and sizes.offsets is not None
    return KernelFeatures(put, layers(features), sum(features.bags), vec, averaged)


@cached_per_stream(256)
def _kept_features(*key: object) -> KernelFeatures:
    """Return cached features: with one batch size, bags have the same positions in every step."""
    return _describe_features(*key, True)  # type: ignore[arg-type, call-arg]


def read_record(
    op: str, tables: KernelTables, record: Gradients, cached: bool, grad_count: int | None = None
) -> Record:
    """Return the record as kernel arguments; raise the reference's errors, except those for values on the device.

    cached: keep the features' numbers for later calls; grad_count: elements of the gradient, if `record.grad` is
    another tensor.
    """
    check_record(op, record)
    grad, ids, offsets, sample_weights, features = record
    grad, ids = grad.contiguous(), (ids if ids.dtype in _INDEX else ids.to(torch.int64)).contiguous()
    if offsets is not None:
        offsets = offsets.contiguous()
    if sample_weights is not None:
        sample_weights = sample_weights.contiguous()
    sizes = record.sizes
    if grad_count is not None:
        sizes = sizes._replace(grad=grad_count)
    layout = (tables.dims, tables.first_keys, tables.rows)
    if cached and offsets is not None:
        # Bags are checked against the offsets, so the number of ids does not matter.
        key = Features(*map(tuple, features))
        numbers = _kept_features(op, sizes._replace(ids=0), layout, key, ids.device)
    else:
        numbers = _describe_features(op, sizes, layout, features, ids.device, False)
    total = numbers.count if offsets is None else numbers.layers * sizes.ids
    vec = min(numbers.vec, 16 // grad.element_size())
    return Record(grad, ids, offsets, sample_weights, numbers.numbers, len(features.tables), numbers.means, total, vec)
