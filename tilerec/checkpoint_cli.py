"""`tilerec checkpoint`: commands on checkpoints.

tilerec checkpoint list runs/today                  the checkpoints of a run
tilerec checkpoint inspect runs/today               tensors, numbers and digest of the newest one
tilerec checkpoint inspect runs/today --run-file    the run file that trained it
tilerec checkpoint verify runs/today/checkpoints/step-100
tilerec checkpoint diff STEP-100 STEP-200           tensors and numbers that differ
tilerec checkpoint compact runs/today               make the newest one whole, if it has changed rows only
tilerec checkpoint export STEP-100 --out model.safetensors --only 'model.*'
tilerec checkpoint export STEP-100 --dcp FOLDER     a checkpoint of torch.distributed.checkpoint
tilerec checkpoint import FOLDER --out STEP-100     from one of torch.distributed.checkpoint; --torchrec: of TorchRec

PATH is a checkpoint, a folder of checkpoints, or the log folder of a run. Of a folder, the newest whole checkpoint
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.command_group import CommandGroup
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.output_path import check_output
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import SafeConsole, print_error, print_plain

if TYPE_CHECKING:
    from tilerec.checkpoint.contents import SavedContents

checkpoint_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Commands on checkpoints.")

_Path = Annotated[str, typer.Argument(help="A checkpoint, a folder of checkpoints, or a run's log folder.")]


@checkpoint_app.callback()
def _root() -> None:
    """Look at checkpoints, verify and compare them."""


@checkpoint_app.command("list")
def list_checkpoints(path: _Path) -> None:
    """List the checkpoints of a run, oldest first."""
    from rich.table import Table

    with command_phase(LOADING):
        from tilerec.checkpoint.contents import SavedContents
        from tilerec.train.checkpoint_paths import checkpoint_paths

    table = Table("step", "GB", "tensors", "files", "base", "state")
    with _error_lines(), command_phase("read the manifests"):
        for found in checkpoint_paths(path):
            try:
                contents = SavedContents(found)
            except TilerecError as error:
                table.add_row(_step(found), "", "", "", "", f"damaged: {error}")
                continue
            manifest = contents.manifest
            row = (f"{contents.bytes / 1e9:.3f}", f"{len(manifest.tensors):,}", str(len(manifest.files)))
            table.add_row(_step(found), *row, manifest.base.name if manifest.base else "", "whole")
        if not table.row_count:
            raise FileError(f"{path}: got no checkpoints; expected step-1, step-2, … in it. Train with --save-every.")
    SafeConsole().print(table)


@checkpoint_app.command()
def inspect(
    path: _Path,
    digest: Annotated[bool, typer.Option(help="Read all bytes, and print a digest of the contents.")] = True,
    run_file: Annotated[bool, typer.Option("--run-file", help="Print the run file of the run, and no more.")] = False,
) -> None:
    """Print the tensors and numbers of a checkpoint, and a digest that does not depend on plan or number of ranks."""
    from rich.table import Table

    with command_phase(LOADING):
        from tilerec.checkpoint.contents import leaves
        from tilerec.train.run_metadata import RUN_FILE_KEY

    with _error_lines():
        contents = _contents(path)
        text = contents.manifest.metadata.get(RUN_FILE_KEY)
        if run_file:
            if not isinstance(text, str):
                raise ConfigError(
                    f"{contents.path}: got a checkpoint without a run file; expected one that `tilerec train` has "
                    "saved. Leave --run-file out."
                )
            print_plain(text.rstrip("\n"))
            return
        table = Table("tensor", "dtype", "shape", "chunks", "MB", *(["digest"] if digest else []))
        with command_phase("read the tensors"):
            for name, saved in contents.manifest.tensors.items():
                layers = contents.chain.layers(name)
                size = saved.dtype.itemsize * math.prod(saved.shape) / 1e6
                row = [name, str(saved.dtype).removeprefix("torch."), " x ".join(map(str, saved.shape)) or "1"]
                row += [str(sum(len(one.chunks) + len(one.rows) for _, one in layers)), f"{size:,.3f}"]
                row += [contents.tensor_digest(name)] if digest else []
                table.add_row(*row)
        SafeConsole().print(table)
        for place, value in leaves("", contents.manifest.state.value):
            print_plain(f"{place}: {value}")
        for name, value in contents.manifest.metadata.items():
            print_plain(f"[{name}] {'see --run-file' if name == RUN_FILE_KEY else value}")
        if digest:
            print_plain(f"digest {contents.digest()}")


@checkpoint_app.command()
def verify(path: _Path) -> None:
    """Read every byte and compare the checksums; of a folder, those of all its checkpoints. Exit code 1 for damage."""
    with command_phase(LOADING):
        from tilerec.checkpoint.contents import SavedContents
        from tilerec.train.checkpoint_paths import checkpoint_paths

    damaged = 0
    with _error_lines():
        found = checkpoint_paths(path)
        if not found:
            raise FileError(f"{path}: got no checkpoints; expected one. Check the path.")
    for one in found:
        try:
            with command_phase(f"verify {one}"):
                size = SavedContents(one).verify(bases=found == [path])
            print_plain(f"{one}: whole, {size:,} bytes")
        except TilerecError as error:
            damaged += 1
            print_error(str(error))
    if damaged:
        raise typer.Exit(1)


@checkpoint_app.command()
def diff(first: _Path, second: _Path) -> None:
    """Print the tensors and numbers that differ between two checkpoints. Exit code 1 if there are any, 2 for errors."""
    from rich.table import Table

    with command_phase(LOADING):
        from tilerec.checkpoint.contents import differences, value_differences

    with _error_lines(code=2):
        one, two = _contents(first), _contents(second)
        table = Table("tensor", "difference")
        with command_phase("compare"):
            for found in differences(one, two):
                text = found.text or (f"{found.cells:,} cells, at most {found.largest:g}" if found.cells else "")
                table.add_row(found.name, f"{found.what} {text}".strip())
            lines = value_differences(one, two)
    if table.row_count:
        SafeConsole().print(table)
    for line in lines:
        print_plain(line)
    if table.row_count or lines:
        raise typer.Exit(1)
    print_plain("equal")


@checkpoint_app.command()
def compact(path: _Path) -> None:
    """Make an incremental checkpoint whole, in its place: it no longer needs the ones before it."""
    with command_phase(LOADING):
        from tilerec.checkpoint.compaction import compact as make_whole

    with _error_lines():
        found = _contents(path).path
        with command_phase("compact"):
            made = make_whole(found)
    print_plain(f"{found}: {'made whole' if made else 'it is whole'}")


def export(
    path: _Path,
    out: Annotated[Path | None, typer.Option(help="The safetensors file to write.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Pattern of names, such as 'model.*'. Repeatable.")] = None,
    dcp: Annotated[Path | None, typer.Option(help="The folder to write for torch.distributed.checkpoint.")] = None,
    part: Annotated[str | None, typer.Option(help="With --dcp: this part alone, under its own names.")] = None,
) -> None:
    """Write whole tensors to one safetensors file, or a checkpoint of torch.distributed.checkpoint."""
    with command_phase(LOADING):
        from tilerec.checkpoint.changes import matches
        from tilerec.checkpoint.dcp_export import export_dcp

    with _error_lines():
        if (out is None) == (dcp is None) or (only if dcp else part):
            raise ConfigError(
                "tilerec checkpoint export: got other options; expected --out FILE [--only PATTERN] or --dcp FOLDER "
                "[--part NAME]. Choose one of the two."
            )
        contents = _contents(path)
        _check_export(contents, "--out" if dcp is None else "--dcp", out or dcp)
        if dcp is not None:
            with command_phase("write the checkpoint"):
                count = export_dcp(contents.path, dcp, part=part)
            print_plain(f"wrote {dcp}: {count:,} tensors")
            return
        names = [name for name in contents.manifest.tensors if not only or matches(name, only)]
        if not names:
            raise ConfigError(f"{path}: got no tensor that matches {only}; expected one. List them with inspect.")
        assert out is not None
        with command_phase("write the tensors"):
            contents.export(out, names)
    print_plain(f"wrote {out}: {len(names):,} tensors")


def _check_export(contents: SavedContents, option: str, out: Path | None) -> None:
    """Raise if the output is in the checkpoint or in one of its bases, or if it is the model or the file of a run."""
    from tilerec.train.run_file import RUN_FILE
    from tilerec.train.saved_model import MODEL_FILE

    assert out is not None
    folders = [link.folder.path for link in contents.chain.links]
    log_folder = Path(folders[0]).absolute().parent.parent
    run = [] if "://" in folders[0] else [log_folder / name for name in (RUN_FILE, MODEL_FILE)]
    check_output(option, out, {"PATH": folders, "the run's file": run})


def import_checkpoint(
    folder: Annotated[str, typer.Argument(help="A checkpoint of torch.distributed.checkpoint.")],
    out: Annotated[str, typer.Option(help="The checkpoint to write.")],
    torchrec: Annotated[
        bool, typer.Option("--torchrec", help="Convert the optimizer state of a TorchRec model.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="With --torchrec: steps that the model was trained.")] = None,
    part: Annotated[str | None, typer.Option(help="Put all of it into this part, such as model.")] = None,
    skip_values: Annotated[bool, typer.Option("--skip-values", help="Leave out values of unknown classes.")] = False,
) -> None:
    """Convert a checkpoint of torch.distributed.checkpoint. No code in it runs."""
    with command_phase(LOADING):
        from tilerec.checkpoint.dcp_import import import_dcp
        from tilerec.checkpoint.torchrec_import import import_torchrec

    with _error_lines():
        if part is not None if torchrec else steps is not None:
            raise ConfigError(
                "tilerec checkpoint import: got other options; expected --torchrec [--steps N], or --part NAME without "
                "--torchrec. Leave one out."
            )
        check_output("--out", out, {"FOLDER": [folder]})
        with command_phase("convert the checkpoint"):
            if torchrec:
                done = import_torchrec(folder, out, steps=steps, skip_values=skip_values)
            else:
                done = import_dcp(folder, out, part=part, skip_values=skip_values)
    for name in done.skipped:
        print_plain(f"skipped {name}")
    print_plain(f"wrote {out}: {done.tensors:,} tensors")


@contextmanager
def _error_lines(code: int = 1) -> Iterator[None]:
    """Print an error of the block as one line, and end the command with an exit code."""
    try:
        yield
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(code) from None


def _contents(path: str) -> SavedContents:
    """Return the checkpoint at a path, or the newest whole one of the folder."""
    from tilerec.checkpoint.contents import SavedContents
    from tilerec.train.checkpoint_paths import checkpoint_paths

    found = checkpoint_paths(path)
    if len(found) == 1 and found[0] == path:
        return SavedContents(path)
    for one in reversed(found):
        try:
            return SavedContents(one)
        except TilerecError as error:
            print_error(f"{error} It is passed over.")
    raise FileError(f"{path}: got no whole checkpoint; expected one. Check the path.")


def _step(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1].removeprefix("step-")
