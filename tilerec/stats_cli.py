"""`tilerec stats`: measure the distribution of the ids of a data set, for the planner.

tilerec stats ml-latest-small --out stats.json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import ConfigError, TilerecError
from tilerec.file_kind import STATS
from tilerec.output_path import check_output_file
from tilerec.progress import LOADING, command_phase, read_progress
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from rich.table import Table

    from tilerec.data.ids import IdSource
    from tilerec.data.statistics import Statistics


def stats(
    data: Annotated[
        str | None,
        typer.Argument(help="A file or folder: Criteo, MovieLens, delimited text or Parquet; or a run file (.toml)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The JSON file to write; `tilerec plan` reads it.")] = Path("stats.json"),
    recipe: Annotated[
        str | None,
        typer.Option(help="Count the row ids that this recipe trains on, instead of a file's ids."),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="auto, criteo, movielens, delimited or parquet. auto: from file name and header."
        ),
    ] = "auto",
    features: Annotated[
        str, typer.Option(help="Columns with ids, comma-separated. Default: those of the format.")
    ] = "",
    separator: Annotated[str, typer.Option(help="Separator of the ids within one field of delimited text.")] = "",
    hot: Annotated[int, typer.Option(help="Number of most frequent ids of each feature to write.")] = 32,
    on_bad_row: Annotated[
        str, typer.Option(help="Malformed lines: 'error' stops, 'skip' skips and counts them.")
    ] = "error",
) -> None:
    """Read a data set once and write statistics of its ids: count, distinct count, skew."""
    with command_phase(LOADING):
        from tilerec.data.ids import BatchIds, open_ids
        from tilerec.recipes.registry import make_run
        from tilerec.train.override import override_all
        from tilerec.train.run_file import read_run_file

    try:
        check_output_file("--out", out, STATS, shared={"DATA": [data or ""]})
        names = tuple(name.strip() for name in features.split(",") if name.strip())
        source: IdSource
        run_file = Path(data) if recipe is None and data and data.endswith(".toml") else None
        if recipe is not None or run_file is not None:
            what = f"recipe {recipe}" if recipe is not None else f"run file {run_file}"
            if names or separator or format_ != "auto":
                raise ConfigError(
                    f"{what}: got --features, --separator or --format, too; expected none of them, as the run defines "
                    "its data. Leave them out."
                )
            # Only readers of text have the setting.
            changes = [f"data.on_bad_row={on_bad_row}"] if data and on_bad_row != "error" else []
            run = override_all(read_run_file(run_file) if run_file else make_run(recipe or "", data), changes)
            dataset = run.data.open()
            source = BatchIds(lambda: dataset.train(run.train.batch_size), what)
        elif data is None:
            raise ConfigError(
                "DATA: got nothing; expected a file or folder. Give one, or --recipe for a recipe that generates data."
            )
        else:
            source = open_ids(
                data,
                format=format_,  # type: ignore[arg-type] # `open_ids` checks both strings
                features=names,
                separator=separator,
                on_bad_row=on_bad_row,  # type: ignore[arg-type]
            )
        found = _gather_statistics(source, hot)
        SafeConsole().print(_stats_table(found))
        found.save(out)
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    skipped = f", {found.skipped:,} malformed lines skipped" if found.skipped else ""
    print_plain(f"wrote {out}: {found.rows:,} samples{skipped}")


def _gather_statistics(source: IdSource, hot: int) -> Statistics:
    """Read a source; show a progress bar if stderr is a terminal."""
    from tilerec.data.statistics import gather

    with read_progress("read", "samples") as update:
        total = source.progress.total or None
        return gather(source, lambda progress: update(progress.done, total, source.count.rows), hot=hot)


def _stats_table(found: Statistics) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("feature", "ids per sample", "distinct", "expected", "exponent", "error", "most frequent")
    for column in table.columns[1:6]:
        column.justify = "right"
    for name, one in found.features.items():
        heavy = ", ".join(f"{str(value)[:16]} {100 * count / one.ids:.1f}%" for value, count in one.heavy[:1])
        cells = (
            f"{one.ids_per_sample:.3g}",
            f"{one.distinct:,}",
            f"{one.population:,}",
            f"{one.exponent:.2f}",
            f"{100 * one.distance:.1f}%",
        )
        table.add_row(Text(name), *cells, Text(heavy))
    return table
