"""`update_rows_` by Triton's kernels against its reference: every rule, every kind of record, runs of all lengths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.triton.gates import ROOT, Gate, compiled
from tests.ops.triton.interpreter import quick
from tests.ops.triton.update_kernels import update_rows_
from tests.ops.update_ops import update_rows_reference_
from tilerec.errors import ConfigError, InputError
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.triton import backend as update
from tilerec.ops.update.triton import launch as update_launch
from tilerec.ops.update.triton import rules, sort
from tilerec.ops.update.triton.launch import registers, tile_rows
from tilerec.ops.update.triton.rules import prepare_rule

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")

COMMON = [0.1, 1.0, 0.05, 1.0]  # lr, grad_scale, weight_decay, stochastic_rounding
ELEMENT, ROW = "element", "row"
RULES: dict[str, tuple[str, list[float], tuple[str, ...]]] = {
    "store": ("store", [], ()),
    "sgd": ("sgd", [*COMMON, 0.0, 0.0], ()),
    "sgd-momentum": ("sgd", [*COMMON, 0.9, 0.0], (ELEMENT,)),
    "sgd-nesterov-scaled": ("sgd", [0.1, 8.0, 0.0, 1.0, 0.9, 1.0], (ELEMENT,)),
    "adagrad": ("adagrad", [*COMMON, 1e-8, 0.01], (ELEMENT,)),
    "rowwise-none": ("rowwise_adagrad", [*COMMON, 1e-8, 0.0, 0.0], (ROW,)),
    "rowwise-l2": ("rowwise_adagrad", [*COMMON, 1e-8, 1.0, 0.0], (ROW,)),
    "rowwise-decoupled-maxnorm": ("rowwise_adagrad", [*COMMON, 1e-8, 2.0, 0.7], (ROW,)),
    "adam": ("adam", [*COMMON, 1e-8, 0.9, 0.999, 0.0, 0.0], (ELEMENT, ELEMENT)),
    "adamw-row-step": ("adam", [*COMMON, 1e-8, 0.9, 0.999, 1.0, 1.0], (ELEMENT, ELEMENT, ROW)),
    "partial-adam": ("partial_rowwise_adam", [*COMMON, 1e-8, 0.9, 0.999, 0.0], (ELEMENT, ROW)),
    "lamb": ("lamb", [*COMMON, 1e-8, 0.9, 0.999, 0.0], (ELEMENT, ELEMENT)),
    "partial-lamb-row-step": ("partial_rowwise_lamb", [*COMMON, 1e-8, 0.9, 0.999, 1.0], (ELEMENT, ROW, ROW)),
    "lars": ("lars_sgd", [*COMMON, 0.9, 0.02], (ELEMENT,)),
}
SGD = RULES["sgd"]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def slots_for(kinds: Sequence[str], rows: int, dim: int) -> list[Tensor]:
    made = [torch.rand(rows, dim) if kind == ELEMENT else torch.rand(rows) for kind in kinds]
    if len(kinds) == 3:  # the third slot counts a row's updates
        made[2] = torch.randint(0, 5, (rows,)).float()
    return made


class Call:
    """A call of the op: tables, slots, record and rule; made twice, the kernels against the reference."""

    def __init__(
        self, weights: Sequence[Tensor], rule: tuple[str, list[float], tuple[str, ...]], record: tuple[Any, ...],
        steps: Sequence[int] | None = None, column_offsets: Sequence[int] | None = None, names: Any = None,
    ) -> None:  # fmt: skip
        count = len(weights)
        self.weights, (self.rule, self.hyper, self.kinds) = list(weights), rule
        self.slots = [s for w in weights for s in slots_for(self.kinds, *w.shape)]
        self.record = record
        self.rest = (
            self.rule, self.hyper, list(steps or [3] * count), [5, 6] * count, [2**33] * count,
            list(column_offsets or [0] * count), names,
        )  # fmt: skip

    def run(self, function: Any) -> tuple[list[int], list[Tensor], list[Tensor]]:
        weights, slots = [w.clone() for w in self.weights], [s.clone() for s in self.slots]
        told = function(weights, slots, *self.record, *self.rest)
        return told.tolist(), weights, slots

    def check(self, rtol: float = 3e-6, twice: bool = False) -> None:
        """Equal to the reference; stochastic rounding draws the same words. Twice: a second run has the same bits."""
        told, weights, slots = self.run(update_rows_)
        want_told, want_weights, want_slots = self.run(update_rows_reference_)
        assert told == want_told
        for a, b in zip(slots, want_slots, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7, equal_nan=True)
        units = {
            torch.float32: rtol,
            torch.bfloat16: 2**-7,
            torch.float16: 2**-10,
            torch.float8_e4m3fn: 0.125,
        }
        for a, b in zip(weights, want_weights, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=units[a.dtype], atol=2e-6, equal_nan=True)
            if a.dtype != torch.float32 and a.numel():
                same = (a == b) | (a.isnan() & b.isnan()) if a.dtype != torch.float8_e4m3fn else a.float() == b.float()
                assert (~same).float().mean() < 0.02
        again = self.run(update_rows_) if twice else (told, weights, slots)
        for a, b in zip((*weights, *slots), (*again[1], *again[2]), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def pooled(
    dims: Sequence[int], lengths: Sequence[int], rows: int, batch: int, dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64, weighted: bool = False, means: Sequence[int] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Feature f reads table f with the bags of key f."""
    features = len(dims)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    count = int(offsets[-1])
    return (
        torch.randn(batch, sum(dims)).to(dtype), torch.randint(0, rows, (count,)).to(index), offsets.to(index),
        torch.rand(count) if weighted else None, list(range(features)), [f * batch for f in range(features)],
        [batch] * features, [sum(dims[:f]) for f in range(features)], [sum(dims)] * features,
        list(means or [0] * features),
    )  # fmt: skip


