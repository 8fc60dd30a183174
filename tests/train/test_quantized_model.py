"""The file of a model with quantized tables: it loads without float tables, in one process, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tilerec.errors import ConfigError, FileError
from tilerec.quantized import quantize_tables
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.recipes.registry import make_run
from tilerec.train.override import override_all
from tilerec.train.quantized_model import load_quantized, row_types_in, save_quantized
from tilerec.train.run_file import RUN_FILE, write_run_file
from tilerec.train.saved_model import MODEL_FILE, save_model
from tilerec.train.trained_run import find_trained
from tilerec.train.world import World

RUN = override_all(make_run("synthetic"), ["data.train_rows=64", "data.held_out_rows=64"])
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log folder with a quantized model, of which one table is fp16."""
    torch.manual_seed(1)
    model = quantize_tables(RUN.model.build(RUN.data.open(), CPU), "int8", per_table={"feature_0_table": "fp16"})
    types = {f"feature_{i}_table": "int8" if i else "fp16" for i in range(6)}
    write_run_file(tmp_path / RUN_FILE, RUN)
    save_quantized(tmp_path / MODEL_FILE, model, types, {})
    return tmp_path


def outputs(model: torch.nn.Module) -> torch.Tensor:
    batch = next(iter(RUN.data.open().held_out(64)))
    with torch.no_grad():
        return cast(torch.Tensor, model(batch.dense_features, batch.sparse_features))


def test_a_quantized_model_loads_with_its_row_types(folder: Path) -> None:
    trained = find_trained(folder)
    model = trained.load(RUN.data.open(), CPU, World(None))
    assert not model.training
    (tables,) = (module for module in model.modules() if isinstance(module, QuantEmbeddingBagCollection))
    assert [own.name for own in tables.row_types().values()] == ["fp16", *["int8"] * 5]
    torch.manual_seed(1)
    built = RUN.model.build(RUN.data.open(), CPU)
    want = quantize_tables(built, "int8", per_table={"feature_0_table": "fp16"}).eval()
    assert torch.equal(outputs(model), outputs(want))


def test_several_processes_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="got 2 processes for a model with quantized tables; expected one"):
        find_trained(folder).load(RUN.data.open(), CPU, cast(World, SimpleNamespace(size=2)))


def test_a_float_model_has_no_row_types(tmp_path: Path) -> None:
    save_model(tmp_path / MODEL_FILE, torch.nn.Linear(2, 1), {"steps": "3"})
    assert row_types_in(tmp_path / MODEL_FILE) is None
    with pytest.raises(FileError, match="expected a readable file"):
        row_types_in(tmp_path / "absent")
    (tmp_path / "torn").write_bytes((tmp_path / MODEL_FILE).read_bytes()[:20])
    with pytest.raises(ConfigError, match="expected a complete safetensors file"):
        row_types_in(tmp_path / "torn")


@pytest.mark.parametrize("text", ["no json", "[1]", '{"a": "int3"}'])
def test_wrong_row_types_of_a_file_are_refused(tmp_path: Path, text: str) -> None:
    save_model(tmp_path / MODEL_FILE, torch.nn.Linear(2, 1), {"row_types": text})
    with pytest.raises(ConfigError, match=r"got row_types .* expected one of"):
        row_types_in(tmp_path / MODEL_FILE)


def test_other_row_types_than_the_file_has_are_refused(folder: Path) -> None:
    types: dict[str, Any] = dict.fromkeys(row_types_in(folder / MODEL_FILE) or {}, "int4")
    with pytest.raises(ConfigError, match="feature_1_table"):
        load_quantized(folder / MODEL_FILE, types, RUN, RUN.data.open(), CPU)
