"""The final report of a run."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilerec.train.result import RunResult


def report(result: RunResult) -> RenderableType:
    """Return a table of held-out scores and the best reachable ones, followed by speed and skipped rows."""
    best = result.best
    title = Text(f"{result.name}: {result.held_out.samples:,} held-out samples", style="bold")
    table = Table()
    table.add_column("")
    table.add_column("model", justify="right")
    if best is not None:
        table.add_column("best reachable", justify="right")
        table.add_column("difference", justify="right")
    for label, name in (
        ("AUC", "auc"),
        ("log loss", "log_loss"),
        ("NE", "ne"),
        ("calibration", "calibration"),
    ):
        value = getattr(result.held_out, name)
        cells = [label, _number(value)]
        if best is not None:
            reachable = getattr(best, name)
            cells += [_number(reachable), _number(value - reachable, sign=True)]
        table.add_row(*cells)
    lines = [
        f"{result.samples:,} samples in {result.steps:,} steps, {result.seconds:.1f} s of training"
        f"{f' on {result.ranks} ranks' if result.ranks > 1 else ''}: {result.samples_per_second:,.0f} samples/s"
    ]
    if best is not None and result.best_expected_auc is not None:
        lines.append(
            "Best reachable: the planted probabilities scored on the same labels "
            f"(expected over all labels drawn from them: AUC {result.best_expected_auc:.4f})."
        )
    if result.rows.skipped:
        lines.append(
            f"{result.rows.skipped:,} bad rows skipped, {result.rows.rows:,} good rows read; the first bad rows:"
        )
        lines += [f"  {example}" for example in result.rows.examples]
    if result.log_dir:
        lines.append(f"logs: {result.log_dir}")
    return Group(title, table, *(Text(line) for line in lines))


def _number(value: float, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "undefined"
    return f"{value:+.4f}" if sign else f"{value:.4f}"
