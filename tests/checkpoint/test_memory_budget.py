"""Loads take no more memory than their budget beside the tables, and read the same values with any budget."""

from __future__ import annotations

import ctypes
import gc
import io
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_asynchronous import same, step, values_of
from tests.checkpoint.test_incremental import SPEC, loaded, manager, parts
from tests.storage.cached_tables import ebc
from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, apply_optimizer_in_backward
from tilerec.checkpoint import Changes, load, save
from tilerec.checkpoint.blocks import BLOCK, BlockReader
from tilerec.checkpoint.manifest import RowList
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.row_numbers import RowNumbers
from tilerec.checkpoint.scratch_memory import LEAST_BUDGET, ScratchMemory
from tilerec.errors import ConfigError, InputError
from tilerec.parallel import DistributedModelParallel
from tilerec.planner.helpers import Cut, column_wise, row_wise
from tilerec.testing.ranks import Ranks

ROWS, DIM = 240_000, 64
TABLE = ROWS * DIM * 4


def tables(cut: Cut) -> dict[str, Any]:
    module = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
    apply_optimizer_in_backward(SPEC, module.parameters())
    model = DistributedModelParallel(module, plan={"t": cut})
    return {"model": model, "optimizer": model.fused_optimizer}


def save_rows(path: str) -> None:
    made = tables(row_wise())
    for tile in made["model"].parameters():
        tile.data.copy_(torch.arange(tile.numel()).view_as(tile) % 251)
    save(path, made)


def status(name: str) -> int:
    """Return bytes of this process by the kernel: VmRSS now, VmHWM at most."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def growth(action: Callable[[], object]) -> int:
    """Return the bytes by which this process grows while it runs an action."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def load_columns(path: str, budget: int) -> tuple[int, int]:
    """Load columns of what was saved in rows; return the growth of this rank, and that of a known action."""
    made = tables(column_wise(ranks=[0, 1]))
    load(path, made, memory_budget=budget)  # the first use of any code takes memory of its own
    for tile in made["model"].parameters():
        tile.data.zero_()
    grown = growth(lambda: load(path, made, memory_budget=budget))
    (tile,) = made["model"].parameters()
    first = 0 if int(tile[0, 0]) == 0 else DIM // 2
    for half in (0, ROWS // 2):  # each rank has counted from 0
        rows = torch.arange(ROWS // 2 * DIM).view(-1, DIM) % 251
        assert torch.equal(tile[half : half + ROWS // 2], rows[:, first : first + DIM // 2].float())
    return grown, growth(lambda: torch.ones(BLOCK * 8, dtype=torch.uint8))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of Linux")
def test_ranks_load_another_plan_within_the_budget(tmp_path: Path, pool: Callable[[int], Ranks]) -> None:
    """Every row is read in part by each rank, so all bytes of the table pass through buffers."""
    assert TABLE > 2 * LEAST_BUDGET
    pool(2).run(save_rows, str(tmp_path / "a"))
    for grown, known in pool(2).run(load_columns, str(tmp_path / "a"), LEAST_BUDGET):
        assert known > BLOCK * 7  # growth of 8 blocks is seen
        assert grown <= LEAST_BUDGET


@pytest.mark.parametrize("budget", [LEAST_BUDGET - 1, 0, -1, 2.5e7, True, None])
def test_a_budget_that_no_block_fits_in_is_refused(tmp_path: Path, budget: Any) -> None:
    save(tmp_path / "a", {"x": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"memory_budget: got .*; expected a whole number of bytes, at least 25,165,"):
        load(tmp_path / "a", {"x": None}, memory_budget=budget)
    assert torch.equal(load(tmp_path / "a", {"x": None}, memory_budget=LEAST_BUDGET)["x"], torch.ones(3))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of 64 bytes, and segments of 4 row numbers."""
    monkeypatch.setattr(ScratchMemory, "of", staticmethod(lambda budget: ScratchMemory(1, 64, 96)))


@pytest.mark.usefixtures("tiny")
def test_rows_wider_than_a_buffer_are_read_in_parts(tmp_path: Path) -> None:
    saved = torch.arange(2 * 3 * 40 * 2.0).view(2, 3, 40, 2)
    save(tmp_path / "a", {"model": nn.ParameterDict({"x": saved, "y": saved[0]})})
    for shape in ((2, 3, 9, 2), (2, 2, 40, 2), (1, 3, 40, 1), (2, 3, 40, 2)):
        into = nn.ParameterDict({"x": torch.zeros(shape), "y": torch.zeros(shape[1:])})
        load(tmp_path / "a", {"model": into}, changes=Changes(resize=["*"]))
        part = saved[tuple(slice(size) for size in shape)]
        assert torch.equal(into["x"], part)
        assert torch.equal(into["y"], saved[0][tuple(slice(size) for size in shape[1:])])


@pytest.mark.usefixtures("tiny")
def test_chains_are_read_in_segments(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(3)
    saves = manager(tmp_path)
    for number in range(4):
        step(module, dice)
        saves.save(number, parts(module))
    same(loaded(tmp_path / "step-3"), values_of(module))


def numbers_file(numbers: Tensor) -> tuple[BlockReader, io.BytesIO]:
    data = numbers.numpy().tobytes()
    file = io.BytesIO(data)
    crcs = [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return BlockReader(file, "f", len(data), crcs), file


def test_numbers_between_two_rows_are_those_of_the_list_and_few_are_kept() -> None:
    dice = random.Random(1)
    for count in (1, 3, 4, 5, 8, 40):
        numbers = torch.tensor(sorted(dice.sample(range(100, 200), count)))
        rows = RowList(("f", 0), ("f", 0), count, Box((100, 0), (100, 2)))
        reader, _ = numbers_file(numbers)
        with reader:
            found = RowNumbers(3 * 4 * 8)  # segments of 4
            for _ in range(20):
                low, high = sorted(dice.sample(range(100, 201), 2))
                segments = list(found.between(reader, "f", rows, low, high))
                assert [int(one) for segment in segments for one in segment.numbers] == [
                    one for one in numbers.tolist() if low <= one < high
                ]
                for segment in segments:
                    assert torch.equal(numbers[segment.at : segment.at + len(segment.numbers)], segment.numbers)
                assert sum(map(len, found._kept.values())) <= 8


@pytest.mark.parametrize("bad", [[1, 2, 3, 4, 4, 6], [1, 2, 3, 9, 5, 6], [1, 2, 3, 4, 5, 10], [-1, 2, 3], [2, 1]])
def test_numbers_that_do_not_ascend_inside_of_the_box_are_refused(bad: list[int]) -> None:
    """In a segment, and from one to the next."""
    rows = RowList(("f", 0), ("f", 0), len(bad), Box((0, 0), (10, 2)))
    reader, _ = numbers_file(torch.tensor(bad))
    with reader, pytest.raises(InputError, match=r"Checkpoint p: got row numbers from .* in \[0, 10\)"):
        list(RowNumbers(3 * 4 * 8).between(reader, "p", rows, 0, 10))
