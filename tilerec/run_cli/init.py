"""`tilerec init`: look at a data set and write a first run file for it.

tilerec init clicks.parquet --label click --out run.toml
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import ConfigError, TilerecError
from tilerec.file_kind import ANY
from tilerec.output_path import check_output_file
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from rich.table import Table

    from tilerec.recipes.guess import Guess


def init(
    data: Annotated[str, typer.Argument(help="File, folder, pattern or URL: Parquet, CSV or TSV with a header.")],
    label: Annotated[str | None, typer.Option(help="The column to predict. Default: guessed.")] = None,
    out: Annotated[Path, typer.Option(help="The run file to write.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the run file if it exists.")] = False,
    rows: Annotated[int, typer.Option(help="Rows to look at.", min=1)] = 1_000_000,
) -> None:
    """Look at a data set, guess the roles of its columns, and write a first run file."""
    from tilerec.atomic_file import write_file

    with command_phase(LOADING):
        from tilerec.recipes.data_profile import profile_data
        from tilerec.recipes.guess import guess_roles, run_text
        from tilerec.train.run_file import run_of_toml, with_paths

    try:
        check_output_file("--out", out, ANY, shared={"DATA": [data]})
        if out.exists() and not force:
            raise ConfigError(
                f"--out: got {out}, which exists; expected a new file. Choose another name, or pass --force to "
                "replace it."
            )
        with command_phase(f"look at {data}"):
            profile = profile_data(data, rows)
        guesses = guess_roles(profile, label)
        text = run_text(profile, _from_folder(data, out), guesses)
        # Opening the data finds a guess that would not train, before the file is written.
        with command_phase("check the run file"):
            with_paths(run_of_toml(text), lambda one: os.path.join(out.parent, one)).data.open()
        SafeConsole().print(_table(guesses))
        write_file(out, text, "Run file")
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    print_plain(f"wrote {out}. Correct its roles, then run: tilerec train {out}")


def _from_folder(data: str, out: Path) -> str:
    """Return the path of the data from the folder of the run file; absolute paths and URLs stay."""
    if "://" in data or os.path.isabs(os.path.expanduser(data)):
        return os.path.expanduser(data) if "://" not in data else data
    return os.path.relpath(data, out.parent)


def _table(guesses: list[Guess]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("column", "type", "role", "table rows", "why")
    table.columns[3].justify = "right"
    for guess in guesses:
        rows = f"{guess.table_rows:,}" if guess.table_rows else ""
        table.add_row(Text(guess.column), Text(guess.type), guess.role or "ignored", rows, Text(guess.why))
    return table
