"""`tilerec parity`: does a package answer as the trained model does?

tilerec parity model.pt2 runs/a requests/*
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import InputError, TilerecError
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from torch import Tensor

    from tilerec.export.manifest import Manifest


def parity(
    package: Annotated[Path, typer.Argument(help="A package of `tilerec export`.")],
    run: Annotated[str, typer.Argument(help="A run file, the log folder of a run, or a checkpoint in it.")],
    batches: Annotated[
        list[Path], typer.Argument(help="Bodies of logged requests: safetensors files (.safetensors), or JSON.")
    ],
    tower: Annotated[
        str, typer.Option(help="Of a two-tower run: the package is the 'query' or the 'candidate' tower.")
    ] = "",
) -> None:
    """Compare a package with the trained model, feature by feature, on logged requests. Exit code 1 for a difference.

    Rounding of compiled sums is no difference.
    """
    from rich.table import Table

    with command_phase(LOADING):
        import torch

        from tilerec.export.loading import load
        from tilerec.export.serving_parity import parity as compare
        from tilerec.run_cli.export import one_tower
        from tilerec.train.trained_run import find_trained
        from tilerec.train.world import World

    try:
        with command_phase("load both models"):
            trained = find_trained(run)
            model = trained.load(trained.config.data.open(), torch.device("cpu"), World(None))
            model = one_tower(model, tower) if tower else model
            opened = load(package)
        with command_phase("compare"):
            found = compare(opened, model, (logged_batch(path, opened.manifest) for path in batches))
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    table = Table("", "name", "table", "compared", "differ", "largest gap", "cause")
    for column in table.columns:
        column.overflow = "fold"
    for kind, some in (("output", found.outputs), ("feature", found.features), ("weight", found.weights)):
        for one in some:
            if kind != "weight" or one.cause:
                own = one.table.rpartition(".")[2]
                row = (one.name, own, f"{one.seen:,}", f"{one.differing:,}", f"{one.largest:.3g}", one.cause)
                table.add_row(kind, *row)
    SafeConsole().print(table)
    if found.causes - {"rounding"}:
        raise typer.Exit(1)
    print_plain(f"equal{' but for rounding' if found.causes else ''} for {found.samples:,} samples")


def logged_batch(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the inputs of a request, as the server reads it.

    Raises:
        InputError: the file cannot be read, or the request does not fit the package.
    """
    import torch

    from tilerec.export.arguments import torch_dtype
    from tilerec.serve.wire import SAFETENSORS, parse

    try:
        body = path.read_bytes()
        arrays = parse(body, SAFETENSORS if path.suffix == ".safetensors" else "application/json", manifest).tensors
    except OSError as error:
        raise InputError(f"{path}: got '{error.strerror}'; expected the file of a request. Check the path.") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return {
        spec.name: torch.tensor(array).view(torch_dtype(spec.dtype))
        for spec, array in zip(manifest.signature.specs(), arrays, strict=True)
    }
