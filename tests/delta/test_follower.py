"""A follower holds the lock for few rows at a time, and for nothing but their bytes."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.delta import DeltaRecord, DeltaWriter, Follower, RequestLock, follower

ROWS, WIDTH = 4096, 1024
"""A row takes a quarter of a page."""


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)


class CountingLock:
    """A lock that adds up the pages that the system had to make for its holder."""

    def __init__(self) -> None:
        self.holds, self.faults, self.held = 0, 0, False

    def __enter__(self) -> None:
        assert not self.held
        self.held = True
        self.holds += 1
        self._before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def __exit__(self, *_: object) -> None:
        self.faults += resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - self._before
        self.held = False


def mapped(path: Path, table: Table) -> dict[str, Tensor]:
    """Return the table's tensors on a private mapping of a file, as those of a served package."""
    path.write_bytes(table.rows.numpy().tobytes())
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {"rows": torch.frombuffer(memory, dtype=torch.uint8).view(ROWS, WIDTH), "bias": torch.zeros(3)}


@pytest.mark.parametrize("every", [1, 2], ids=["all rows", "listed rows"])
def test_pages_of_a_file_are_copied_before_the_lock_is_taken(tmp_path: Path, every: int) -> None:
    source = Table()
    target = mapped(tmp_path / "weights", source)
    writer = DeltaWriter(tmp_path / "log", source, base_every=99)
    writer.publish(0)
    lock = CountingLock()
    follows = Follower(tmp_path / "log", target, lock=lock)
    source.rows[::every] += 1
    source.bias += 1
    writer.publish(1)
    lock.holds = lock.faults = 0
    follows.poll()
    assert torch.equal(target["rows"], source.rows)
    assert torch.equal(target["bias"], source.bias)
    assert lock.holds >= ROWS / every / follower.ROWS
    assert lock.faults < ROWS * WIDTH / mmap.PAGESIZE / 20  # one for each page if the holder writes to them first
    assert set((tmp_path / "weights").read_bytes()) == {0}


def test_readers_hear_of_a_state_before_its_first_row_and_after_its_last(tmp_path: Path) -> None:
    source, target = Table(), Table()
    writer = DeltaWriter(tmp_path, source, base_every=99)
    writer.publish(10)
    lock = CountingLock()
    seen: list[tuple[int, int, bool, int]] = []

    def note(record: DeltaRecord, complete: bool) -> None:
        assert lock.held
        seen.append((record.sequence, record.step, complete, int(target.rows.sum())))

    follows = Follower(tmp_path, target, lock=lock, noted=note)
    source.rows[:600] += 1
    writer.publish(20)
    follows.poll()
    follows.poll()
    assert seen == [(0, 10, False, 0), (0, 10, True, 0), (1, 20, False, 0), (1, 20, True, 600 * WIDTH)]


def test_a_state_that_is_half_written_is_not_noted_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    source, target = Table(), Table()
    writer = DeltaWriter(tmp_path, source, base_every=99)
    writer.publish(0)
    seen: list[bool] = []
    follows = Follower(tmp_path, target, noted=lambda record, complete: seen.append(complete))
    source.rows[:600] += 1
    writer.publish(1)

    def fails(*_: Any) -> None:
        raise OSError(5, "a disk that is gone")

    with monkeypatch.context() as patch:
        patch.setattr(follower.Follower, "_write", fails)
        with pytest.raises(OSError, match="a disk that is gone"):
            follows.poll()
    assert (seen, follows.sequence) == ([False, True, False], 0)
    follows.poll()
    assert (seen, follows.sequence) == ([False, True, False, False, True], 1)
    assert torch.equal(target.rows, source.rows)


@pytest.mark.parametrize("width", [64, 68, 3, 1], ids=lambda width: f"{width} bytes")
@pytest.mark.parametrize("first", [0, 1, 4])
def test_rows_of_any_width_and_place_are_written_as_they_are(tmp_path: Path, width: int, first: int) -> None:
    """Rows are copied as the widest whole numbers that their bytes allow."""
    draw = torch.Generator().manual_seed(width)
    source = {"rows": torch.randint(0, 256, (2000, width), dtype=torch.uint8, generator=draw)}
    memory = torch.zeros(2000 * width + 16, dtype=torch.uint8)
    target = {"rows": memory[first : first + 2000 * width].view(2000, width)}
    model = nn.Module()
    model.register_parameter("rows", nn.Parameter(source["rows"], requires_grad=False))
    writer = DeltaWriter(tmp_path, model, base_every=99)
    writer.publish(0)
    lock = RequestLock()
    follows = Follower(tmp_path, target, lock=lock)
    with torch.no_grad():
        model.rows[::2] += 1  # type: ignore[operator]
    writer.publish(1)
    follows.poll()
    assert torch.equal(target["rows"], model.rows)
    assert not memory[:first].any()
    assert not memory[first + 2000 * width :].any()
