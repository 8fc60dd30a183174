"""The folder of an index: whole or absent, and refused before the work begins."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tilerec.data.dataset import Catalog
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.retrieval.index_files import check_out, write_index
from tilerec.retrieval.item_index_file import load_item_index
from tilerec.retrieval.ranking_task import IndexVectors
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def _index() -> IndexVectors:
    ids = torch.tensor([3, 1])
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([1, 1]), stride=2)
    return IndexVectors(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Catalog(ids, pa.array(["a", "b"]), ids, features))


def test_an_index_is_written_with_its_facts(tmp_path: Path) -> None:
    out = tmp_path / "index"
    out.mkdir()  # an empty folder is no obstacle
    check_out(out, "none")
    write_index(out, _index(), {"run": "r"}, iter(()))
    assert json.loads((out / "index.json").read_text()) == {
        "format": 1, "items": 2, "dim": 2, "metric": "inner_product", "faiss": "none", "index": "none",
        "queries": 0, "run": "r"
    }  # fmt: skip
    assert np.load(out / "vectors.npy").tolist() == [[1, 2], [3, 4]]
    assert sorted(one.name for one in out.iterdir()) == ["index.json", "items.parquet", "vectors.npy"]


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[int, pa.Table]]:
        yield 1, pa.table({"user": [1]})
        raise InputError("bad row")

    with pytest.raises(InputError, match="bad row"):
        write_index(tmp_path / "index", _index(), {}, broken())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "no").touch()
    with pytest.raises(FileError, match=r"Index: .* cannot be written: got 'File exists'"):
        write_index(tmp_path / "no" / "index", _index(), {}, iter(()))


def test_folders_that_exist_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="which exists; expected a new folder"):
            check_out(out, "none")
    with pytest.raises(ConfigError, match="expected one of none, flat, hnsw"):
        check_out(tmp_path / "index", "ivf")


def test_without_faiss_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **named: Any) -> Any:
        if name == "faiss":
            raise ImportError(name)
        return original(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'tilerec\[faiss\]'"):
        check_out(tmp_path / "index", "flat")


def _vectors(count: int) -> IndexVectors:
    """Vectors in groups of 50, as those of embeddings."""
    torch.manual_seed(0)
    vectors = torch.randn(count // 50, 1, 16).expand(-1, 50, -1).reshape(count, 16) + torch.randn(count, 16) / 4
    ids = torch.arange(count) * 3
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(count, dtype=torch.int64), stride=count)
    return IndexVectors(vectors, Catalog(ids, pa.array(ids.numpy()), ids, features))


def test_the_recall_of_lists_is_that_of_a_sort_of_all_scores(tmp_path: Path) -> None:
    items, query = _vectors(5_000), torch.randn(30, 16)
    table = pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(query.reshape(-1).numpy()), 16)})
    found = write_index(tmp_path / "index", items, {}, iter([(30, table)]), form="ivf")
    index = load_item_index(tmp_path / "index" / "index.safetensors")
    best = torch.argsort(query @ items.vectors.T, dim=1, descending=True)[:, :100] * 3
    own = index(query, 100)[1]
    hits = sum(len(set(a) & set(b)) for a, b in zip(best.tolist(), own.tolist(), strict=True))
    assert found is not None
    assert 0.3 < found.recall < 1
    assert found.recall == hits / 3_000
    assert found.queries == 30
    assert 0.02 < found.rows < 0.12  # a twentieth of the lists
    assert json.loads((tmp_path / "index" / "index.json").read_text())["recall"]["recall"] == found.recall


def test_without_queries_vectors_of_items_are_searched_and_exact_has_no_recall(tmp_path: Path) -> None:
    found = write_index(tmp_path / "lists", _vectors(2_500), {}, iter(()), form="ivf-int8")
    assert found is not None
    assert found.queries == 834  # every third item
    assert write_index(tmp_path / "exact", _vectors(100), {}, iter(()), form="exact") is None
