"""Picoseconds as readable text."""

from __future__ import annotations

_UNITS = ((10**12, "s"), (10**9, "ms"), (10**6, "us"), (10**3, "ns"), (1, "ps"))


def time_text(ps: int | float) -> str:
    """Return picoseconds as text: `1_234_000_000` -> `"1.23 ms"`."""
    for size, unit in _UNITS:
        if ps >= size:
            value = ps / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return "0"
