"""A small case of every op, on any device: what torch's own checks of operators (`opcheck`) are run on.

`CASES[op](device)` are the op's arguments. `EXEMPT` says which have none, and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import opcheck

from tests.ops.hash_pair import assign_call, resize_call
from tilerec.ops import backends as backends
from tilerec.ops.cache.definition import NONE
from tilerec.ops.hash.definition import empty_state
from tilerec.ops.hot.definition import finder_of
from tilerec.ops.quantized.row_format import row_bytes

Arguments = tuple[Any, ...]

EXEMPT = {
    "submit_pooled_": "it hands a gradient to a table: a second call with the same ticket is an error",
    "submit_sequence_": "the same",
    "begin_sharded_lookup": "it is collective, and names a sharded module; tests/sharding/test_compiled.py runs it",
    "begin_managed_lookup": "the same",
    "remapped_batch": "the same",
    "finish_sharded_lookup": "the same",
    "sharded_lookup_backward": "the same",
    "sync_replicas": "it names the tables of a DMPCollection; tests/parallel/test_compiled_ddp.py runs it",
    "prepare_ddp": "it names a DistributedDataParallel; tests/parallel/test_compiled_ddp.py runs it",
}

ROWS = os.memfd_create("rows")
"""A file of three rows of three fp32 zeros."""
os.truncate(ROWS, 36)

# The ticket counts lookups, so two runs differ in it by design: everything but the comparison of values.
NO_VALUES = ("test_schema", "test_autograd_registration", "test_faketensor")
COUNTED = ("pooled_lookup", "sequence_lookup")

HYPER = [
    0.1,
    1.0,
    0.05,
    1.0,
    1e-8,
    0.0,
    0.0,
]  # lr, grad_scale, weight_decay, stochastic_rounding, and the rule's own
RULE = "rowwise_adagrad"


def cases(device: str) -> dict[str, Callable[[], Arguments]]:
    """By op; what a case makes is new each time, as ops write into it."""

    def whole(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    def rand(*shape: int, grad: bool = False) -> Tensor:
        return torch.rand(shape, device=device, requires_grad=grad)

    def segments(grad: bool = True) -> Arguments:
        return rand(3, 2, grad=grad), whole(0, 2, 2, 3)

    def state(clocks: bool) -> Arguments:
        made = empty_state(5, 4, expires=True, counters=3, device=device)
        ids = torch.arange(20, device=device)
        more = (torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))
        step = (whole(2)[0], whole(0)[0]) if clocks else ()
        return assign_call(ids, *more, *made, 0, 5, 4, 3, 2, 0, 1, 1.0, 0, 1, 2, *step).packed()

    def cached(which: int) -> Arguments:
        """One table of 9 rows, 2 sets of 2 ways and 2 spare lines, ids (6, 8, 8); see `tests/ops/test_cache.py`."""
        line_of = torch.full((9,), NONE, dtype=torch.int32, device=device)
        line_of[[4, 6, 1]] = whole(0, 1, 2, dtype=torch.int32)
        books = [
            line_of, whole(4, 6, 1, -1, -1, -1), whole(1, 2, 3, 0, 0, 0), whole(0, 0, 0, 0, 0, 0, dtype=torch.int32),
            whole(dtype=torch.int32), torch.ones(6, dtype=torch.bool, device=device), whole(0, 0, 0, 0, 0, 0, 0, 0),
        ]  # fmt: skip
        ask = (whole(6, 8, 8), [0], [3], [0], books, [2], 2, whole(4, 1, 1).view(3, 1))
        if which == 0:
            return (*ask, "")
        header, keys, order = torch.ops.tilerec.cache_ask_(*ask, "")
        if which == 1:
            return (*ask, header, keys, order)
        plan = torch.ops.tilerec.cache_plan(*ask, header, keys, order)
        if which == 2:
            return plan, header, [rand(6, 2)], [rand(9, 2)], [0], 3, True
        return plan, header, books, ask[-1], 3

    def bags(grad: bool) -> Arguments:
        tables = [rand(10, 4, grad=grad), rand(7, 3, grad=grad)]
        return tables, whole(1, 2, 3, 4, 0, 1), whole(0, 2, 2, 5, 6)

    def pooled() -> Arguments:
        tables, ids, offsets = bags(True)
        layout = ([0, 1], [0, 1], [0, 1], [2])
        return (
            tables,
            torch.zeros(0, dtype=torch.int64),
            ids,
            offsets,
            rand(6, grad=True),
            *layout,
            torch.float32,
            "a@x,b@y",
        )

    def of_tables(scalars: list[Tensor]) -> Arguments:
        weights, slots = [rand(3, 4), rand(2, 3)], [rand(3), rand(2)]
        return weights, slots, [whole(1, 2), whole(0)], [rand(2, 4), rand(1, 3)], scalars

    def served() -> Arguments:
        rows = [torch.zeros(10, row_bytes(4, bits), dtype=torch.uint8, device=device) for bits in (8, 4)]
        return rows, [4, 4], [8, 4], whole(1, 2, 3, 4, 0, 1), whole(0, 2, 2, 5, 6)

    sums: Arguments = ([0], [2], [0], [4], [0])  # starts, bags, where gradients begin, their strides, means
    return {
        "offsets_from_lengths": lambda: (whole(2, 0, 1, dtype=torch.int32),),
        "segment_ids": lambda: (whole(0, 2, 2, 3), 3),
        "unbacked_rows": lambda: (whole(2, 0, 1, 4), 2),
        "select_segments": lambda: (*segments(), whole(2, 0, 2), whole(0, 1, 3, 4), 4),
        "select_segments_backward": lambda: (
            rand(4, 2, grad=True), whole(0, 2, 2, 3), whole(2, 0, 2), whole(0, 1, 3, 4), 3
        ),
        "take_segments_": lambda: (
            [rand(2, 2), rand(1, 2)], [whole(0, 2, 2), whole(0, 1)], [whole(2, 0), whole(0)],
            [torch.zeros(4, 2, device=device), rand(1, 2)],
            [whole(0, 0, dtype=torch.int32), whole(0, dtype=torch.int32)],
        ),
        "bucketize_by_cuts": lambda: (whole(7, 1, 4), whole(2, 0, 1), whole(0, 4, 10)),
        "jagged_to_padded": lambda: (*segments(), 1, 0.5),
        "padded_to_jagged": lambda: (rand(3, 1, 2, grad=True), whole(0, 1, 1, 2), 2),
        "segment_sum": segments,
        "repeat_segments": lambda: (rand(3, 2, grad=True), whole(0, 2, 2, 3), 3),
        "pooled_lookup": pooled,
        "sequence_lookup": lambda: (
            [rand(10, 4, grad=True)], torch.zeros(0, dtype=torch.int64), whole(1, 2, 3), whole(0, 3), [0],
            torch.float32, "a@x",
        ),
        "sample_weight_grad": lambda: (*bags(False), rand(2, 7), [0, 1], [0, 1], [0, 1], [2]),
        "dense_weight_grads": lambda: (
            [rand(10, 4)], [4, 3], [0], rand(2, 7), *bags(False)[1:], None, [0, 1], [0, 1], [0, 1], [2]
        ),
        "update_rows_": lambda: (
            [rand(3, 4)], [rand(3)], rand(2, 4), whole(1, 2), None, None, [0], *sums, RULE, HYPER, [1], [0, 0], [0], [0]
        ),
        "cache_ask_": lambda: cached(0),
        "cache_plan": lambda: cached(1),
        "cache_move_": lambda: cached(2),
        "cache_seat_": lambda: cached(3),
        "cache_lines_": lambda: (
            whole(2, 7, 11), [1, 0], [3, 1], [0, -1], [whole(-1, 3, 1, 0, 2, dtype=torch.int32)],
            [torch.zeros(4, dtype=torch.bool, device=device)], [3],
        ),
        "order_rows": lambda: ([rand(10, 4), rand(7, 3)], whole(1, 2, 3), None, None, [0], [0], [3], [0], [4], [0]),
        "sum_row_gradients_of_tables": lambda: (
            rand(2, 7), whole(1, 1, 0, 2), whole(0, 1, 2, 3, 4), None, [3, 0], [4, 3], [0, 1], [0, 2], [2, 2], [0, 4],
            [7, 7], [0, 0],
        ),
        "rule_partials_of_tables": lambda: (
            *of_tables([rand(0, 2), rand(0, 1)]), 0, [8, 3], True, True, [4, 0], RULE, HYPER, [1, 1]
        ),
        "rule_apply_to_tables_": lambda: (
            *of_tables([rand(1, 2), rand(1, 1)]), [8, 3], RULE, HYPER, [1, 1], [0] * 4, [0, 0], [4, 0]
        ),
        "route_ids": lambda: (
            whole(3, 0, 1), whole(0, 2, 3), (0,), (2,), (0, 2, 4), (2,), (1, 0), False, torch.int32, "clicks@items"
        ),
        "place_rows_": lambda: (
            rand(9), rand(4), whole(0, 2, dtype=torch.int32), [2], [2], [0], [1], [3], [1], True
        ),
        "pick_rows_": lambda: (rand(4), rand(9), whole(0, 2, dtype=torch.int32), [2], [2], [0], [1], [3]),
        "pick_rows": lambda: (rand(9), whole(0, 2, dtype=torch.int32), [2], [2], [0], [1], [3]),
        "distinct_ids": lambda: (whole(7, 3, 7, 5, 6), whole(0, 1, 1, 2, 3, 5), [4, 1], [9, 9], [100, 100], False),
        "expand_rows_": lambda: (
            rand(9), rand(4), whole(dtype=torch.int32), [2], [2], [-1], [1], [3], [0], True,
            whole(0, 2, 1, dtype=torch.int32), whole(0, 2, 3, dtype=torch.int32), [0], [0],
        ),
        "sum_rows_": lambda: (
            rand(4), rand(9), whole(dtype=torch.int32), [2], [2], [-1], [1], [3],
            whole(0, 2, 1, dtype=torch.int32), whole(0, 2, 3, dtype=torch.int32), [0],
        ),
        "pack_segments": lambda: (rand(13), [2, 1], [5, 3], "int8"),
        "unpack_segments": lambda: (
            torch.ops.tilerec.pack_segments(rand(13), [2, 1], [5, 3], "int8"), [2, 1], [5, 3], "int8", torch.float32
        ),
        "quantized_pooled_lookup": lambda: (*served(), None, [0, 1], [0, 1], [0, 1], [2], torch.float32, "a@x,b@y"),
        "quantized_sequence_lookup": lambda: (
            *served()[:4], whole(0, 2, 6), [0, 1], torch.float32, "a@x,b@y"
        ),
        "random_fill_": lambda: (rand(3, 5), [3, 4], 0, 0, "uniform", 0.0, 1.0),
        "random_rows_": lambda: (rand(3, 5), whole(4, 1, 4), [3, 4], 0, "uniform", 0.0, 1.0),
        "renew_rows_": lambda: (
            whole(1, -1), rand(3, 4), [rand(3), rand(3, 4)], 0, 0, [3, 4], 0.0, 1.0, [0.0, 0.5]
        ),
        "read_rows_": lambda: ([rand(2, 2), rand(2)], whole(1, 0), whole(0, 2), ROWS, 12, 0),
        "write_rows_": lambda: ([rand(2, 2), rand(2)], whole(1, 0), whole(0, 2), ROWS, 12, 0),
        "hot_ids": lambda: (
            *(whole(7, 3, 7, 0, 3, 9), whole(0, 2, 6), [1], [1]),
            *([whole(3, 7)], [finder_of(np.array([3, 7])).to(device)], [10], "f@t"),
        ),
        "updated_hot_rows": lambda: (whole(2, 0, 2), [0], [0], [3], [whole(3, 7, 8)], [0], [6], [10]),
        "copy_rows_": lambda: ([rand(2, 3)], [rand(2, 4)], whole(1), whole(0), [0], [1], [1]),
        "mark_rows_": lambda: ([whole(0, 8, dtype=torch.int32)], [whole(3, 33, -1)], [40]),
        "dot_interaction": lambda: (rand(2, 5), rand(2, 2, 5)),
        "dot_interaction_gradients": lambda: (rand(2, 8), rand(2, 3, 5)),
        "best_rows": lambda: (
            rand(2, 3), whole(*range(12), dtype=torch.int8).view(4, 3), rand(4), whole(1, 1, 0, 1),
            whole(0, 1).view(2, 1), whole(4, 3).view(2, 1), whole(1, 1), whole(0, 0), 3,
        ),
        "zch_buckets": lambda: (whole(0, 1, -1), 7),
        "cross_": lambda: (
            *(torch.ones(2, 3, device=device) for _ in range(3)), None, torch.zeros(2, 3, device=device),
        ),
        "cross_backward_": lambda: (
            *(torch.ones(2, 3, device=device) for _ in range(3)), torch.ones(3, device=device), True, True,
            *(torch.zeros(*shape, device=device) for shape in ((2, 3), (2, 3), (3,))),
        ),
        "hash_rows_": lambda: (whole(0, 1, -1), 7, 1, whole(0, 0, 0)),
        "take_items_": lambda: (whole(0, 1, -1), whole(2, 0), [1, 1], [whole(0), whole(0, 0)], [0, 1], 7, 1),
        "zch_find": lambda: (whole(0, 1, -1), *empty_state(5, 4, device=device)[:2], 0, 5, 4, 3),
        "zch_assign_": lambda: state(False),
        "zch_assign_each_": lambda: state(True),
        "zch_resize": lambda: resize_call(*state(False)[2][:6], 0, 5, 4, 10, 3, 3, 2, 0, 1.0).packed(),
    }  # fmt: skip


def check(op: str, device: str) -> None:
    """Torch's own checks of an operator: schema, aliasing, fake tensors, autograd, tracing with any sizes."""
    options = {"test_utils": NO_VALUES} if op in COUNTED else {}
    opcheck(getattr(torch.ops.tilerec, op).default, cases(device)[op](), **options)  # type: ignore[arg-type]
