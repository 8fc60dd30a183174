"""Every row rule against torch.optim, or against its formula written out number by number, over many steps.

Each step touches every row twice, so that the summed gradient of a row is what counts; the learning rate changes
from step to step. float64 tables show that the formula is the same; float32 tables, which the native library serves,
that its rounding stays small. One row starts at zero and one row's gradient is always zero: LAMB and LARS divide norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.update_ops import rule_apply_, rule_partials
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRowWiseAdagrad
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    SPECS,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

STEPS, ROWS = 24, 5
Row = list[float]
State = dict[str, Any]  # slot name -> list of floats per element, or one float per row
Oracle = Callable[[Row, Row, State, OptimizerSpec, float, int], Row]

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
}


def _lr(spec: OptimizerSpec, step: int) -> float:
    return spec.lr * (1 + 0.25 * math.sin(step))


def _table(dim: int, dtype: torch.dtype) -> Tensor:
    weight = torch.randn(ROWS, dim, dtype=torch.float64)
    weight[1] = 0
    return weight.to(dtype)


def _gradients(dim: int, dtype: torch.dtype) -> Tensor:
    """[STEPS, 2, ROWS, dim]: two occurrences of every row per step."""
    grads = torch.randn(STEPS, 2, ROWS, dim, dtype=torch.float64)
    grads[:, :, 2] = 0
    return grads.to(dtype)


def _slots(spec: OptimizerSpec, weight: Tensor) -> list[Tensor]:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return [torch.full(slot.shape(*weight.shape), slot.init, dtype=wide) for slot in spec.slots]


def _update(weight: Tensor, slots: list[Tensor], spec: OptimizerSpec, rows: Tensor, grads: Tensor, step: int) -> None:
    """One step: `grads` [n, dim] are the row gradients of the occurrences `rows` [n]."""
    n, dim = grads.shape
    skipped = torch.ops.tilerec.update_rows_(
        [weight], slots, grads.contiguous(), rows, None, None, [0], [0], [n], [0], [dim], [0],
        spec.rule, spec.hyper(_lr(spec, step)), [step], [1, 2], [0], [0],
    )  # fmt: skip
    assert skipped.tolist() == [0, -1, -1]


def _run(spec: OptimizerSpec, weight: Tensor, grads: Tensor) -> tuple[Tensor, list[Tensor]]:
    weight, slots = weight.clone(), _slots(spec, weight)
    rows = torch.cat((torch.arange(ROWS), torch.arange(ROWS).flip(0)))
    for step, (first, second) in enumerate(grads, start=1):
        _update(weight, slots, spec, rows, torch.cat((first, second.flip(0))), step)
    return weight, slots


# ------------------------------------------------------------------------------------------------ torch.optim

TORCH: list[tuple[OptimizerSpec, Callable[[list[Tensor]], torch.optim.Optimizer], dict[str, str]]] = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1), {}),
    (SGD(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), {}),
    (
        SGD(0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        {"momentum_buffer": "momentum_buffer"},
    ),
    (
        SGD(0.1, momentum=0.5, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True),
        {"momentum_buffer": "momentum_buffer"},
    ),
    (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), {"sum": "sum"}),
    (
        Adagrad(0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3
        ),
        {"sum": "sum"},
    ),
    (
        RowWiseAdagrad(0.1, weight_decay=0.1, initial_accumulator_value=0.5),
        lambda p: TorchRowWiseAdagrad(p, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
        {"sum": "sum"},
    ),
    (Adam(0.1), lambda p: torch.optim.Adam(p, lr=0.1), {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}),
    (
        Adam(0.1, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.1),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    (
        Adam(0.1, row_step=True),
        lambda p: torch.optim.Adam(p, lr=0.1),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    (
        AdamW(0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    (
        AdamW(0.1, weight_decay=0.1, row_step=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [1, 20])
@pytest.mark.parametrize(("spec", "factory", "names"), TORCH, ids=lambda value: _id(value))
def test_a_rule_equals_the_torch_optimizer_of_its_name(
    spec: OptimizerSpec, factory: Any, names: dict[str, str], dim: int, dtype: torch.dtype
) -> None:
    weight, grads = _table(dim, dtype), _gradients(dim, dtype)
    got, slots = _run(spec, weight, grads)
    parameter = torch.nn.Parameter(weight.to(torch.float64, copy=True))
    optimizer = factory([parameter])
    for step, pair in enumerate(grads.double(), start=1):
        optimizer.param_groups[0]["lr"] = _lr(spec, step)
        parameter.grad = pair.sum(0)
        optimizer.step()
    torch.testing.assert_close(got.double(), parameter.detach(), **TOLERANCE[dtype])
    state = {slot.name: tensor for slot, tensor in zip(spec.slots, slots, strict=True)}
    for ours, theirs in names.items():
        torch.testing.assert_close(state[ours].double(), optimizer.state[parameter][theirs], **TOLERANCE[dtype])
    if "step" in state:
        assert state["step"].tolist() == [STEPS] * ROWS


# ----------------------------------------------------------------------------------------------------- formulas


def _norm(row: Row) -> float:
    return math.sqrt(math.fsum(x * x for x in row))


def _rowwise_adagrad(w: Row, g: Row, state: State, spec: Any, lr: float, t: int) -> Row:
    decayed = spec.weight_decay > 0 and spec.weight_decay_mode
    seen = [gi + spec.weight_decay * wi for gi, wi in zip(g, w, strict=True)] if decayed == "l2" else g
    state["sum"] += math.fsum(x * x for x in seen) / len(g)
    rate = lr / (math.sqrt(state["sum"]) + spec.eps)
    if decayed == "decoupled":
        w = [(1 - lr * spec.weight_decay) * wi for wi in w]
    w = [wi - rate * gi for wi, gi in zip(w, seen, strict=True)]
    norm = _norm(w)
    if spec.max_norm and norm > spec.max_norm:
        w = [wi * spec.max_norm / norm for wi in w]
    return w


def _direction(w: Row, g: Row, state: State, spec: Any, t: int) -> Row:
    """Adam's step direction, with the decay added to it; the second moment per row if its slot is."""
    b1, b2 = spec.betas
    mean = math.fsum(x * x for x in g) / len(g)
    per_row = isinstance(state["exp_avg_sq"], float)
    for d in range(len(g)):
        state["exp_avg"][d] += (1 - b1) * (g[d] - state["exp_avg"][d])
        if not per_row:
            state["exp_avg_sq"][d] += (1 - b2) * (g[d] ** 2 - state["exp_avg_sq"][d])
    if per_row:
        state["exp_avg_sq"] += (1 - b2) * (mean - state["exp_avg_sq"])
    out = []
    for d in range(len(g)):
        second = state["exp_avg_sq"] if per_row else state["exp_avg_sq"][d]
        adam = state["exp_avg"][d] / (1 - b1**t) / (math.sqrt(second / (1 - b2**t)) + spec.eps)
        out.append(adam + spec.weight_decay * w[d])
    return out


