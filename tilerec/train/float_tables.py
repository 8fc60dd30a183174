"""The tables of a trained run as floats, to be converted."""

from __future__ import annotations

import warnings
from glob import escape
from pathlib import Path

import torch

from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.loading import load as load_checkpoint
from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.quantized.collection import quant_tables
from tilerec.train.quantized_model import build_quantized, row_types_in
from tilerec.train.saved_model import load_model
from tilerec.train.saved_rows import CheckpointRows, HeldRows, MappedRows, SavedRows
from tilerec.train.table_conversion import TrainedTables
from tilerec.train.trained_run import TrainedRun


def float_tables(run: TrainedRun, dataset: Dataset, device: torch.device, scratch: Path | None) -> TrainedTables:
    """Return the tables of the model to convert, in eval mode. Their float rows are read from the model file.

    Args:
        run: with a model whose tables are not quantized.
        scratch: a folder for the rows of a checkpoint: they are copied to a file there, so that the model can be
            called with them. None: the model of a checkpoint has no rows until they are converted.

    Raises:
        FileError, InputError, ConfigError: as of `TrainedRun.load`, or the model's tables are quantized.
    """
    if run.checkpoint is None and row_types_in(run.model_file) is not None:
        raise ConfigError(
            f"{run.folder}: got a model with quantized tables; expected one as it was trained. Pass the log "
            "folder of the training run."
        )
    torch.manual_seed(run.config.train.seed)
    model = build_quantized(run.config, dataset, device, None, torch.device("meta"))
    shapes = {name: tuple(table.weight.shape) for name, table in quant_tables(model).items()}
    names = list(shapes)
    source: SavedRows
    mapped: MappedRows | None
    if run.checkpoint is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # rows of the tables
            load_model(run.model_file, model)
        source = mapped = MappedRows(run.model_file, names)
    else:
        rows = [escape(f"model.{name}") for name in names]
        load_checkpoint(run.checkpoint, {"model": model}, changes=Changes(drop=rows, keep=rows))
        source = CheckpointRows(run.checkpoint, shapes)
        mapped = None if scratch is None else source.mapped(scratch, names)
    if mapped is not None:
        source = mapped if device.type == "cpu" else HeldRows({n: t.to(device) for n, t in mapped.tables.items()})
    return TrainedTables(model.eval(), source, device)
