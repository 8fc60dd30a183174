"""Several cached tables as the cache ops take them, on any device, and requests of all of them in one go."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilerec.ops import backends as backends
from tilerec.ops.cache.definition import BOOKS, DIRTY, LINE_OF, NONE, HeaderColumn

Ops = Mapping[str, Callable[..., Any]]


@dataclass
class Shape:
    """A table: rows, sets, spare lines, whether LFU, and the columns of its rows and slots (0: a number per row)."""

    rows: int
    sets: int
    spare: int
    lfu: bool = False
    widths: Sequence[int] = (4, 0)
    dtype: torch.dtype = torch.float32


@dataclass
class CachedTables:
    """Books, lines and rows; `truth` is what every row holds, wherever it is."""

    shapes: Sequence[Shape]
    ways: int
    device: str = "cpu"
    serial: int = 0
    flying: list[int] = field(default_factory=list)  # bits, oldest first
    books: list[Tensor] = field(default_factory=list)
    lines: list[Tensor] = field(default_factory=list)
    host: list[Tensor] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)  # of lines and host

    def __post_init__(self) -> None:
        for t, shape in enumerate(self.shapes):
            lines = shape.sets * self.ways + shape.spare

            def numbers(size: int, value: int, dtype: torch.dtype) -> Tensor:
                return torch.full((size,), value, dtype=dtype, device=self.device)

            self.books += [
                numbers(shape.rows, NONE, torch.int32), numbers(lines, -1, torch.int64), numbers(lines, 0, torch.int64),
                numbers(lines, 0, torch.int32), numbers(shape.rows if shape.lfu else 0, 0, torch.int32),
                torch.zeros(lines, dtype=torch.bool, device=self.device), numbers(8, 0, torch.int64),
            ]  # fmt: skip
            for width in shape.widths:
                more = (width,) if width else ()
                values = torch.randint(-100, 100, (shape.rows, *more)).to(shape.dtype)
                self.host.append(values.to(self.device))
                self.lines.append(torch.zeros((lines, *more), dtype=shape.dtype, device=self.device))
                self.tables.append(t)
        self.truth = [own.clone() for own in self.host]

    @property
    def sets(self) -> list[int]:
        return [shape.sets for shape in self.shapes]

    def request(
        self, ops: Ops, segments: Sequence[tuple[int, int, int]], ids: Tensor, ahead: int
    ) -> tuple[Tensor, ...]:
        """Ask for a batch, of which `ahead` before it are still in flight; header, plan and order of it."""
        self.serial += 1
        bit = 1 << (self.serial % 31)
        self.flying = [*self.flying, bit][-ahead - 1 :]
        count = len(self.shapes)
        clock = torch.tensor([[self.serial] * count, [bit] * count, [sum(self.flying)] * count], device=self.device)
        for t in range(count):  # the bit is clean
            self.books[BOOKS * t + 3] &= sum(self.flying) & ~bit
        begins, ends, tables = ([s[k] for s in segments] for k in range(3))
        header, keys, order = ops["cache_ask_"](ids, begins, ends, tables, self.books, self.sets, self.ways, clock, "")
        plan = ops["cache_plan"](
            ids, begins, ends, tables, self.books, self.sets, self.ways, clock, header, keys, order
        )
        for comes in (False, True):
            for _ in range(2 if self.serial == 3 else 1):  # twice is as once
                ops["cache_move_"](plan, header, self.lines, self.host, self.tables, keys.shape[0], comes)
        for _ in range(2 if self.serial == 3 else 1):
            ops["cache_seat_"](plan, header, self.books, clock, keys.shape[0])
        return header, keys, plan

    def update(self, ops: Ops, segments: Sequence[tuple[int, int, int]], ids: Tensor) -> Tensor:
        """Add one to every row that the batch names, in its line."""
        begins, ends, tables = ([s[k] for s in segments] for k in range(3))
        lines = ops["cache_lines_"](
            ids,
            begins,
            ends,
            tables,
            self.books[LINE_OF::BOOKS],
            self.books[DIRTY::BOOKS],
            [-1] * len(self.shapes),
        )
        at = 0
        for begin, end, t in segments:
            own = lines[at : at + end - begin].long()
            rows = ids[begin:end].long()
            at += end - begin
            for k, table in enumerate(self.tables):
                if table == t:
                    assert torch.equal(self.lines[k][own], self.truth[k][rows]), "lines have the newest rows"
                    self.lines[k][own] += 1
                    self.truth[k][rows] += 1
        return lines

    def check(self) -> None:
        """Every row's newest values are in its line, if it has one, or else in the table."""
        for k, t in enumerate(self.tables):
            line_of, row_in = self.books[BOOKS * t], self.books[BOOKS * t + 1]
            where = (line_of >= 0).nonzero()[:, 0]
            assert torch.equal(row_in[line_of[where].long()], where)
            assert int((row_in >= 0).sum()) == where.numel()
            now = self.host[k].clone()
            now[where] = self.lines[k][line_of[where].long()]
            assert torch.equal(now, self.truth[k])


def batch(rng: random.Random, shapes: Sequence[Shape], most: int, dtype: torch.dtype = torch.int64) -> Any:
    """Segments (one or two a table, in any order, some empty) and skewed ids."""
    ids: list[int] = []
    segments: list[tuple[int, int, int]] = []
    owners = [t for t in range(len(shapes)) for _ in range(rng.randrange(1, 3))]
    rng.shuffle(owners)
    for t in owners:
        rows = shapes[t].rows
        own = [
            min(int(rng.paretovariate(0.5)), rows) - 1 if rng.random() < 0.6 else rng.randrange(rows)
            for _ in range(rng.randrange(most) if rows else 0)
        ]
        segments.append((len(ids), len(ids) + len(own), t))
        ids += own
    return segments, torch.tensor(ids, dtype=dtype)


def moving(header: Tensor, plan: Tensor, total: int) -> Tensor:
    """The entries of a plan that mean something, in their order."""
    wanting = int(header[:, HeaderColumn.WANTING].sum())
    return torch.cat((plan[:, :wanting], plan[:, total:]), 1)
