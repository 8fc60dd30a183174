"""Lookups in Triton against the reference: types, dims, layouts; long and empty bags; hostile ids and offsets."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.lookup_ops import (
    pooled_lookup_reference,
    sample_weight_grad_reference,
    sequence_lookup_reference,
)
from tilerec.errors import InputError

pytest.importorskip("triton")

import triton.language as tl

from tests.ops.triton import lookup_kernels
from tests.ops.triton.gates import ROOT, Compiled, Gate, aside, compiled
from tests.ops.triton.interpreter import quick
from tilerec.ops.lookup.calls import PooledLayout
from tilerec.ops.lookup.triton import backend as lookup
from tilerec.ops.lookup.triton import layout as lookup_layout
from tilerec.ops.lookup.triton import parts as lookup_parts
from tilerec.ops.lookup.triton import pooled as lookup_pooled
from tilerec.ops.lookup.triton import sample_weights as lookup_sample_weights
from tilerec.ops.lookup.triton import sequence as lookup_sequence
from tilerec.ops.runtime.triton import library
from tilerec.ops.runtime.triton.rows import group_rows, tile_width

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels are compiled here: tests/cuda")

NO_SINKS = torch.zeros(0, dtype=torch.int64)
F32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
# The interpreter cuts bfloat16 off where a GPU rounds: a whole step, not half of one.
UNITS = {F32: 2e-6, BF16: 2**-7, FP16: 2**-9}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turns of 2 positions for 8: the interpreter takes four times as long for those."""
    monkeypatch.setattr(lookup, "_STEPS", 2)
    with quick():
        yield


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 ids in bags of more than 16, for 256 and 512."""
    for module in (lookup, lookup_parts, lookup_pooled, lookup_sample_weights):
        monkeypatch.setattr(module, "CHUNK", tl.constexpr(8))
        monkeypatch.setattr(module, "LONG", tl.constexpr(16))


@dataclass(frozen=True)
class Pooled:
    """The arguments of a pooled lookup."""

    weights: list[Tensor]
    ids: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    tables: list[int]
    keys: list[int]
    means: list[int]
    batches: list[int]

    @property
    def names(self) -> str:
        return ",".join(f"f{f}@t{t}" for f, t in enumerate(self.tables))

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.tables, self.keys, self.means, self.batches

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.weights, NO_SINKS, self.ids, self.offsets, self.sample_weights, *self.layout

    def run(self, dtype: torch.dtype = F32) -> Tensor:
        return lookup_kernels.pooled_lookup(*self.arguments, dtype, self.names)[0]

    def reference(self, dtype: torch.dtype = F32) -> Tensor:
        return pooled_lookup_reference(*self.arguments, dtype, self.names)[0]

    def grads(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the sample weights: Triton's, the reference's."""
        arguments = (self.weights, self.ids, self.offsets, grad, *self.layout)
        return lookup_kernels.sample_weight_grad(*arguments), sample_weight_grad_reference(*arguments)


def make(
    dims: list[int],
    dtypes: list[torch.dtype],
    keys: list[int],
    batches: list[int],
    lengths: list[int],
    weighted: bool = False,
    index: torch.dtype = torch.int64,
    rows: int = 11,
    means: list[int] | None = None,
) -> Pooled:
    """Feature f reads table f % T and key keys[f]; every second feature takes means. `lengths` repeat themselves."""
    key_count = max(keys, default=-1) + 1 if len(batches) == 1 else len(batches)
    bags = batches[0] * key_count if len(batches) == 1 else sum(batches)
    cycle = torch.tensor([lengths[b % len(lengths)] for b in range(bags)], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), cycle.cumsum(0)])
    count = int(offsets[-1])
    return Pooled(
        weights=[torch.randn(rows, d).to(t) for d, t in zip(dims, dtypes, strict=True)],
        ids=torch.randint(0, rows, (count,)).to(index),
        offsets=offsets,
        sample_weights=torch.randn(count) if weighted else None,
        tables=[f % max(len(dims), 1) for f in range(len(keys))],
        keys=keys,
        means=[f % 2 for f in range(len(keys))] if means is None else means,
        batches=batches,
    )


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype = F32) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=UNITS[dtype], atol=UNITS[dtype])


