"""The sanitizer finds what is wrong on purpose, and nothing in kernels that are right.

What is wrong is in kernels of this file, a constant away from what is right, and in the library's, made wrong from
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.ops.triton.hooks import SanitizerError
from tests.ops.triton.interpreter import quick
from tests.ops.triton.reasons import SAMPLE
from tests.ops.triton.sanitizer import Sanitizer, sanitized
from tilerec.errors import InputError
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(
    not library.status().interpreted, reason="kernels are compiled here: compute-sanitizer looks at those"
)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def passes(launch: Callable[[], Any], watch: Sanitizer | None = None) -> Sanitizer:
    with sanitized(watch) as used:
        launch()
    return used


def fails(kind: str, launch: Callable[[], Any], watch: Sanitizer | None = None) -> str:
    """What was found: of this kind only."""
    with sanitized(watch) as used, pytest.raises(SanitizerError) as error:
        launch()
    assert {found for _, found, _ in used.findings} == {kind}
    return str(error.value)


# ---------------------------------------------------------------------------------------------------- memory


@triton.jit
def copy(out, values, count, LOADS: tl.constexpr, STORES: tl.constexpr, BLOCK: tl.constexpr):
    """Right with LOADS and STORES 0: how many elements too many."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + n, mask=n - LOADS < count, other=0)
    tl.store(out + n, x, mask=n - STORES < count)


@pytest.mark.parametrize(("loads", "stores", "at"), [(1, 0, "read of values"), (0, 1, "write of out")])
def test_a_mask_that_is_one_too_long(loads: int, stores: int, at: str) -> None:
    """Also where the memory behind belongs to the same storage."""
    for room in (20, 30):
        out, values = torch.zeros(room)[:20], torch.arange(float(room))[:20]
        passes(lambda: copy[(3,)](out, values, 20, LOADS=0, STORES=0, BLOCK=8))  # noqa: B023
        assert torch.equal(out, values)
        told = fails("memory", lambda: copy[(3,)](out, values, 20, LOADS=loads, STORES=stores, BLOCK=8))  # noqa: B023
        assert at in told
        assert "test_sanitizer.py" in told
        assert "program (2, 0, 0): 1 of 5 addresses" in told
        assert "first 80 bytes" in told


def test_what_is_behind_is_not_written() -> None:
    memory = torch.zeros(30)
    fails("memory", lambda: copy[(3,)](memory[:20], torch.ones(20), 20, LOADS=0, STORES=4, BLOCK=8))
    assert not memory[20:].any()


