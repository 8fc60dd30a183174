"""The model file: the same bytes from any sharding, loaded under any other, atomic."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tilerec.errors import ConfigError, FileError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import Cut, column_wise, data_parallel, row_wise, table_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing import Ranks
from tilerec.train import saved_model
from tilerec.train.saved_model import MODEL_FILE, load_model, save_model


class Model(nn.Module):
    """Two tables of two dtypes and a dense part with a parameter without dimensions."""

    def __init__(self, table_device: str = "cpu") -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(num_embeddings=11, embedding_dim=8, name="a", feature_names=["a"]),
            EmbeddingBagConfig(num_embeddings=5, embedding_dim=16, name="b", feature_names=["b"]),
        ]
        self.bags = EmbeddingBagCollection(tables, device=torch.device(table_device))
        self.over = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("count", torch.tensor([3, 4], dtype=torch.int32))


def _values(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = Model().state_dict()
    return {name: torch.randn(one.shape) if one.is_floating_point() else one + seed for name, one in state.items()}


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_one_process_reads_back_what_it_wrote(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_model, "_CHUNK_BYTES", chunk_bytes)
    model, other, values = Model(), Model(), _values(1)
    model.load_state_dict(values)
    save_model(tmp_path / MODEL_FILE, model, {"samples": "7"})
    assert load_model(tmp_path / MODEL_FILE, other) == {"samples": "7"}
    found = other.state_dict()
    assert found.keys() == values.keys()
    for name, one in load_file(tmp_path / MODEL_FILE).items():
        assert torch.equal(one, values[name]), name
        assert torch.equal(found[name], values[name]), name


CUTS: dict[str, Callable[[], Cut]] = {
    "rows": row_wise,
    "columns": lambda: column_wise(ranks=[0, 1]),
    "second": lambda: table_wise(rank=1),
    "copies": data_parallel,
}


def _sharded(cut: str) -> nn.Module:
    return shard(Model(table_device="meta"), CUTS[cut](), device=torch.device("cpu"))


def _write(path: str, cut: str) -> None:
    saved_model._CHUNK_BYTES = 100
    model = _sharded(cut)
    model.load_state_dict(_values(1))
    save_model(path, model, {}, rank=dist.get_rank())


def _read(path: str, cut: str) -> dict[str, torch.Tensor]:
    model = _sharded(cut)
    load_model(path, model)
    return full_state_dict(model)


@pytest.fixture(scope="module")
def ranks() -> Any:
    with Ranks(2) as started:
        yield started


@pytest.mark.parametrize(
    ("written", "read"),
    [("rows", "columns"), ("columns", "second"), ("second", "copies"), ("copies", "rows")],
)
def test_ranks_write_whole_tables_and_read_their_own_tiles(
    written: str, read: str, ranks: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / MODEL_FILE)
    ranks.run(_write, path, written)
    values = _values(1)
    one = Model()
    load_model(path, one)
    for found in (one.state_dict(), *ranks.run(_read, path, read)):
        assert all(torch.equal(found[name], values[name]) for name in values)


def _managed() -> ManagedCollisionEmbeddingBagCollection:
    tables = [EmbeddingBagConfig(num_embeddings=12, embedding_dim=4, name="t", feature_names=["a"])]
    module = HashZchManagedCollisionModule(12, "cpu", 2, eviction_policy_name="LRU_EVICTION")
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables), ManagedCollisionCollection({"t": module}, tables)
    )


def test_a_table_with_managed_ids_keeps_rows_and_ids(tmp_path: Path) -> None:
    ids = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([5, -1, 2**62]), torch.tensor([1, 1, 1]))
    model, other = _managed(), _managed()
    model(ids)
    expected = model.eval()(ids)[0].values()
    save_model(tmp_path / MODEL_FILE, model, {})
    load_model(tmp_path / MODEL_FILE, other)
    assert torch.equal(other.eval()(ids)[0].values(), expected)


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    save_model(tmp_path / MODEL_FILE, model, {})
    before = (tmp_path / MODEL_FILE).read_bytes()

    def full(chunk: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved_model, "bytes_of", full)
    with pytest.raises(FileError, match=r"model\.safetensors cannot be written: got 'No space left"):
        save_model(tmp_path / MODEL_FILE, model, {})
    assert (tmp_path / MODEL_FILE).read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [MODEL_FILE]


def test_files_of_other_models_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / MODEL_FILE
    with pytest.raises(FileError, match=r"got 'No such file.*Train the run first"):
        load_model(path, Model())
    save_model(path, Model(), {})
    model = Model()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"without \['extra\.weight', 'extra\.bias'\]"):
        load_model(path, model)
    model = Model()
    model.over = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"size mismatch for over\.weight"):
        load_model(path, model)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"expected a complete safetensors file"):
        load_model(path, Model())


def test_a_tensor_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    model = Model()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"complex64 for 'wave'"):
        save_model(tmp_path / MODEL_FILE, model, {})
    assert not list(tmp_path.iterdir())
