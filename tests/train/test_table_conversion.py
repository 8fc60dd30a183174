"""Tables are converted block by block from a file, to the rows of `quantize_tables`, in the memory of the result."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.checkpoint import CheckpointManager, save
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.ops import backends
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.fused import FusedOptimizer
from tilerec.quantized import quantize_tables, row_type
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig
from tilerec.train import saved_rows
from tilerec.train.float_tables import float_tables as tables_of
from tilerec.train.saved_model import MODEL_FILE, save_model
from tilerec.train.table_conversion import TrainedTables
from tilerec.train.table_types import choose_types, convert_all
from tilerec.train.trained_run import TrainedRun

CPU = torch.device("cpu")
INT8 = row_type("int8")
CHECKPOINT = "checkpoint"


class Model(nn.Module):
    """Pooled tables of two dtypes, sequences, managed ids, and a dense part."""

    def __init__(self, rows: int, table_device: torch.device) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(rows, 16, "a", feature_names=["a"]),
            EmbeddingBagConfig(7, 5, "half", feature_names=["b"], data_type=DataType.FP16),
        ]
        managed = [EmbeddingBagConfig(12, 4, "m", feature_names=["m"])]
        ids = HashZchManagedCollisionModule(12, table_device, 2, eviction_policy_name="LRU_EVICTION")
        self.bags = EmbeddingBagCollection(bags, device=table_device)
        self.lists = EmbeddingCollection([EmbeddingConfig(9, 8, "a", feature_names=["a"])], device=table_device)
        self.managed = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(managed, device=table_device), ManagedCollisionCollection({"m": ids}, managed)
        )
        self.over = nn.Linear(3, 2)


def run_of(folder: Path, source: str, build: Callable[[torch.device], nn.Module]) -> TrainedRun:
    """A run whose model `build` makes; its files are in the folder."""
    model = SimpleNamespace(build=lambda dataset, device, table_device=None: build(table_device or device))
    config: Any = SimpleNamespace(model=model, train=SimpleNamespace(seed=0))
    return TrainedRun(config, folder, folder / source if source else None, folder)


def built(device: torch.device) -> nn.Module:
    return Model(300, device)


def float_tables(run: TrainedRun, scratch: Path | None = None) -> TrainedTables:
    dataset: Any = None
    return tables_of(run, dataset, CPU, scratch)


def saved(folder: Path) -> Model:
    """Write a model to a model file and to a checkpoint."""
    torch.manual_seed(3)
    model = Model(300, CPU)
    ids = KeyedJaggedTensor.from_lengths_sync(["m"], torch.tensor([5, -1, 2**62]), torch.tensor([1, 1, 1]))
    model.managed(ids)
    save_model(folder / MODEL_FILE, model, {})
    save(folder / CHECKPOINT, {"model": model})
    return model


def same(made: nn.Module, want: nn.Module) -> bool:
    state, wanted = made.state_dict(), want.state_dict()
    return state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("source", ["", CHECKPOINT])
@pytest.mark.parametrize("block", [1, 1000, saved_rows.BLOCK_BYTES])
def test_converted_tables_are_those_of_the_model_in_memory(
    block: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "BLOCK_BYTES", block)
    model = saved(tmp_path)
    for name in ("int8", "fp16"):
        tables = float_tables(run_of(tmp_path, source, built))
        convert_all(tables, row_type(name))
        assert same(tables.model, quantize_tables(model, name).eval())


@pytest.mark.parametrize("source", ["", CHECKPOINT])
def test_the_model_has_its_float_rows_until_they_are_converted(source: str, tmp_path: Path) -> None:
    model = saved(tmp_path)
    tables = float_tables(run_of(tmp_path, source, built), tmp_path)
    want = quantize_tables(model, "fp32", per_table={"half": "fp16"}).eval()
    assert same(tables.model, want)
    for name in ("int4", "fp32"):
        tables.convert("a", row_type(name))  # tables of two collections
    assert same(tables.model, want)


def test_rows_of_incremental_checkpoints_are_the_newest(tmp_path: Path) -> None:
    def tables(device: torch.device) -> EmbeddingBagCollection:
        return EmbeddingBagCollection([EmbeddingBagConfig(50, 8, "a", feature_names=["a"])], device=device)

    model = tables(CPU)
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), model.parameters())
    manager = CheckpointManager(tmp_path, incremental=True, keep_last=0)
    for step in (1, 2):
        ids = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([step, 40]), torch.tensor([1, 1]))
        model(ids).values().sum().backward()
        manager.save(step, {"model": model, "optimizer": FusedOptimizer(model)})
    made = float_tables(run_of(tmp_path, "step-2", tables))
    convert_all(made, INT8)
    assert same(made.model, quantize_tables(model, "int8").eval())


def test_files_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    model = saved(tmp_path)

    def larger(device: torch.device) -> nn.Module:
        return Model(301, device)

    with pytest.raises(ConfigError, match=r"size mismatch.*\[300, 16\]"):
        float_tables(run_of(tmp_path, "", larger))
    with pytest.raises(
        ConfigError, match=r"got the shape \[300, 16\] for model.bags.embedding_bags.a.weight; expected"
    ):
        float_tables(run_of(tmp_path, CHECKPOINT, larger))
    with pytest.raises(FileError, match="absent"):
        float_tables(run_of(tmp_path, "absent", built))
    with torch.no_grad():
        model.bags.embedding_bags["a"].weight[299, 3] = torch.nan
    save(tmp_path / "bad", {"model": model})
    with pytest.raises(InputError, match="Table 'a': got nan in row 299"):
        convert_all(float_tables(run_of(tmp_path, "bad", built)), INT8)


# ------------------------------------------------------------------------------------------------------------- memory

TABLES, ROWS, DIM = 4, 65_536, 64
FLOAT_BYTES, RESULT = TABLES * ROWS * DIM * 4, TABLES * ROWS * (DIM + 4)
SLACK = 12 << 20  # two blocks, blocks of files that wait for their checksums, and the growth of the heap


def large(device: torch.device) -> EmbeddingBagCollection:
    names = [f"t{t}" for t in range(TABLES)]
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in names], device=device
    )


def status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def settled() -> None:
    """Return freed memory to the system, and reset the peak of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


