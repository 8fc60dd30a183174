"""Models of a run with quantized tables: their file, and how to build them for it.

The file is that of any model (`saved_model.py`), and its metadata have the row type of each table:

    row_types    {"item": "int8", "user": "int4", "country": "fp32"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.quantized.quantize import quantize_tables
from tilerec.quantized.row_type import ROW_TYPES
from tilerec.train.config import RunConfig
from tilerec.train.saved_model import load_model, read_metadata, save_model

_AS_TRAINED = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Names of row types by the dtype of a trained table."""
_ROW_TYPES = "row_types"


def save_quantized(path: str | Path, model: nn.Module, row_types: Mapping[str, str], metadata: dict[str, str]) -> None:
    """Write a quantized model; `row_types`: of each table by name. Raises as `save_model` does."""
    save_model(path, model, {**metadata, _ROW_TYPES: json.dumps(dict(row_types))})


def row_types_in(path: str | Path) -> dict[str, str] | None:
    """Return the row type of each table of a model file by name; None for a float model.

    Raises:
        FileError, ConfigError: the file cannot be read, or is damaged.
    """
    text = read_metadata(path).get(_ROW_TYPES)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(value in ROW_TYPES for value in found.values()):
        raise ConfigError(
            f"Model {path}: got row_types {text[:80]!r}; expected one of {list(ROW_TYPES)} per table. Run `tilerec "
            "quantize` again."
        )
    return found


def load_quantized(
    path: str | Path, row_types: Mapping[str, str], config: RunConfig, dataset: Dataset, device: torch.device
) -> nn.Module:
    """Return a run's quantized model with the weights of a file. Float tables get no memory.

    Raises:
        FileError, ConfigError: as of `load_model`.
    """
    model = build_quantized(config, dataset, device, row_types)
    load_model(path, model)
    return model


def build_quantized(
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    row_types: Mapping[str, str] | None,
    table_device: torch.device | None = None,
) -> nn.Module:
    """Return a run's model with quantized tables, whose rows are to be loaded. Float tables get no memory.

    Args:
        row_types: of each table by name; None: those of floats, as the tables are trained.
        table_device: of the quantized tables, if different; "meta" allocates nothing.
    """
    model = config.model.build(dataset, device, torch.device("meta"))
    for part in model.modules():
        if isinstance(part, ManagedCollisionModule):  # is built beside its table
            part.hold(0, part.buckets(), None, device)
    types = {
        name: _AS_TRAINED.get(table.rows.leaf.dtype, "fp32")
        for part in model.modules()
        if isinstance(part, TableCollection)
        for name, table in part._tables.items()
    }
    return quantize_tables(
        model, per_table=types if row_types is None else row_types, inplace=True, device=table_device or device
    )
