"""A follower holds the lock for few rows at a time, and for nothing but their bytes."""

from __future__ import annotations

import mmap
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.delta import DeltaRecord, DeltaWriter, Follower, RequestLock, follower
from tilerec.errors import ConfigError
from tilerec.ops.backends import RowWrite

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


def published(folder: Path, target: Table, lock: Any) -> tuple[Table, Follower]:
    """Return a model, and a follower of its log with one delta to come, of all rows."""
    source = Table()
    writer = DeltaWriter(folder, source, base_every=99)
    writer.publish(0)
    found = Follower(folder, target, lock=lock)
    source.rows += 1
    writer.publish(1)
    return source, found


def test_a_limit_spreads_rows_evenly_between_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, lock = Table(), RequestLock()
    if lock.gate is None:
        pytest.skip("needs the native library")
    source, follows = published(tmp_path, target, lock)
    calls: list[tuple[int, int, int]] = []
    run = RowWrite.run_between_requests

    def noted(self: RowWrite, native: Any, gate: Any, hold: int, row_ns: int = 0) -> None:
        calls.append((len(self.values), hold, row_ns))
        run(self, native, gate, hold)

    monkeypatch.setattr(RowWrite, "run_between_requests", noted)
    follows.rows_per_second = 100_000
    follows.poll()
    assert torch.equal(target.rows, source.rows)
    assert {(hold, row_ns) for _, hold, row_ns in calls} == {(follower.ROWS, 10_000)}
    assert max(rows for rows, _, _ in calls) * 10_000 <= follower.CALL_SECONDS * 1e9


def test_a_limit_holds_without_the_native_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, slept = Table(), list[float]()
    _, follows = published(tmp_path, target, threading.Lock())
    monkeypatch.setattr(follower.time, "sleep", slept.append)
    follows.poll()
    assert not slept
    source, follows = published(tmp_path / "next", target, threading.Lock())
    follows.rows_per_second = 1000
    target.rows.zero_()
    follows.poll()
    assert torch.equal(target.rows, source.rows)
    assert sum(slept) == pytest.approx(ROWS / 1000)


@pytest.mark.parametrize("lock", [RequestLock, threading.Lock])
def test_a_poll_that_runs_follows_a_new_limit(tmp_path: Path, lock: Any) -> None:
    """With the old limit it would take 82 s."""
    target = Table()
    source, follows = published(tmp_path, target, lock())
    follows.rows_per_second = 50
    thread = threading.Thread(target=follows.poll, daemon=True)
    thread.start()
    while not target.rows[0, 0]:
        pass
    assert not target.rows[-1, 0]
    follows.rows_per_second = None
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(target.rows, source.rows)


def test_a_limit_that_is_too_low_is_refused(tmp_path: Path) -> None:
    _, follows = published(tmp_path, Table(), None)
    follows.rows_per_second = 2e6
    assert follows.rows_per_second == pytest.approx(2e6)
    for wrong in (49, 0, -1, float("nan")):
        with pytest.raises(ConfigError, match="expected at least 50, or None for no limit"):
            follows.rows_per_second = wrong
