"""Rows of a file: every kernel moves the bytes that the reference moves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.op_cases import check
from tilerec import ConfigError
from tilerec.ops.runtime.library import LIBRARY

KERNELS = [LIBRARY.references, LIBRARY.cpu_kernels] if "read_rows_" in LIBRARY.cpu_kernels else [LIBRARY.references]


@pytest.fixture(params=range(len(KERNELS)), ids=["reference", "native"][: len(KERNELS)])
def op(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., None]]:
    return lambda name: KERNELS[request.param][name]


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile() as opened:
        yield opened.fileno()


def written(table: Tensor, file: int, op: Callable[[str], Callable[..., None]]) -> None:
    every = torch.arange(table.shape[0])
    op("write_rows_")([table], every, every, file, table[:1].nbytes, 0)


@pytest.mark.parametrize("width", [1, 3, 128, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_and_lines_are_those_that_are_named(
    op: Callable[[str], Callable[..., None]], file: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(width)
    table = torch.randint(0, 256, (400, width), dtype=torch.uint8).to(dtype)
    written(table, file, op)
    rows, at = torch.randperm(400)[:150].sort().values, torch.randperm(200)[:150]
    lines = torch.full((200, width), 7, dtype=dtype)
    expected = lines.index_copy(0, at, table[rows])
    op("read_rows_")([lines], at, rows, file, table[:1].nbytes, 0)
    assert torch.equal(lines, expected)

    changed = torch.randint(0, 256, (200, width), dtype=torch.uint8).to(dtype)
    op("write_rows_")([changed], at, rows, file, table[:1].nbytes, 0)
    table[rows] = changed[at]
    found = torch.empty_like(table)
    op("read_rows_")([found], torch.arange(400), torch.arange(400), file, table[:1].nbytes, 0)
    assert torch.equal(found, table)


@pytest.mark.parametrize("padding", [0, 2])
def test_fields_of_a_record_move_together_or_alone(
    op: Callable[[str], Callable[..., None]], file: int, padding: int
) -> None:
    torch.manual_seed(padding)
    state, rows, size = torch.randn(300, 2), torch.randint(0, 256, (300, 3), dtype=torch.uint8), 11 + padding
    every = torch.arange(300)
    os.ftruncate(file, 300 * size)
    op("write_rows_")([state, rows], every, every, file, size, 0)
    wanted, at = torch.tensor([0, 1, 2, 7, 298, 299]), torch.tensor([5, 3, 1, 0, 2, 4])
    lines = [torch.zeros(6, 2), torch.zeros(6, 3, dtype=torch.uint8)]
    op("read_rows_")(lines, at, wanted, file, size, 0)
    assert torch.equal(lines[0][at], state[wanted])
    assert torch.equal(lines[1][at], rows[wanted])

    changed = torch.randint(0, 256, (6, 3), dtype=torch.uint8)
    op("write_rows_")([changed], at, wanted, file, size, 8)
    op("read_rows_")(lines, at, wanted, file, size, 0)
    assert torch.equal(lines[0][at], state[wanted])  # the other field is as it was
    assert torch.equal(lines[1], changed)


@pytest.mark.parametrize(("size", "start"), [(15, 0), (16, 1), (16, -1)])
def test_fields_outside_of_a_record_are_refused(file: int, size: int, start: int) -> None:
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"read_rows_: got 1 fields of \[16\] bytes from byte .* of a record of"):
        torch.ops.tilerec.read_rows_([torch.empty(2, 4)], none, none, file, size, start)


def test_runs_of_neighbouring_rows_are_longer_than_one_call(
    op: Callable[[str], Callable[..., None]], file: int
) -> None:
    table = torch.randn(1000, 5)
    written(table, file, op)
    lines = torch.empty(1000, 5)
    op("read_rows_")([lines], torch.arange(999, -1, -1), torch.arange(1000), file, 20, 0)
    assert torch.equal(lines.flip(0), table)


def test_a_file_that_is_too_short_is_an_error(op: Callable[[str], Callable[..., None]], file: int) -> None:
    written(torch.randn(10, 4), file, op)
    with pytest.raises(OSError):
        op("read_rows_")([torch.empty(2, 4)], torch.tensor([0, 1]), torch.tensor([9, 10]), file, 16, 0)


@pytest.mark.parametrize("name", ["read_rows_", "write_rows_"])
def test_the_ops_pass_torchs_own_checks(name: str) -> None:
    check(name, "cpu")


def test_a_closed_file_is_an_error(op: Callable[[str], Callable[..., None]]) -> None:
    for name in ("read_rows_", "write_rows_"):
        with pytest.raises(OSError):
            op(name)([torch.empty(2, 4)], torch.tensor([0]), torch.tensor([0]), 9999, 16, 0)


@pytest.mark.parametrize(
    ("lines", "at", "rows"),
    [
        (torch.empty(4, 2), torch.tensor([4]), torch.tensor([0])),
        (torch.empty(4, 2), torch.tensor([-1]), torch.tensor([0])),
        (torch.empty(4, 2), torch.tensor([0, 1]), torch.tensor([0])),
        (torch.empty(4, 2), torch.tensor([0], dtype=torch.int32), torch.tensor([0])),
        (torch.empty(2, 4).T, torch.tensor([0]), torch.tensor([0])),
    ],
)
def test_memory_outside_of_the_lines_is_refused(file: int, lines: Tensor, at: Tensor, rows: Tensor) -> None:
    with pytest.raises(ConfigError, match="read_rows_: got"):
        torch.ops.tilerec.read_rows_([lines], at, rows, file, lines[:1].nbytes, 0)