@pytest.fixture
def large_run(tmp_path: Path) -> Path:
    model = large(CPU)
    save_model(tmp_path / MODEL_FILE, model, {})
    save(tmp_path / CHECKPOINT, {"model": model})
    return tmp_path


@pytest.mark.skipif(not backends.NATIVE_CPU, reason="pages are released by the native library")
@pytest.mark.parametrize("source", ["", CHECKPOINT])
def test_one_type_takes_the_memory_of_the_result(source: str, large_run: Path) -> None:
    run = run_of(large_run, source, large)

    def convert() -> None:
        tables = float_tables(run)
        convert_all(tables, INT8)
        save_model(large_run / "served.safetensors", tables.model, {})

    convert()  # the first use of any code takes memory of its own
    growth = []
    for _ in range(3):  # the heap and threads of earlier tests may grow meanwhile, so the least counts
        settled()
        before = status("VmRSS")
        convert()
        growth.append(status("VmHWM") - before)
    assert min(growth) <= RESULT * 1.05 + SLACK < FLOAT_BYTES / 2


@pytest.mark.skipif(not backends.NATIVE_CPU, reason="pages are released by the native library")
@pytest.mark.parametrize("source", ["", CHECKPOINT])
def test_types_by_data_take_the_memory_of_the_result_and_pages_of_a_file(source: str, large_run: Path) -> None:
    run, seen = run_of(large_run, source, large), [0]
    ids = torch.arange(ROWS).repeat(TABLES)
    batch = KeyedJaggedTensor([f"t{t}" for t in range(TABLES)], ids, lengths=torch.full((TABLES,), ROWS))

    def score(model: nn.Module) -> float:
        model(batch)  # reads every row once: a bag per table
        seen.append(status("RssAnon"))
        return 1.0

    growth = []
    for _ in range(3):
        settled()
        before, seen = status("RssAnon"), [0]
        choice = choose_types(float_tables(run, large_run), score, [INT8], None, 0.1)
        growth.append(max(seen) - before)
    assert choice.bytes == RESULT
    assert len(seen) == 1 + 1 + TABLES + 1
    assert min(growth) <= RESULT * 1.05 + SLACK < FLOAT_BYTES / 2
