"""`tilerec data`: commands on data files.

tilerec data convert clicks.tsv --out clicks.parquet            text to Parquet, with statistics of the columns
tilerec data vocabulary clicks.parquet --table user --out ids   rows of frequent ids
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.command_group import CommandGroup
from tilerec.errors import ConfigError, TilerecError
from tilerec.file_kind import VOCABULARY, check_kind
from tilerec.option_file import with_config
from tilerec.output_path import check_output
from tilerec.progress import LOADING, command_phase, read_progress
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from rich.table import Table

    from tilerec.data.convert import Conversion
    from tilerec.data.text_files import ListColumn

data_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Commands on data files.")


@data_app.callback()
def _root() -> None:
    """Work on data files."""


@data_app.command()
@with_config
def convert(
    files: Annotated[list[str], typer.Argument(help="CSV or TSV files, plain or gzip: files, folders, patterns.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    delimiter: Annotated[
        str, typer.Option(help="Between fields; 'tab' for a tab. Default: the most frequent one of line 1.")
    ] = "",
    names: Annotated[str, typer.Option(help="Column names, comma-separated, for files without a header line.")] = "",
    lists: Annotated[
        list[str] | None,
        typer.Option("--list", help="A column with several ids per field: name=separator. Repeatable."),
    ] = None,
    texts: Annotated[
        str,
        typer.Option("--text", help="Columns that stay text even if they look like numbers, comma-separated."),
    ] = "",
    on_bad_row: Annotated[
        str, typer.Option(help="Malformed lines: 'error' stops, 'skip' skips and counts them.")
    ] = "error",
    rows_per_group: Annotated[
        int, typer.Option(help="Rows of a row group, the unit that training reads and shuffles.", min=1)
    ] = 1 << 17,
) -> None:
    """Convert CSV or TSV files to one Parquet file, in bounded memory, and print statistics of its columns."""
    with command_phase(LOADING):
        from tilerec.data.convert import convert as write_parquet

    try:
        with read_progress("convert") as update:
            result = write_parquet(
                files,
                out,
                delimiter="\t" if delimiter == "tab" else delimiter,
                names=_words(names),
                texts=_words(texts),
                lists=[_list_column(text) for text in lists or []],
                on_bad_row=on_bad_row,  # type: ignore[arg-type] # checked by the parser
                rows_per_group=rows_per_group,
                report=update,
            )
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    SafeConsole().print(_summary_table(result))
    for example in result.examples[:5]:
        print_plain(f"skipped: {example}")
    skipped = f", {result.skipped:,} malformed lines skipped" if result.skipped else ""
    print_plain(f"wrote {out}: {result.rows:,} rows{skipped}")


@data_app.command()
@with_config
def vocabulary(
    files: Annotated[list[str], typer.Argument(help="Parquet, CSV or TSV files: files, folders, patterns, URLs.")],
    tables: Annotated[
        list[str],
        typer.Option("--table", help="An id column, or TABLE=COLUMN,COLUMN for columns that share ids. Repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="The folder for TABLE.parquet.")],
    min_count: Annotated[int, typer.Option(help="Least number of occurrences of an id with a row of its own.")] = 1,
    max_rows: Annotated[int, typer.Option(help="Most rows of a table; 0 for no limit.")] = 0,
    memory_mb: Annotated[int, typer.Option(help="Memory for the counts, in megabytes.", min=1)] = 256,
) -> None:
    """Give each frequent id a row of its own. A run uses the file with ids = "vocabulary" on the table."""
    from rich.table import Table
    from rich.text import Text

    with command_phase(LOADING):
        from tilerec.data.id_counts import vocabulary_file, write_vocabularies
        from tilerec.recipes.files import file_source

    try:
        with read_progress("vocabulary") as update:
            pairs = [_table_columns(text) for text in tables]
            columns_of = dict(pairs)
            if len(columns_of) < len(pairs):
                raise ConfigError(
                    f"--table: got {', '.join(tables)}; expected each table once. Join its columns: "
                    "TABLE=COLUMN,COLUMN."
                )
            for name in columns_of:
                check_output("--out", vocabulary_file(out, name), {"FILES": files})
                check_kind("--out", vocabulary_file(out, name), VOCABULARY)
            written = write_vocabularies(
                file_source(tuple(files)),
                columns_of,
                out,
                min_count=min_count,
                max_rows=max_rows,
                memory_bytes=memory_mb << 20,
                report=lambda done, total: update(done, total, done),
            )
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    shown = Table("table", "distinct ids", "kept", "rows", "of all occurrences", "file")
    for column in shown.columns[1:5]:
        column.justify = "right"
    for one in written:
        share = f"{one.covered / one.occurrences:.2%}" if one.occurrences else "-"
        numbers = [f"{number:,}" for number in (one.distinct, one.kept, one.kept + 1)]
        shown.add_row(Text(one.table), *numbers, share, Text(str(one.path)))
    SafeConsole().print(shown)


def _table_columns(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, columns = text.partition("=")
    return name, _words(columns) if equals else (name,)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _list_column(text: str) -> ListColumn:
    from tilerec.data.text_files import ListColumn

    name, equals, separator = text.partition("=")
    if not (name and equals and separator):
        raise ConfigError(f"--list: got {text!r}; expected name=separator, such as tags=|. Correct it.")
    return ListColumn(name, separator)


def _summary_table(result: Conversion) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("column", "type", "missing", "distinct", "least", "greatest")
    for column in table.columns[2:]:
        column.justify = "right"
    for one in result.columns:
        bounds = ["" if bound is None else f"{bound:.6g}" for bound in (one.low, one.high)]
        table.add_row(Text(one.name), one.kind, f"{one.missing:,}", f"{one.distinct:,}", *bounds)
    return table
