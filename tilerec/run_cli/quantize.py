"""`tilerec quantize`: a trained run with quantized tables, of one type, or of types that are chosen per table by data.

tilerec quantize run.toml --types int8 --out served
tilerec quantize run.toml --max-ne 0.01% --out served
tilerec quantize run.toml --budget 2GiB --max-ne 0.05% --out served
tilerec predict served test.parquet --out scores.parquet
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilerec.errors import ConfigError, TilerecError
from tilerec.output_path import check_output
from tilerec.progress import LOADING, command_phase, row_progress
from tilerec.terminal import SafeConsole, print_plain, print_rank_error

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch import nn

    from tilerec.data.batch import Batch
    from tilerec.data.dataset import Dataset
    from tilerec.train.table_types import TypeChoice
    from tilerec.train.trained_run import TrainedRun


def quantize(
    run: Annotated[
        str,
        typer.Argument(help="A run file, for its newest model; the log folder of a run; or one of its checkpoints."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; `tilerec eval` and `predict` read it.")],
    budget: Annotated[str | None, typer.Option(help="Most bytes of all tables: 2GiB, 500MB, or bytes.")] = None,
    max_ne: Annotated[
        str | None, typer.Option(help="Most increase of the normalized entropy, relative: 0.01%, or 0.0001.")
    ] = None,
    types: Annotated[
        str,
        typer.Option(
            help="Row types to choose from: int8, int4, int2, fp16, bf16, comma-separated. Without limits: the one "
            "type of all tables."
        ),
    ] = "int8,int4,int2",
    data: Annotated[
        str | None, typer.Option(help="File, folder or URL with labelled samples. Default: the run's held-out part.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Most samples to evaluate on; 0: all.", min=0)] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the run: name=value. Repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, … Default: that of the run.")] = None,
) -> None:
    """Quantize the tables of a trained run: to one type, or with little loss, measured by table on held-out samples."""
    with command_phase(LOADING):
        from tilerec.quantized.row_type import row_type
        from tilerec.spec.byte_text import bytes_of
        from tilerec.train.device import run_device
        from tilerec.train.float_tables import float_tables
        from tilerec.train.quantized_folder import check_new, write_quantized
        from tilerec.train.table_types import choose_types, convert_all
        from tilerec.train.trained_run import find_trained

    try:
        check_new(out)
        limit = None if budget is None else bytes_of("--budget", budget)
        loss = None if max_ne is None else _share("--max-ne", max_ne)
        chosen = [row_type(name.strip(), "--types") for name in types.split(",")]
        by_data = limit is not None or loss is not None
        if not by_data and len(chosen) > 1:
            raise ConfigError(
                "--budget, --max-ne: got neither; expected one or both, or a single type in --types. Try "
                "--max-ne 0.01%."
            )
        trained = find_trained(run).with_settings(set_ or [])
        check_output("--out", out, {"--data": [data or ""], **trained.inputs})
        place = run_device(device or trained.config.train.device, 1)
        with tempfile.TemporaryDirectory(prefix=".tilerec-quantize-", dir=_existing(out)) as scratch:
            with command_phase("read the samples"):
                dataset, batches = _samples(trained, data, samples if by_data else None)
            with command_phase("load the model"):
                tables = float_tables(trained, dataset, place, Path(scratch) if by_data else None)
            if by_data:
                choice = choose_types(tables, _Score(trained, dataset, batches, place), chosen, limit, loss)
            else:
                with command_phase("convert the tables"):
                    choice = convert_all(tables, chosen[0])
            with command_phase(f"write {out}"):
                write_quantized(out, trained, choice, tables.model)
    except TilerecError as error:
        print_rank_error(error)
        raise typer.Exit(1) from None
    SafeConsole().print(_table(choice))
    share = f"tables {choice.bytes / choice.float_bytes:.1%} of {trained.folder}"
    if choice.ne_change is None:
        print_plain(f"wrote {out}: {share}")
    else:
        print_plain(f"wrote {out}: NE {choice.float_ne:.6f} -> {choice.ne:.6f} ({choice.ne_change:+.4%}), {share}")


def _existing(folder: Path) -> Path:
    """Return the nearest folder above that exists."""
    return next(parent for parent in folder.absolute().parents if parent.is_dir())


def _share(option: str, text: str) -> float:
    """Return a share: "0.01%" -> 0.0001."""
    word = text.strip()
    try:
        value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        if not 0 <= value < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{option}: got {text!r}; expected a share below 1. Write 0.01% or 0.0001.") from None
    return value


def _samples(trained: TrainedRun, data: str | None, samples: int | None) -> tuple[Dataset, list[Batch]]:
    """Return the data set of a run and batches to evaluate on: of at most `samples` samples; 0: all; None: no batch."""
    from tilerec.train.labelled_data import LabelledData

    found = LabelledData.open(trained.config, data)
    kept: list[Batch] = []
    count = 0
    for batch in () if samples is None else found.batches:
        if samples and count >= samples:
            break
        kept.append(batch)
        count += batch.batch_size
    return found.dataset, kept


class _Score:
    """Returns the normalized entropy of a model on the kept batches, the mean over tasks."""

    def __init__(self, trained: TrainedRun, dataset: Dataset, batches: list[Batch], device: torch.device) -> None:
        from tilerec.train.world import World

        config = trained.config
        self._trained, self._batches = trained, batches
        self._task = config.task.build(dataset, config.train, device, World(None))
        self._samples = sum(batch.batch_size for batch in batches)

    def __call__(self, model: nn.Module) -> float:
        from tilerec.train.labelled_data import counted

        with row_progress("score", self._samples) as progress:
            scores = self._task.evaluate(model, counted(self._batches, progress)).tasks.values()
        found = [one.numbers["ne"] for one in scores if "ne" in one.numbers]
        if not found:
            raise ConfigError(
                f"{self._trained.folder}: got a task without normalized entropy; expected task.kind = 'click'. Choose "
                "one type for all tables: --types int8 without --max-ne and --budget."
            )
        return sum(found) / len(found)


def _table(choice: TypeChoice) -> Table:
    """Return the chosen types as a table, the largest tables first."""
    from rich.table import Table

    from tilerec.spec.byte_text import byte_text

    out = Table("table", "rows", "dim", "as trained", "type", "bytes", "NE alone")
    for table in sorted(choice.costs, key=lambda table: -table.types[0].bytes):
        cost = choice.chosen(table)
        out.add_row(
            table.name, f"{table.rows:,}", str(table.dim), byte_text(table.types[0].bytes), cost.row_type,
            byte_text(cost.bytes), _percent(cost.ne_change),
        )  # fmt: skip
    out.add_row("all", "", "", byte_text(choice.float_bytes), "", byte_text(choice.bytes), _percent(choice.ne_change))
    return out


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.4%}"
