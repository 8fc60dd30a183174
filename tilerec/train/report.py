"""The final report of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilerec.train.result import RunResult
from tilerec.train.scores import HeldOutScores, mean_scores

LABELS = {"auc": "AUC", "log_loss": "log loss", "ne": "NE"}
"""Labels of scores in reports that differ from their names."""


def report(result: RunResult) -> RenderableType:
    """Return a table of held-out scores and the best reachable ones, followed by speed and skipped rows."""
    best = result.best
    tasks = result.tasks or {"model": result.held_out}
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
    return Group(score_table(result.name, "held-out samples", tasks, best), *(Text(line) for line in lines))


def score_table(
    name: str,
    what: str,
    tasks: Mapping[str, HeldOutScores],
    best: HeldOutScores | None = None,
    *,
    mean: bool = True,
) -> RenderableType:
    """Return a table of scores: a column per task, their mean, and the best reachable scores if they are known.

    Args:
        name: of the run.
        what: kind of the samples, for the title.
        tasks: scores by task, or by model.
        best: the best reachable scores.
        mean: add the mean of several columns.
    """
    average = mean_scores(tasks.values())
    columns = {"model": average}
    if len(tasks) > 1:
        columns = {**tasks, **({"mean": average} if mean else {})}
    table = Table("")
    for header in (*columns, *(("best reachable", "difference") if best is not None else ())):
        table.add_column(Text(header), justify="right")
    for measure, value in average.numbers.items():
        cells = [_number(scores.numbers[measure]) for scores in columns.values()]
        if best is not None:
            reachable = best.numbers[measure]
            cells += [_number(reachable), _number(value - reachable, sign=True)]
        table.add_row(Text(LABELS.get(measure, measure)), *cells)
    title = Text(f"{name}: {average.samples:,} {what}", style="bold")
    return Group(title, table)


def _number(value: float, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "undefined"
    return f"{value:+.4f}" if sign else f"{value:.4f}"
