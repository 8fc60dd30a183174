"""Rows that lie elsewhere and go by their own numbers (`row_names`): a cache's lines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import update_ops as update
from tilerec.errors import InputError
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad

ROWS, DIM = 9, 12
ORDER = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])  # line i holds row ORDER[i]
KERNELS = {"served": torch.ops.tilerec.update_rows_, "reference": update.update_rows_reference_}


def _slots(spec: OptimizerSpec) -> list[Tensor]:
    return [torch.full(slot.shape(ROWS, DIM), slot.init) for slot in spec.slots]


def _record(ids: Tensor, grad: Tensor) -> tuple[object, ...]:
    n = ids.numel()
    return grad, ids, None, None, [0], [0], [n], [0], [DIM], [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("kernel", KERNELS)
def test_named_rows_in_another_order_get_the_same_bits(spec: OptimizerSpec, dtype: torch.dtype, kernel: str) -> None:
    table, slots = torch.randn(ROWS, DIM).to(dtype), _slots(spec)
    lines, line_slots = table[ORDER].clone(), [slot[ORDER].clone() for slot in slots]
    line_of = torch.empty_like(ORDER)
    line_of[ORDER] = torch.arange(ROWS)
    ids, grad = torch.tensor([3, 3, 8, 0, 3, 5]), torch.randn(6, DIM)
    rest = (spec.rule, spec.hyper(), [1], [5, 6], [100], [3])
    KERNELS[kernel]([table], slots, *_record(ids, grad), *rest)
    KERNELS[kernel]([lines], line_slots, *_record(line_of[ids], grad), *rest, [ORDER])
    assert torch.equal(lines, table[ORDER])
    for line_slot, slot in zip(line_slots, slots, strict=True):
        assert torch.equal(line_slot, slot[ORDER])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_is_not_finite_is_told_by_its_name(kernel: str) -> None:
    lines, grad = torch.zeros(ROWS, DIM), torch.zeros(3, DIM)
    grad[0, 1], grad[2, 0] = float("nan"), float("inf")
    spec = SGD(0.1)
    told = KERNELS[kernel](
        [lines],
        [],
        *_record(torch.tensor([0, 1, 5]), grad),
        spec.rule,
        spec.hyper(),
        [1],
        [5, 6],
        [0],
        [0],
        [ORDER],
    )
    assert told.tolist() == [2, 0, 1]  # lines 0 and 5 hold rows 4 and 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_phases_round_by_the_names_too(dtype: torch.dtype) -> None:
    table, spec = torch.randn(ROWS, DIM).to(dtype), RowWiseAdagrad(0.1)
    lines, slots, line_slots = table[ORDER].clone(), _slots(spec), _slots(spec)
    rows, grads = torch.tensor([0, 3, 8]), torch.randn(3, DIM)
    line_of = torch.empty_like(ORDER)
    line_of[ORDER] = torch.arange(ROWS)
    scalars = (grads * grads).sum(1)[None]
    rest = ([grads], [scalars], [DIM], spec.rule, spec.hyper(), [1], [5, 6], [100], [3])
    torch.ops.tilerec.rule_apply_to_tables_([table], slots, [rows], *rest)
    torch.ops.tilerec.rule_apply_to_tables_([lines], line_slots, [line_of[rows]], *rest, [ORDER])
    update.rule_apply_to_tables_reference_([table.clone()], _slots(spec), [rows], *rest, [torch.empty(0).long()])
    assert torch.equal(lines, table[ORDER])
    assert torch.equal(line_slots[0], slots[0][ORDER])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("names", [[], [torch.zeros(4, dtype=torch.int64)], [torch.zeros(ROWS)]])
def test_names_that_do_not_fit_are_refused(names: list[Tensor], kernel: str) -> None:
    spec = SGD(0.1)
    record = _record(torch.tensor([0]), torch.ones(1, DIM))
    with pytest.raises(InputError, match="row names"):
        KERNELS[kernel]([torch.zeros(ROWS, DIM)], [], *record, spec.rule, spec.hyper(), [1], [5, 6], [0], [0], names)