def _partial_adam(w: Row, g: Row, state: State, spec: Any, lr: float, t: int) -> Row:
    return [wi - lr * ui for wi, ui in zip(w, _direction(w, g, state, spec, t), strict=True)]


def _lamb(w: Row, g: Row, state: State, spec: Any, lr: float, t: int) -> Row:
    u = _direction(w, g, state, spec, t)
    trust = _norm(w) / _norm(u) if _norm(w) > 0 and _norm(u) > 0 else 1.0
    return [wi - lr * trust * ui for wi, ui in zip(w, u, strict=True)]


def _lars(w: Row, g: Row, state: State, spec: Any, lr: float, t: int) -> Row:
    rate = lr
    if _norm(w) > 0 and _norm(g) > 0:
        rate = lr * spec.trust_coefficient * _norm(w) / (_norm(g) + spec.weight_decay * _norm(w))
    m = state["momentum_buffer"]
    for d in range(len(g)):
        m[d] = spec.momentum * m[d] + rate * (g[d] + spec.weight_decay * w[d])
    return [wi - mi for wi, mi in zip(w, m, strict=True)]


FORMULAS: list[tuple[OptimizerSpec, Oracle]] = [
    (RowWiseAdagrad(0.1), _rowwise_adagrad),
    (RowWiseAdagrad(0.1, eps=0.1, initial_accumulator_value=0.25), _rowwise_adagrad),
    (RowWiseAdagrad(0.1, weight_decay=0.1), _rowwise_adagrad),
    (RowWiseAdagrad(0.1, weight_decay=0.1, weight_decay_mode="decoupled"), _rowwise_adagrad),
    (RowWiseAdagrad(0.1, max_norm=0.75), _rowwise_adagrad),
    (RowWiseAdagrad(0.1, max_norm=0.75, weight_decay=0.5), _rowwise_adagrad),
    (PartialRowWiseAdam(0.1), _partial_adam),
    (PartialRowWiseAdam(0.1, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3, row_step=True), _partial_adam),
    (LAMB(0.1), _lamb),
    (LAMB(0.1, betas=(0.5, 0.75), weight_decay=0.1, row_step=True), _lamb),
    (PartialRowWiseLAMB(0.1), _lamb),
    (PartialRowWiseLAMB(0.1, betas=(0.5, 0.75), weight_decay=0.1, row_step=True), _lamb),
    (LarsSGD(0.1, trust_coefficient=0.5), _lars),
    (LarsSGD(0.1, trust_coefficient=0.5, momentum=0.0, weight_decay=0.1), _lars),
]