def check(case: Pooled, dtype: torch.dtype = F32) -> None:
    assert_close(case.run(dtype), case.reference(dtype), dtype)


SHORT = [3, 0, 1, 5, 2, 0, 9]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_short_bags_have_the_bits_of_the_reference(index: torch.dtype, weighted: bool) -> None:
    case = make([4, 8, 3, 130], [F32, BF16, FP16, F32], [0, 1, 2, 1, 0], [5], SHORT, weighted, index)
    assert torch.equal(case.run(), case.reference())


@pytest.mark.parametrize("dim", [1, 2, 3, 12, 128, 257])
@pytest.mark.parametrize("dtype", [F32, BF16, FP16, FP8])
def test_rows_of_any_type_and_dim_are_read(dtype: torch.dtype, dim: int) -> None:
    case = make([dim, dim], [dtype] * 2, [0, 1], [3], SHORT)
    assert torch.equal(case.run(), case.reference())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_outputs_are_rounded_once(dtype: torch.dtype) -> None:
    check(make([6, 20], [F32, BF16], [0, 1, 0], [4], SHORT, weighted=True), dtype)


@pytest.mark.parametrize("weighted", [False, True])
def test_batch_sizes_may_differ_by_key(weighted: bool) -> None:
    check(make([4, 9, 16], [F32, BF16, F32], [2, 0, 1, 2], [3, 1, 6], SHORT, weighted))
    check(make([4, 9], [F32, BF16], [2, 0], [3, 5, 0], SHORT, weighted))


@pytest.mark.parametrize("batches", [[0], [4], [0, 0], [2, 0]])
@pytest.mark.parametrize("lengths", [[0], [0, 1], [1]])
def test_empty_batches_bags_and_keys_give_zeros(batches: list[int], lengths: list[int]) -> None:
    case = make([4, 3], [F32, F32], [0, 1], batches, lengths)
    assert torch.equal(case.run(), case.reference())


def test_no_features_give_no_columns() -> None:
    for batches in ([3], []):
        case = make([4], [F32], [], batches, [1])
        assert case.run().shape == case.reference().shape == ((3, 0) if batches else (0,))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_where_ids_are_few_bags_of_one_id_are_copied_and_longer_ones_summed(dtype: torch.dtype, weighted: bool) -> None:
    for lengths in ([1], [1, 0, 1], [1, 0, 0, 2, 1] + [0] * 20 + [4]):
        case = make([4, 40], [dtype] * 2, [0, 1, 0], [40], lengths, weighted)
        assert case.ids.shape[0] < case.offsets.shape[0]
        assert torch.equal(case.run(), case.reference())


def test_minus_zero_is_summed_to_zero_however_it_is_read() -> None:
    for lengths in ([1], [1, 1, 3]):
        case = make([4], [F32], [0], [6], lengths)
        case.weights[0].fill_(-0.0)
        assert not torch.signbit(case.run()).any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batches", [[3], [1, 3, 2]])
@pytest.mark.usefixtures("small_chunks")
def test_long_bags_are_summed_in_chunks(batches: list[int], weighted: bool) -> None:
    lengths = [17, 0, 27, 16, 2, 41]
    case = make([130, 20, 2], [F32, BF16, F32], [1, 2, 0, 1], batches, lengths, weighted)
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_chunks")
def test_a_bag_has_the_same_bits_wherever_it_stands() -> None:
    weight = torch.randn(50, 12)
    bag = torch.randint(0, 50, (37,))
    alone = Pooled([weight], bag, torch.tensor([0, 37]), None, [0], [0], [0], [1]).run()
    for before in (1, 8, 13):
        ids = torch.cat([torch.randint(0, 50, (before,)), bag, torch.randint(0, 50, (5,))])
        offsets = torch.tensor([0, before, before, before + 37, before + 37 + 5])
        assert torch.equal(Pooled([weight], ids, offsets, None, [0], [0], [0], [4]).run()[2], alone[0])


