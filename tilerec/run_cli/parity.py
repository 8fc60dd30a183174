"""`tilerec parity`: does a package answer as the trained model does?

tilerec parity model.pt2 runs/a requests/*.safetensors
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import InputError, TilerecError
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from torch import Tensor


def parity(
    package: Annotated[Path, typer.Argument(help="A package of `tilerec export`.")],
    run: Annotated[str, typer.Argument(help="A run file, the log folder of a run, or a checkpoint in it.")],
    batches: Annotated[
        list[Path], typer.Argument(help="Logged batches: safetensors files with the package's inputs by name.")
    ],
) -> None:
    """Compare a package with the trained model, feature by feature, on logged batches. Exit code 1 for a difference."""
    import torch
    from rich.table import Table

    from tilerec.export.loading import load
    from tilerec.export.parity import parity as compare
    from tilerec.train.trained_run import find_trained
    from tilerec.train.world import World

    try:
        trained = find_trained(run)
        model = trained.load(trained.config.data.open(), torch.device("cpu"), World(None))
        found = compare(load(package), model, map(_batch, batches))
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    table = Table("", "name", "table", "compared", "differ", "largest difference", "cause")
    for kind, some in (("output", found.outputs), ("feature", found.features), ("weight", found.weights)):
        for one in some:
            if kind != "weight" or one.cause:
                row = (one.name, one.table, f"{one.seen:,}", f"{one.differing:,}", f"{one.largest:g}", one.cause)
                table.add_row(kind, *row)
    SafeConsole().print(table)
    if not found.is_equal:
        raise typer.Exit(1)
    print_plain(f"equal for {found.samples:,} samples")


def _batch(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: got '{error}'; expected a safetensors file of a request. Check the path.") from error