def _id(value: Any) -> str | None:
    if not isinstance(value, OptimizerSpec):
        return ""
    default = type(value)()
    changed = {k: v for k, v in value.to_json().items() if k not in ("optimizer", "lr") and v != default.to_json()[k]}
    return "-".join((type(value).__name__, *(f"{k}={v}" for k, v in changed.items())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [1, 3, 20])
@pytest.mark.parametrize(("spec", "oracle"), FORMULAS, ids=_id)
def test_a_rule_equals_its_formula_written_out(
    spec: OptimizerSpec, oracle: Oracle, dim: int, dtype: torch.dtype
) -> None:
    weight, grads = _table(dim, dtype), _gradients(dim, dtype)
    got, slots = _run(spec, weight, grads)
    for r in range(ROWS):
        row = weight[r].double().tolist()
        state: State = {s.name: s.init if s.per == "row" else [s.init] * dim for s in spec.slots}
        for step in range(1, STEPS + 1):
            total = grads[step - 1, :, r].double().sum(0).tolist()
            row = oracle(row, total, state, spec, _lr(spec, step), step)
        torch.testing.assert_close(got[r].double(), torch.tensor(row, dtype=torch.float64), **TOLERANCE[dtype])
        for slot, tensor in zip(spec.slots, slots, strict=True):
            want = torch.tensor(state[slot.name] if slot.name != "step" else float(STEPS), dtype=torch.float64)
            torch.testing.assert_close(tensor[r].double(), want, **TOLERANCE[dtype])


ALL_RULES = [spec for spec, *_ in TORCH] + [spec for spec, _ in FORMULAS]


def test_all_rules_of_the_specs_are_covered() -> None:
    own = {cls for cls in SPECS.values() if cls.__module__ == "tilerec.spec.optimizer"}  # a program may register others
    assert {type(spec) for spec in ALL_RULES} == own


# -------------------------------------------------------------------------------------------- rows, scale, parts


@pytest.mark.parametrize("spec", ALL_RULES, ids=_id)
def test_rows_that_a_step_does_not_touch_stand_still(spec: OptimizerSpec) -> None:
    weight, grads = _table(3, torch.float64), _gradients(3, torch.float64)
    slots = _slots(spec, weight)
    for step in range(1, 4):
        before = [tensor.clone() for tensor in (weight, *slots)]
        _update(weight, slots, spec, torch.tensor([4, 0]), grads[step, 0, [4, 0]], step)
        for tensor, old in zip((weight, *slots), before, strict=True):
            assert torch.equal(tensor[1:4], old[1:4])
            assert not torch.equal(tensor[[0, 4]], old[[0, 4]])


@pytest.mark.parametrize("row_step", [False, True])
def test_adams_count_is_the_tables_or_with_row_step_the_rows(row_step: bool) -> None:
    spec = Adam(0.1, row_step=row_step)
    weight = torch.randn(2, 3, dtype=torch.float64)
    grads = torch.randn(6, 2, 3, dtype=torch.float64)
    rows = [torch.nn.Parameter(row.clone()) for row in weight]
    optimizers = [torch.optim.Adam([row], lr=0.1) for row in rows]
    slots = _slots(spec, weight)
    for step in range(1, 7):
        touched = [0, 1] if step % 3 == 0 else [0]  # row 1 every third step
        _update(weight, slots, spec, torch.tensor(touched), grads[step - 1, touched], step)
        for r in touched:
            optimizers[r].param_groups[0]["lr"] = _lr(spec, step)
            rows[r].grad = grads[step - 1, r].clone()
            if not row_step and step > 1:  # the count that the table has
                optimizers[r].state[rows[r]].setdefault("exp_avg", torch.zeros(3, dtype=torch.float64))
                optimizers[r].state[rows[r]].setdefault("exp_avg_sq", torch.zeros(3, dtype=torch.float64))
                optimizers[r].state[rows[r]]["step"] = torch.tensor(float(step - 1))
            optimizers[r].step()
    for r in range(2):
        torch.testing.assert_close(weight[r], rows[r].detach(), **TOLERANCE[torch.float64])
    if row_step:
        assert slots[2].tolist() == [6.0, 2.0]


@pytest.mark.parametrize("spec", ALL_RULES, ids=_id)
def test_the_grad_scale_is_divided_out_first(spec: OptimizerSpec) -> None:
    weight, grads = _table(3, torch.float64), _gradients(3, torch.float64)[:4]
    scaled = OptimizerSpec.from_json({**spec.to_json(), "grad_scale": 8.0})
    want, want_slots = _run(spec, weight, grads)
    got, got_slots = _run(scaled, weight, grads * 8)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(got_slots, want_slots, strict=True))


