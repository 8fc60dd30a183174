"""Native lookups against the reference: every type, dim, layout; hostile ids and offsets; bits on any thread count."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.ops.lookup_ops import (
    pooled_lookup_reference,
    sample_weight_grad_reference,
    sequence_lookup_reference,
)
from tilerec.errors import InputError
from tilerec.ops import backends
from tilerec.ops.runtime.cpu.library import DTYPES, library

pytestmark = pytest.mark.skipif(not backends.NATIVE_CPU, reason="the native library is not built")

NO_SINKS = torch.zeros(0, dtype=torch.int64)
UNITS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ops = torch.ops.tilerec


@pytest.fixture
def lib() -> Iterator[ctypes.CDLL]:
    lib = library()
    assert lib is not None
    before = lib.tr_isa()
    yield lib
    lib.tr_isa_choose(before)


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
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.weights, NO_SINKS, self.ids, self.offsets, self.sample_weights, self.tables, self.keys, self.means,
            self.batches,
        )  # fmt: skip

    def native(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return ops.pooled_lookup(*self.arguments, dtype, self.names)[0]

    def reference(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return pooled_lookup_reference(*self.arguments, dtype, self.names)[0]

    def grads(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the sample weights: native, reference."""
        rest = (self.tables, self.keys, self.means, self.batches)
        return (
            ops.sample_weight_grad(self.weights, self.ids, self.offsets, grad, *rest),
            sample_weight_grad_reference(self.weights, self.ids, self.offsets, grad, *rest),
        )


