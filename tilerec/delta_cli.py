"""`tilerec delta`: commands on a log of published states.

tilerec delta list runs/a/deltas                    its entries
tilerec delta verify runs/a/deltas                  read every byte, and check that each entry follows the one before
tilerec delta inspect runs/a/deltas ebc.embedding_bags.user.weight --row 17        why a row is as it is
tilerec delta inspect runs/a/deltas mc.embedding_bags.user.weight --id 1234567     the same by a raw id
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.command_group import CommandGroup
from tilerec.errors import TilerecError
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from tilerec.delta.log import DeltaLog

delta_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Commands on logs of published states.")

_Folder = Annotated[str, typer.Argument(help="Folder of the log, or a URL of fsspec.")]


@delta_app.callback()
def _root() -> None:
    """Look at logs of published states, and verify them."""


def _log(folder: str) -> DeltaLog:
    from tilerec.delta.log import DeltaLog

    log = DeltaLog(folder)
    try:
        if log.names():
            return log
        print_error(f"{folder}: got no entries; expected base-0, delta-1, … in it. Check the path.")
    except TilerecError as error:
        print_error(str(error))
    raise typer.Exit(1)


@delta_app.command("list")
def list_entries(folder: _Folder) -> None:
    """List the entries of a log, oldest first."""
    from rich.table import Table

    table = Table("entry", "step", "MB", "listed rows", "left out", "largest of these", "state")
    log = _log(folder)
    for name in log.names():
        try:
            entry = log.open(name)
        except TilerecError as error:
            table.add_row(str(name), "", "", "", "", "", f"damaged: {error}")
            continue
        left = entry.record.left_out.values()
        table.add_row(
            str(name), f"{entry.record.step:,}", f"{entry.manifest.bytes / 1e6:,.3f}", f"{entry.rows:,}",
            f"{sum(one.rows for one in left):,}", f"{max((one.largest for one in left), default=0.0):g}",
            entry.record.state,
        )  # fmt: skip
    SafeConsole().print(table)


@delta_app.command()
def verify(folder: _Folder) -> None:
    """Read every byte, and check that each entry follows the one before. Exit code 1 for damage."""
    from tilerec.checkpoint.contents import SavedContents

    log, state, damaged = _log(folder), None, 0
    for name in log.names():
        try:
            entry = log.open(name)
            size = SavedContents(entry.path).verify(bases=False)
        except TilerecError as error:
            print_error(str(error))
            damaged, state = damaged + 1, None
            continue
        if not name.is_base and state is not None and entry.record.previous != state:
            print_error(f"{entry.path}: got an entry that does not follow the one before it. Files were replaced.")
            damaged += 1
        else:
            print_plain(f"{name}: whole, {size:,} bytes")
        state = entry.record.state
    if damaged:
        raise typer.Exit(1)


@delta_app.command()
def inspect(
    folder: _Folder,
    tensor: Annotated[str, typer.Argument(help="Name of the tensor in the model.")],
    row: Annotated[int | None, typer.Option(help="Number of the row.")] = None,
    id_: Annotated[int | None, typer.Option("--id", help="Raw id, for a table with managed ids.")] = None,
) -> None:
    """Print the entries that have a row, newest first: step, rank and values."""
    from rich.table import Table

    from tilerec.delta.row_history import row_history, row_of_id

    if (row is None) == (id_ is None):
        print_error("tilerec delta inspect: got both or none of --row and --id; expected one of them. Correct it.")
        raise typer.Exit(2)
    try:
        log = _log(folder)
        if id_ is not None:
            row = row_of_id(log, tensor, id_)
            print_plain(f"id {id_} has row {row}")
        assert row is not None
        table = Table("entry", "step", "rank", "columns", "values")
        for found in row_history(log, tensor, row):
            shown = ", ".join(f"{value:.6g}" for value in found.values[:6].tolist())
            more = ", …" if found.values.numel() > 6 else ""
            low, high = found.columns
            table.add_row(
                str(found.entry.name), f"{found.entry.record.step:,}", str(found.rank), f"{low} to {high - 1}",
                f"{shown}{more}",
            )  # fmt: skip
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    SafeConsole().print(table)
