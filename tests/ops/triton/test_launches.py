"""How much a step gives a GPU to do: these numbers shall not grow unnoticed. docs/gpu.md shows them as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.triton.interpreter import quick
from tests.ops.triton.launches import counted
from tests.ops.triton.workloads import CALLS, POINTS, READS, step
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.set_num_threads(1)
    with quick():
        yield


# ------------------------------------------------------------------------------------------------ steps

POOLED = ["chunk_kernel", "pooled_kernel"]
UPDATE = ["occurrence_keys", "aten.sort.stable", "aten.gather", "sum_chunks", "update_runs"]
SMALL = ["sort_blocks", "rank_blocks", "sum_chunks", "update_runs"]  # up to 65,536 occurrences
POINT, ONES = POINTS["small"], (1,) * 4
STEPS = {
    **{name: (POINTS[name], POOLED, UPDATE) for name in ("P1", "P1 bf16", "P2", "P2 bf16", "P3 bf16", "multi-hot")},
    "P1, row-wise adagrad": (replace(POINTS["P1"], optimizer="row-wise adagrad"), POOLED, UPDATE),
    "P1, adam": (replace(POINTS["P1"], optimizer="adam"), POOLED, UPDATE),
    # 24 tables of 4 to 256 columns: lookups go by five widths of tiles, updates by six numbers of columns.
    "mixed dims": (POINTS["mixed dims"], POOLED * 5, [*UPDATE, *["update_runs"] * 5]),
    # The gradients of 10 features' results are put together: one torch.cat.
    "unpooled": (POINTS["unpooled"], ["sequence_kernel"], ["aten.cat", *UPDATE]),
    "unpooled, adam": (replace(POINTS["unpooled"], optimizer="adam"), ["sequence_kernel"], ["aten.cat", *UPDATE]),
    "small": (POINT, POOLED, SMALL),
    "small, lamb": (replace(POINT, optimizer="lamb"), POOLED, SMALL),
    # zeros: of ids that no bag reads. add_: autograd's, as this batch's weights have a gradient from the step before.
    "small, weighted": (
        replace(POINT, weighted=True), POOLED,
        ["aten.zeros", "sample_weight_chunk_kernel", "sample_weight_kernel", "aten.add_.Tensor", *SMALL],
    ),
    "small, dense gradients": (
        replace(POINT, optimizer=None), POOLED,
        [*["aten.zeros_like"] * 4, *SMALL, *["aten.add_.Tensor"] * 4],
    ),
    "4,000 ids": (replace(POINT, batch=1000, lengths=ONES), POOLED, SMALL),
    "200 ids": (
        replace(POINT, batch=50, lengths=ONES), ["pooled_kernel"], ["sort_blocks", "update_runs"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_so_many_launches(name: str) -> None:
    workload, forward, backward = STEPS[name]
    given = step(workload)
    assert [entry for kind, entry in given[0].all if kind != "copy"] == forward
    assert [entry for kind, entry in given[1].all if kind != "copy"] == backward
    assert given[0].copies == ["report"]


# ------------------------------------------------------------------------------------------------ single ops

SORT = "aten.sort.stable"
OPS = {
    "segment_ids": ["write_segment_ids"],
    "select_segments": ["copy_items"],
    "select_segments_backward": [SORT, "aten.arange", "aten.searchsorted.Tensor", "sum_copies"],
    "bucketize_by_cuts": ["aten.zeros", "aten.cumsum.out", "aten.zeros", "deal_ids", SORT, "local_ids"],
    "jagged_to_padded": ["copy_items"],
    "padded_to_jagged": ["copy_items"],
    "segment_sum": ["sum_segments"],
    "repeat_segments": ["copy_items"],
    "route_ids": ["aten.zeros", "deal_items", SORT, "aten.zeros", "order_items", "number_bags"],
    "pick_rows": ["move_rows"],
    "place_rows_": ["move_rows"],
    "pack_segments int8": ["pack"],
    "pack_segments fp8": ["pack"],
    "unpack_segments int8": ["unpack"],
    "unpack_segments fp8": ["unpack"],
    "zch_find": ["find_kernel"],
    "zch_assign_each_": ["aten.zeros", "find_kernel", SORT, "runs_kernel", "walk_kernel", "hit_kernel"],
}


@pytest.mark.parametrize("name", CALLS)
def test_an_op_is_so_many_launches(name: str) -> None:
    if name not in READS:  # what is sent once has been sent
        with counted():
            CALLS[name](200)()
    call = CALLS[name](5 if name in READS else 300)
    with counted(run=name in READS) as given:
        call()
    assert [entry for kind, entry in given.all if kind != "copy"] == OPS[name]
