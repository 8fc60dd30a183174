"""Batches of other sizes compile nothing; what is recorded is what Triton would compile."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.ops.triton.gates import compiled
from tests.ops.triton.interpreter import quick
from tests.ops.triton.launches import counted
from tests.ops.triton.variants import Variant, cover, load, recorded, save, sweep
from tests.ops.triton.workloads import (
    BF16,
    CALLS,
    FP8,
    OPTIMIZERS,
    POINTS,
    READS,
    Model,
    Workload,
    everything,
    replace,
    same,
    step,
)
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes; TILEREC_NIGHTLY=1 runs it")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    torch.set_num_threads(1)  # many small tensors
    with quick():
        yield


# ------------------------------------------------------------------------------------------------ what is recorded


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["anywhere"])
def copy(out, anywhere, count, size, scale, TILE: tl.constexpr, CHANGE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out + at, CHANGE(tl.load(anywhere + at, mask=at < count, other=0) * scale), mask=at < size)


@triton.jit
def same_number(x):
    return x


def launched(*arguments: object, **options: object) -> Variant:
    with recorded(run=False) as record:
        copy[(1,)](*arguments, TILE=8, CHANGE=same_number, **options)
    return record.launches[0]


def test_a_variant_is_what_triton_tells_launches_apart_by() -> None:
    floats, numbers = torch.zeros(16), torch.zeros(16, dtype=torch.int64)
    here = launched(floats, numbers, 5, 5, 0.5)
    assert here.kernel == f"{__name__}:copy"
    assert dict(here.types) == {
        "out": "*fp32",
        "anywhere": "*i64",
        "count": "i32",
        "size": "i32",
        "scale": "fp32",
    }
    assert dict(here.constants) == {"TILE": 8, "CHANGE": f"{__name__}:same_number"}
    assert here.multiples_of_16 == ("out",)
    for alike in (
        (floats, numbers[1:], 5, 5, 0.5),
        (floats, numbers, 16, 7, 2.0),
        (floats, numbers, 1, 5, 1.0),
    ):
        assert launched(*alike) == here
    for other in (
        (floats[1:], numbers, 5, 5, 0.5),
        (floats, numbers.int(), 5, 5, 0.5),
        (floats, numbers, 2**31, 5, 0.5),
        (floats, numbers, 5, 16, 0.5),
        (floats, numbers, 5, 1, 0.5),
    ):
        assert launched(*other) != here
    assert launched(floats, numbers, 5, 5, 0.5, num_warps=1) != here
    assert dict(launched(floats, numbers, 5, 1, 0.5).constants)["size"] == 1


def test_kernels_run_unless_they_are_not_to() -> None:
    out = torch.full((8,), 7.0)
    with recorded(run=False):
        copy[(1,)](out, torch.arange(8), 8, 3, 2.0, TILE=8, CHANGE=same_number)
    assert out.tolist() == [7.0] * 8
    with recorded() as record:
        copy[(1,)](out, torch.arange(8), 8, 3, 2.0, TILE=8, CHANGE=same_number)
    assert out.tolist() == [0.0, 2.0, 4.0, *[7.0] * 5]
    assert record.names == ["copy"]


def test_a_cover_has_each_value_with_each_other(tmp_path: Path) -> None:
    def variant(*values: int) -> Variant:
        return Variant("m:k", (("p", "*fp32"),), tuple(zip("abc", values, strict=True)), (), ())

    every = {variant(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(cover(every, 1)) == 4
    pairs = cover(every, 2)
    assert 16 <= len(pairs) <= 24
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert len({(v.constants[i], v.constants[j]) for v in pairs}) == 16
    save(set(pairs[:5]), tmp_path / "variants")
    save(set(pairs), tmp_path / "variants")
    assert set(load(tmp_path / "variants")) == set(pairs)


# ------------------------------------------------------------------------------------------------ new batches

# Samples and ids per bag: large ones first; then those of other launches, a program's numbers 1, and no ids at all.
LARGE = [(3500, (7, 7, 7)), (1750, (14, 30, 0))]
BATCHES = [(1000, (7, 7, 7)), (96, (8, 0, 1)), (257, (2, 5, 6)), (4, (700, 1, 0)), (1024, (4, 4, 8))]
FEW = [(600, (1, 1, 0)), (1024, (1, 0, 1)), (1, (600, 0, 0)), (800, (1, 1, 1))]
TINY = [(16, (9, 3, 1)), (1, (2, 2, 1)), (64, (1, 2, 4)), (8, (16, 16, 16))]
TINY_FEW = [(16, (1, 1, 1)), (1, (1, 0, 0)), (48, (1, 0, 1)), (5, (0, 1, 0)), (3, (0, 0, 0))]
BASE = same(3, 128, 256, 7)
WORKLOADS = {
    **{name: replace(BASE, optimizer=name) for name in OPTIMIZERS},
    "no optimizer": replace(BASE, optimizer=None),
    "bf16, weighted means": replace(BASE, dtype=BF16, weighted=True, mean=True, optimizer="adam"),
    "e4m3, mixed dims": replace(BASE, dtype=FP8, dims=(64, 128, 32), optimizer="row-wise adagrad"),
    "batches of several sizes": replace(BASE, variable=True),
    "sequences": replace(BASE, pooled=False),
    "sequences, bf16": replace(BASE, pooled=False, dtype=BF16, optimizer="adam"),
}
ALWAYS = ("sgd", "adam", "bf16, weighted means", "e4m3, mixed dims", "batches of several sizes", "sequences")


def variants_of(model: Model, batches: list[tuple[int, tuple[int, ...]]]) -> list[Variant]:
    found = []
    for size, lengths in batches:
        for given in model.step(model.batch(size, lengths)):
            found += given.variants
        model.module.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    "workload",
    [pytest.param(w, id=name, marks=[] if name in ALWAYS else NIGHTLY) for name, w in WORKLOADS.items()],
)
def test_a_batch_of_another_size_compiles_nothing(workload: Workload) -> None:
    model = Model(workload)
    known: set[Variant] = set()
    for batches, new_kernels in (
        (LARGE, None),
        (BATCHES, _SMALL),
        (FEW, _LOOKUPS),
        (TINY, _SMALL),
        (TINY_FEW, _LOOKUPS),
    ):
        first, *others = variants_of(model, batches[:1]), variants_of(model, batches[1:])
        new = set(first) - known
        if new_kernels is not None:
            assert {v.kernel.partition(":")[2] for v in new} <= new_kernels
        known |= new
        assert not {str(v) for v in set(others[0]) - known}


_LOOKUPS = {"pooled_kernel", "sample_weight_kernel"}
_SMALL = {*_LOOKUPS, "sort_blocks", "rank_blocks"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_size_compiles_nothing(name: str) -> None:
    known: set[Variant] = set()
    for number, size in enumerate((5, 1, 2, 16) if name in READS else (41, 1, 2, 40, 48, 16, 300, 5000)):
        call = CALLS[name](size)
        with counted(run=name in READS) as given:
            call()
        if not number:
            known = set(given.variants)
            assert known
        assert not {str(v) for v in set(given.variants) - known}


# ------------------------------------------------------------------------------------------------ what compiles


def forward_of(workload: Workload, kernel: str) -> Variant:
    """The variant of a workload's lookup."""
    given, _ = step(workload)
    return next(v for v in given.variants if v.kernel.endswith(f":{kernel}"))