def test_a_bag_of_700_ids_and_one_id_1000_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_STEPS", 8)
    weight = torch.randn(11, 4)
    ids = torch.cat([torch.randint(0, 11, (700,)), torch.full((1000,), 7)])
    case = Pooled([weight], ids, torch.tensor([0, 700, 1700]), None, [0], [0], [0], [2])
    torch.testing.assert_close(case.run(), case.reference(), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("small_chunks")
def test_every_run_gives_the_same_bits() -> None:
    case = make([4, 20], [F32, BF16], [0, 1], [2], [27, 1, 0, 19], weighted=True)
    first = case.run()
    assert torch.equal(case.run(), first)


def test_strided_inputs_are_read_as_they_look() -> None:
    case = make([4, 8], [F32, BF16], [0, 1], [3], SHORT, weighted=True)
    assert case.sample_weights is not None
    spread = replace(
        case,
        ids=torch.stack([case.ids, case.ids * 0 + 10**6], 1)[:, 0],
        offsets=torch.stack([case.offsets, case.offsets], 1)[:, 1],
        sample_weights=torch.stack([case.sample_weights, case.sample_weights * 0], 1)[:, 0],
    )
    assert torch.equal(spread.run(), case.run())


def test_rows_that_begin_anywhere_in_memory_are_read() -> None:
    flat = torch.randn(200)
    case = make([4, 4], [F32, F32], [0, 1], [3], SHORT)
    odd = replace(case, weights=[flat[1:45].view(11, 4), flat[90:134].view(11, 4)])
    assert torch.equal(odd.run(), odd.reference())


@pytest.mark.parametrize("dims", [[4, 8], [128, 4, 130], [8, 3, 8], [12, 6], [16, 16, 1], [64, 257]])
@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", [F32, BF16, FP8])
def test_what_kernels_are_told_of_alignments_is_true(dtype: torch.dtype, shift: int, dims: list[int]) -> None:
    """A GPU traps where vectors begin elsewhere than the compiler was told; the interpreter does not."""
    flat = torch.zeros(20_000).to(dtype)
    places = [shift + 4096 * t for t in range(len(dims))]
    weights = [flat[at : at + 7 * d].view(7, d) for at, d in zip(places, dims, strict=True)]
    features = list(range(len(dims)))
    for uniform in (True, False):
        for cut in (True, False):
            for out_size in (4, 2):
                batches = [1] if uniform else [1] * (len(dims) + 1)
                given = PooledLayout(features, features, [0] * len(dims), batches)
                layout = lookup_layout.layout_of(
                    weights, torch.zeros(1, dtype=torch.int64), given, lookup_layout.types_of(weights), out_size, cut,
                    "",
                )  # fmt: skip
                assert sum(family.count for family in layout.families) >= len(dims)
                for family in layout.families:
                    base = weights[family.table]
                    assert base.data_ptr() % (family.vec * dtype.itemsize) == 0
                    for part in family.parts.view(-1, lookup_parts.FIELDS.value).tolist():
                        distance, _, dim, column, key, place, stride, _, feature, plane = part
                        own = weights[feature]
                        assert base.data_ptr() + distance * dtype.itemsize == own.data_ptr()
                        assert not any(number % family.vec for number in (distance, dim, column))
                        assert not any(number % family.out_vec for number in (dim, column, stride))
                        assert not uniform or place % family.out_vec == 0
                        assert (key, plane < family.planes) == (feature, True)
                batches = [5] if uniform else [5, 3, 1][: len(dims)]
                offsets = torch.zeros(16, dtype=torch.int64)
                batch = lookup.batch_of(layout.dims, offsets, offsets, given._replace(batches=batches))
                if batch.runs is not None:
                    runs = batch.runs.view(-1, 3)
                    assert all(not (runs[:, 2] % family.out_vec).any() for family in layout.families)


def test_more_parts_than_a_launch_can_have_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_layout, "GRID_Y", 2)
    case = make([4, 300], [F32, F32], [0, 1, 2, 0, 1], [2], SHORT)
    assert torch.equal(case.run(), case.reference())


def test_rows_of_more_tiles_than_a_grid_allows_are_served_by_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "GRID_Y", 2)
    monkeypatch.setattr(lookup, "launch", lambda *args, **constants: pytest.fail("launched"))
    case = sequence([torch.randn(11, 300)], torch.randint(0, 11, (9,)), [0, 9], [0])
    assert torch.equal(lookup_kernels.sequence_lookup(*case)[0], sequence_lookup_reference(*case)[0])


