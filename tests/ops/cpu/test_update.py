"""The native updates: bits of the reference, of every thread count and instruction set, at every shape."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.update_ops import (
    rule_apply_,
    rule_partials,
    sum_row_gradients,
    sum_row_gradients_reference,
    update_rows_reference_,
)
from tilerec.errors import InputError
from tilerec.ops import backends
from tilerec.ops.runtime.cpu.library import ISAS, library

pytestmark = pytest.mark.skipif(not backends.NATIVE_CPU, reason="the native CPU library is not built")

ops = torch.ops.tilerec
LR, SCALE, DECAY = 0.1, 1.0, 0.05
RULES: dict[str, tuple[str, list[float], str]] = {
    "store": ("store", [], ""),
    "sgd": ("sgd", [0.0, 0.0], ""),
    "sgd-momentum": ("sgd", [0.9, 0.0], "e"),
    "sgd-nesterov": ("sgd", [0.9, 1.0], "e"),
    "adagrad": ("adagrad", [1e-8, 0.01], "e"),
    "rowwise": ("rowwise_adagrad", [1e-8, 0.0, 0.0], "r"),
    "rowwise-l2-maxnorm": ("rowwise_adagrad", [1e-8, 1.0, 0.7], "r"),
    "rowwise-decoupled": ("rowwise_adagrad", [1e-8, 2.0, 0.0], "r"),
    "adam": ("adam", [1e-8, 0.9, 0.999, 0.0, 0.0], "ee"),
    "adamw-row-step": ("adam", [1e-8, 0.9, 0.999, 1.0, 1.0], "eer"),
    "partial-adam": ("partial_rowwise_adam", [1e-8, 0.9, 0.999, 0.0], "er"),
    "partial-adam-row-step": ("partial_rowwise_adam", [1e-8, 0.9, 0.999, 1.0], "err"),
    "lamb": ("lamb", [1e-8, 0.9, 0.999, 0.0], "ee"),
    # eps 0: columns behind a row's end would divide 0 by 0, and must not leak in.
    "lamb-row-step": ("lamb", [0.0, 0.9, 0.999, 1.0], "eer"),
    "partial-lamb": ("partial_rowwise_lamb", [1e-8, 0.9, 0.999, 0.0], "er"),
    "lars": ("lars_sgd", [0.9, 0.02], "e"),
}
HALF = (torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """A call of update_rows_."""

    weights: list[Tensor]
    slots: list[Tensor]
    rest: tuple[Any, ...]

    def copy(self) -> Case:
        return Case([w.clone() for w in self.weights], [s.clone() for s in self.slots], self.rest)

    def state(self) -> list[Tensor]:
        return [*self.weights, *self.slots]


def hyper_of(name: str, rounding: float = 0.0) -> list[float]:
    return [LR, SCALE, DECAY, rounding, *RULES[name][1]] if RULES[name][1] else []


def slots_of(name: str, rows: int, dim: int) -> list[Tensor]:
    kinds = RULES[name][2]
    made = [torch.rand(rows, dim) if kind == "e" else torch.rand(rows) for kind in kinds]
    if len(kinds) == 3:
        made[2] = torch.randint(0, 5, (rows,)).float()
    return made


def case(
    name: str, dims: Sequence[int], dtypes: Sequence[torch.dtype], grad_dtype: torch.dtype, rounding: float = 0.0,
    rows: int = 12, batch: int = 11, longest: int = 4, index: torch.dtype = torch.int64, skew: float = 1.0,
) -> Case:  # fmt: skip
    """One pooled feature per table."""
    features = len(dims)
    offsets = torch.cat(
        (torch.zeros(1, dtype=torch.int64), torch.randint(0, longest + 1, (batch * features,)).cumsum(0))
    )
    ids = (torch.rand(int(offsets[-1])) ** skew * rows).to(index).clamp(max=rows - 1)
    grad = torch.randn(batch, sum(dims)).to(grad_dtype)
    return Case(
        [torch.randn(rows, d).to(t) for d, t in zip(dims, dtypes, strict=True)],
        [s for d in dims for s in slots_of(name, rows, d)],
        (
            grad, ids, offsets, None, list(range(features)), [f * batch for f in range(features)], [batch] * features,
            [sum(dims[:f]) for f in range(features)], [sum(dims)] * features, [0] * features, RULES[name][0],
            hyper_of(name, rounding), [3 + f for f in range(features)], [7, 9] * features, [5] * features,
            [0] * features,
        ),
    )  # fmt: skip


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ, the first by {(a - b)[~same][0]}"


@pytest.fixture
def exact_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference with roots and quotients rounded once, as the formulas and the library do it.

    torch's fp32 square root is one unit off for some numbers, and its `number / tensor` multiplies by a reciprocal.
    """
    monkeypatch.setattr(torch, "sqrt", lambda x: torch.from_numpy(np.asarray(np.sqrt(x.numpy()))))
    monkeypatch.setattr(torch.Tensor, "__rtruediv__", lambda self, other: torch.full_like(self, other) / self)


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.usefixtures("exact_reference")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("grad_dtype", "rounding"), [(torch.float32, 0.0), (torch.bfloat16, 1.0), (torch.float16, 0.0)]
)
def test_every_rule_has_the_bits_of_the_reference(name: str, grad_dtype: torch.dtype, rounding: float) -> None:
    """Tables of mixed dims and dtypes in one call; stochastic rounding included."""
    dims = [1, 3, 16, 19, 64, 257, 32, 8]
    dtypes = list(itertools.islice(itertools.cycle([torch.float32, *HALF]), len(dims)))
    for turned in (dtypes, dtypes[1:] + dtypes[:1]):
        mine = case(name, dims, turned, grad_dtype, rounding)
        other = mine.copy()
        assert ops.update_rows_(*mine[:2], *mine.rest).tolist() == [0, -1, -1]
        update_rows_reference_(*other[:2], *other.rest)
        assert_same_bits(mine.state(), other.state())