def single(ids: Tensor, grad: Tensor) -> tuple[Any, ...]:
    """One table; every id is its own bag."""
    n, dim = grad.shape
    return grad, ids, None, None, [0], [0], [n], [0], [dim], [0]


EVERY_RULE = [(name, dtype) for name in RULES for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*EVERY_RULE, *[("sgd", t) for t in (torch.float16, torch.float8_e4m3fn)], ("adam", torch.float8_e4m3fn)],
    ids=str,
)
def test_every_rule_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Mixed dims, tables at different update counts, means, a table that begins inside a group of 4 columns."""
    dims = [1, 8, 35]
    weights = [torch.randn(9, d).to(dtype) for d in dims]
    Call(weights, RULES[name], pooled(dims, [2, 0, 5, 1] * 3, 9, 4, means=[0, 1, 0]), [3, 1, 7], [0, 4, 2]).check(
        twice=name in ("rowwise-l2", "adam")
    )


@pytest.mark.parametrize("dim", [2, 64, 257, 2048])
@pytest.mark.parametrize("name", ["rowwise-l2", "adam"])
def test_rows_of_any_width_are_updated_whole(name: str, dim: int) -> None:
    Call([torch.randn(5, dim)], RULES[name], pooled([dim], [2, 3], 5, 2)).check(rtol=1e-5)


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_records_of_all_types(grad: torch.dtype, weighted: bool, index: torch.dtype) -> None:
    record = pooled([4, 12], [3, 0, 1, 2, 2, 7], 6, 3, grad, index, weighted, [1, 0])
    Call([torch.randn(6, 4), torch.randn(6, 12)], SGD, record).check()


def test_tables_of_several_types_in_one_call() -> None:
    dims = [8, 8, 16, 3]
    types = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float16]
    weights = [torch.randn(7, d).to(t) for d, t in zip(dims, types, strict=True)]
    Call(weights, RULES["adam"], pooled(dims, [1, 2, 0] * 4, 7, 3)).check()


def test_variable_batches() -> None:
    """Key 0 has 3 bags, key 1 has 1, key 2 none; gradients lie feature after feature."""
    offsets = torch.tensor([0, 2, 2, 5, 9])
    grad = torch.randn(3 * 4 + 1 * 8)
    record = (
        grad, torch.randint(0, 5, (9,)), offsets, None, [0, 1, 0], [0, 3, 4], [3, 1, 0], [0, 12, 20], [4, 8, 4],
        [0, 1, 0],
    )  # fmt: skip
    Call([torch.randn(5, 4), torch.randn(5, 8)], RULES["rowwise-none"], record).check()


def test_features_that_share_a_key_and_keys_that_nobody_reads() -> None:
    """Tables 0 and 1 read key 1, table 0 again key 3 before it; keys 0 and 2 are for others."""
    offsets = torch.tensor([0, 2, 4, 5, 5, 8, 9, 9, 12])
    grad = torch.randn(2, 12)
    record = (
        grad, torch.randint(0, 4, (12,)), offsets, torch.rand(12), [0, 0, 1], [6, 2, 2], [2, 2, 2], [0, 4, 8],
        [12, 12, 12], [0, 1, 0],
    )  # fmt: skip
    Call([torch.randn(4, 4), torch.randn(4, 4)], SGD, record).check()


def test_a_sum_is_in_the_order_of_features_then_positions() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1: feature 0 reads the later bag."""
    record = (
        torch.tensor([[1e8, 1.0], [-1e8, 0.0]]), torch.tensor([0, 0, 0, 0]), torch.tensor([0, 1, 2, 3, 4]), None,
        [0, 0], [2, 0], [2, 2], [0, 1], [2, 2], [0, 0],
    )  # fmt: skip
    weight = torch.zeros(1, 1)
    update_rows_([weight], [], *record, "store", [], [0], [0, 0], [0], [0])
    assert weight.item() == 1.0