def test_fp64_tables_are_served_by_the_reference() -> None:
    case = make([6, 5], [torch.float64] * 2, [0, 1], [4], SHORT)
    assert torch.equal(case.run(torch.float64), case.reference(torch.float64))


@pytest.mark.parametrize("batches", [[4], [4, 1, 2]])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_of_sample_weights(dtype: torch.dtype, batches: list[int]) -> None:
    case = make([4, 40, 257], [F32, BF16, F32], [0, 2, 1, 2, 0], batches, SHORT)
    grad = torch.randn(case.reference().shape).to(dtype)
    got, want = case.grads(grad)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_first_reader_of_a_key_writes_before_the_second_adds() -> None:
    """Key 1 is read in bfloat16 first, by a launch that other features than its own bring about later."""
    case = replace(make([4, 4], [F32, BF16], [0, 0, 1, 1], [3], SHORT), tables=[0, 0, 1, 0], means=[0, 0, 0, 0])
    got, want = case.grads(torch.randn(3, 16))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batches", [[3], [1, 2]])
@pytest.mark.usefixtures("small_chunks")
def test_gradients_of_sample_weights_in_long_bags(batches: list[int]) -> None:
    case = make([4, 150], [F32, F32], [1, 0, 1], batches, [20, 0, 17, 3, 33])
    got, want = case.grads(torch.randn(case.reference().shape))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_ids_of_keys_that_nobody_reads_have_no_gradient() -> None:
    case = make([4], [F32], [1], [3], [2])
    case = replace(case, ids=torch.cat([case.ids, case.ids[:6]]), offsets=torch.arange(10) * 2)
    got, want = case.grads(torch.randn(3, 4))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not got[:6].any()
    assert not got[12:].any()
    assert got[6:12].all()


# -- sequences


def sequence(
    weights: list[Tensor], ids: Tensor, starts: list[int], tables: list[int], dtype: torch.dtype = F32
) -> tuple[Any, ...]:
    names = ",".join(f"f{f}@t{t}" for f, t in enumerate(tables))
    return weights, NO_SINKS, ids, torch.tensor(starts), tables, dtype, names


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dim", [1, 3, 64, 257])
def test_rows_of_sequences_are_copied(dim: int, index: torch.dtype) -> None:
    weights = [torch.randn(11, dim), torch.randn(9, dim).to(BF16), torch.randn(10, dim)]
    ids = torch.randint(0, 9, (30,)).to(index)
    case = sequence(weights, ids, [0, 0, 20, 20, 21, 30, 30], [1, 0, 2, 1, 2, 0])
    assert torch.equal(lookup_kernels.sequence_lookup(*case)[0], sequence_lookup_reference(*case)[0])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_of_sequences_are_rounded_once(dtype: torch.dtype) -> None:
    case = sequence([torch.randn(11, 6)], torch.randint(0, 11, (30,)), [0, 30], [0], dtype)
    assert_close(lookup_kernels.sequence_lookup(*case)[0], sequence_lookup_reference(*case)[0], dtype)


def test_sequences_without_ids_or_features() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    case = sequence([torch.randn(11, 6)], none, [0, 0, 0], [0, 0])
    assert lookup_kernels.sequence_lookup(*case)[0].shape == (0, 6)


def test_starts_that_the_host_knows_are_checked_there() -> None:
    raise_report = lookup.RaiseReport("f@t,g@u", (0, 1), (5, 5), 6, pooled=False)
    cpu = torch.device("cpu")
    assert lookup.known_starts(torch.tensor([0, 2, 6]), raise_report, cpu).tolist() == [0, 2, 6]
    for starts, message in WRONG_STARTS.items():
        with pytest.raises(InputError, match=message):
            lookup.known_starts(torch.tensor(starts), raise_report, cpu)


WRONG_STARTS = {
    (1, 2, 6): r"'f'.*offsets\[0\] is 1; .* begin at 0",
    (0, 2, 5): r"'g'.*offsets\[2\] is 5; .* end there",
    (0, 2, 7): r"'g'.*offsets\[2\] is 7",
    (0, 7, 6): r"'f'.*offsets\[1\] is 7",
    (0, -3, 6): r"'f'.*offsets\[1\] is -3",
}