@pytest.mark.parametrize("name", ["rowwise-l2-maxnorm", "adamw-row-step", "partial-lamb", "lars"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_every_instruction_set_and_thread_count_gives_the_same_bits(
    name: str, dtype: torch.dtype, threads: Any
) -> None:
    native = library()
    assert native is not None
    first = case(name, [1, 19, 64, 130], [dtype] * 4, torch.float32, 1.0, rows=300, batch=1500)
    results = []
    try:
        for level, count in itertools.product(range(native.tr_isa_widest() + 1), (1, 2)):
            assert native.tr_isa_choose(level) == level < len(ISAS)
            threads(count)
            run = first.copy()
            ops.update_rows_(*run[:2], *run.rest)
            results.append(run.state())
    finally:
        native.tr_isa_choose(len(ISAS))
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("name", [name for name in RULES if name != "store"])
@pytest.mark.parametrize("cuts", [[0, 5, 19], [0, 7, 19], [0, 5, 7, 19], [0, 8, 16, 19]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_parts_equal_the_whole_row_in_bits_where_cuts_lie_on_blocks(
    name: str, cuts: list[int], dtype: torch.dtype
) -> None:
    whole = case(name, [19], [dtype], torch.float32, 1.0)
    parts = [
        (
            whole.weights[0][:, a:b].clone(),
            [s[:, a:b].clone() if s.dim() == 2 else s.clone() for s in whole.slots],
            a,
            b,
        )
        for a, b in itertools.pairwise(cuts)
    ]
    grad, ids, offsets, _, _, *layout = whole.rest[:10]
    rule, hyper, (step,), seed = whole.rest[10:14]
    rows_U, grads_UD = sum_row_gradients(grad, ids, offsets, None, 12, 19, *layout)
    kinds = RULES[name][2]
    phases = {"rowwise_adagrad": 2 if "maxnorm" in name else 1, "partial_rowwise_lamb": 2}.get(
        rule, 0 if rule in ("sgd", "adagrad", "adam") else 1
    )
    scalars_PU = torch.zeros(0, rows_U.numel())
    for phase in range(phases):
        total = None
        for weight, slots, a, b in parts:
            part = rule_partials(
                weight,
                slots,
                rows_U,
                grads_UD[:, a:b].contiguous(),
                scalars_PU,
                phase,
                19,
                True,
                a,
                rule,
                hyper,
                step,
            )
            if total is None:
                total = torch.zeros(*part.shape[:2], 3)
            # A block cut in two: its parts' sums are added, which may round otherwise than the block in one go.
            total[:, :, a // 8 : a // 8 + part.shape[2]] += part
        assert total is not None
        sums = total[..., 0]
        for block in (1, 2):
            sums = sums + total[..., block]
        scalars_PU = torch.cat((scalars_PU, sums.T))
    for weight, slots, a, b in parts:
        rule_apply_(
            weight,
            slots,
            rows_U,
            grads_UD[:, a:b].contiguous(),
            scalars_PU,
            19,
            rule,
            hyper,
            step,
            seed,
            5,
            a,
        )
    ops.update_rows_(*whole[:2], *whole.rest)
    joined = [torch.cat([part[0] for part in parts], 1)]
    joined += [
        torch.cat([part[1][k] for part in parts], 1) if kind == "e" else parts[0][1][k] for k, kind in enumerate(kinds)
    ]
    aligned = all(cut % 8 == 0 for cut in cuts[:-1])
    for got, want in zip(joined, whole.state(), strict=True):
        if aligned or phases == 0:
            assert_same_bits([got], [want])
        else:
            torch.testing.assert_close(got, want, rtol=2e-6 if got.dtype == torch.float32 else 2**-7, atol=1e-6)
    for _, slots, _, _ in parts[1:]:
        assert_same_bits([s for s in slots if s.dim() == 1], [s for s in parts[0][1] if s.dim() == 1])


@given(
    lengths=st.lists(st.integers(0, 5), max_size=24),
    features=st.integers(0, 3),
    dim=st.sampled_from([1, 3, 8, 64, 70, 257]),
    weighted=st.booleans(),
    pooled=st.booleans(),
    int32=st.booleans(),
    dtype=st.sampled_from([torch.float32, *HALF]),
)
def test_row_sums_of_any_record_equal_the_reference(
    lengths: list[int], features: int, dim: int, weighted: bool, pooled: bool, int32: bool, dtype: torch.dtype
) -> None:
    """Several features of one table, means, sample weights, empty bags, strided gradients, features without bags."""
    batch = len(lengths)
    offsets = torch.tensor([0, *(lengths * max(features, 1))]).cumsum(0)
    count = int(offsets[-1])
    ids = torch.randint(0, 6, (count,)).to(torch.int32 if int32 else torch.int64)
    sample_weights = torch.randn(count) if weighted else None
    layout: tuple[Any, ...]
    if pooled:
        grad = torch.randn(batch, features * dim + 2).to(dtype)
        layout = (
            [f * batch for f in range(features)], [batch] * features, [f * dim for f in range(features)],
            [features * dim + 2] * features, [f % 2 for f in range(features)],
        )  # fmt: skip
    else:
        grad = torch.randn(count, dim).to(dtype)
        cut = count // 2 if features > 1 else count
        begins, ends = [[0, cut, cut], [cut, count, cut]] if features else [[], []]
        begins, ends = begins[:features], ends[:features]
        layout = (
            begins, [e - b for b, e in zip(begins, ends, strict=True)], [b * dim for b in begins], [dim] * features,
            [0] * features,
        )  # fmt: skip
    for rows in (6, 0):  # 0: not known
        record = (grad, ids, offsets if pooled else None, sample_weights, rows, dim, *layout)
        rows_U, grads_UD = sum_row_gradients(*record)
        want_rows, want_grads = sum_row_gradients_reference(*record)
        assert rows_U.tolist() == want_rows.tolist()
        torch.testing.assert_close(grads_UD, want_grads.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [3, 40, 500, 5000, 70000])
@pytest.mark.parametrize("top", [1, 2, 100, 2**20, 2**31 + 5, 2**50, 2**62])
def test_rows_of_every_width_come_out_sorted_and_complete(count: int, top: int, threads: Any) -> None:
    """Keys of 32 bits, of 64, and wider; sorted by insertion, by comparison, by radix, by one thread and by two."""
    threads(2)
    ids = torch.randint(0, top, (count,))
    grad = torch.ones(count, 1)
    rows_U, grads_UD = sum_row_gradients(grad, ids, None, None, top, 1, [0], [count], [0], [1], [0])
    want, counts = ids.unique(return_counts=True)
    assert torch.equal(rows_U, want)
    assert torch.equal(grads_UD[:, 0], counts.float())


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "rowwise", "store"])
def test_a_row_hit_100_000_times_is_summed_exactly_once_by_any_number_of_threads(
    name: str, tables: int, threads: Any
) -> None:
    count, dim = 120_000, 5
    ids = torch.where(torch.arange(count) % 6 == 0, torch.arange(count) % 1000, 37).repeat(tables)
    grad = torch.randint(-3, 4, (count * tables, dim)).float()
    places = [t * count for t in range(tables)]
    rest = (
        grad, ids, None, None, list(range(tables)), places, [count] * tables, [p * dim for p in places], [dim] * tables,
        [0] * tables, RULES[name][0], hyper_of(name), [1] * tables, [0] * 2 * tables, [0] * tables, [0] * tables,
    )  # fmt: skip
    runs = []
    for n in (1, 2, 2):
        threads(n)
        run = Case(
            [torch.zeros(1000, dim) for _ in range(tables)],
            [torch.zeros(1000)] * (name == "rowwise") * tables,
            rest,
        )
        run = run.copy()
        assert ops.update_rows_(*run[:2], *run.rest).tolist() == [0, -1, -1]
        runs.append(run.state())
    assert_same_bits(runs[1], runs[0])
    assert_same_bits(runs[2], runs[0])
    for t in range(tables):
        # Small integers: every order of additions gives this sum.
        part = slice(t * count, (t + 1) * count)
        want = torch.zeros(1000, dim, dtype=torch.float64).index_add_(0, ids[part], grad[part].double())
        if name == "store":
            assert torch.equal(runs[0][t], want.float())
        if name == "sgd":
            torch.testing.assert_close(runs[0][t], (-LR * want).float(), rtol=1e-6, atol=0)


def test_untouched_rows_and_tables_keep_every_bit() -> None:
    run = case("adam", [7, 7], [torch.bfloat16] * 2, torch.float32, 1.0, rows=200)
    before = run.copy()
    rest = list(run.rest)
    rest[4:10] = [values[:1] for values in rest[4:10]]  # table 1 has no feature now
    ops.update_rows_(*run[:2], *rest)
    touched = torch.zeros(200, dtype=torch.bool)
    touched[run.rest[1][: int(run.rest[2][11])]] = True
    assert bool(touched.any())
    assert not bool(touched.all())
    for k in (0, 2, 3):
        now, then = run.state()[k], before.state()[k]
        assert torch.equal(now[~touched], then[~touched])
        assert bool((now[touched] != then[touched]).any(1).all())
    assert_same_bits([run.state()[k] for k in (1, 4, 5)], [before.state()[k] for k in (1, 4, 5)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dim", [1, 8, 19, 64])
def test_rows_whose_gradient_is_not_finite_are_skipped_and_the_first_is_named(
    bad: float, dim: int, threads: Any
) -> None:
    count = 9000
    ids = torch.cat((torch.arange(count), torch.arange(count), torch.full((5000,), 77)))
    grad = torch.randn(ids.numel(), dim)
    grad[[5, count + 70, count + 6, ids.numel() - 1], dim - 1] = bad
    grad[5] = 1.0  # so: rows 6, 70 and 77 of table 1
    rest = (
        grad, ids, None, None, [0, 1], [0, count], [count, count + 5000], [0, count * dim], [dim] * 2, [0, 0],
        "adagrad", hyper_of("adagrad"), [1, 1], [0] * 4, [0] * 2, [0] * 2,
    )  # fmt: skip
    first = Case([torch.randn(count, dim) for _ in range(2)], [torch.rand(count, dim) for _ in range(2)], rest)
    for n in (1, 2):
        threads(n)
        run = first.copy()
        assert ops.update_rows_(*run[:2], *run.rest).tolist() == [3, 1, 6]
        kept = torch.zeros(count, dtype=torch.bool)
        kept[[6, 70, 77]] = True
        for now, then in ((run.weights[1], first.weights[1]), (run.slots[1], first.slots[1])):
            assert torch.equal((now == then).all(1), kept)
        assert bool((run.weights[0] != first.weights[0]).any(1).all())


def test_a_bad_id_or_offset_is_an_error_and_changes_nothing() -> None:
    for value, word in ((12, "id 12"), (-1, "id -1"), (2**40, f"id {2**40}")):
        run = case("sgd", [4, 4], [torch.float32] * 2, torch.float32)
        before = run.copy()
        run.rest[1][-1] = value
        with pytest.raises(InputError, match=rf"{word} of feature number 1 .* outside \[0, 12\)"):
            ops.update_rows_(*run[:2], *run.rest)
        assert_same_bits(run.state(), before.state())
    run = case("sgd", [4, 4], [torch.float32] * 2, torch.float32)
    run.rest[2][3] = 1000
    with pytest.raises(InputError, match="offsets of feature number 0: offsets"):
        ops.update_rows_(*run[:2], *run.rest)
    weight = torch.zeros(4, 2)
    with pytest.raises(InputError, match="id 4 "):
        rule_apply_(
            weight,
            [],
            torch.tensor([4]),
            torch.ones(1, 2),
            torch.zeros(0, 1),
            2,
            "sgd",
            hyper_of("sgd"),
            1,
            [0, 0],
            0,
            0,
        )


def test_rows_beyond_two_to_the_31_are_found(tmp_path: Path) -> None:
    """A table of 2^31 + 16 rows in a sparse file: only the touched pages exist."""
    rows = 2**31 + 16
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(rows * 2)
    weight = torch.from_file(str(path), shared=True, size=rows, dtype=torch.float16).view(rows, 1)
    ids = torch.tensor([rows - 1, 3, 2**31, rows - 1, 2**31 - 1])
    grad = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    hyper = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    skipped = ops.update_rows_(
        [weight], [], grad, ids, None, None, [0], [0], [5], [0], [1], [0], "sgd", hyper, [1], [0, 0], [0], [0]
    )
    assert skipped.tolist() == [0, -1, -1]
    assert weight[[3, 2**31 - 1, 2**31, rows - 1], 0].tolist() == [-2.0, -16.0, -4.0, -9.0]
    assert weight[[0, 4, 2**31 + 1, rows - 2], 0].tolist() == [0.0] * 4
    assert path.stat().st_blocks * 512 < 64 * mmap.PAGESIZE


@pytest.mark.parametrize("name", RULES)
def test_nothing_to_do_changes_nothing(name: str) -> None:
    run = case(name, [3], [torch.float32], torch.float32)
    before = run.copy()
    for batch in (0, 4):
        empty = list(run.rest)
        empty[0], empty[1] = torch.zeros(batch, 3), torch.zeros(0, dtype=torch.int64)
        empty[2], empty[6] = torch.zeros(batch + 1, dtype=torch.int64), [batch]
        assert ops.update_rows_(*run[:2], *empty).tolist() == [0, -1, -1]
    empty[4:10] = [[]] * 6
    assert ops.update_rows_(*run[:2], *empty).tolist() == [0, -1, -1]
    assert_same_bits(run.state(), before.state())
    rows_U, grads_UD = sum_row_gradients(torch.zeros(0), torch.zeros(0, dtype=torch.int32), None, None, 5, 3, *[[]] * 5)
    assert rows_U.shape == (0,)
    assert grads_UD.shape == (0, 3)


def test_fp64_tables_are_served_by_the_reference() -> None:
    weight, grad = torch.ones(3, 2, dtype=torch.float64), torch.full((1, 2), 1e-12, dtype=torch.float64)
    ops.update_rows_(
        [weight], [], grad, torch.tensor([1]), None, None, [0], [0], [1], [0], [2], [0], "sgd",
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1], [0, 0], [0], [0],
    )  # fmt: skip
    assert weight[1].tolist() == [1.0 - 1e-12] * 2
    assert weight[0].tolist() == [1.0, 1.0]


def strided(values: Tensor) -> Tensor:
    """The same numbers, every other of a tensor twice as long; what lies between would be seen."""
    return torch.stack((values, torch.full_like(values, 3)), dim=1)[:, 0]


KINDS = {
    "fp64 weights": lambda ids, offsets, weights: (ids, offsets, weights.double()),
    "bf16 weights": lambda ids, offsets, weights: (ids, offsets, weights.bfloat16()),
    "fp16 weights": lambda ids, offsets, weights: (ids, offsets, weights.half()),
    "integer weights": lambda ids, offsets, weights: (ids, offsets, (weights * 3).long()),
    "strided weights": lambda ids, offsets, weights: (ids, offsets, strided(weights)),
    "one weight for all": lambda ids, offsets, weights: (ids, offsets, weights[:1].expand(ids.numel())),
    "int32 offsets": lambda ids, offsets, weights: (ids, offsets.int(), weights),
    "strided offsets": lambda ids, offsets, weights: (ids, strided(offsets), weights),
    "strided int32 offsets, no weights": lambda ids, offsets, weights: (ids, strided(offsets.int()), None),
    "strided ids": lambda ids, offsets, weights: (strided(ids), offsets, weights),
    "int32 ids": lambda ids, offsets, weights: (ids.int(), offsets, weights),
    "int16 ids": lambda ids, offsets, weights: (ids.short(), offsets, weights),
    "uint8 ids": lambda ids, offsets, weights: (strided(ids.byte()), offsets, None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooled", [True, False])
def test_ids_offsets_and_weights_of_any_type_and_stride_are_read_as_they_look(kind: str, pooled: bool) -> None:
    run = case("rowwise", [3, 16], [torch.float32] * 2, torch.float32)
    grad, ids, offsets, *layout = run.rest[:10]
    if not pooled:
        grad = torch.randn(ids.numel(), 3)
        run = Case(run.weights[:1], run.slots[:1], run.rest)
        layout = [None, [0], [0], [ids.numel()], [0], [3], [0]]
    new_ids, new_offsets, weights = KINDS[kind](ids, offsets, torch.randn(ids.numel()))
    plain = weights.float().contiguous() if weights is not None else None
    got, want = run.copy(), run.copy()
    count = len(run.weights)
    steps, seeds, row_offsets, column_offsets = run.rest[12:]
    tail = (*run.rest[10:12], steps[:count], seeds[: 2 * count], row_offsets[:count], column_offsets[:count])
    ops.update_rows_(*got[:2], grad, new_ids, new_offsets if pooled else None, weights, *layout[1:], *tail)
    update_rows_reference_(*want[:2], grad, ids, offsets if pooled else None, plain, *layout[1:], *tail)
    for a, b in zip(got.state(), want.state(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.equal(got.weights[0], run.weights[0])
    own = [values[:1] for values in layout[2:]]
    mine = sum_row_gradients(grad, new_ids, new_offsets if pooled else None, weights, 12, 3, *own)
    others = sum_row_gradients_reference(grad, ids, offsets if pooled else None, plain, 12, 3, *own)
    assert torch.equal(mine[0], others[0])
    torch.testing.assert_close(mine[1], others[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("turn", [lambda g: g.t().contiguous().t(), strided, lambda g: g[:1].expand_as(g)])
def test_gradients_of_any_type_and_stride_are_read_as_they_look(dtype: torch.dtype, turn: Any) -> None:
    run = case("adagrad", [3, 16], [torch.float32] * 2, dtype)
    grad = turn(run.rest[0])
    got, want = run.copy(), run.copy()
    ops.update_rows_(*got[:2], grad, *run.rest[1:])
    update_rows_reference_(*want[:2], grad.clone(memory_format=torch.contiguous_format), *run.rest[1:])
    for a, b in zip(got.state(), want.state(), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-6)
    layout = [values[1:] for values in run.rest[5:10]]
    rows_U, grads_UD = sum_row_gradients(grad, *run.rest[1:4], 12, 16, *layout)
    want_rows, want_grads = sum_row_gradients_reference(grad.contiguous(), *run.rest[1:4], 12, 16, *layout)
    assert torch.equal(rows_U, want_rows)
    assert grads_UD.dtype == want_grads.dtype
    torch.testing.assert_close(grads_UD, want_grads, rtol=1e-5, atol=1e-6)


def test_slots_that_the_library_does_not_read_are_updated_by_the_reference() -> None:
    plain = case("adam", [3, 16], [torch.float32] * 2, torch.float32)
    want = plain.copy()
    ops.update_rows_(*want[:2], *plain.rest)
    wide = Case(plain.weights, [s.double() for s in plain.slots], plain.rest).copy()
    spread = plain.copy()._replace(slots=[torch.stack((s, s), dim=-1)[..., 0] for s in plain.slots])
    for run in (wide, spread):
        ops.update_rows_(*run[:2], *run.rest)
        for a, b in zip(run.state(), want.state(), strict=True):
            torch.testing.assert_close(a.float(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("victim", ["weight", "slot"])
def test_a_table_whose_memory_was_freed_is_refused(victim: str) -> None:
    run = case("rowwise", [3, 16], [torch.float32] * 2, torch.float32)
    before = run.copy()
    (run.weights if victim == "weight" else run.slots)[1].untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"table number 1, or its optimizer state, has no memory\. Give it memory"):
        ops.update_rows_(*run[:2], *run.rest)
    assert_same_bits([run.weights[0], run.slots[0]], [before.weights[0], before.slots[0]])
    hyper = hyper_of("rowwise")
    rows, grads = torch.tensor([1]), torch.ones(1, 16)
    with pytest.raises(InputError, match="has no memory"):
        rule_apply_(
            run.weights[1], run.slots[1:], rows, grads, torch.ones(1, 1), 16, "rowwise_adagrad", hyper, 1, [0, 0], 0, 0
        )  # fmt: skip


def test_row_sums_that_lie_in_columns_are_read_like_those_in_rows() -> None:
    """Of a rule with two phases, three sums for each row."""
    rows, grads = torch.arange(5), torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    sums = torch.rand(5, 3, generator=torch.Generator().manual_seed(1)) + 1.0
    hyper = [0.1, 1.0, 0.0, 0.0, 1e-8, 0.9, 0.999, 0.0]
    found = []
    for scalars in (sums.T.contiguous(), sums.T, sums.T.repeat_interleave(2, 1)[:, ::2]):
        weight, slots = torch.ones(5, 8), [torch.zeros(5, 8), torch.zeros(5)]
        rule_apply_(weight, slots, rows, grads, scalars, 8, "partial_rowwise_lamb", hyper, 1, [0, 0], 0, 0)
        found.append((weight, *slots))
    assert not torch.equal(found[0][0], torch.ones(5, 8))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])
