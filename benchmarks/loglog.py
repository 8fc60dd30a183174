"""A chart of times against sizes: an SVG file with logarithmic axes, light and dark, without any dependency."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 74, 40, 44, 54
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .soft { fill: #57606a } .grid { stroke: #d0d7de }
  .axis { stroke: #57606a } .line { fill: none; stroke-width: 2 } .of0 { stroke: #0550ae } .of1 { stroke: #bc4c00 }
  .of2 { stroke: #1a7f37 } .of3 { stroke: #8250df }
  .dot2 { fill: #1a7f37 } .dot3 { fill: #8250df } .name2 { fill: #1a7f37 } .name3 { fill: #8250df }
  .dot0 { fill: #0550ae } .dot1 { fill: #bc4c00 } .name0 { fill: #0550ae } .name1 { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .soft { fill: #9198a1 } .grid { stroke: #30363d } .axis { stroke: #9198a1 }
    .of0 { stroke: #79c0ff } .of1 { stroke: #ffa657 } .dot0, .name0 { fill: #79c0ff } .dot1, .name1 { fill: #ffa657 }
    .of2 { stroke: #56d364 } .of3 { stroke: #d2a8ff } .dot2, .name2 { fill: #56d364 } .dot3, .name3 { fill: #d2a8ff }
  }
"""


@dataclass(frozen=True)
class Series:
    """Points (x, y), both above 0, by x, and their label."""

    name: str
    points: Sequence[tuple[float, float]]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of the power law that fits best: the slope of logarithms."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def write(path: Path, title: str, across: str, up: str, series: Sequence[Series]) -> None:
    """Write the chart.

    Args:
        across, up: labels of the axes.
        series: one to four, with two points or more each.
    """
    every = [point for one in series for point in one.points]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = _decade(min(y for _, y in every), math.floor), _decade(max(y for _, y in every), math.ceil)

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / left) / math.log(right / left)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(y / low) / math.log(high / low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f'<text x="{LEFT}" y="24">{html.escape(title)}</text>',
    ]
    for tick in _decades(left, right):
        x = at_x(tick)
        out.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        out.append(f'<text class="soft" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick:,.0f}</text>')
    for tick in _decades(low, high):
        y = at_y(tick)
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out.append(f'<path class="axis line" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{html.escape(across)}</text>')
    out.append(
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(up)}</text>"
    )
    for i, one in enumerate(series):
        places = [(at_x(x), at_y(y)) for x, y in one.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline class="line of{i}" points="{line}"/>')
        for (x, y), (size, seconds) in zip(places, one.points, strict=True):
            text = f"{size:,.0f}: {seconds:.3g}"
            out.append(f'<circle class="dot{i}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{text}</title></circle>')
        x, y = places[len(places) // 2]
        end = x > (LEFT + WIDTH) / 2  # the right half: text ends at its point
        anchor = f'x="{WIDTH - RIGHT}" text-anchor="end"' if end else f'x="{x + 12:.1f}"'
        out.append(f'<text class="name{i}" {anchor} y="{y + 22:.1f}">{html.escape(one.name)}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*out, "</svg>", ""]), encoding="utf-8")


def _decade(value: float, rounded: Callable[[float], int]) -> float:
    return float(10.0 ** rounded(math.log10(value)))


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**k for k in range(first, last + 1)]