@pytest.mark.parametrize("starts", WRONG_STARTS)
def test_wrong_starts_are_told_and_never_followed(starts: tuple[int, ...]) -> None:
    case = sequence([torch.ones(5, 3)] * 2, torch.tensor([1, 2, 3, 4, 0, 1]), list(starts), [0, 1])
    with pytest.raises(InputError, match=WRONG_STARTS[starts].replace("'g'", "'f1'").replace("'f'", "'f0'")):
        lookup_kernels.sequence_lookup(*case)


# -- what a batch may not say


def a_batch() -> Pooled:
    """Keys 0 and 1 of two samples each: ids (1 2 | 3) and (4 | 0 1); dims 3 and 2."""
    return Pooled(
        [torch.ones(5, 3), torch.ones(5, 2)], torch.tensor([1, 2, 3, 4, 0, 1]), torch.tensor([0, 2, 3, 4, 6]), None,
        [0, 1], [0, 1], [0, 1], [2],
    )  # fmt: skip


@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1, -(2**31), 2**40])
def test_an_id_outside_its_table_is_named(bad: int) -> None:
    case = a_batch()
    case.ids[4] = bad
    message = (
        rf"Table 't1': got id {bad} of feature 'f1' \(position 4 of the batch's values\); expected ids in \[0, 5\)"
    )
    with pytest.raises(InputError, match=message):
        case.run()
    with pytest.raises(InputError, match=rf"Table '1': got id {bad} of feature '1'"):
        case.grads(torch.zeros(2, 5))
    with pytest.raises(InputError, match=message.replace("f1", "f0").replace("t1", "t0")):
        lookup_kernels.sequence_lookup(*sequence([torch.ones(5, 4)], case.ids, [0, 6], [0]))


@pytest.mark.parametrize("lengths", [[1], [2, 3], [19, 2]])
@pytest.mark.usefixtures("small_chunks")
def test_an_id_outside_its_table_counts_as_a_row_of_zeros(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(lookup, "post", lambda report, raise_: told.append(tuple(report.tolist())))
    case = make([4, 20], [F32, BF16], [0, 1], [2], lengths, means=[0, 0])
    at = int(case.offsets[2])
    sound = replace(case, weights=[torch.cat([w, w[:1] * 0]) for w in case.weights], ids=case.ids.clone())
    case.ids[at], sound.ids[at] = 99, 11
    assert torch.equal(case.run(), sound.run())
    assert told == [(1, 2, at, 99), (0, 0, 0, 0)]
    bad = replace(case, sample_weights=torch.ones(case.ids.shape))
    assert torch.equal(bad.run(), sound.run())


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (0, -1, (0, -1)), (2, 10**9, (2, 10**9)), (3, -5, (3, -5)), (3, 0, (3, 0)), (1, 2**62, (1, 2**62)),
        (3, -(2**62), (3, -(2**62))), (4, 7, (4, 7)),
    ],
)  # fmt: skip
def test_offsets_that_fall_or_leave_the_ids_are_named_and_never_followed(
    at: int, value: int, told: tuple[int, int]
) -> None:
    case = a_batch()
    case.offsets[at] = value
    message = rf"offsets\[{told[0]}\] is {told[1]}; offsets must not fall and must lie in \[0, 6\]"
    with pytest.raises(InputError, match=message):
        case.run()
    with pytest.raises(InputError, match=message):
        case.grads(torch.zeros(2, 5))


@pytest.mark.parametrize(("at", "value"), [(5, -1), (7, 4), (20, 30), (40, 41)])
def test_wrong_offsets_are_named_where_ids_are_few(at: int, value: int) -> None:
    case = make([4], [F32], [0], [40], [1])
    case.offsets[at] = value
    with pytest.raises(InputError, match=r"offsets\[\d+\] is -?\d+; offsets must not fall"):
        case.run()


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("value", [-7, 38, 10**12])
@pytest.mark.usefixtures("small_chunks")
def test_wrong_offsets_of_long_bags_are_named_and_never_followed(at: int, value: int) -> None:
    case = make([128], [F32], [0, 1], [2], [20, 17, 9, 18])
    case.offsets[at] = value
    if bool((case.offsets.diff() >= 0).all()):
        assert_close(case.run(), case.reference())
        return
    with pytest.raises(InputError, match=r"offsets\[\d+\] is -?\d+; offsets must not fall"):
        case.run()
    with pytest.raises(InputError, match=r"offsets\[\d+\] is -?\d+; offsets must not fall"):
        case.grads(torch.zeros(2, 256))