def make_pooled(
    dims: list[int],
    dtypes: list[torch.dtype],
    keys: list[int],
    batches: list[int],
    most: int = 6,
    weighted: bool = False,
    index: torch.dtype = torch.int64,
    rows: int = 11,
    seed: int = 0,
) -> Pooled:
    """Feature f reads table f % T and key keys[f]; bags of 0 to `most` ids."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    key_count = max(keys, default=-1) + 1 if len(batches) == 1 else len(batches)
    bags = batches[0] * key_count if len(batches) == 1 else sum(batches)
    lengths = torch.tensor([dice.randint(0, most) for _ in range(bags)], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    return Pooled(
        weights=[torch.randn(rows, d, generator=generator).to(t) for d, t in zip(dims, dtypes, strict=True)],
        ids=torch.randint(0, rows, (count,), generator=generator, dtype=index),
        offsets=offsets,
        sample_weights=torch.randn(count, generator=generator) if weighted else None,
        tables=[f % len(dims) for f in range(len(keys))],
        keys=keys,
        means=[dice.randint(0, 1) for _ in keys],
        batches=batches,
    )


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=UNITS[dtype], atol=UNITS[dtype])


dtypes = st.sampled_from(list(DTYPES))
dims = st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 20, 32, 40, 64, 65, 100, 128, 200, 256, 257])


@given(
    dims=st.lists(dims, min_size=1, max_size=4),
    data=st.data(),
    samples=st.integers(0, 9),
    variable=st.booleans(),
    weighted=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    output=dtypes,
)
def test_pooled_lookup_equals_the_reference(
    dims: list[int], data: st.DataObject, samples: int, variable: bool, weighted: bool, index: torch.dtype,
    output: torch.dtype,
) -> None:  # fmt: skip
    keys = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    kinds = [data.draw(dtypes) for _ in dims]
    batches = [samples] if not variable else [data.draw(st.integers(0, 7)) for _ in range(max(keys) + 2)]
    case = make_pooled(dims, kinds, keys, batches, weighted=weighted, index=index, seed=samples)
    assert_close(case.native(output), case.reference(output), output)


@given(
    dims=st.lists(dims, min_size=1, max_size=3),
    data=st.data(),
    variable=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    kind=dtypes,
)
def test_sample_weight_grad_equals_the_reference_also_for_shared_keys(
    dims: list[int], data: st.DataObject, variable: bool, index: torch.dtype, kind: torch.dtype
) -> None:
    keys = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    kinds = [data.draw(dtypes) for _ in dims]
    batches = [5] if not variable else [data.draw(st.integers(0, 7)) for _ in range(max(keys) + 2)]
    case = make_pooled(dims, kinds, keys, batches, weighted=True, index=index)
    grad = torch.randn(case.reference().shape).to(kind)
    got, want = case.grads(grad)
    assert_close(got, want, torch.float32) if max(dims) < 9 else torch.testing.assert_close(
        got, want, rtol=1e-5, atol=2e-5
    )


@given(
    dim=dims,
    kinds=st.lists(dtypes, min_size=1, max_size=3),
    data=st.data(),
    index=st.sampled_from([torch.int32, torch.int64]),
    output=dtypes,
)
def test_sequence_lookup_equals_the_reference_bit_for_bit(
    dim: int, kinds: list[torch.dtype], data: st.DataObject, index: torch.dtype, output: torch.dtype
) -> None:
    counts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    weights = [torch.randn(9, dim).to(kind) for kind in kinds]
    starts = torch.tensor([0, *counts]).cumsum(0)
    ids = torch.randint(0, 9, (int(starts[-1]),), dtype=index)
    tables = [f % len(kinds) for f in range(len(counts))]
    names = ",".join(f"f{f}@t{t}" for f, t in enumerate(tables))
    arguments = (weights, NO_SINKS, ids, starts, tables, output, names)
    got, want = ops.sequence_lookup(*arguments)[0], sequence_lookup_reference(*arguments)[0]
    assert torch.equal(got, want)


def test_worked_example() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    case = Pooled([weight], torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]), None, [0], [0], [0], [2])
    assert case.native().tolist() == [[4.0, 6.0], [3.0, 4.0]]
    assert replace(case, means=[1]).native().tolist() == [[2.0, 3.0], [3.0, 4.0]]
    weighted = replace(case, sample_weights=torch.tensor([2.0, 1.0, 0.5]))
    assert weighted.native().tolist() == [[5.0, 8.0], [1.5, 2.0]]
    got, _ = weighted.grads(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert got.tolist() == [1.0, 3.0, 7.0]


def test_nothing_to_look_up_gives_empty_and_zero_outputs() -> None:
    weight = torch.randn(3, 5)
    none = torch.empty(0, dtype=torch.int64)
    bags = Pooled([weight], none, torch.zeros(4, dtype=torch.int64), None, [0], [0], [1], [3])
    assert torch.equal(bags.native(), torch.zeros(3, 5))
    no_bags = replace(bags, offsets=torch.zeros(1, dtype=torch.int64), batches=[0])
    assert no_bags.native().shape == (0, 5)
    no_features = replace(bags, tables=[], keys=[], means=[])
    assert no_features.native().shape == (3, 0)
    out, _ = ops.sequence_lookup([weight], NO_SINKS, none, torch.zeros(2, dtype=torch.int64), [0], torch.float32, "f@t")
    assert out.shape == (0, 5)


def big(weighted: bool = False, dims: tuple[int, ...] = (64, 20, 257, 3)) -> Pooled:
    """Enough work for several threads, several parts and several groups of a wide row."""
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float16]
    return make_pooled(list(dims), kinds, [0, 1, 2, 3, 1], [300], most=40, weighted=weighted, rows=500)


def test_bits_depend_neither_on_threads_nor_on_the_instruction_set(lib: ctypes.CDLL) -> None:
    plain, weighted = big(), big(weighted=True)
    grad = torch.randn(plain.reference().shape)
    sequence = (
        plain.weights[:1], NO_SINKS, plain.ids, torch.tensor([0, plain.ids.numel()]), [0], torch.bfloat16,
        "f@t",
    )  # fmt: skip
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for level in range(lib.tr_isa_widest() + 1):
            lib.tr_isa_choose(level)
            results.append(
                (
                    plain.native(),
                    weighted.native(),
                    weighted.grads(grad)[0],
                    ops.sequence_lookup(*sequence)[0],
                )
            )
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)


def test_a_call_from_a_fresh_thread_gives_the_same_bits() -> None:
    case = big()
    seen: list[Tensor] = []
    thread = threading.Thread(target=lambda: seen.append(case.native()))
    thread.start()
    thread.join()
    assert torch.equal(seen[0], case.native())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [500, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_first_id_outside_its_table_is_named(index: torch.dtype, bad: int, threads: int) -> None:
    torch.set_num_threads(threads)
    case = big()
    ids = case.ids.to(index)
    begin = int(case.offsets[2 * 300])
    ids[begin + 700] = bad
    ids[begin + 2500] = bad
    case = replace(case, ids=ids)
    message = rf"Table 't2': got id {bad} of feature 'f2' \(position {begin + 700} .* expected ids in \[0, 500\)"
    with pytest.raises(InputError, match=message):
        case.native()
    with pytest.raises(InputError, match=message.replace("'t2'", "'2'").replace("'f2'", "'2'")):
        case.grads(torch.zeros(300, 64 + 20 + 257 + 3 + 64))
    with pytest.raises(InputError, match=rf"id {bad} of feature 'f' \(position {begin + 700} "):
        ops.sequence_lookup(
            [torch.zeros(500, 8)], NO_SINKS, ids, torch.tensor([0, ids.numel()]), [0], torch.float32, "f@t"
        )


def test_ids_beyond_32_bits_are_out_of_range_not_wrapped() -> None:
    case = big()
    ids = case.ids.clone()
    ids[0] = 2**32
    with pytest.raises(InputError, match=f"id {2**32} of feature 'f0'"):
        replace(case, ids=ids).native()


@pytest.mark.parametrize(
    ("at", "value"), [(0, -1), (5, 10**9), (700, -5), (700, 0), (1200, 2**62), (1200, 0), (3, -(2**62))]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_offsets_that_fall_or_leave_the_ids_are_named_and_never_followed(at: int, value: int, threads: int) -> None:
    torch.set_num_threads(threads)
    case = big()
    offsets = case.offsets.clone()
    offsets[at] = value
    with pytest.raises(InputError, match=r"offsets\[\d+\] is -?\d+; offsets must not fall and must lie in \[0, \d+\]"):
        replace(case, offsets=offsets).native()
    with pytest.raises(InputError, match=r"offsets must not fall"):
        replace(case, offsets=offsets).grads(torch.zeros(300, 64 + 20 + 257 + 3 + 64))


@pytest.mark.parametrize("starts", [[0, 9], [3, 2], [-1, 4], [0, 2**62]])
def test_starts_that_leave_the_ids_are_refused(starts: list[int]) -> None:
    with pytest.raises(InputError, match="offsets must not fall"):
        ops.sequence_lookup(
            [torch.zeros(5, 4)], NO_SINKS, torch.zeros(4, dtype=torch.int64), torch.tensor(starts), [0], torch.float32,
            "f@t",
        )  # fmt: skip


def test_too_few_offsets_for_the_batch_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="fewer bags than the batch sizes require"):
        replace(big(), batches=[301]).native()


def test_an_output_too_large_for_the_caches_is_right_to_its_ends() -> None:
    weight, ids = torch.randn(1000, 64), torch.randint(0, 1000, (140_000,), dtype=torch.int32)  # 34 MiB
    out, _ = ops.sequence_lookup(
        [weight, weight], NO_SINKS, ids, torch.tensor([0, 70_001, 140_000]), [0, 1], torch.float32, "f@t,g@u"
    )
    assert torch.equal(out, weight[ids])


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    rows, dim = 2**26 + 3, 64  # 2^32 numbers of 2 bytes: address space, of which two pages are touched
    weight = torch.empty(rows, dim, dtype=torch.bfloat16)
    weight[rows - 1] = 3.0
    weight[2**25] = 2.0
    ids = torch.tensor([rows - 1, 2**25])
    case = Pooled([weight], ids, torch.tensor([0, 2]), None, [0], [0], [0], [1])
    assert case.native().tolist() == [[5.0] * dim]
    out, _ = ops.sequence_lookup([weight], NO_SINKS, ids, torch.tensor([0, 2]), [0], torch.bfloat16, "f@t")
    assert out[:, 0].tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("table", "out"),
    [
        (torch.float64, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_tables_and_outputs_in_fp64_are_served_by_the_reference(table: torch.dtype, out: torch.dtype) -> None:
    case = make_pooled([6, 5], [torch.float32] * 2, [0, 1], [4])
    double = replace(case, weights=[w.to(table) for w in case.weights])
    assert torch.equal(double.native(out), double.reference(out))
    rows, ids, starts = double.weights[0], torch.tensor([5, 0, 5]), torch.tensor([0, 3])
    found, _ = ops.sequence_lookup([rows], NO_SINKS, ids, starts, [0], out, "f@t")
    assert torch.equal(found, rows[ids].to(out))
    grad = torch.ones(3, rows.shape[1], dtype=out)
    offsets = torch.arange(4)
    of_weights = ops.sample_weight_grad([rows], ids, offsets, grad, [0], [0], [0], [3])
    torch.testing.assert_close(of_weights, rows[ids].sum(1).to(of_weights.dtype))


def test_strided_inputs_are_read_as_they_look() -> None:
    case = big(weighted=True)
    assert case.sample_weights is not None
    spread = replace(
        case,
        ids=torch.stack([case.ids, case.ids * 0 + 10**6], 1)[:, 0],
        offsets=torch.stack([case.offsets, case.offsets], 1)[:, 1],
        sample_weights=torch.stack([case.sample_weights, case.sample_weights * 0], 1)[:, 0],
    )
    assert torch.equal(spread.native(), case.native())


def test_a_strided_table_is_refused_by_its_number() -> None:
    case = make_pooled([6, 5], [torch.float32] * 2, [0, 1], [4])
    weights = [case.weights[0], torch.randn(5, 11).t()]
    with pytest.raises(InputError, match=r"Table 1 of a lookup: .* expected contiguous rows"):
        replace(case, weights=weights).native()


def test_a_layout_is_not_mistaken_for_another_with_the_same_numbers_of_features() -> None:
    for seed in range(5):
        case = make_pooled([4 + seed, 9], [torch.float32] * 2, [0, 1, 1], [3 + seed], seed=seed, rows=7 + seed)
        assert_close(case.native(), case.reference(), torch.float32)
        swapped = replace(case, weights=case.weights[::-1], means=[1 - m for m in case.means])
        assert_close(swapped.native(), swapped.reference(), torch.float32)


def two_features() -> Pooled:
    """Keys 0 and 1 of two samples each: ids (1 2 | 3) and (4 | 0 1); dims 3 and 2."""
    return Pooled(
        [torch.ones(5, 3), torch.ones(5, 2)], torch.tensor([1, 2, 3, 4, 0, 1]), torch.tensor([0, 2, 3, 4, 6]), None,
        [0, 1], [0, 1], [0, 1], [2],
    )  # fmt: skip


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "ids in two dimensions": ({"ids": torch.ones(6, 1, dtype=torch.int64)}, r"ids have shape \[6, 1\]"),
    "ids of no dimension": ({"ids": torch.tensor(1)}, r"ids have shape \[\]"),
    "ids that are no integers": ({"ids": torch.ones(6)}, r"ids have .* type torch.float32; expected a flat list of"),
    "ids that are truths": ({"ids": torch.ones(6, dtype=torch.bool)}, r"ids have .* type torch.bool"),
    "offsets in two dimensions": ({"offsets": torch.zeros(5, 2, dtype=torch.int64)}, r"offsets have shape \[5, 2\]"),
    "offsets that are no integers": ({"offsets": torch.zeros(5)}, r"offsets have .* type torch.float32"),
    "offsets that are none": ({"offsets": torch.zeros(0, dtype=torch.int64)}, "fewer bags than the batch sizes req"),
    "offsets too few": ({"offsets": torch.tensor([0, 2, 3, 4])}, r"fewer bags .*\(4 offsets for 4 bags; expected 5\)"),
    "offsets too few for the only key": (
        {"keys": [0], "tables": [0], "means": [0], "batches": [3], "offsets": torch.tensor([0, 2, 3])},
        r"fewer bags .*\(3 offsets for 3 bags; expected 4\)",
    ),
    "key behind the offsets": ({"keys": [0, 2]}, r"fewer bags .*\(5 offsets for 6 bags; expected 7\)"),
    "key that wraps": ({"keys": [0, 2**62]}, r"fewer bags than the batch sizes require"),
    "key below 0": ({"keys": [0, -1]}, r"read keys \[0, -1\]; expected numbers of at least 0"),
    "key without a batch size": ({"batches": [2, 1, 1], "keys": [0, 3]}, "reads key number 3, .* sizes for 3 keys"),
    "no batch sizes": ({"batches": []}, "reads key number 1, .* sizes for 0 keys"),
    "batch size below 0": ({"batches": [-1]}, "fewer bags than the batch sizes require"),
    "an unread key's below 0": ({"batches": [2, -1, 2], "keys": [0, 2]}, "fewer bags than the batch sizes require"),
    "batch size too large": ({"batches": [2**40]}, "fewer bags than the batch sizes require"),
    "an unread key's too large": ({"batches": [2, 2**62, 2], "keys": [0, 2]}, "fewer bags than the batch sizes req"),
    "table behind the last": ({"tables": [0, 2]}, r"Feature 1 of a lookup reads table 2; expected \[0, 2\)"),
    "table below 0": ({"tables": [0, -1]}, r"Feature 1 of a lookup reads table -1; expected \[0, 2\)"),
    "keys too few": ({"keys": [0]}, "of 2 features: got 1 keys and 2 poolings; expected one of each"),
    "poolings too few": ({"means": [0]}, "of 2 features: got 2 keys and 1 poolings"),
    "tables too few": ({"tables": [0]}, "of 1 features: got 2 keys and 2 poolings"),
    "table of one dimension": ({"weights": [torch.ones(5, 3), torch.ones(5)]}, r"Table 1 .* \[5\]; expected \[rows"),
    "table of three dimensions": ({"weights": [torch.ones(5, 3, 1), torch.ones(5, 2)]}, r"Table 0 .* \[5, 3, 1\]"),
    "table without rows": ({"weights": [torch.ones(5, 3), torch.ones(0, 2)]}, r"id 4 of .* expected ids in \[0, 0\)"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lookup_that_contradicts_itself_is_refused(lie: str) -> None:
    changed, message = LIES[lie]
    case = replace(two_features(), **changed)
    with pytest.raises(InputError, match=message):
        case.native()
    grad = torch.ones(2, 5)
    with pytest.raises(InputError, match=message):
        ops.sample_weight_grad(
            case.weights, case.ids, case.offsets, grad, case.tables, case.keys, case.means, case.batches
        )


@pytest.mark.parametrize("shape", [(5,), (7,), (6, 1), (0,), ()])
def test_sample_weights_that_are_not_one_per_id_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=r"sample_weights have shape \[.*\], the ids \[6\]; expected one weight per id"
    ):
        replace(two_features(), sample_weights=torch.ones(shape)).native()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_sample_weights_of_any_type_are_read_as_they_look(dtype: torch.dtype) -> None:
    case = replace(two_features(), sample_weights=torch.tensor([1, 2, -3, 4, 5, 6]).to(dtype))
    assert case.native().tolist() == [[3.0] * 3 + [4.0] * 2, [-3.0] * 3 + [5.5] * 2]


@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (9,), (0,), (11,), (3, 5)])
def test_a_gradient_of_another_size_than_the_output_is_refused(shape: tuple[int, ...]) -> None:
    case = two_features()
    rest = (case.tables, case.keys, case.means)
    with pytest.raises(
        InputError, match=r"the gradient has shape \[.*\]; expected \[2, 5\], the shape of the lookup's"
    ):
        ops.sample_weight_grad(case.weights, case.ids, case.offsets, torch.ones(shape), *rest, [2])
    with pytest.raises(InputError, match=r"the gradient has shape \[.*\]; expected \[10\]"):
        ops.sample_weight_grad(case.weights, case.ids, case.offsets, torch.ones(shape), *rest, [2, 2])


def test_the_lookup_that_tells_the_truth_is_served() -> None:
    """The one the lies are made from."""
    case = two_features()
    assert case.native().tolist() == [[2.0, 2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
    got, want = case.grads(torch.ones(2, 5))
    assert got.tolist() == want.tolist() == [3.0, 3.0, 3.0, 2.0, 1.0, 1.0]
    flat, _ = replace(case, batches=[2, 2]).grads(torch.ones(10))
    assert flat.tolist() == got.tolist()


SEQUENCE_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "starts too few": ({"starts": torch.tensor([0, 6])}, "lookup of 2 features has 2 starts; expected 3"),
    "starts too many": ({"starts": torch.tensor([0, 2, 4, 6])}, "lookup of 2 features has 4 starts; expected 3"),
    "starts that are none": ({"starts": torch.zeros(0, dtype=torch.int64)}, "has 0 starts; expected 3"),
    "starts in two dimensions": ({"starts": torch.zeros(3, 1, dtype=torch.int64)}, r"offsets have shape \[3, 1\]"),
    "starts behind the first id": ({"starts": torch.tensor([1, 2, 6])}, r"'f'.*offsets\[0\] is 1; .* begin at 0"),
    "starts before the last id": ({"starts": torch.tensor([0, 2, 5])}, r"'g'.*offsets\[2\] is 5; .* end there"),
    "starts behind the ids": ({"starts": torch.tensor([0, 2, 7])}, r"'g'.*offsets\[2\] is 7"),
    "starts that fall": ({"starts": torch.tensor([0, 7, 6])}, r"'f'.*offsets\[1\] is 7"),
    "ids in two dimensions": ({"ids": torch.zeros(6, 2, dtype=torch.int64)}, r"ids have shape \[6, 2\]"),
    "table behind the last": ({"tables": [0, 2]}, r"reads table 2; expected \[0, 2\)"),
    "table below 0": ({"tables": [-1, 0]}, r"reads table -1; expected \[0, 2\)"),
    "tables of other dims": ({"weights": [torch.ones(5, 3), torch.ones(5, 4)]}, "'u': dim 4, but .* dim 3"),
    "tables of narrower dims": ({"weights": [torch.ones(5, 3), torch.ones(5, 2)]}, "'u': dim 2, but .* dim 3"),
    "table without rows": ({"weights": [torch.ones(0, 3), torch.ones(5, 3)]}, r"'t': got id 1 of feature 'f'"),
}  # fmt: skip


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lie", SEQUENCE_LIES)
def test_a_sequence_lookup_that_contradicts_itself_is_refused(lie: str, output: torch.dtype) -> None:
    changed, message = SEQUENCE_LIES[lie]
    case: dict[str, Any] = {
        "weights": [torch.ones(5, 3)] * 2, "sinks": NO_SINKS, "ids": torch.tensor([1, 2, 3, 4, 0, 1]),
        "starts": torch.tensor([0, 2, 6]), "tables": [0, 1], "dtype": output, "names": "f@t,g@u",
    }  # fmt: skip
    assert ops.sequence_lookup(*case.values())[0].shape == (6, 3)
    with pytest.raises(InputError, match=message):
        ops.sequence_lookup(*(case | changed).values())


def test_a_table_whose_memory_was_freed_is_refused_by_its_name() -> None:
    case = two_features()
    case.weights[1].untyped_storage().resize_(0)
    message = r"Table 't1': its rows have no memory .*Give it memory with to_empty"
    with pytest.raises(InputError, match=message):
        case.native()
    with pytest.raises(InputError, match=message):
        ops.sequence_lookup(case.weights, NO_SINKS, case.ids, torch.tensor([0, 6]), [1], torch.float32, "f1@t1")
    # Nobody reads the other table's rows.
    assert replace(case, tables=[0], keys=[0], means=[0]).native().shape == (2, 3)


def test_a_table_on_another_device_is_refused_by_its_name() -> None:
    case = two_features()
    weights = [case.weights[0], case.weights[1].to("meta")]
    with pytest.raises(
        InputError, match=r"Table 't1': its rows are on meta, the ids of feature 'f1' are on cpu\. Give it"
    ):
        replace(case, weights=weights).native()


@pytest.mark.parametrize("index", [torch.int8, torch.int16, torch.uint8])
def test_small_integers_are_ids_too(index: torch.dtype) -> None:
    case = two_features()
    assert torch.equal(replace(case, ids=case.ids.to(index)).native(), case.native())


@pytest.mark.real_empty  # filling large outputs would start a thread, too
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads of the process")
def test_little_work_starts_no_second_thread() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def lookup(samples: int) -> None:
        ids = torch.zeros(samples, dtype=torch.int64)
        ops.pooled_lookup(
            [weight], NO_SINKS, ids, torch.arange(samples + 1), None, [0], [0], [0], [samples], torch.float32, "f@t"
        )

    weight, seen = torch.zeros(4, 64), []

    def run() -> None:  # OpenMP has a team of threads for each thread that calls it
        torch.set_num_threads(2)
        seen.append(threads())
        for samples in (1500, 20_000):  # 0.8 and 11 MiB of work
            lookup(samples)
            seen.append(threads())

    lib = library()
    assert lib is not None
    if lib.tr_threads(2) < 2:
        pytest.skip("there is no OpenMP runtime")
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [seen[0], seen[0], seen[0] + 1]