@pytest.mark.parametrize(
    "lookups",
    [
        [("P1 bf16", "pooled_kernel")],
        pytest.param([("small", "pooled_kernel"), ("unpooled", "sequence_kernel")], marks=NIGHTLY),
    ],
)
def test_a_turn_asks_for_all_of_its_rows_before_it_uses_one(lookups: list[tuple[str, str]]) -> None:
    """In machine code: what the memory is kept busy with."""
    gates = [forward_of(POINTS[point], kernel).gate() for point, kernel in lookups]
    for kernel in compiled(gates).values():
        assert kernel.on_their_way == 8
        assert kernel.warps() >= 24
        assert kernel.spilled == 0


@NIGHTLY
@pytest.mark.timeout(4000)
def test_every_variant_compiles(tmp_path: Path) -> None:
    """Not quite every one: each of their values with each other (`cover`). Half an hour."""
    variants = {v for workload in everything() for given in step(workload) for v in given.variants}
    results = tmp_path / "results"
    assert sweep(cover(variants), results, seconds=3600) == 0
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert not [f"{one['name']}: {one['error']}" for one in found if "error" in one]
    # Updates that keep to 96 registers: Triton 3.9 was seen to spill 260 bytes.
    most = 320 if importlib.metadata.version("triton").startswith("3.9.") else 128
    assert not [one for one in found if one["spilled"] > most]