@triton.jit
def count_up(counts, places, n, ATOMIC: tl.constexpr):
    at = tl.load(places + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(counts + at, 1)
    else:
        tl.store(counts + at, tl.load(counts + at) + 1)


def test_atomics_have_bounds_too() -> None:
    counts = torch.zeros(3, dtype=torch.int64)
    told = fails("memory", lambda: count_up[(2,)](counts, torch.tensor([2, 3]), 2, ATOMIC=True, num_warps=1))
    assert "atomic of counts" in told


@triton.jit
def far(base, out, distance):
    tl.store(out, tl.load(base + distance.to(tl.int64)))


def test_distances_lead_to_tensors_that_are_alive() -> None:
    base, out, others = torch.zeros(4), torch.zeros(1), [torch.full((4,), 7.0)]
    distance = (others[0].data_ptr() - base.data_ptr()) // 4
    roams = Sanitizer(roams={"far": ("base",)})
    told = fails("memory", lambda: far[(1,)](base, out, distance), roams)
    assert "in no tensor that the host knows the address of" in told
    passes(lambda: far[(1,)](base, out, (others[0].data_ptr() - base.data_ptr()) // 4), roams)
    assert out.item() == 7
    assert "belongs into ROAMS" in fails("memory", lambda: far[(1,)](base, out, distance))
    roams.findings.clear()
    others.clear()
    fails("memory", lambda: far[(1,)](base, out, distance), roams)


@triton.jit
def halves(out, values, n, OTHER: tl.constexpr):
    i = tl.arange(0, 8)
    x = tl.load(values + i, mask=i < n, other=0.0) if OTHER else tl.load(values + i, mask=i < n)
    tl.store(out, tl.sum(x, 0))


def test_what_a_mask_hides_has_no_value() -> None:
    out = torch.zeros(1)
    passes(lambda: halves[(1,)](out, torch.ones(5), 5, OTHER=True))
    assert out.item() == 5
    passes(lambda: halves[(1,)](out, torch.ones(5), 5, OTHER=False))
    assert out.isnan()


# ---------------------------------------------------------------------------------------------------- races


def test_two_programs_on_one_row() -> None:
    counts, apart, together = torch.zeros(3, dtype=torch.int64), torch.tensor([2, 0]), torch.tensor([1, 1])
    passes(lambda: count_up[(2,)](counts, apart, 2, ATOMIC=False, num_warps=1))
    passes(lambda: count_up[(2,)](counts, together, 2, ATOMIC=True, num_warps=1))
    told = fails("race", lambda: count_up[(2,)](counts, together, 2, ATOMIC=False, num_warps=1))
    assert "programs (0, 0, 0) and (1, 0, 0)" in told


@triton.jit
def flag(flags, value, PLAIN: tl.constexpr):
    if PLAIN and tl.program_id(0) == 1:
        tl.store(flags + 1, tl.load(flags))
    else:
        tl.store(flags, value)


def test_stores_of_one_value_need_a_reason() -> None:
    flags = torch.zeros(2, dtype=torch.int64)
    assert "the same value" in fails("race", lambda: flag[(3,)](flags, 5, PLAIN=False))
    reason = {("flag", "flags"): "all write 5"}
    passes(lambda: flag[(3,)](flags, 5, PLAIN=False), Sanitizer(shared=reason))
    # And none for who reads it meanwhile.
    told = fails("race", lambda: flag[(3,)](flags, 5, PLAIN=True), Sanitizer(shared=reason))
    assert "read of flags" in told


@triton.jit
def mixed_widths(bytes_, words):
    if tl.program_id(0) == 0:
        tl.store(words, 7)
    else:
        tl.store(bytes_ + 3, tl.full((), 1, tl.uint8))


def test_bytes_of_a_word_race_with_it() -> None:
    words = torch.zeros(2, dtype=torch.int32)
    fails("race", lambda: mixed_widths[(2,)](words.view(torch.uint8), words))
    passes(lambda: mixed_widths[(2,)](words.view(torch.uint8)[4:], words))


@triton.jit
def last_one(out, parts, count, MANY: tl.constexpr, LAST: tl.constexpr, SEM: tl.constexpr, BARRIERS: tl.constexpr):
    """Right with LAST = MANY: the program that finds all others done adds up what they wrote."""
    program, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, 8)
    tl.store(parts + (program * 8 + lanes), (program + lanes).to(tl.float32))
    if BARRIERS & 1:
        tl.debug_barrier()
    if tl.atomic_add(count, 1, sem=SEM) == LAST - 1:
        if BARRIERS & 2:
            tl.debug_barrier()
        total = tl.zeros((8,), tl.float32)
        for other in range(MANY):
            total += tl.load(parts + (other * 8 + lanes))
        tl.store(out + lanes, total)


@pytest.mark.parametrize(
    ("last", "sem", "barriers"),
    [
        (5, "relaxed", 3),
        (5, "release", 3),
        (5, "acquire", 3),
        (5, "acq_rel", 1),
        (5, "acq_rel", 2),
        (4, "acq_rel", 3),
    ],
)
def test_what_is_handed_over_is_no_race(last: int, sem: str, barriers: int) -> None:
    out, parts = torch.zeros(8), torch.zeros(40)

    def launch(last: int, sem: str, barriers: int) -> None:
        count = torch.zeros(1, dtype=torch.int64)
        last_one[(5,)](out, parts, count, MANY=5, LAST=last, SEM=sem, BARRIERS=barriers, num_warps=1)

    passes(lambda: launch(5, "acq_rel", 3))
    assert out.tolist() == [5 * i + 10 for i in range(8)]
    assert "read of parts" in fails("race", lambda: launch(last, sem, barriers))


@triton.jit
def lanes(out, EACH: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(out + i // 2, i // EACH)


def test_lanes_of_a_store_agree() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    passes(lambda: lanes[(1,)](out, EACH=2))
    fails("lanes", lambda: lanes[(1,)](out, EACH=1))


@triton.jit
def turned(out, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i)
    if BARRIER:
        tl.debug_barrier()
    x = tl.load(out + (BLOCK - 1 - i))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + i, x)


def test_threads_that_read_what_others_write_need_a_barrier() -> None:
    out = torch.zeros(256, dtype=torch.int32)
    passes(lambda: turned[(1,)](out, BARRIER=True, BLOCK=256, num_warps=4))
    assert out[0] == 255
    fails("hazard", lambda: turned[(1,)](out, BARRIER=False, BLOCK=256, num_warps=4))
    fails("hazard", lambda: turned[(1,)](out, BARRIER=False, BLOCK=256))  # 4 warps unless it says otherwise
    alone = passes(lambda: turned[(1,)](out, BARRIER=False, BLOCK=256, num_warps=1))
    assert any("then read of out" in line for line in alone.one_warp)


@triton.jit
def bump(out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(out + i) + 1)


def test_threads_see_what_they_wrote_themselves() -> None:
    """But what has fewer elements than there are threads is read by several warps, and written by one."""
    passes(lambda: bump[(1,)](torch.zeros(128), BLOCK=128, num_warps=4))
    fails("hazard", lambda: bump[(1,)](torch.zeros(16), BLOCK=16, num_warps=4))
    assert not passes(lambda: bump[(1,)](torch.zeros(16), BLOCK=16, num_warps=1)).one_warp


# ---------------------------------------------------------------------------------------------------- hints


@triton.jit
def hinted(out, values, starts, BY: tl.constexpr):
    i = tl.arange(0, 4)
    start = tl.multiple_of(tl.load(starts + tl.program_id(0)), BY)
    tl.store(out + tl.program_id(0).to(tl.int64) * 4 + i, tl.load(values + start + i))


def test_hints_that_lie() -> None:
    out, values = torch.zeros(8), torch.arange(20.0)
    passes(lambda: hinted[(2,)](out, values, torch.tensor([8, 16]), BY=4))
    told = fails("hint", lambda: hinted[(2,)](out, values, torch.tensor([8, 6]), BY=4))
    assert "multiple_of [4]" in told
    assert "of [6]" in told


@triton.jit
def hinted_lanes(out, values, starts, count):
    i = tl.arange(0, 4)
    start = tl.multiple_of(tl.load(starts + i), 4)
    tl.store(out + i, tl.load(values + start, mask=i < count, other=0.0))


def test_a_hint_says_nothing_of_lanes_that_nobody_wrote_but_no_access_may_use_them() -> None:
    out, values, starts = torch.zeros(4), torch.arange(20.0), torch.empty(4, dtype=torch.int64)
    starts[:2] = torch.tensor([8, 16])
    passes(lambda: hinted_lanes[(1,)](out, values, starts, 2))
    assert out.tolist() == [8.0, 16.0, 0.0, 0.0]
    fails("memory", lambda: hinted_lanes[(1,)](out, values, starts, 3))


@triton.jit
def contiguous(out, stride, CONSTANT: tl.constexpr):
    i = tl.arange(0, 8) * tl.cast(stride, tl.int64)
    i = tl.max_constancy(i, 4) if CONSTANT else tl.max_contiguous(i, 4)
    tl.store(out + tl.arange(0, 8), i)


@pytest.mark.parametrize(("constant", "right", "wrong"), [(False, 1, 2), (True, 0, 1)])
def test_lanes_that_do_not_follow_each_other(constant: bool, right: int, wrong: int) -> None:
    out = torch.zeros(8, dtype=torch.int32)
    passes(lambda: contiguous[(1,)](out, right, CONSTANT=constant))
    fails("hint", lambda: contiguous[(1,)](out, wrong, CONSTANT=constant))


# ---------------------------------------------------------------------------------------------------- numbers


@triton.jit
def products(out, a, b, WIDE: tl.constexpr):
    first = tl.load(a).to(tl.int64) if WIDE else tl.load(a)
    tl.store(out, (first * tl.load(b)) // 65536)


def test_products_that_wrap() -> None:
    out, a = torch.zeros(1, dtype=torch.int64), torch.tensor([2**20], dtype=torch.int32)
    passes(lambda: products[(1,)](out, a, a, WIDE=True))
    assert out.item() == 2**24
    assert "1099511627776" in fails("wrap", lambda: products[(1,)](out, a, a, WIDE=False))


@triton.jit
def numbers(out, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, i)


def test_products_that_would_wrap_in_a_larger_launch() -> None:
    out = torch.zeros(16, dtype=torch.int64)
    passes(lambda: numbers[(2,)](out, WIDE=True, BLOCK=8))
    told = fails("may wrap", lambda: numbers[(2,)](out, WIDE=False, BLOCK=8))
    assert "up to 2147483647 and 8" in told
    few = {("numbers", "program_id(0)"): 4096}
    passes(lambda: numbers[(2,)](out, WIDE=False, BLOCK=8), Sanitizer(most=few))


@triton.jit
def quotient(out, by, SHIFT: tl.constexpr):
    x = tl.full((), 100, tl.int32)
    tl.store(out, x >> by if SHIFT else x // by)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("shift", "good", "bad"), [(False, 3, 0), (True, 3, 32), (True, 3, -1)])
def test_divisions_by_zero_and_shifts_by_too_much(shift: bool, good: int, bad: int) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    passes(lambda: quotient[(1,)](out, good, SHIFT=shift))
    fails("divisor", lambda: quotient[(1,)](out, bad, SHIFT=shift))


# ---------------------------------------------------------------------------------------------------- order


@triton.jit
def queue(out, tail, SORTED: tl.constexpr):
    """No address has two programs; which has which is who came first."""
    place = tl.atomic_add(tail, 1)
    if SORTED:
        place = tl.program_id(0).to(tl.int64)
    tl.store(out + place, tl.program_id(0))


def test_results_that_depend_on_the_order_of_programs() -> None:
    out, tail = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    passes(lambda: queue[(8,)](out, tail, SORTED=True))
    tail.zero_()
    assert "leave other numbers in out" in fails("order", lambda: queue[(8,)](out, tail, SORTED=False))
    # The launch leaves what it leaves without the sanitizer.
    assert out.tolist() == list(range(8))
    assert tail.item() == 8


# ---------------------------------------------------------------------------------------------------- the library


def looked_up(dims: list[int]) -> Tensor:
    from tests.ops.triton.lookup_kernels import pooled_lookup

    tables = [torch.randn(5, dim) for dim in dims]
    ids, offsets = torch.tensor([0, 4, 1, 2, 2, 3]), torch.tensor([0, 2, 2, 3, 6])
    every = list(range(len(dims)))
    names = ",".join(f"f{f}@t{f}" for f in every)
    return pooled_lookup(
        tables, torch.zeros(0, dtype=torch.int64), ids, offsets, None, every, every, [0] * len(dims), [2],
        torch.float32, names,
    )[0]  # fmt: skip


def test_lookups_that_take_rows_for_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilerec.ops.lookup.triton import backend as lookup

    monkeypatch.setattr(lookup, "_STEPS", 2)
    passes(lambda: looked_up([6, 2]))
    right = lookup.layout_of

    def wrong(*args: Any, **named: Any) -> Any:
        layout = right(*args, **named)
        return replace(layout, families=tuple([replace(family, vec=4) for family in layout.families]))

    monkeypatch.setattr(lookup, "layout_of", wrong)
    assert "multiple_of [4]" in fails("hint", lambda: looked_up([6, 2]))


def test_hash_ops_with_many_programs_where_interpreted_ones_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that share flags and reports meet here only: elsewhere one program takes a whole batch."""
    from tests.ops.hash_pair import assign_call, resize_call
    from tilerec.ops.hash.state import empty_state
    from tilerec.ops.hash.triton import assign as hash_assign
    from tilerec.ops.hash.triton import find as hash_find
    from tilerec.ops.hash.triton import resize as hash_resize

    def assigned() -> list[Tensor]:
        state = empty_state(3, 4)
        used = [*state]
        entries = (torch.arange(14) % 9, None, None, None)
        got = hash_assign.zch_assign_each_(assign_call(*entries, *state, 0, 3, 4, 2, 1, 0, 0, 1.0, 0, 1, 1))
        moved = hash_resize.zch_resize(resize_call(*used[:6], 0, 3, 4, 6, 4, 2, 3, 0, 1.0))
        return [values.clone() for values in (*got, *used, *moved)]

    wanted = assigned()
    for module in (hash_assign, hash_find, hash_resize):
        monkeypatch.setattr(module, "blocks", lambda count, values, block: ((-(-count // 8),), 8), raising=False)
    got: list[list[Tensor]] = []
    passes(lambda: got.append(assigned()))
    for one, other in zip(got[0], wanted, strict=True):
        assert torch.equal(one, other)
    # Each reason that is given is needed.
    unexplained = Sanitizer(shared={})
    told = fails("race", assigned, unexplained)
    assert "write the same value" in told


def test_errors_of_input_are_those_of_the_host() -> None:
    """A kernel that tells of a bad id has done nothing wrong."""
    from tilerec.ops.hash.triton.backend import KERNELS

    state = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    with sanitized() as watch, pytest.raises(InputError):
        KERNELS["zch_find"](torch.arange(50), state[0], torch.zeros(4, dtype=torch.bool), 0, 16, 1, 1)
    assert watch.launches["find_kernel"] == 1


def test_the_sample_is_there() -> None:
    """What runs under the sanitizer in every run of the tests (`conftest.py`) has the names it is known by."""
    for file, names in SAMPLE.items():
        text = (Path(__file__).parent / file).read_text()
        for name in names:
            assert f"def {name}(" in text, f"{file} has no {name}: name another in SAMPLE"


def test_nothing_is_left_behind() -> None:
    from triton.runtime import interpreter

    owners = (torch.Tensor, interpreter, interpreter.InterpreterBuilder, interpreter.InterpretedFunction)
    before = [dict(vars(owner)) for owner in owners]
    passes(lambda: bump[(1,)](torch.zeros(16), BLOCK=16, num_warps=1))
    assert [dict(vars(owner)) for owner in owners] == before
    out = torch.zeros(4)
    bump[(1,)](out, BLOCK=4)
    assert out.tolist() == [1, 1, 1, 1]
