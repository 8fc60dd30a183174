"""Orders of occurrences computed before the gradients exist, and a check that their layout still holds.

`tilerec/ops/update/order.py` defines them.

Example: ids (3, 1) and (1), tables of 4 and 2 rows -> keys (1, 3, 5), places of ids 1, 3 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.triton.rows import FLOATS as ROW_TYPES
from tilerec.ops.update.calls import OrderCall, RuleTables
from tilerec.ops.update.order import TENSORS as ORDER_TENSORS
from tilerec.ops.update.order import key_type, order_rows_reference, reach
from tilerec.ops.update.triton.launch import device_guard
from tilerec.ops.update.triton.record import read_record
from tilerec.ops.update.triton.sort import Record, SortedKeys, order_occurrences
from tilerec.ops.update.triton.status import STATUS_SIZE
from tilerec.ops.update.triton.tables import KernelTables, TableAddresses, tables_of


def reuse_order(ordered: Sequence[Tensor] | None, layout: KernelTables, record: Record) -> SortedKeys | None:
    """Return the order that `order_rows` computed; None if there is none, or if the tables' layout has changed."""
    if ordered is None:
        return None
    if len(ordered) != ORDER_TENSORS:
        raise InputError(
            f"update_rows_: ordered has {len(ordered)} tensors, expected {ORDER_TENSORS}; "
            "pass the result of order_rows."
        )
    keys, places, scales, first_keys = ordered
    scaled = record.means or record.sample_weights is not None
    if (
        keys.numel() != record.total
        or (scales.numel() > 0) != scaled
        or first_keys.tolist() != [*layout.first_keys, layout.sentinel]
        or keys.device != record.ids.device
    ):
        return None
    return SortedKeys(keys, places, scales if scaled else None)


def order_rows(call: OrderCall) -> list[Tensor]:
    """See `tilerec/ops/update/order.py`. Keys follow the groups of tables, as in `update_rows_`."""
    op, weights, (_, ids, _, _, features) = "order_rows", call.weights, call.gradients
    device, zeros = ids.device, (0,) * len(weights)
    if not all([w.dtype in ROW_TYPES for w in weights]):  # noqa: C419 - the reference updates such tables
        return order_rows_reference(call)
    tables = RuleTables(weights, (), "store", (), (), zeros + zeros, zeros, zeros)
    layout = tables_of(op, device, TableAddresses.of(tables, "", ()))
    least = reach(layout.dims, features)
    record = read_record(op, layout, call.gradients, True, grad_count=least)
    first_keys = torch.tensor([*layout.first_keys, layout.sentinel], dtype=torch.int64, device="cpu")
    no_scales = torch.empty(0, dtype=torch.float32, device=device)
    if not record.total or not layout.sentinel:  # no rows to update
        nothing = torch.zeros(record.total, dtype=torch.int64, device=device)
        keys, places = nothing.to(key_type(layout.sentinel.bit_length())), nothing.to(torch.int32)
        return [keys, places, no_scales, first_keys]
    with device_guard(ids):
        status = torch.empty(STATUS_SIZE, dtype=torch.int64, device=device)  # not used here
        made = order_occurrences(record, layout.sentinel, least, status)
    scales = no_scales if made.scales is None else made.scales
    return [made.keys, made.places, scales, first_keys]