@pytest.mark.parametrize(("head", "run"), [(3, 1000), (120, 300), (5, 123), (1, 127), (0, 256), (127, 129)])
def test_long_runs_are_summed_in_chunks(head: int, run: int) -> None:
    """One row `run` times, between `head` rows before and 40 behind: chunks of 128, whole and cut."""
    ids = torch.cat((torch.randint(0, 4, (head,)), torch.full((run,), 4), torch.randint(5, 9, (40,))))
    ids = ids[torch.randperm(ids.numel())]
    Call([torch.randn(9, 3)], SGD, single(ids, torch.randn(ids.numel(), 3))).check(3e-5, twice=run == 300)


@pytest.mark.parametrize(("head", "run"), [(0, 80), (3, 77), (33, 100)])
def test_very_long_runs_are_summed_in_super_chunks(head: int, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of 16 and super-chunks of 2 chunks, a run of 80 has two of these, a chunk and a rest."""
    for module in (sort, update_launch):
        monkeypatch.setattr(module, "CHUNK", 16)
        monkeypatch.setattr(module, "CHUNKS", 2)
    ids = torch.cat((torch.zeros(head), torch.full((run,), 1), torch.full((9,), 2), torch.full((2,), 3))).long()
    grad = torch.randint(-9, 9, (ids.numel(), 2)).float()  # whole numbers: every order gives one sum
    weight, want = torch.zeros(4, 2), torch.zeros(4, 2)
    update_rows_([weight], [], *single(ids, grad), "store", [], [0], [0, 0], [0], [0])
    want.index_add_(0, ids, grad)
    assert torch.equal(weight, want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_left_alone_and_the_first_is_told(bad: float) -> None:
    dims = [3, 4]
    record = pooled(dims, [1] * 8, 4, 4)
    record[1].copy_(torch.tensor([3, 2, 1, 0, 3, 2, 2, 1]))
    record[0][1, 0] = record[0][0, 2] = record[0][2, 5] = bad
    call = Call([torch.ones(4, 3), torch.ones(4, 4)], RULES["adam"], record)
    call.check()
    assert call.run(update_rows_)[0] == [3, 0, 2]


def test_rows_go_by_their_names() -> None:
    names = [torch.tensor([2**34, 7, 5, 1]), torch.empty(0, dtype=torch.int64)]
    record = pooled([4, 4], [1] * 8, 4, 4)
    record[1].copy_(torch.tensor([0, 1, 2, 3] * 2))
    record[0][1, 1] = record[0][2, 1] = float("nan")
    weights = [torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()]
    call = Call(weights, SGD, record, names=names)
    call.check()
    assert call.run(update_rows_)[0] == [2, 0, 5]


def test_ids_that_are_no_rows_are_left_out() -> None:
    """Their lookup has told of them: the kernel must only not follow them."""
    ids = torch.tensor([1, -1, 5, 2**40, -(2**62), 1])
    weight, grad = torch.zeros(5, 2), torch.ones(6, 2)
    told = update_rows_([weight], [], *single(ids, grad), "store", [], [0], [0, 0], [0], [0])
    assert told.tolist() == [0, -1, -1]
    want = torch.zeros(5, 2)
    want[1] = 2
    assert torch.equal(weight, want)


def test_offsets_that_lie_are_not_followed() -> None:
    offsets = torch.tensor([-3, 7, 2, 99])
    weight = torch.zeros(5, 2)
    record = (torch.ones(3, 2), torch.tensor([1, 2, 3]), offsets, None, [0], [0], [3], [0], [2], [0])
    update_rows_([weight], [], *record, "store", [], [0], [0, 0], [0], [0])
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize(
    ("dims", "lengths", "rows", "batch"),
    [([4], [], 3, 0), ([4], [0, 0], 3, 2), ([], [], 3, 2), ([4, 2], [0, 2, 1, 0], 3, 2)],
    ids=["no bags", "no ids", "no features", "empty bags"],
)
def test_nothing_to_do_is_done(dims: list[int], lengths: list[int], rows: int, batch: int) -> None:
    Call([torch.randn(rows, d) for d in dims], SGD, pooled(dims, lengths, rows, batch)).check()


def test_tables_without_rows_or_columns_stand_by() -> None:
    weights = [torch.empty(0, 4), torch.randn(3, 4), torch.empty(0, 2)]
    record = pooled([4, 4, 2], [0, 0, 2, 1, 0, 0], 3, 2)
    Call(weights, RULES["adam"], record).check()


def test_strided_input_is_read_as_it_stands() -> None:
    record = pooled([4], [2, 1, 3], 5, 3, weighted=True)
    wide = [torch.stack((x, x), dim=-1)[..., 0] for x in record[:4]]
    assert not any(x.is_contiguous() for x in wide)
    Call([torch.randn(5, 4)], SGD, (*wide, *record[4:])).check()


def test_fp64_tables_go_to_the_reference() -> None:
    weight = torch.randn(4, 3, dtype=torch.float64)
    want, record = weight.clone(), single(torch.tensor([1, 1, 2]), torch.randn(3, 3, dtype=torch.float64))
    rest = ("sgd", SGD[1], [1], [0, 0], [0], [0])
    update_rows_([weight], [], *record, *rest)
    update_rows_reference_([want], [], *record, *rest)
    assert torch.equal(weight, want)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_five_steps_follow_a_float64_oracle(name: str) -> None:
    rows, dim = 6, 5
    w, slots = torch.randn(rows, dim), [torch.zeros(rows, dim) for _ in RULES[name][2]]
    rule, hyper, _ = RULES[name]
    lr, _, wd, _, eps, *tail = hyper
    w64, s64 = w.double(), [s.double() for s in slots]
    for t in range(1, 6):
        ids, grad = torch.randint(0, rows, (7,)), torch.randn(7, dim)
        update_rows_([w], slots, *single(ids, grad), rule, hyper, [t], [0, 0], [0], [0])
        for row in ids.unique().tolist():
            g = grad[ids == row].double().sum(0) + wd * w64[row]
            if name == "adagrad":
                s64[0][row] += g * g
                w64[row] -= lr / (1 + (t - 1) * tail[0]) * g / (s64[0][row].sqrt() + eps)
            else:
                b1, b2 = tail[:2]
                s64[0][row] = b1 * s64[0][row] + (1 - b1) * g
                s64[1][row] = b2 * s64[1][row] + (1 - b2) * g * g
                hat = s64[0][row] / (1 - b1**t), s64[1][row] / (1 - b2**t)
                w64[row] -= lr * hat[0] / (hat[1].sqrt() + eps)
    torch.testing.assert_close(w.double(), w64, rtol=1e-5, atol=1e-6)
    for a, b in zip(slots, s64, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_refused_with_the_references_words() -> None:
    good = single(torch.tensor([0, 1]), torch.ones(2, 3))
    rest = ([1], [0, 0], [0], [0])
    bad: list[tuple[Any, ...]] = [
        ([torch.ones(2, 3)], [torch.ones(2)], good, "sgd", SGD[1]),
        ([torch.ones(2, 4)], [], good, "sgd", SGD[1]),
        ([torch.ones(2, 3)], [], (good[0][:1], *good[1:]), "sgd", SGD[1]),
        ([torch.ones(2, 3)], [], (good[0], good[1].float(), *good[2:]), "sgd", SGD[1]),
        ([torch.ones(2, 3)], [], good, "sgd", SGD[1][:3]),
        ([torch.ones(2, 3)], [], good, "grad", SGD[1]),
    ]
    for weights, slots, record, rule, hyper in bad:
        words = []
        for function in (update_rows_, update_rows_reference_):
            with pytest.raises((InputError, ConfigError)) as error:
                function(weights, slots, *record, rule, hyper, *rest)
            words.append(str(error.value))
        assert words[0] == words[1]


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("adam", torch.float32, "bias correction"), ("sgd", torch.bfloat16, "stochastic rounding"),
        ("sgd", torch.float32, ""),
    ],
)  # fmt: skip
def test_a_captured_update_by_a_count_of_the_host_is_refused(
    name: str, dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "capturing", lambda: True)
    call = Call([torch.ones(5, 4).to(dtype)], RULES[name], single(torch.tensor([1, 2]), torch.ones(2, 4)))
    if words:
        with pytest.raises(ConfigError, match=f"{words}.* depends on it. Attach .*'capturable': True"):
            call.run(update_rows_)
    else:
        call.check()


def test_tables_that_lie_where_others_lay_are_read_as_they_are() -> None:
    """The same memory, and even the same tensor, of another shape; and the same table through another tensor."""
    memory = torch.zeros(24)
    weight = memory.view(4, 6)

    def add(target: Tensor, row: int) -> None:
        width = target.shape[1]
        update_rows_(
            [target], [], *single(torch.tensor([row]), torch.ones(1, width)), "sgd",
            [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1], [0, 0], [0], [0],
        )  # fmt: skip

    add(weight, 1)
    add(memory.view(6, 4), 0)
    weight.data = memory.view(8, 3)
    add(weight, 7)
    add(memory.view(8, 3), 7)
    assert memory.tolist() == [-1.0] * 4 + [0.0] * 2 + [-1.0] * 6 + [0.0] * 9 + [-2.0] * 3


def test_leaves_that_got_another_type_where_they_lay_are_read_as_they_are() -> None:
    """The very same parameters, whose memory was given up, and given to them again in bfloat16."""
    memory = torch.zeros(2, 512, dtype=torch.uint8)
    leaves = [torch.nn.Parameter(torch.empty(0), requires_grad=False) for _ in range(2)]
    record = pooled([4, 4], [1, 2, 1, 0], 8, 2)
    for dtype in (torch.float32, torch.bfloat16):
        memory.zero_()
        for leaf, own in zip(leaves, memory, strict=True):
            leaf.data = own.view(dtype)[:32].view(8, 4)
        other = [torch.zeros(8, 4, dtype=dtype) for _ in leaves]
        for weights in (leaves, other):
            update_rows_(weights, [], *record, "sgd", RULES["sgd"][1], [1, 1], [5, 6] * 2, [0, 0], [0, 0])
        for leaf, want in zip(leaves, other, strict=True):
            assert torch.equal(leaf, want)
            assert want.any()


def test_an_update_that_found_no_memory_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("none left")

    count, weight = torch.zeros((), dtype=torch.int64), torch.zeros(3, 4)
    record = single(torch.tensor([1]), torch.ones(1, 4))
    call = [weight], [], *record, "sgd", RULES["sgd"][1], [], [0, 0], [0], [0], None, [count], None
    with monkeypatch.context() as short:
        short.setattr(update, "sort_occurrences", full)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            update_rows_(*call)
    assert count.item() == 0
    update_rows_(*call)
    assert count.item() == 1
    nothing = single(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    update_rows_([weight], [], *nothing, *call[12:])
    assert count.item() == 2


def test_whole_modules_train_as_on_the_other_backend() -> None:
    """`whole_module.py`, in a process of its own: it takes the CPU's ops over."""
    script = Path(__file__).parent / "whole_module.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 20


def gate(rule: str, hyper: list[float], dtype: str, dim: int = 128) -> Gate:
    """The run kernel for rows and gradients of one type, all aligned."""
    made, size = prepare_rule(rule, hyper), {"fp32": 4, "bf16": 2}[dtype]
    columns = max(4, 1 << (dim - 1).bit_length())
    rows = tile_rows(columns, made.kinds.count(1))
    names = {id(value): name for name, value in vars(rules).items()}
    constants = {
        "TERMS": f"tilerec.ops.update.triton.rules:{names[id(made.bundle.terms)]}",
        "APPLY": f"tilerec.ops.update.triton.rules:{names[id(made.bundle.apply)]}",
        "MODE": made.mode, "WD": made.decays, "ROW_STEP": made.row_step, "SUMS0": made.sums[0], "SUMS1": made.sums[1],
        "KIND0": made.kinds[0], "KIND1": made.kinds[1], "KIND2": made.kinds[2], "KEEPS": True, "READS": True,
        "GRAD_SCALED": False, "SCALED": False, "ROUND": int(dtype != "fp32"), "PER_TABLE": False, "NAMED": False,
        "COMPACT": False, "STEPS": 5, "CHUNK": 128, "CHUNKS": 64, "PITCH": columns, "ROWS": rows,
        "COLUMNS": columns, "VEC": 16 // size, "VEC_D": 16, "VEC_G": 16 // size, "VEC_S": 4,
    }  # fmt: skip
    signature = {
        "keys": "*i32", "places": "*i32", "scales": "*fp32", "grad": f"*{dtype}",
        "weights": f"*{dtype}", "slot0": "*fp32", "slot1": "*fp32", "slot2": "*fp32", "partials": "*fp32",
        "supers": "*fp32", "meta": "*i64", "paces": "*i64", "names": "*i64", "status": "*i64", "runs": "*i64",
        "rows_out": "*i64", **dict.fromkeys(["grad_scale", "e0", "e1", *[f"h{i}" for i in range(8)]], "fp32"),
        **dict.fromkeys(["total", "span", "levels", "tables", "first_key", "end_key", "step"], "i32"),
    }  # fmt: skip
    options = {"num_warps": sort.warps_of(rows * columns), "enable_fp_fusion": False, **registers(columns)}
    name = f"{rule} {dtype}"
    return Gate(name, "tilerec.ops.update.triton.apply_runs:update_runs", signature, constants, options=options)


def test_compiled_kernels_read_and_write_rows_16_bytes_at_a_time() -> None:
    """And leave room for 21 warps: on an H100 these are worth more than the spills that they cost."""
    plain = [0.1, 1.0, 0.0, 1.0]
    rules_of = {
        "sgd": [*plain, 0.0, 0.0],
        "rowwise_adagrad": [*plain, 1e-8, 0.0, 0.0],
        "adam": [*plain, 1e-8, 0.9, 0.999, 0.0, 0.0],
    }
    nightly = os.environ.get("TILEREC_NIGHTLY") == "1"
    always = {("sgd", "bf16"), ("rowwise_adagrad", "fp32"), ("adam", "fp32")}
    chosen = [(rule, dtype) for rule in rules_of for dtype in ("fp32", "bf16")]
    gates = [gate(rule, rules_of[rule], dtype) for rule, dtype in chosen if nightly or (rule, dtype) in always]
    for name, kernel in compiled(gates).items():
        rows, rule, narrow = (2 if "adam " in name else 4), name.split()[0], name.endswith("bf16")
        lanes = 2 if narrow else 1  # rows that one instruction of a warp reads
        slots = 2 * rows if rule == "adam" else 0
        # Gradients of a tile, weights, slots; and sums of chunks and super-chunks, 8 at a time. The rows of a run that
        # goes on behind the span are read one by one, by the whole warp: 8 bytes a lane if they are narrow.
        stores = rows // lanes + slots
        assert kernel.count("st.global.v4.b32") == stores, (name, kernel)
        ahead = 8
        assert kernel.count("ld.global.v4.b32") == 2 * (rows // lanes) + slots + (2 + (not narrow)) * ahead, (
            name,
            kernel,
        )
        assert kernel.count("ld.global.v2.b32") == narrow * ahead, (name, kernel)
        assert kernel.count("st.global.v2.b32", "ld.global.b16", "st.global.b16") == 0, (name, kernel)
        assert kernel.spilled <= 200, (name, kernel)
        assert kernel.warps() >= 21, (name, kernel)
        assert kernel.shared <= 64, (name, kernel)