def _run_in_parts(
    spec: OptimizerSpec, weight: Tensor, grads: Tensor, widths: tuple[int, ...], exact: bool
) -> tuple[Tensor, list[Tensor]]:
    """As `_run`, on column parts of the table that add their row sums between phases."""
    dim = weight.shape[1]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = [weight[:, s : s + w].clone() for s, w in zip(starts, widths, strict=True)]
    slots = [_slots(spec, part) for part in parts]
    rows = torch.arange(ROWS)
    for step, pair in enumerate(grads, start=1):
        total, hyper = pair.sum(0), spec.hyper(_lr(spec, step))
        own = [total[:, s : s + w].contiguous() for s, w in zip(starts, widths, strict=True)]
        scalars = total.new_zeros(0, ROWS)
        for phase, terms in enumerate(spec.partials):
            blocks = total.new_zeros(ROWS, terms, (dim + 7) // 8 if exact else 1)
            for start, part, part_slots, grad in zip(starts, parts, slots, own, strict=True):
                share = rule_partials(
                    part, part_slots, rows, grad, scalars, phase, dim, exact, start, spec.rule, hyper, step
                )
                first = start // 8 if exact else 0
                assert share.shape[:2] == (ROWS, terms)
                blocks[:, :, first : first + share.shape[2]] += share
            sums = blocks.new_zeros(ROWS, terms)
            for block in blocks.unbind(2):
                sums = sums + block
            scalars = torch.cat((scalars, sums.T))
        for start, part, part_slots, grad in zip(starts, parts, slots, own, strict=True):
            rule_apply_(part, part_slots, rows, grad, scalars, dim, spec.rule, hyper, step, [1, 2], 0, start)
    whole = []
    for number, slot in enumerate(spec.slots):
        pieces = [part_slots[number] for part_slots in slots]
        if slot.per == "row":  # every part keeps the row's state, and the copies agree
            assert all(torch.equal(piece, pieces[0]) for piece in pieces)
        whole.append(pieces[0] if slot.per == "row" else torch.cat(pieces, dim=1))
    return torch.cat(parts, dim=1), whole


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("widths", [(2, 1), (7, 13), (3, 8, 9), (16, 8, 8)])
@pytest.mark.parametrize("spec", [spec for spec in ALL_RULES if spec.phases], ids=_id)
def test_a_table_in_column_parts_moves_as_the_whole(spec: OptimizerSpec, widths: tuple[int, ...], exact: bool) -> None:
    dim = sum(widths)
    weight, grads = _table(dim, torch.float64), _gradients(dim, torch.float64)[:8]
    want, want_slots = _run(spec, weight, grads)
    got, got_slots = _run_in_parts(spec, weight, grads, widths, exact)
    torch.testing.assert_close(got, want, **TOLERANCE[torch.float64])
    for ours, theirs in zip(got_slots, want_slots, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float64])
    if exact and all(width % 8 == 0 for width in widths):
        assert torch.equal(got, want)


@pytest.mark.parametrize("spec", [spec for spec in ALL_RULES if spec.phases], ids=_id)
def test_exact_sums_of_aligned_parts_give_the_bits_of_the_whole_in_float32(spec: OptimizerSpec) -> None:
    weight, grads = _table(28, torch.float32), _gradients(28, torch.float32)[:8]
    grads[:, 1] = 0  # one summand per row, whatever the order of the sum
    want, want_slots = _run(spec, weight, grads)
    for widths in ((8, 20), (16, 8, 4), (24, 4)):
        got, got_slots = _run_in_parts(spec, weight, grads, widths, exact=True)
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(got_slots, want_slots, strict=True))


@pytest.mark.parametrize("spec", [spec for spec in ALL_RULES if not spec.phases], ids=_id)
def test_rules_without_phases_need_no_sums(spec: OptimizerSpec) -> None:
    weight, grads = _table(20, torch.float64), _gradients(20, torch.float64)
    want, _ = _run(spec, weight, grads)
    got, _ = _run_in_parts(spec, weight, grads, (7, 13), exact=False)
    torch.testing.assert_close(got, want, **TOLERANCE[torch.float64])
