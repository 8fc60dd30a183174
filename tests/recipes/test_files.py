"""Your own files as the data of a run: Parquet and text, shared tables, sessions, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
import torch

from tilerec.comms.process import ProcessGroupComms
from tilerec.data import assembly
from tilerec.data.batch import Batch
from tilerec.data.batch_join import join_parts
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.recipes.files import FilesData
from tilerec.recipes.model import DLRMConfig
from tilerec.spec.optimizer import SGD
from tilerec.testing import run_ranks
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.loop import train

COLUMNS = Columns(
    labels=(LabelColumn("click"),),
    dense=(DenseColumn("price", transform="log"),),
    ids=(
        IdColumn("user", table="people"),
        IdColumn("friends", kind="list", table="people"),
        IdColumn("history", kind="sequence", max_length=3, weights="seconds"),
    ),
    tables=(TableRows("people", 50), TableRows("history", 40)),
)


def _table(rows: int, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    session = np.sort(draw.integers(0, max(rows // 5, 1), rows))
    lists = [list(range(number % 4)) for number in session.tolist()]
    return pa.table(
        {
            "click": (draw.random(rows) < 0.3).astype(np.float32),
            "price": draw.random(rows),
            "user": session % 30,
            "friends": pa.array(lists, pa.list_(pa.int64())),
            "history": pa.array([[7 + n % 3, n % 5, n] for n in range(rows)], pa.list_(pa.int64())),
            "seconds": pa.array([[1.0, 0.5, 2.0]] * rows, pa.list_(pa.float32())),
            "session": session,
        }
    )


def _run(data: FilesData) -> RunConfig:
    return RunConfig(
        name="files",
        data=data,
        model=DLRMConfig(embedding_dim=4, dense_arch=(4,), over_arch=(8, 4)),
        train=TrainConfig(batch_size=16, max_steps=6, embedding_optimizer=SGD(lr=0.1), dense_optimizer=SGD(lr=0.1)),
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    parquet.write_table(_table(150), tmp_path / "a.parquet", row_group_size=40)
    parquet.write_table(_table(60, seed=1), tmp_path / "b.parquet", row_group_size=40)
    return tmp_path


def test_a_run_trains_on_files_and_evaluates_on_their_held_out_rows(files: Path) -> None:
    result = train(_run(FilesData((str(files),), COLUMNS)))
    assert result.steps == 6
    assert result.held_out.samples == 21
    weights = dict(result.model.named_parameters())
    assert [name for name in weights if "embedding" in name] == [
        "sparse_arch.embedding_bag_collection.embedding_bags.people.weight",
        "sparse_arch.embedding_bag_collection.embedding_bags.history.weight",
    ]


def test_relative_paths_begin_at_the_base_folder(files: Path) -> None:
    data = FilesData(("a.parquet",), COLUMNS, base=str(files)).open()
    assert data.row_count().rows == 150
    assert FilesData("*.parquet", COLUMNS, base=str(files)).open().row_count().rows == 210  # type: ignore[arg-type]


def test_other_files_are_predicted_with_or_without_labels(files: Path) -> None:
    parquet.write_table(_table(7).drop_columns(["click"]), files / "new.pq")
    data = FilesData(("a.parquet",), COLUMNS, base=str(files))
    rows = data.open_rows((str(files / "new.pq"),), labels=False)
    assert [keys.num_rows for _, keys in rows.rows(4, keys=["user"])] == [4, 3]
    assert data.open_rows((str(files / "b.parquet"),)).row_count().rows == 60


def test_files_of_their_own_can_be_held_out(files: Path) -> None:
    held = HoldOut(path=("b.parquet",))
    data = FilesData(("a.parquet",), COLUMNS, hold_out=held, base=str(files)).open()
    assert (data.train_rows, data.held_out_rows) == (150, 60)


def test_text_and_parquet_of_one_table_give_the_same_batches(tmp_path: Path) -> None:
    table = _table(90).drop_columns(["friends", "history", "seconds"])
    parquet.write_table(table, tmp_path / "x.parquet")
    arrow_csv.write_csv(table, tmp_path / "x.csv", arrow_csv.WriteOptions(quoting_header="none"))
    columns = Columns(COLUMNS.labels, COLUMNS.dense, (IdColumn("user"),), (TableRows("user", 20),))
    batches = [
        next(iter(FilesData((str(tmp_path / name),), columns).open().train(80))) for name in ("x.parquet", "x.csv")
    ]
    assert torch.equal(batches[0].labels, batches[1].labels)
    assert torch.equal(batches[0].sparse_features.values(), batches[1].sparse_features.values())
    torch.testing.assert_close(batches[0].dense_features, batches[1].dense_features)


def _state(data: FilesData, group: ProcessGroupComms | None = None) -> dict[str, torch.Tensor]:
    model = train(_run(data), group=group).model
    tensors = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
    return {name.replace("_dmp_wrapped_module.", "").replace("module.", ""): t for name, t in tensors.items()}


def test_shared_bags_of_sessions_train_to_the_same_numbers(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = FilesData(("a.parquet",), COLUMNS, base=str(files), group_by_session="session")
    shares = list(grouped.open().train_shares(16))
    assert all(share.batch.sparse_features.inverse_indices_or_none() is not None for share in shares)

    found = _state(grouped)

    def join_unshared(parts: Any, features: Any, savings: Any = None) -> Batch:
        return join_parts(parts, features)

    monkeypatch.setattr(assembly, "join_parts", join_unshared)
    expected = _state(grouped)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


CASES = [("", 1), ("session", 1), ("", 2)]  # session column, lanes


def _losses(folder: str, group: ProcessGroupComms | None = None) -> list[float]:
    losses = []
    for session, lanes in CASES:
        data = FilesData(("a.parquet",), COLUMNS, base=folder, group_by_session=session, lanes=lanes)
        losses.append(train(_run(data), group=group).held_out.log_loss)
    return losses


def _losses_of_rank(folder: str) -> list[float]:
    return _losses(folder, ProcessGroupComms())


def test_two_ranks_train_as_one(files: Path) -> None:
    one = _losses(str(files))
    assert len(set(one)) == len(CASES)
    for losses in run_ranks(2, _losses_of_rank, str(files), timeout_s=150.0):
        assert losses == pytest.approx(one, rel=1e-5)


def test_a_managed_table_gives_its_rows_to_the_ids_of_the_files(files: Path) -> None:
    columns = Columns(COLUMNS.labels, COLUMNS.dense, (IdColumn("user"),), (TableRows("user", 20, "managed"),))
    result = train(_run(FilesData(("a.parquet",), columns, base=str(files))))
    stats = result.model.sparse_arch.embedding_bag_collection.stats()["user"]  # type: ignore[union-attr, operator]
    assert stats.live == 30
