"""A run's sum: the bits of one order of additions, wherever the run lies; short runs have the CPU's bits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.triton.gates import Gate, compiled
from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_update import RULES, Call, pooled, single
from tests.ops.triton.update_kernels import sum_row_gradients_of_tables, update_rows_
from tilerec.ops.runtime.cpu import library as cpu_library
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.triton import launch as update_launch
from tilerec.ops.update.triton import runs, sort

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")
RUNS = "tilerec.ops.update.triton.runs"
nightly = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="takes a minute")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def small(monkeypatch: pytest.MonkeyPatch, chunk: int, chunks: int) -> None:
    """Chunks of so many rows, super-chunks of so many chunks; a chunk holds a program's span, here one tile."""
    for module in (sort, update_launch):
        monkeypatch.setattr(module, "CHUNK", chunk)
        monkeypatch.setattr(module, "CHUNKS", chunks)


def fold(rows: Tensor | Sequence[Tensor]) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def sum_of(rows: Tensor, chunk: int = runs.CHUNK, chunks: int = runs.CHUNKS) -> Tensor:
    """What `runs.py` says."""
    whole = len(rows) // chunk
    sums = [fold(rows[k * chunk : (k + 1) * chunk]) for k in range(whole)]
    supers = [fold(sums[k * chunks : (k + 1) * chunks]) for k in range(whole // chunks)]
    return fold([*supers, *sums[len(supers) * chunks :], *rows[whole * chunk :]])


def summed(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    weight = torch.full((rows, grad.shape[1]), float("nan"))
    update_rows_([weight], [], *single(ids, grad), "store", [], [0], [0, 0], [0], [0])
    return weight


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def copies(lengths: Sequence[int], starts: Sequence[int], period: int, dim: int) -> tuple[Tensor, Tensor, list[int]]:
    """Ids and gradients of runs whose first occurrences sort to `starts` (mod `period`): runs of each length have the
    same gradients, single occurrences fill the gaps. And which row each run is."""
    sources = {n: torch.randn(n, dim) for n in lengths}
    ids: list[int] = []
    grads: list[Tensor] = []
    rows, row = [], 0
    for n in lengths:
        for start in starts:
            for _ in range((start - len(ids)) % period):
                ids.append(row)
                grads.append(torch.randn(1, dim))
                row += 1
            ids += [row] * n
            grads.append(sources[n])
            rows.append(row)
            row += 1
    return torch.tensor(ids), torch.cat(grads), rows


def check(lengths: Sequence[int], starts: Sequence[int], period: int, dim: int, chunk: int, chunks: int) -> None:
    ids, grad, rows = copies(lengths, starts, period, dim)
    got = summed(ids, grad, int(ids.max()) + 1)
    for at, row in enumerate(rows):
        n = lengths[at // len(starts)]
        want = sum_of(grad[ids == row], chunk, chunks)
        assert same_bits(got[row], want), (n, starts[at % len(starts)])


def test_a_sum_as_it_is_written() -> None:
    """Chunks of 4, super-chunks of 2: ((8 rows + 4 rows) + row) + row. The first row of the first is 2^24."""
    rows = torch.ones(14, 1)
    rows[0] = 2.0**24  # and 1 is lost, but not 4
    assert sum_of(rows, 4, 2).item() == 2.0**24 + 4 + 4
    assert fold(rows).item() == 2.0**24
    assert sum_of(rows[:7], 4, 2).item() == fold(rows[:7]).item()


def test_a_short_run_has_the_same_bits_at_every_position_of_a_tile() -> None:
    check([3], range(16), 16, 3, runs.CHUNK, runs.CHUNKS)


def test_a_run_has_the_same_bits_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16, super-chunks of 32, tiles of 8 rows."""
    small(monkeypatch, 16, 2)
    check([17, 33, 70], [0, 1, 31], 32, 40, 16, 2)


def test_long_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one chunk begins in a block, whatever lies around it."""
    small(monkeypatch, 16, 2)
    lengths = [16, 32, 31, 33, 65, 17, 15]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    grad = torch.randn(ids.numel(), 2)
    got = summed(ids, grad, len(lengths))
    for row in range(len(lengths)):
        assert same_bits(got[row], sum_of(grad[ids == row], 16, 2)), row


def test_runs_of_a_chunk_and_more() -> None:
    check([127, 128, 257], [5], 16, 2, runs.CHUNK, runs.CHUNKS)


@nightly
@pytest.mark.parametrize("dim", [1, 3, 32, 128, 257])
def test_runs_of_all_lengths_have_the_same_bits_at_all_places(dim: int) -> None:
    check([2, 5, 127, 128, 129, 255, 256, 257], [0, 1, 3, 31, 64, 127], 128, dim, runs.CHUNK, runs.CHUNKS)


@nightly
@pytest.mark.parametrize("n", [8191, 8192, 8193, 16383, 16384, 16385 + 8192])
@pytest.mark.parametrize("start", [0, 1, 8191])
def test_runs_of_super_chunks_have_the_same_bits_at_all_places(n: int, start: int) -> None:
    ids = torch.cat((torch.zeros(start), torch.ones(n), torch.full((17000 - start,), 2))).long()
    grad = torch.randn(ids.numel(), 2)
    assert same_bits(summed(ids, grad, 3)[1], sum_of(grad[ids == 1]))


def test_zeros_keep_their_sign() -> None:
    """Alone, in a tile, from one tile into the next, and from one program to the next."""
    ids = torch.tensor([0, 1, 1, *[2] * 40])
    assert torch.signbit(summed(ids, torch.full((43, 4), -0.0), 3)).all()


CPU = pytest.mark.skipif(cpu_library.library() is None, reason="needs the native library")


@CPU
@pytest.mark.parametrize(
    ("dims", "grad", "weighted", "mean"),
    [
        ([1, 3, 4], torch.float32, False, 0), ([32, 128], torch.bfloat16, True, 0), ([257], torch.float16, True, 1),
        ([4, 128], torch.float32, True, 1), ([3, 32], torch.bfloat16, False, 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "sgd-nesterov-scaled"])
def test_short_runs_have_the_cpus_bits(
    name: str, dims: list[int], grad: torch.dtype, weighted: bool, mean: int
) -> None:
    lengths = torch.randint(0, 9, (len(dims) * 8,)).tolist()
    record = pooled(dims, lengths, 5, 8, grad, torch.int64, weighted, [mean] * len(dims))
    call = Call([torch.randn(5, d) for d in dims], RULES[name], record)
    got, want = call.run(update_rows_), call.run(torch.ops.tilerec.update_rows_)
    for a, b in zip((*got[1], *got[2]), (*want[1], *want[2]), strict=True):
        assert torch.equal(a, b)


@CPU
def test_row_sums_given_out_have_the_cpus_bits() -> None:
    dims, rows = [3, 32], [4, 6]
    record = pooled(dims, [3, 0, 40, 7, 1, 80], 4, 3, weighted=True, means=[0, 1])
    got = sum_row_gradients_of_tables(*record[:4], rows, dims, *record[4:])
    want = torch.ops.tilerec.sum_row_gradients_of_tables(*record[:4], rows, dims, *record[4:])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_every_whole_chunk_is_summed_and_nothing_else() -> None:
    chunk = 8
    lengths = torch.tensor([7, 8, 9, 30, 1, 16, 15, 1, 33])
    keys = torch.repeat_interleave(torch.arange(9), lengths).int()
    total = keys.numel()
    partials = torch.full((total // chunk, 4), float("nan"))
    numbers = torch.zeros(1, sort.PER_TABLE, dtype=torch.int64)
    numbers[0, 1] = 1
    runs.sum_chunks[(total // chunk,)](
        keys, torch.arange(total), partials, torch.arange(total).float(), partials, partials,
        numbers, numbers, total, 8, 1, 0, STEPS=0, SCALED=False, CHUNK=chunk, CHUNKS=2, COLUMNS=4, VEC=1, VEC_D=1,
    )  # fmt: skip
    want = {}
    for row, first in enumerate((lengths.cumsum(0) - lengths).tolist()):
        for k in range(int(lengths[row]) // chunk if row < 8 else 0):  # the last row is the sentinel
            at = first + k * chunk
            want[at // chunk] = float(sum(range(at, at + chunk)))
    found = {b: partials[b, 0].item() for b in range(total // chunk) if not partials[b, 0].isnan()}
    assert found == want


def gates() -> list[Gate]:
    signature = {
        "keys": "*i32", "places": "*i32", "scales": "*fp32", "grad": "*fp32",
        "partials": "*fp32", "supers": "*fp32", "status": "*i64", "meta": "*i64",
        **dict.fromkeys(["total", "sentinel", "tables", "chunks"], "i32"),
    }  # fmt: skip
    constants = {"STEPS": 5, "CHUNK": 128, "CHUNKS": 64, "COLUMNS": 128, "VEC": 4, "VEC_D": 16}
    options = {"num_warps": 1, "enable_fp_fusion": False, **sort.REGISTERS}
    return [
        Gate(name, f"{RUNS}:sum_chunks", signature, {**constants, "SCALED": scaled}, options=options)
        for name, scaled in (("plain", False), ("scaled", True))
    ]  # fmt: skip


def test_compiled_sums_read_rows_16_bytes_at_a_time() -> None:
    """8 rows, or 8 chunks' sums, are on their way at once, and a multiprocessor holds all the programs that it can."""
    for name, kernel in compiled(gates()).items():
        assert kernel.count("ld.global.v4.b32") == 16, (name, kernel)
        assert kernel.count("st.global.v4.b32") == 2, (name, kernel)
        assert kernel.on_their_way == 8, (name, kernel)
        assert kernel.spilled == 0, (name, kernel)
        assert kernel.warps() == 32, (name, kernel)
        # The last one sees what the others wrote: a barrier on both sides of what releases and acquires.
        assert kernel.count("atom.global.gpu.acq_rel.add.u64") == 1, (name, kernel)
        assert kernel.count("atom", "red") == 1, (name, kernel)
        assert kernel.count("bar.sync") >= 3, (name, kernel)
        assert kernel.count("ld.global.nc") == 0, (name, kernel)
