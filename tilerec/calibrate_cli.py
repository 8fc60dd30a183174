"""`tilerec calibrate`: measure a machine's speeds, for the planner.

tilerec calibrate --nproc 2 --out topology.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import FileError, TilerecError
from tilerec.file_kind import CALIBRATE
from tilerec.output_path import check_output_file
from tilerec.phase import timed
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import SafeConsole, print_plain, print_rank_error

if TYPE_CHECKING:
    from tilerec.comms.group import Group
    from tilerec.spec.speeds import Speeds


def calibrate(
    nproc: Annotated[
        int, typer.Option(help="Processes to measure at once: use the number that will train here.", min=1)
    ] = 2,
    out: Annotated[Path, typer.Option(help="The topology file to write.")] = Path("topology.json"),
    device: Annotated[str, typer.Option(help="Device to measure: cpu or cuda.")] = "cpu",
    folder: Annotated[
        str | None, typer.Option(help="Folder of tables in files: measure reads of their rows from its disk, too.")
    ] = None,
) -> None:
    """Measure this machine (under a minute), print its speeds and write a topology file for the planner."""
    with command_phase(LOADING):
        from tilerec.train.launch import launch

    try:
        check_output_file("--out", out, CALIBRATE)
        with timed("measure this machine", SafeConsole(stderr=True)):  # a spinner would take time from the ranks
            launch(nproc, _calibrate, str(out), device, folder, device=device)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None
    print_plain(f"wrote {out}: the speeds of {nproc} {device} ranks")


def _calibrate(group: Group, out: str, device: str, folder: str | None = None) -> None:
    """Measure on all ranks of a group; rank 0 prints the speeds, then writes the topology.

    Raises:
        FileError: the file cannot be written. The topology is printed first, so you can save it by hand.
    """
    import torch

    from tilerec.atomic_file import write_file
    from tilerec.planner.cost.calibrate import calibrate, machine

    own = f"cuda:{group.rank % torch.cuda.device_count()}" if device == "cuda" else device
    measured = calibrate(group, machine(group.size, device), own, folder)
    if group.rank:
        return
    assert measured.speeds is not None
    print_plain(_speeds_text(measured.speeds))
    text = json.dumps(measured.to_json(), indent=1)
    try:
        write_file(out, text + "\n", "Topology")
    except FileError:
        print_plain(f"The topology, to save by hand:\n{text}")
        raise


def _speeds_text(speeds: Speeds) -> str:
    """Format all speeds as two tables: rates per width, then single numbers."""
    from tilerec.spec.plan_table import format_columns
    from tilerec.spec.speeds import PER_WIDTH, SINGLE

    widths = [str(width) for width in speeds.widths]
    rates = [[name, *(f"{1e9 * rate:.4g}" for rate in getattr(speeds, name))] for name in PER_WIDTH]
    single = [[name, f"{1e9 * getattr(speeds, name):.4g}"] for name in SINGLE]
    optional = {"fresh": speeds.fresh, "file_row": speeds.file_row, "hot_id": speeds.hot_id}
    single += [[name, f"{1e9 * rate:.4g}"] for name, rate in optional.items() if rate is not None]
    return "\n\n".join(
        [
            speeds.origin,
            format_columns(["ns per row of columns", *widths], rates, range(1, 1 + len(widths))),
            format_columns(["ns per id, byte, call, ...", ""], single, [1]),
            f"cache per rank: {speeds.cache:,} bytes",
        ]
    )