@pytest.mark.usefixtures("small_chunks")
def test_keys_that_hold_the_same_ids_are_told() -> None:
    """Offsets that fall in a key that nobody reads: what the chunks of two keys share."""
    case = make([4], [F32], [0, 2], [1], [20, 0, 20])
    case = replace(case, offsets=torch.tensor([0, 20, 0, 20]))
    with pytest.raises(InputError, match="offsets must not fall"):
        case.run()


@pytest.mark.parametrize(
    ("more", "message"),
    [(2, "the lengths sum to 6, but there are 8 values"), (0, "the first offset is 1; expected 0")],
)
def test_ids_in_no_bag_are_refused(more: int, message: str) -> None:
    case = a_batch()
    offsets = case.offsets.clone()
    if not more:
        offsets[0] = 1
    ids = torch.cat((case.ids, torch.zeros(more, dtype=case.ids.dtype)))
    with pytest.raises(InputError, match=message):
        replace(case, ids=ids, offsets=offsets).run()


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "ids in two dimensions": ({"ids": torch.ones(6, 1, dtype=torch.int64)}, r"ids have shape \[6, 1\]"),
    "ids that are no integers": ({"ids": torch.ones(6)}, r"ids have .* type torch.float32; expected a flat list of"),
    "offsets too few": ({"offsets": torch.tensor([0, 2, 3, 4])}, r"fewer bags .*\(4 offsets for 4 bags; expected 5\)"),
    "key below 0": ({"keys": [0, -1]}, r"read keys \[0, -1\]; expected numbers of at least 0"),
    "key without a batch size": ({"batches": [2, 1, 1], "keys": [0, 3]}, "reads key number 3, .* sizes for 3 keys"),
    "batch size below 0": ({"batches": [-1]}, "fewer bags than the batch sizes require"),
    "table behind the last": ({"tables": [0, 2]}, r"Feature 1 of a lookup reads table 2; expected \[0, 2\)"),
    "poolings too few": ({"means": [0]}, "of 2 features: got 2 keys and 1 poolings"),
    "table of one dimension": ({"weights": [torch.ones(5, 3), torch.ones(5)]}, r"Table 1 .* \[5\]; expected \[rows"),
    "table without rows": ({"weights": [torch.ones(5, 3), torch.ones(0, 2)]}, r"id 4 of .* expected ids in \[0, 0\)"),
    "strided table": ({"weights": [torch.ones(5, 3), torch.ones(2, 5).t()]}, "Table 1 .* expected contiguous rows"),
    "table elsewhere": ({"weights": [torch.ones(5, 3), torch.ones(5, 2, device="meta")]}, "rows are on meta"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lookup_that_contradicts_itself_is_refused(lie: str) -> None:
    changed, message = LIES[lie]
    case = replace(a_batch(), **changed)
    with pytest.raises(InputError, match=message):
        case.run()
    with pytest.raises(InputError, match=message):
        lookup_kernels.sample_weight_grad(case.weights, case.ids, case.offsets, torch.ones(2, 5), *case.layout)


def test_sample_weights_and_gradients_of_another_size_are_refused() -> None:
    case = a_batch()
    with pytest.raises(InputError, match="expected one weight per id"):
        replace(case, sample_weights=torch.ones(5)).run()
    with pytest.raises(InputError, match=r"the gradient has shape \[9\]; expected \[2, 5\]"):
        case.grads(torch.ones(9))


def test_sequences_that_contradict_themselves_are_refused() -> None:
    ids = torch.tensor([1, 2, 3, 4, 0, 1])
    with pytest.raises(InputError, match=r"lookup of 2 features has 2 starts; expected 3"):
        lookup_kernels.sequence_lookup(*sequence([torch.ones(5, 3)], ids, [0, 6], [0, 0]))
    with pytest.raises(InputError, match=r"'t1': dim 4, but .* dim 3"):
        lookup_kernels.sequence_lookup(*sequence([torch.ones(5, 3), torch.ones(5, 4)], ids, [0, 2, 6], [0, 1]))


def test_a_table_whose_memory_was_freed_is_refused_by_its_name() -> None:
    case = a_batch()
    case.weights[1].untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"Table 't1': its rows have no memory .*Give it memory with to_empty"):
        case.run()
    assert replace(case, tables=[0], keys=[0], means=[0]).run().shape == (2, 3)


