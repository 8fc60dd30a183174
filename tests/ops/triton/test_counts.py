"""Update counts and learning rates on the device: a call made again, frozen numbers and all, is the next step."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.triton.gates import Gate, compiled, nightly
from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_parts import PHASED, parts_of, scalars_for
from tests.ops.triton.test_update import RULES, Call, pooled, single
from tests.ops.triton.update_kernels import rule_apply_to_tables_, rule_partials_of_tables, update_rows_
from tests.ops.update_ops import (
    rule_apply_to_tables_reference_,
    rule_partials_of_tables_reference,
    update_rows_reference_,
)
from tilerec.errors import InputError
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.calls import RuleTables
from tilerec.ops.update.rules import make_rule
from tilerec.ops.update.triton import rules
from tilerec.ops.update.triton.counts import PACES, pace_table, paces_on_device
from tilerec.ops.update.triton.rules import prepare_rule

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def counts_of(*values: int) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


def with_lr(hyper: list[float], lr: float) -> list[float]:
    return [lr, *hyper[1:]]


ALL = [name for name in RULES if name != "store"]
NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"
# Without the nightly variants: every rule once.
NAMES = ALL if NIGHTLY else [
    name for name in ALL if name not in ("sgd-momentum", "sgd-nesterov-scaled", "rowwise-none", "rowwise-l2")
]  # fmt: skip


def _tables(counts: list[Tensor], lr: Tensor | None = None) -> RuleTables:
    return RuleTables([], [], "", [], [], [], [], [], None, counts, lr)


@pytest.mark.parametrize("name", NAMES)
def test_the_device_makes_the_bits_of_the_hosts_paces(name: str) -> None:
    rule, hyper, _ = RULES[name]
    before = [0, 1, 2, 9, 99, 1000, 12345, 10**6, 2**31 - 3]
    for lr, rate in ((0.1, torch.float64), (0.00037, torch.float32), (3.0, None)):
        tensor = None if rate is None else torch.tensor(lr, dtype=rate)
        value = lr if tensor is None else float(tensor)
        counts = counts_of(*before)
        frozen = with_lr(hyper, lr if tensor is None else 7.0)
        told = paces_on_device(prepare_rule(rule, frozen), _tables(counts, tensor), torch.device("cpu"), True)
        want = pace_table(prepare_rule(rule, with_lr(hyper, value)), [n + 1 for n in before], torch.device("cpu"))
        # Where a rule has no learning rate among its numbers (Adagrad's is in e0), nobody reads h0.
        read = [k for k in range(PACES) if name != "adagrad" or k != 3]
        assert torch.equal(told.view(-1, PACES)[:, read], want.view(-1, PACES)[:, read])
        assert [int(c) for c in counts] == [n + 1 for n in before]


def test_more_tables_than_a_program_takes() -> None:
    made = prepare_rule(*RULES["adam"][:2])
    counts = counts_of(*range(70))
    told = paces_on_device(made, _tables(counts), torch.device("cpu"), True).view(-1, PACES)
    assert told[:, 0].tolist() == [int(c) for c in counts] == list(range(1, 71))
    e0 = [struct.unpack("f", struct.pack("i", bits))[0] for bits in told[:, 1].tolist()]
    assert e0 == pytest.approx([0.1 / (1 - 0.9 ** (t + 1)) for t in range(70)], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)], ids=str)
def test_the_same_call_again_is_the_next_step(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:  # fmt: skip
    """What a replay is: nothing of the host changes, the learning rate is filled by a schedule."""
    if not NIGHTLY and dtypes[0] != dtypes[1]:
        pytest.skip("two types, so twice the launches: nightly")
    rule, hyper, _ = RULES[name]
    weights = [torch.randn(7, 4).to(dtypes[0]), torch.randn(5, 3).to(dtypes[1])]
    record = pooled([4, 3], [2, 1, 1, 0], 5, 2)
    call = Call(weights, RULES[name], record)
    rest = ([5, 6] * 2, [2**33] * 2, [0] * 2)
    ours, slots = [w.clone() for w in weights], [s.clone() for s in call.slots]
    theirs, their_slots = [w.clone() for w in weights], [s.clone() for s in call.slots]
    counts, lr = counts_of(0, 4), torch.tensor(0.0, dtype=torch.float64)
    frozen = (ours, slots, *record, rule, with_lr(hyper, 1e9), [], *rest, None, counts, lr)
    for step, rate in enumerate((0.1, 0.3)):
        lr.fill_(rate)
        update_rows_(*frozen)
        update_rows_(theirs, their_slots, *record, rule, with_lr(hyper, rate), [step + 1, step + 5], *rest)
        for a, b in zip((*ours, *slots), (*theirs, *their_slots), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert [int(c) for c in counts] == [2, 6]


def test_counts_without_a_rate_take_the_rules_own() -> None:
    weights = [torch.ones(4, 4), torch.ones(4, 4)]
    record = single(torch.tensor([1, 1]), torch.ones(2, 4))
    counts = counts_of(0, 3)
    hyper = [0.5, 1.0, 0.0, 0.0, 1e-8, 1.0]  # Adagrad with lr_decay 1
    slots = [torch.zeros(4, 4), torch.zeros(4, 4)]
    update_rows_(weights, slots, *record, "adagrad", hyper, [], [0] * 4, [0] * 2, [0] * 2, None, counts)
    torch.testing.assert_close(weights[0][1], torch.full((4,), 0.5))
    assert bool((weights[1] == 1).all())
    assert [int(c) for c in counts] == [1, 4], "tables of a pass are counted, whether or not it has rows of them"
    update_rows_(weights, slots, *record, "adagrad", hyper, [], [0] * 4, [0] * 2, [0] * 2, None, counts)
    torch.testing.assert_close(weights[0][1], torch.full((4,), 0.5 - 0.25 / 2**0.5))


def test_a_pass_without_ids_is_counted() -> None:
    counts, weight = counts_of(3), torch.ones(4, 4)
    for op in (update_rows_, update_rows_reference_):
        record = single(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
        op([weight], [], *record, *RULES["sgd"][:2], [], [0] * 2, [0], [0], None, counts)
    assert int(counts[0]) == 5
    assert bool((weight == 1).all())


@pytest.mark.parametrize("name", [name for name in PHASED if name in NAMES])
def test_parts_read_the_count_of_the_update_to_come_and_applying_counts_it(name: str) -> None:
    """Step after step the same calls; sums of parts with the references' bits, by numbers of the host."""
    rule, hyper, _ = RULES[name]
    widths, offsets, dims = [9, 13], [8, 3], [37, 37]
    parts, made = parts_of(name, offsets, widths, torch.bfloat16), make_rule(rule, hyper)
    theirs = {k: [x.clone() for x in v] for k, v in parts.items() if k != "offsets"}
    counts, lr = counts_of(1, 2), torch.tensor(0.0, dtype=torch.float64)
    for step, rate in enumerate((0.1, 0.3)):
        lr.fill_(rate)
        host, steps = with_lr(hyper, rate), [step + 2, step + 3]
        for phase in range(made.phases):
            scalars = scalars_for(parts, sum(made.sums(p) for p in range(phase)))
            rest: tuple[Any, ...] = (phase, dims, True, phase == 0, offsets, rule)
            got = rule_partials_of_tables(*_given(parts), scalars, *rest, with_lr(hyper, 1e9), [], counts, lr)
            want = rule_partials_of_tables(*_given(theirs), scalars, *rest, host, steps)
            assert torch.equal(got, want)
            torch.testing.assert_close(
                rule_partials_of_tables_reference(*_given(parts), scalars, *rest, hyper, [], counts, lr), want
            )
        assert [int(c) for c in counts] == [step + 1, step + 2], "nothing is updated yet"
        scalars = scalars_for(parts, sum(made.sums(p) for p in range(made.phases)))
        places = ([1, 2, 3, 4], [0, 0], offsets)
        rule_apply_to_tables_(*_given(parts), scalars, dims, rule, with_lr(hyper, 1e9), [], *places, None, counts, lr)
        rule_apply_to_tables_(*_given(theirs), scalars, dims, rule, host, steps, *places)
        for a, b in zip((*parts["weights"], *parts["slots"]), (*theirs["weights"], *theirs["slots"]), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert [int(c) for c in counts] == steps
    rule_apply_to_tables_reference_(*_given(theirs), scalars, dims, rule, hyper, [], *places, None, counts, lr)
    assert [int(c) for c in counts] == [4, 5]


def _given(parts: dict[str, list[Tensor]]) -> list[list[Tensor]]:
    return [parts[k] for k in ("weights", "slots", "rows", "grads")]


def test_counts_that_are_none_are_refused_with_the_references_words() -> None:
    good, lr = counts_of(1), torch.tensor(0.1)
    bad: list[tuple[list[int], Any, Any, str]] = [
        ([1], good, None, r"got 1 steps and 1 counts"),
        ([1], None, lr, "lr as a tensor without counts"),
        ([], counts_of(1, 2), None, "got 2 counts for 1 tables"),
        ([], [torch.tensor(1.0)], None, r"has shape \[\] and type torch.float32; expected int64"),
        ([], [torch.tensor([1])], None, r"has shape \[1\] and type torch.int64"),
        ([], good, torch.tensor(1), "lr has shape"),
        ([], good, torch.ones(1), r"lr has shape \[1\]"),
    ]
    record = single(torch.tensor([1]), torch.ones(1, 4))
    for steps, counts, rate, words in bad:
        for op in (update_rows_, update_rows_reference_, torch.ops.tilerec.update_rows_):
            weight = torch.ones(3, 4)
            with pytest.raises(InputError, match=words):
                op([weight], [], *record, *RULES["sgd"][:2], steps, [0, 0], [0], [0], None, counts, rate)
            assert bool((weight == 1).all())
    assert int(good[0]) == 1


def gate(name: str, rate: str) -> Gate:
    made = prepare_rule(*RULES[name][:2])
    names = {id(value): key for key, value in vars(rules).items()}
    return Gate(
        f"{name} {rate}",
        "tilerec.ops.update.triton.counts:advance_counts",
        {
            **dict.fromkeys(["counts", "places", "numbers", "paces"], "*i64"),
            "lr": f"*{rate}",
            "tables": "i32",
        },
        {
            "RULE": f"tilerec.ops.update.triton.rules:{names[id(made.bundle.on_device)]}",
            "ROW_STEP": made.row_step,
            "RATED": True,
            "ADVANCE": True,
            "BLOCK": 32,
        },
        options={"num_warps": 1, "enable_fp_fusion": False},
    )


@nightly
def test_compiled_paces_are_rounded_operation_by_operation_in_double() -> None:
    """No joined multiply and add, no approximate division or root: the bits of the host."""
    chosen = [(name, "fp64") for name in NAMES] if NIGHTLY else [("adam", "fp32")]
    for name, kernel in compiled([gate(name, rate) for name, rate in chosen]).items():
        rule = name.split()[0]
        assert kernel.count("fma.", "div.", "sqrt.") == kernel.count("div.rn.f64", "sqrt.rn.f64"), (
            name,
            kernel,
        )
        assert kernel.count("div.rn.f64") == int(rule in ("adam", "adagrad")), (name, kernel)
        assert kernel.count("sqrt.rn.f64") == int(rule == "adam"), (name, kernel)
        assert kernel.spilled == 0, (name, kernel)
