"""Draw docs/img/plan.svg: a plan for eight GPUs, as tiles of tables and bars of ranks.

python scripts/plan_picture.py        # writes docs/img/plan.svg

The plan is that of the planner for the tables below. The picture follows the reader's light or dark colours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tilerec
from tilerec.atomic_file import write_file
from tilerec.optim import RowWiseAdagrad
from tilerec.planner import EmbeddingShardingPlanner, ParameterConstraints, PlanReport, Topology
from tilerec.planner.report.plan_report import TableEntry
from tilerec.planner.search.instance import PICO

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "img" / "plan.svg"
TABLES = {  # name: rows, columns, ids per sample
    "user": (400_000_000, 128, 1),
    "item": (120_000_000, 128, 50),
    "query": (50_000_000, 128, 8),
    "shop": (8_000_000, 128, 20),
    "brand": (900_000, 128, 20),
    "city": (80_000, 64, 1),
    "category": (12_000, 64, 10),
    "device": (400, 64, 1),
}
# Colours of Okabe and Ito, distinct for readers with any colour vision; one per rank.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b3a400", "#8c8c8c")
WIDTH, TOP, LINE, TALL = 860, 64, 30, 22
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.s{fill:#666;font-size:12px}.b{font-weight:600}"
    ".p{fill:#fff;stroke:#ddd}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.s{fill:#aaa}.p{fill:#16181d;stroke:#333}}"
)


def planned() -> PlanReport:
    """Return the report of the plan of `TABLES` on one host of eight GPUs with 80 GB."""
    configs = [
        tilerec.EmbeddingBagConfig(rows, dim, name, feature_names=[name]) for name, (rows, dim, _) in TABLES.items()
    ]
    model = tilerec.EmbeddingBagCollection(configs, device="meta")
    tilerec.apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.05})
    constraints = {name: ParameterConstraints(pooling_factors=[ids]) for name, (_, _, ids) in TABLES.items()}
    topology = Topology(8, "cuda", hbm_cap=80 * 2**30, local_world_size=8)
    plan = EmbeddingShardingPlanner(topology, batch_size=4096, constraints=constraints).plan(model)
    assert plan.report is not None
    return plan.report


def tiles(entry: TableEntry, left: float, top: float, width: float) -> Iterator[str]:
    """Yield the tiles of a table, columns across and rows down; copies on all ranks are stripes."""
    rows, columns = entry.tiling.rows, entry.tiling.dim
    for tile in entry.tiling.tiles():
        x, y = left + width * tile.c0 / columns, top + TALL * tile.r0 / rows
        w, h = width * (tile.c1 - tile.c0) / columns, TALL * (tile.r1 - tile.r0) / rows
        part = w / len(tile.owners)
        for place, rank in enumerate(tile.owners):
            yield _box(x + place * part, y, part, h, COLOURS[rank], f"{entry.name} on rank {rank}")


def picture(report: PlanReport) -> str:
    """Return the picture as SVG."""
    height = TOP + LINE * len(TABLES) + 34
    parts = [f'<rect class="p" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>']
    parts += [_text(20, 26, f"{len(report.tables)} tables on {report.topology.world_size} GPUs", "b")]
    gap = f"{report.cost_s * 1e3:.2f} ms a step predicted; at most {report.gap:.0%} above the best plan"
    parts += [_text(20, 46, gap, "s"), _text(500, 46, "time of each rank, by rank", "s")]
    by_name = {entry.name: entry for entry in report.tables}
    for line, (name, (rows, dim, _)) in enumerate(TABLES.items()):
        y = TOP + LINE * line
        parts += [_text(20, y + 16, name), _text(90, y + 16, f"{_count(rows)} x {dim}", "s")]
        parts += tiles(by_name[name], 190, y, 200)
        parts += [_text(400, y + 16, by_name[name].sharding_type.replace("_", "-"), "s")]
    times = report.load_ps.sum(1) / PICO * 1e3
    for rank, time in enumerate(times.tolist()):
        y = TOP + LINE * rank
        parts += [_box(520, y, 250 * time / times.max(), TALL, COLOURS[rank], f"rank {rank}")]
        parts += [_text(500, y + 16, str(rank), "s"), _text(780, y + 16, f"{time:.2f} ms", "s")]
    parts += [
        _text(20, height - 14, "Colours are ranks. Each table is drawn as its tiles: rows down, columns across.", "s")
    ]
    about = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="A plan"'
    return f"<svg {about}>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width - 0.6, 0.4):.1f}" height="{max(height - 0.6, 0.4):.1f}"'
    return f'<rect {place} fill="{colour}"><title>{title}</title></rect>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{text}</text>"


def _count(rows: int) -> str:
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if rows >= size:
            return f"{rows / size:g}{unit}"
    return str(rows)


if __name__ == "__main__":
    write_file(PICTURE, picture(planned()), "Picture")
    print(PICTURE)