def test_modules_and_torchs_checks_of_operators_pass_when_the_kernels_serve_them() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("serve_cpu.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr[-3000:]


# -- what is compiled


def test_batch_sizes_and_id_counts_are_not_compiled_into_kernels() -> None:
    for kernel, sizes in (
        (lookup_pooled.pooled_kernel, {"id_count", "bags", "slots", "last"}),
        (lookup_pooled.chunk_kernel, {"id_count", "bags", "slots", "part_count"}),
        (lookup_sequence.sequence_kernel, {"id_count", "feature_count"}),
        (lookup_sample_weights.sample_weight_kernel, {"id_count", "bags"}),
        (lookup_sample_weights.sample_weight_chunk_kernel, {"id_count", "bags", "part_count"}),
    ):
        # Interpreted functions do not keep the list; the source of the decorator does.
        source = (
            Path(str(inspect.getsourcefile(kernel.fn)))
            .read_text()
            .partition(f"def {kernel.__name__}(")[0]
            .rpartition("@triton.jit")[2]
        )
        assert all(f'"{size}"' in source for size in sizes), kernel.__name__
        assert "".join(source.split()).startswith("(do_not_specialize=[")
        assert "do_not_specialize_on_alignment=ANYWHERE" in source


SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}
_BATCH = {"ids": "*i64", "offsets": "*i64", "parts": "*i64", "runs": "*i64", "report": "*i64"}


