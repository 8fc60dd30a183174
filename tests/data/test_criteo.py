"""The Criteo format in both layouts, against values computed by hand."""

from __future__ import annotations

import gzip
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.data.convert import convert
from tilerec.data.criteo import DENSE, MULTI_HOT, SPARSE, Criteo, criteo_columns
from tilerec.data.id_counts import write_vocabularies
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.rows import hash_rows
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, InputError

Row = list[str]  # label, 13 counts, 26 categories


def _rows(count: int, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    return [
        [
            str(draw.randrange(2)),
            *("" if draw.random() < 0.3 else str(draw.randrange(-2, 900)) for _ in DENSE),
            *("" if draw.random() < 0.2 else f"{draw.randrange(50):08x}" for _ in SPARSE),
        ]
        for _ in range(count)
    ]


def _csv(path: Path, rows: list[Row]) -> Path:
    names = ["Id", "Label", *DENSE, *SPARSE]
    lines = [",".join(names), *(",".join([str(1000 + index), *row]) for index, row in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def _tsv(path: Path, rows: list[Row], *, zipped: bool = False) -> Path:
    text = "".join("\t".join(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if zipped else text)
    return path


def _columns(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, list[list[list[int]]]]:
    """Labels, dense features, and per sample and feature the ids."""
    labels = torch.cat([batch.labels for batch in batches])
    dense = torch.cat([batch.dense_features for batch in batches])
    ids = []
    for batch in batches:
        features = batch.sparse_features
        assert list(features.keys()) == list(SPARSE)
        per_feature = []
        for name in SPARSE:
            parts = features[name].values().split(features[name].lengths().tolist())
            per_feature.append([part.tolist() for part in parts])
        ids += [list(sample) for sample in zip(*per_feature, strict=True)]
    return labels, dense, ids


def _expected_ids(row: Row, num_rows: int, missing: str) -> list[list[int]]:
    first = 1 if missing == "row" else 0
    out = []
    for text in row[14:]:
        hashed = hash_rows(pa.array([text.encode()], pa.binary()), num_rows, first_row=first).tolist()
        out.append(hashed if text else [0] if missing == "row" else [])
    return out


@pytest.mark.parametrize("missing", ["row", "empty"])
@pytest.mark.parametrize("block_bytes", [500, 1 << 20])
def test_every_value_of_both_layouts_arrives_where_it_belongs(tmp_path: Path, missing: str, block_bytes: int) -> None:
    rows = _rows(40)
    held = [row for index, row in enumerate(rows) if index % 4 == 3]
    for path in (
        _csv(tmp_path / "a.csv", rows),
        _tsv(tmp_path / "b.txt", rows),
        _tsv(tmp_path / "c.gz", rows, zipped=True),
    ):
        data = Criteo(path, num_rows=30, missing=missing, held_out_every=4, block_bytes=block_bytes)  # type: ignore[arg-type]
        labels, dense, ids = _columns(list(data.held_out(3)))
        assert labels.tolist() == [float(row[0]) for row in held]
        counts = np.array([[float(text or 0) for text in row[1:14]] for row in held])
        np.testing.assert_allclose(dense.numpy(), np.sign(counts) * np.log1p(np.abs(counts)), rtol=1e-6)
        assert ids == [_expected_ids(row, 30, missing) for row in held]
        train = list(data.train(8))
        assert sum(batch.batch_size for batch in train) == 30
        assert sorted(map(str, _columns(train)[2])) == sorted(
            str(_expected_ids(row, 30, missing)) for index, row in enumerate(rows) if index % 4 != 3
        )
        assert data.row_count().rows == 40


def test_each_table_may_have_its_own_size(tmp_path: Path) -> None:
    sizes = list(range(2, 28))
    data = Criteo(_tsv(tmp_path / "a.txt", _rows(50)), num_rows=sizes, held_out_every=2)
    assert [feature.num_rows for feature in data.sparse_features] == sizes
    for batch in data.train(10):
        for name, size in zip(SPARSE, sizes, strict=True):
            assert int(batch.sparse_features[name].values().max()) < size


def test_all_categories_missing_make_an_empty_batch_of_ids(tmp_path: Path) -> None:
    rows = [["1", *[""] * 39]] * 4
    (batch,) = Criteo(_tsv(tmp_path / "a.txt", rows), missing="empty", held_out_every=2).held_out(5)
    assert batch.sparse_features.values().numel() == 0
    assert batch.sparse_features.stride() == 2
    assert torch.equal(batch.dense_features, torch.zeros(2, 13))


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        (0, "2", r":3: column 'Label': got '2'; expected an integer in \[0, 1\]"),
        (0, "", r":3: column 'Label': got ''"),
        (5, "1.5", r":3: column 'I5': got '1.5'; expected an integer or nothing"),
    ],
)
def test_a_bad_value_is_named_in_both_layouts(tmp_path: Path, place: int, text: str, message: str) -> None:
    rows = _rows(10)
    rows[1][place] = text
    with pytest.raises(InputError, match=message):
        list(Criteo(_csv(tmp_path / "a.csv", rows)).train(4))
    rows.insert(0, rows[0])
    with pytest.raises(InputError, match=message):
        list(Criteo(_tsv(tmp_path / "a.txt", rows)).train(4))


def test_bad_lines_can_be_left_out_and_do_not_move_the_split(tmp_path: Path) -> None:
    rows = _rows(20)
    good = Criteo(_tsv(tmp_path / "good.txt", rows), held_out_every=5)
    bad_rows = [*rows[:7], rows[7][:20], *rows[7:]]
    bad = Criteo(_tsv(tmp_path / "bad.txt", bad_rows), held_out_every=5, on_bad_row="skip")
    for one, other in zip(good.held_out(4), bad.held_out(4), strict=True):
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.sparse_features.values(), other.sparse_features.values())
    assert (bad.row_count().rows, bad.row_count().skipped) == (20, 1)
    assert "where column 'C7' is missing; expected 40 columns instead of 20" in bad.row_count().examples[0]


def test_leaving_a_pass_early_ends_its_thread_and_changes_no_later_pass(tmp_path: Path) -> None:
    data = Criteo(_tsv(tmp_path / "train.txt", _rows(200)), shuffle_window=50, block_bytes=2000)
    whole = _columns(list(data.train(10)))
    threads = threading.active_count()
    batches = data.train(10)
    next(batches)
    batches.close()
    assert threading.active_count() == threads
    again = _columns(list(data.train(10)))
    assert torch.equal(whole[0], again[0])
    assert torch.equal(whole[1], again[1])
    assert whole[2] == again[2]


def test_files_that_are_no_criteo_data_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on opening it"):
        Criteo(tmp_path / "nowhere.txt")
    header_only = _csv(tmp_path / "a.csv", [])
    with pytest.raises(InputError, match="got no rows; expected"):
        list(Criteo(header_only).train(4))
    test_file = tmp_path / "test.csv"
    test_file.write_text("Id," + ",".join([*DENSE, *SPARSE]) + "\n")
    with pytest.raises(InputError, match=r"test\.csv:1: got header .*; expected a column 'Label'"):
        list(Criteo(test_file).train(4))
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"\x1f\x8b not gzip at all")
    with pytest.raises(InputError, match="damaged"):
        Criteo(broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rows": [3, 4]}, "num_rows: got 2 numbers"),
        ({"num_rows": 1}, "num_rows of 'C1': got 1; expected above 1"),
        ({"missing": "zero"}, "missing: got 'zero'"),
        ({"held_out_every": 1}, "held_out_every: got 1"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Criteo(_tsv(tmp_path / "a.txt", _rows(3)), **options)  # type: ignore[arg-type]


def test_rare_categories_share_row_0_and_bags_have_the_sizes_of_mlperf(tmp_path: Path) -> None:
    days, names = _tsv(tmp_path / "day_0", _rows(200)), ("Label", *DENSE, *SPARSE)
    convert([days], tmp_path / "0.parquet", delimiter="\t", names=names, texts=SPARSE)
    source = ParquetGroups(tmp_path / "0.parquet")
    write_vocabularies(source, {name: [name] for name in SPARSE}, tmp_path / "ids", min_count=3)
    columns = criteo_columns(vocabularies=tmp_path / "ids", multi_hot=MULTI_HOT)
    batch, table = next(iter(TableDataset(source, columns).rows(200, SPARSE)))
    for name, count in zip(SPARSE, MULTI_HOT, strict=True):
        texts = table.column(name).to_pylist()
        first = batch.sparse_features[name].values().view(200, count)[:, 0].tolist()
        often = Counter(text for text in texts if text is not None)
        assert [row == 0 for row in first] == [often[text] < 3 for text in texts]
        assert len(set(first) - {0}) == sum(n >= 3 for n in often.values())
    with pytest.raises(ConfigError, match="multi_hot: got 2 numbers; expected 26"):
        criteo_columns(multi_hot=(1, 2))


@pytest.mark.parametrize("missing", ["row", "empty"])
def test_day_files_as_parquet_give_the_same_samples(tmp_path: Path, missing: Any) -> None:
    days = [_tsv(tmp_path / "day_0", _rows(40)), _tsv(tmp_path / "day_1.gz", _rows(30, seed=1), zipped=True)]
    names = ("Label", *DENSE, *SPARSE)
    convert(days, tmp_path / "days.parquet", delimiter="\t", names=names, texts=SPARSE, rows_per_group=25)
    data = TableDataset(ParquetGroups(tmp_path), criteo_columns(1000, missing=missing))
    found = _columns([batch for batch, _ in data.rows(16)])
    expected = [
        _columns([*streamed.train(1000), *streamed.held_out(1000)])
        for streamed in (Criteo(day, num_rows=1000, missing=missing) for day in days)
    ]
    # `Criteo` shuffles: compare the samples as a multiset.
    samples = [str(one) for one in zip(found[0].tolist(), found[1].tolist(), found[2], strict=True)]
    wanted = [str(one) for part in expected for one in zip(part[0].tolist(), part[1].tolist(), part[2], strict=True)]
    assert sorted(samples) == sorted(wanted)
