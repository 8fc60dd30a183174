"""The folder of a run with quantized tables: files that `tilerec eval` and `predict` read, and what was measured.

run.toml             the run as it was trained
vocabulary/          values of features with a vocabulary
quantization.json    NE and bytes before and after; of each table its row type, and what each type costs
model.safetensors    the quantized model
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from tilerec.atomic_file import new_folder
from tilerec.errors import ConfigError
from tilerec.train.log_folder import write_json
from tilerec.train.quantized_model import save_quantized
from tilerec.train.run_file import RUN_FILE, write_run_file
from tilerec.train.saved_model import MODEL_FILE
from tilerec.train.table_types import TypeChoice
from tilerec.train.trained_run import TrainedRun
from tilerec.train.vocabulary_files import read_vocabularies, write_vocabularies


def check_new(folder: Path) -> None:
    """Raise a `ConfigError` unless the folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out: got {folder}, which exists; expected a new or an empty folder. Name another one.")


def write_quantized(folder: Path, trained: TrainedRun, choice: TypeChoice, model: nn.Module) -> None:
    """Write the folder, as a whole or not at all.

    Raises:
        FileError: a file cannot be written.
    """
    with new_folder(folder, "--out") as made:
        if trained.vocabulary.is_dir():
            write_vocabularies(made, read_vocabularies(trained.vocabulary))
        write_run_file(made / RUN_FILE, replace(trained.config, log_dir=""))
        write_json(made / "quantization.json", _record(choice))
        save_quantized(made / MODEL_FILE, model, choice.types, {})


def _record(choice: TypeChoice) -> dict[str, object]:
    return {
        "float_ne": choice.float_ne,
        "ne": choice.ne,
        "float_bytes": choice.float_bytes,
        "bytes": choice.bytes,
        "tables": {
            table.name: {
                "row_type": choice.types[table.name],
                "measured": {cost.row_type: {"bytes": cost.bytes, "ne_change": cost.ne_change} for cost in table.types},
            }
            for table in choice.costs
        },
    }
