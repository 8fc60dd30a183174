"""Text table of a plan: the cuts of each table, and the memory of each rank.

Each line of a table is a group of ranks that hold rectangles of the same sizes, with the bytes that each rank holds.

    module  table  rows x dim  type      kernel  ranks  hosts  each holds  bytes each
    ebc     user   7 x 4       row_wise  fused   0-2    0      2 x 4       32
                                                 3      0      1 x 4       16
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.tile import Tiling, rectangles

if TYPE_CHECKING:
    from tilerec.spec.parameter_sharding import ParameterSharding
    from tilerec.spec.plan import ShardingPlan

_TABLE_COLUMNS = (
    "module", "table", "rows x dim", "type", "kernel", "ranks", "hosts", "each holds", "bytes each",
)  # fmt: skip
_TOTAL_COLUMNS = ("ranks", "hosts", "tables", "bytes each")
_NUMBER_COLUMNS = ("rows x dim", "each holds", "bytes each", "tables")
_MOST_RUNS = 32
_MOST_LINES = 60  # of a plan in a notebook
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def plan_table(plan: ShardingPlan) -> str:
    """Return the text of `str(plan)`, without a final newline."""
    host_of = {rank: h for h, host in enumerate(plan.hosts or ()) for rank in host}
    lines: list[tuple[str, ...]] = []
    tables: dict[int, int] = {}
    total: dict[int, int | None] = {}
    for path, table, sharding in plan.tables():
        kernel = "" if sharding.kernel is None else sharding.kernel.value
        first: tuple[str, ...] = (path, table, _size(sharding), sharding.kind.value, kernel)
        if sharding.tiling is None:
            ranks = () if sharding.ranks is None else sharding.ranks
            lines.append((*first, ranks_to_text(ranks), _hosts(ranks, host_of), "not yet cut", ""))
            continue
        size = sharding.element_bytes
        for ranks, shapes in _rank_groups(sharding.tiling):
            cells = sum(rows * width for rows, width in shapes)
            held = None if size is None else cells * size
            shape = " + ".join(f"{rows:,} x {width:,}" for rows, width in shapes)
            lines.append((*first, _short_ranks(ranks), _hosts(ranks, host_of), shape, bytes_text(held)))
            first = ("",) * 5
            for rank in ranks:
                tables[rank] = tables.get(rank, 0) + 1
                before = total.get(rank, 0)
                total[rank] = None if before is None or held is None else before + held
    if not lines:
        return f"{_head(plan)}: no tables"
    parts = [_head(plan), _aligned(_TABLE_COLUMNS, lines)]
    everyone = sorted(set(tables) | set(range(plan.world_size or 0)))
    if everyone:
        runs = _equal_runs({r: (tables.get(r, 0), total.get(r, 0)) for r in everyone})
        title = "in all"
        if len(runs) > _MOST_RUNS:
            by_bytes = sorted(runs, key=lambda run: (run[0][1] or 0, run[0][0]))
            runs = [by_bytes[0], by_bytes[len(runs) // 2], by_bytes[-1]]
            title = f"in all {len(everyone)} ranks: the emptiest, the median, the fullest"
        rows = [
            (_short_ranks(ranks), _hosts(ranks, host_of), str(count), bytes_text(held)) for (count, held), ranks in runs
        ]
        parts.append(f"{title}\n" + _aligned(_TOTAL_COLUMNS, rows))
    return "\n\n".join(parts)


def plan_html(plan: ShardingPlan) -> str:
    """Return the text table for a notebook, cut to its first lines if it is long."""
    lines = plan_table(plan).split("\n")
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"… {len(lines) - _MOST_LINES:,} more lines: print(plan)"]
    return f'<pre style="overflow-x: auto">{html.escape(chr(10).join(lines))}</pre>'


def plan_summary(plan: ShardingPlan) -> str:
    """Return one line: the ranks, and the number of tables of each sharding type."""
    kinds = Counter(sharding.kind.value for _, _, sharding in plan.tables())
    parts = [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]
    return f"{_head(plan)}: {', '.join(parts) or 'no tables'}"


def bytes_text(count: int | None) -> str:
    """Format a number of bytes: `1536` -> `"1.5 KiB"`; None -> `"?"`."""
    if count is None:
        return "?"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if not unit else f"{value:.1f} {_UNITS[unit]}"


def _head(plan: ShardingPlan) -> str:
    world = "an unknown number of" if plan.world_size is None else str(plan.world_size)
    hosts = ""
    if plan.hosts is not None:
        ranks = " | ".join(ranks_to_text(host) for host in plan.hosts)
        hosts = f" on {len(plan.hosts)} host{'s' * (len(plan.hosts) != 1)} (ranks {ranks})"
    return f"plan for {world} rank{'s' * (plan.world_size != 1)}{hosts}"


def _size(sharding: ParameterSharding) -> str:
    tiling = sharding.tiling
    return "?" if tiling is None else f"{tiling.rows:,} x {tiling.dim:,}"


def _rank_groups(tiling: Tiling) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Group the ranks by the sizes of their rectangles: [(ranks, ((rows, width), ...)), ...]."""
    shapes: dict[int, list[tuple[int, int]]] = {}
    for tile in rectangles(tiling):
        for rank in tile.owners:
            shapes.setdefault(rank, []).append((tile.r1 - tile.r0, tile.c1 - tile.c0))
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, own in sorted(shapes.items()):
        alike.setdefault(tuple(own), []).append(rank)
    return [(tuple(ranks), own) for own, ranks in alike.items()]


def _equal_runs(
    held: Mapping[int, tuple[int, int | None]],
) -> list[tuple[tuple[int, int | None], tuple[int, ...]]]:
    """Group successive ranks that have the same number of tables and bytes."""
    return [(key, tuple(rank for rank, _ in run)) for key, run in groupby(held.items(), lambda item: item[1])]


def _short_ranks(ranks: Sequence[int], most: int = 8) -> str:
    text = ranks_to_text(ranks)
    parts = text.split(",")
    return text if len(parts) <= most else f"{','.join(parts[:most])},… ({len(ranks)} ranks)"


def _hosts(ranks: Iterable[int], host_of: Mapping[int, int]) -> str:
    return _short_ranks(sorted({host_of[rank] for rank in ranks if rank in host_of}))


def _aligned(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns to their widest entry: numbers to the right, empty columns omitted."""
    kept = [i for i, name in enumerate(names) if name in ("table", "ranks") or any(row[i] for row in rows)]
    right = [place for place, i in enumerate(kept) if names[i] in _NUMBER_COLUMNS]
    return format_columns([names[i] for i in kept], [[row[i] for i in kept] for row in rows], right)


def format_columns(names: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return a table as text, with columns as wide as their widest entry; columns in `right` are right-aligned."""
    widths = [max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(names)]
    lines = []
    for row in (names, *rows):
        cells = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
