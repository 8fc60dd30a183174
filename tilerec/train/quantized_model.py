"""Models of a run with quantized tables: their file, and how to build them for it.

The file is that of any model (`saved_model.py`), and its metadata have the row type of each table:

    row_types    {"item": "int8", "user": "int4", "country": "fp32"}
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.quantized.quantize import quantize_tables
from tilerec.quantized.row_type import ROW_TYPES
from tilerec.train.config import RunConfig
from tilerec.train.saved_model import load_model, read_metadata, save_model

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
    model = quantize_tables(
        config.model.build(dataset, device, torch.device("meta")), per_table=row_types, inplace=True, device=device
    )
    if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        # Maps of managed ids are built beside their tables.
        model = quantize_tables(config.model.build(dataset, device), per_table=row_types, inplace=True)
    load_model(path, model)
    return model