def shape_of(row: str, dim: int, out: str) -> dict[str, int]:
    vec = min(16 // SIZES[row], dim & -dim)
    tile = tile_width(dim, SIZES[row])
    out_vec = min(16 // SIZES[out], dim & -dim)
    return {"GROUP": group_rows(tile, vec), "TILE": tile, "VEC": vec, "OUT_VEC": out_vec, "STEPS": 8}


def pooled_gate(name: str, row: str, dim: int, out: str, weighted: bool = False, waves: int = 1) -> Gate:
    signature = {
        "base": f"*{row}",
        "out": f"*{out}",
        "sample_weights": "*fp32",
        "chunk_sums": "*fp32",
        **_BATCH,
    }
    constants = {"WEIGHTED": weighted, "VARIABLE": False, "SPLIT": True, "WAVES": waves}
    sizes = dict.fromkeys(["id_count", "bags", "slots", "last"], "i32")
    return Gate(
        name,
        f"{lookup_pooled.__name__}:pooled_kernel",
        signature | sizes,
        shape_of(row, dim, out) | constants,
    )


def chunk_gate(name: str, row: str, dim: int) -> Gate:
    signature = {"base": f"*{row}", "sample_weights": "*fp32", "chunk_sums": "*fp32", **_BATCH}
    shape = shape_of(row, dim, row)
    constants = {"TILE": shape["TILE"], "VEC": shape["VEC"], "STEPS": min(8 * shape["GROUP"], 32)}
    sizes = dict.fromkeys(["id_count", "bags", "slots", "part_count"], "i32")
    rest = {"WEIGHTED": False, "VARIABLE": False}
    return Gate(name, f"{lookup_pooled.__name__}:chunk_kernel", signature | sizes, constants | rest)


def sequence_gate(name: str, row: str, dim: int) -> Gate:
    signature = {"base": f"*{row}", "out": f"*{row}", "ids": "*i64", "starts": "*i64", "features": "*i64"}
    sizes = {"report": "*i64", "id_count": "i32", "feature_count": "i32"}
    constants = shape_of(row, dim, row) | {"CHECK": True}
    constants["GROUP"] *= constants.pop("STEPS")
    return Gate(name, f"{lookup_sequence.__name__}:sequence_kernel", signature | sizes, constants)


def sample_weight_gate(name: str, row: str, dim: int, grad: str, chunks: bool = False) -> Gate:
    signature = {"base": f"*{row}", "out": "*fp32", "grad": f"*{grad}", **_BATCH}
    shape = shape_of(row, dim, grad)
    shape["GRAD_VEC"] = shape.pop("OUT_VEC")
    constants = {"ONE": dim <= shape["TILE"], "ADD": False, "VARIABLE": False}
    constants |= {} if chunks else {"SPLIT": True}
    sizes = dict.fromkeys(["id_count", "bags", *(["part_count"] if chunks else [])], "i32")
    return Gate(
        name,
        f"{lookup_sample_weights.__name__}:sample_weight{'_chunk' if chunks else ''}_kernel",
        signature | sizes,
        shape | constants,
        options={"num_warps": 1, "enable_fp_fusion": False, **lookup._WIDE_BOUND},
    )


GATES = [
    pooled_gate("pooled fp32 128, weighted", "fp32", 128, "fp32", weighted=True),
    pooled_gate("pooled bf16 128", "bf16", 128, "bf16"),
    chunk_gate("chunks fp32 128", "fp32", 128),
    sequence_gate("sequence bf16 128", "bf16", 128),
    sample_weight_gate("sample weights bf16 128", "bf16", 128, "bf16"),
]
"""What every run compiles; docs/gpu.md has the table of all."""

MORE_GATES = [
    pooled_gate("pooled fp32 128, few ids", "fp32", 128, "fp32", waves=4),
    pooled_gate("pooled e4m3 128 to bf16", "fp8e4nv", 128, "bf16"),
    pooled_gate("pooled fp32 128", "fp32", 128, "fp32"),
    pooled_gate("pooled bf16 32", "bf16", 32, "bf16"),
    pooled_gate("pooled bf16 128, few ids", "bf16", 128, "bf16", waves=4),
    sequence_gate("sequence fp32 128", "fp32", 128),
    sample_weight_gate("sample weights fp32 128", "fp32", 128, "fp32"),
    sample_weight_gate("sample weights bf16 32", "bf16", 32, "bf16"),
    sample_weight_gate("sample weights fp32 512", "fp32", 512, "fp32"),
    sample_weight_gate("sample weights e4m3 128, bf16", "fp8e4nv", 128, "bf16"),
    sample_weight_gate("sample weights in chunks, bf16 32", "bf16", 32, "bf16", chunks=True),
]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Compiled]:
    return compiled(GATES + (MORE_GATES if os.environ.get("TILEREC_NIGHTLY") == "1" else []))


def test_kernels_read_rows_16_bytes_at_a_time_and_spill_nothing(kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        assert kernel.count("ld.global.v4.b32") >= 8, (name, kernel)
        # Else a row would be read in numbers: one instruction for each column of a lane, or for two.
        narrow = kernel.count("ld.global.b32", "ld.global.b16", "ld.global.v2")
        assert narrow <= (8 if name.endswith("weighted") else 0), (name, kernel)
        assert kernel.spilled <= aside(), (name, kernel)


def test_kernels_leave_room_for_twenty_warps_and_share_next_to_no_memory(
    kernels: dict[str, Compiled],
) -> None:
    for name, kernel in kernels.items():
        assert kernel.registers <= (112 if "e4m3" in name else 96), (name, kernel)
        # 8 bytes: how Triton 3.6 tells a program's lanes what an atomic gave (of a report that is taken). A sequence's
        # starts and ids are handed round once.
        assert kernel.shared <= (256 if name.startswith("sequence") else 8), (name, kernel)


def test_products_ask_for_nearly_all_rows_of_a_turn_before_they_use_one(kernels: dict[str, Compiled]) -> None:
    """In machine code; Triton 3.6 has six of fp32 x 128 on their way, and eight of the others."""
    of_products = [kernel for name, kernel in kernels.items() if name.startswith("sample")]
    assert of_products
    assert all(kernel.on_their_way >= 6 for kernel in of_products), of_products


def test_kernels_write_results_16_bytes_at_a_time(kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        if not name.startswith("sample"):
            assert kernel.count("st.global.v4.b32") >= 1, (name, kernel)
            assert kernel.count("st.global.b32", "st.global.b16", "st.global.v2") == 0, (name, kernel)
