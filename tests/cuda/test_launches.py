"""Where and when kernels run on GPUs: the tensors' device, several streams, captures of what is new, tall grids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import real, size
from tests.ops.random_ops import random_fill_reference_
from tilerec.errors import InputError
from tilerec.ops.runtime import readback as later
from tilerec.ops.runtime import upload

pytest.importorskip("triton")

from tests.ops.triton import lookup_kernels
from tests.ops.triton import random_kernels as random
from tilerec.ops.runtime.triton import reports

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
LONG = 2_000_000_000  # cycles: a second or so


@pytest.fixture(autouse=True)
def _nothing_is_told() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        reports.raise_all(CUDA)


def fresh(rows: int, device: torch.device = CUDA) -> tuple[Tensor, Tensor, Tensor]:
    """A table whose layout nobody has seen, ids of one bag each, offsets."""
    ids = torch.arange(rows, device=device) % 7
    return torch.randn(rows, 64, device=device), ids, torch.arange(rows + 1, device=device)


def pooled(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    sinks = torch.zeros(0, dtype=torch.int64)
    batch = [ids.numel()]
    return lookup_kernels.pooled_lookup([table], sinks, ids, offsets, None, [0], [0], [0], batch, torch.float32, "f@t")[
        0
    ]


def test_a_stream_does_not_read_a_layout_that_another_has_yet_to_send() -> None:
    table, ids, offsets = fresh(size(1000, 40))
    pooled(*fresh(size(1000, 40)))  # compiles
    one, other = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(LONG)
        first = pooled(table, ids, offsets)
    with torch.cuda.stream(other):
        second = pooled(table, ids, offsets)
        assert torch.equal(second, table[ids])
    torch.cuda.synchronize()
    assert torch.equal(first, second)


def look() -> None:
    for _ in range(5):  # the simulated GPU's events are heard of late
        reports.raise_due(CUDA)


def test_a_slow_stream_keeps_no_other_from_its_news() -> None:
    table, ids, offsets = fresh(size(1000, 40))
    wrong = ids.clone()
    wrong[3] = 10**6
    pooled(table, ids, offsets)  # compiles
    slow, quick = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA)
    reports.raise_all(CUDA)
    with torch.cuda.stream(slow):
        torch.cuda._sleep(LONG)
        pooled(table, ids, offsets)
    done, late = torch.cuda.Event(), torch.cuda.Event()
    late.record(slow)
    with torch.cuda.stream(quick):
        pooled(table, wrong, offsets)
        done.record(quick)
        while not done.query():
            pass
        with pytest.raises(InputError, match="id 1000000"):
            look()
    assert not late.query()
    torch.cuda.synchronize()


def test_a_layout_that_is_captured_is_no_layout_before_the_replay() -> None:
    pooled(*fresh(size(1100, 44)))  # compiles
    table, ids, offsets = fresh(size(1100, 44))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = pooled(table, ids, offsets)
    assert torch.equal(pooled(table, ids, offsets), table[ids])
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, table[ids])


def test_a_graph_outlives_the_layouts_that_are_kept() -> None:
    table, ids, offsets = fresh(size(1200, 48))
    pooled(table, ids, offsets)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = pooled(table, ids, offsets)
    for n in range(size(600, 520)):  # more than are kept; their memory would be that of the graph's
        upload.constants([-(1 << 40)] * 10 + [n], CUDA)
        pooled(torch.randn(8, 64, device=CUDA)[n % 8 :], ids[:0], offsets[:1])
    out.zero_()
    graph.replay()
    assert torch.equal(out, table[ids])


def test_what_one_replay_finds_is_told_after_another_that_finds_nothing() -> None:
    table, ids, offsets = fresh(size(1300, 52))
    pooled(table, ids, offsets)
    reports.raise_all(CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled(table, ids, offsets)
    ids[3] = 5000
    graph.replay()
    ids[3] = 0
    graph.replay()
    with pytest.raises(InputError, match="id 5000"):
        reports.raise_all(torch.device("cuda"))


def test_what_a_graph_writes_is_not_looked_at_before_its_first_replay() -> None:
    """Its memory holds anything until then."""
    seen: list[list[int]] = []
    numbers = torch.full((3,), 7, device=CUDA)
    later.on_arrival(torch.zeros_like(numbers), lambda _: None)  # as a step before the capture does
    later.wait_all(CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.fill_(5)
        later.on_arrival(numbers, seen.append)
    later.wait_all(CUDA)
    assert seen == []
    graph.replay()
    later.wait_all(CUDA)
    later.wait_all(CUDA)
    assert seen == [[5, 5, 5]]


def test_a_step_of_many_ops_captured_takes_reports_that_are_zeros() -> None:
    table, ids, offsets = fresh(size(100, 12))
    pooled(table, ids, offsets)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before = len(reports._REPORTS._devices[CUDA].of_graphs)
    with torch.cuda.graph(graph):
        for _ in range(100):
            pooled(table, ids, offsets)
    own = reports._DEVICES[CUDA].own
    assert {g.numbers.data_ptr() for g in reports._REPORTS._devices[CUDA].of_graphs[before:]} <= own


def test_inference_mode_and_training_share_what_reports_are_copied_to() -> None:
    table, ids, offsets = fresh(size(100, 12))
    with torch.inference_mode():
        pooled(table, ids, offsets)
    reports.raise_all(CUDA)
    out = pooled(table, ids, offsets)
    assert torch.equal(out, table[ids])
    ids[1] = 5000
    with torch.inference_mode():
        pooled(table, ids, offsets)
    with pytest.raises(InputError, match="id 5000"):
        reports.raise_all(CUDA)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_their_tensors_are() -> None:
    there = torch.device("cuda", 1)
    table, ids, offsets = fresh(100, there)
    assert torch.cuda.current_device() == 0
    ops = torch.ops.tilerec
    batch: list[int] = [100]
    sinks = torch.zeros(0, dtype=torch.int64)
    out = ops.pooled_lookup([table], sinks, ids, offsets, None, [0], [0], [0], batch, torch.float32, "f@t")[0]
    assert torch.equal(out, table[ids])
    assert torch.equal(ops.segment_ids(offsets, 100), torch.arange(100, device=there))
    filled, wanted = torch.empty(50, 5, device=there), torch.empty(50, 5)
    ops.random_fill_(filled, [3, 4], 0, 0, "uniform", -1.0, 1.0)
    random_fill_reference_(wanted, [3, 4], 0, 0, "uniform", -1.0, 1.0)
    assert torch.equal(filled.cpu(), wanted)
    reports.raise_all(there)


@real
@pytest.mark.parametrize(("rows", "dim"), [(20_000_000, 1), (3_000_000, 128)])
def test_tables_of_many_rows_are_filled_to_their_end(rows: int, dim: int) -> None:
    out, wanted = torch.empty(rows, dim, device=CUDA), torch.empty(1000, dim)
    random.random_fill_(out, [3, 4], 0, 0, "uniform", -1.0, 1.0)
    random_fill_reference_(wanted, [3, 4], rows - 1000, 0, "uniform", -1.0, 1.0)
    assert torch.equal(out[-1000:].cpu(), wanted)
