"""Guessed roles: each kind of column, table sizes, and a first run file that trains."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, InputError
from tilerec.recipes.data_profile import profile_data
from tilerec.recipes.guess import Guess, guess_roles, run_text, table_rows, words_of
from tilerec.train.run_file import run_of_toml

ROWS = 400


def _columns() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "row_key": [f"k{i}" for i in range(ROWS)],
        "clicked": draw.integers(0, 2, ROWS),
        "flag": draw.integers(0, 2, ROWS) == 1,
        "price": draw.random(ROWS) * 4,
        "views": (draw.pareto(1.0, ROWS) * 10).astype(np.int64),
        "userId": draw.integers(0, 90, ROWS),
        "big": draw.integers(0, 50, ROWS) + 2**40,
        "city": [None if i % 7 == 0 else f"c{i % 20}" for i in range(ROWS)],
        "tags": [[int(i % 9)] * (i % 4) for i in range(ROWS)],
        "hist_items": [[f"i{i % 12}"] * 3 for i in range(ROWS)],
        "tag_scores": [[0.5] * (i % 4) for i in range(ROWS)],
        "vector": [[0.5] * 3 for _ in range(ROWS)],
        "comment": ["a long text that is no id at all, because it is a sentence " + str(i % 50) for i in range(ROWS)],
        "constant": [1] * ROWS,
        "nothing": pa.nulls(ROWS, pa.float64()),
        "ts": 1_700_000_000 + np.arange(ROWS),
    }


def _guesses(tmp_path: Path, label: str | None = None, **changes: Any) -> dict[str, Guess]:
    columns = {name: one for name, one in {**_columns(), **changes}.items() if one is not None}
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet")
    profile = profile_data(str(tmp_path / "data.parquet"))
    return {guess.column: guess for guess in guess_roles(profile, label)}


def test_each_kind_of_column_has_its_role(tmp_path: Path) -> None:
    found = _guesses(tmp_path)
    assert {name: guess.role for name, guess in found.items()} == {
        "row_key": "", "clicked": "label", "flag": "dense", "price": "dense", "views": "dense", "userId": "id",
        "big": "id", "city": "id", "tags": "id", "hist_items": "id", "tag_scores": "weights", "vector": "",
        "comment": "", "constant": "", "nothing": "", "ts": "time",
    }  # fmt: skip
    assert found["views"].settings["transform"] == "log"
    assert found["city"].settings == {"column": "city", "missing": "row"}
    assert found["tags"].settings == {"column": "tags", "kind": "list", "missing": "empty", "weights": "tag_scores"}
    assert found["hist_items"].settings["kind"] == "sequence"
    assert found["hist_items"].settings["max_length"] == 3
    assert found["ts"].settings == {"column": "ts", "at_least": str(1_700_000_000 + 359)}
    assert all(guess.why for guess in found.values())


def test_columns_of_0_and_1_are_flags_or_further_labels(tmp_path: Path) -> None:
    bits = [i % 2 for i in range(ROWS)]
    found = _guesses(tmp_path, purchased=bits, is_new=bits, count=bits)
    assert {name: found[name].role for name in ("purchased", "is_new", "count", "flag")} == {
        "purchased": "", "is_new": "dense", "count": "dense", "flag": "dense",
    }  # fmt: skip
    assert "second label" in found["purchased"].why
    assert all(found[name].why == "a flag, 0 or 1" for name in ("is_new", "count", "flag"))


@pytest.mark.parametrize(
    ("weights", "weighted"),
    [
        ([[0.5] * (i % 4) for i in range(ROWS)], True),
        ([None if i % 4 == 0 else [0.5] * (i % 4) for i in range(ROWS)], True),  # no list is a list without values
        ([[0.5] * (i % 4 if i < ROWS - 1 else 1) for i in range(ROWS)], False),
        ([[None if i == 1 else 0.5] * (i % 4) for i in range(ROWS)], False),
        ([[float("inf") if i == 1 else 0.5] * (i % 4) for i in range(ROWS)], False),
        ([[] for _ in range(ROWS)], False),
    ],
)
def test_lists_of_numbers_are_weights_if_each_row_has_one_per_id(
    weights: list[Any], weighted: bool, tmp_path: Path
) -> None:
    listed = pa.array(weights, pa.list_(pa.float32()))
    found = _guesses(tmp_path, tag_scores=None, strange_name=listed)
    assert found["strange_name"].role == ("weights" if weighted else "")
    assert found["tags"].settings.get("weights") == ("strange_name" if weighted else None)


@pytest.mark.parametrize(("name", "weighted"), [("weights", True), ("item_strength", True), ("vector", False)])
def test_lists_of_one_length_are_weights_only_by_their_name(name: str, weighted: bool, tmp_path: Path) -> None:
    pairs = {"tags": [[i % 9, i % 7] for i in range(ROWS)], "vector": None, name: [[0.5, 2.0]] * ROWS}
    found = _guesses(tmp_path, tag_scores=None, **pairs)
    assert (found[name].role == "weights") is weighted


def test_a_list_of_ids_has_one_column_of_weights_the_one_named_like_it(tmp_path: Path) -> None:
    lists = {name: [[1] * (i % 4) for i in range(ROWS)] for name in ("tags", "shops")}
    weights = {name: [[0.5] * (i % 4) for i in range(ROWS)] for name in ("third", "shops_seen", "tag_scores")}
    found = _guesses(tmp_path, **{**lists, **weights})
    assert found["shops"].settings["weights"] == "shops_seen"
    assert found["tags"].settings["weights"] == "tag_scores"
    assert found["third"].role == ""


def test_ids_with_a_plain_name_keep_their_weights(tmp_path: Path) -> None:
    lists = {"a.b": [[i % 5] * (i % 4) for i in range(ROWS)], "a_b": [i % 9 for i in range(ROWS)]}
    weights = {"a.b weights": [[0.5] * (i % 4) for i in range(ROWS)]}
    found = _guesses(tmp_path, tags=None, tag_scores=None, **lists, **weights)
    assert {"column": "a.b", "name": "a_b_", "weights": "a.b weights"}.items() <= found["a.b"].settings.items()
    text = run_text(profile_data(str(tmp_path / "data.parquet")), str(tmp_path / "data.parquet"), list(found.values()))
    features = next(run_of_toml(text).data.open().train(ROWS)).sparse_features
    assert features["a_b_"].values().numel() > 0
    assert (features["a_b_"].weights() == 0.5).all()
    assert (features["userId"].weights() == 1).all()


@pytest.mark.parametrize(
    ("changes", "label", "expected"),
    [
        ({}, "flag", {"column": "flag"}),
        (
            {"clicked": None, "flag": None, "rating": [i % 5 + 1.0 for i in range(ROWS)]},
            None,
            {"column": "rating", "at_least": 4.0},
        ),
        ({"clicked": None}, None, {"column": "flag"}),
        ({}, "views", {"column": "views", "at_least": 10.0}),
        ({"clicked": [0] * 300 + [3, 7] * 50}, "clicked", {"column": "clicked", "at_least": 3.0}),
        ({"clicked": [1, 2] * 200}, "clicked", {"column": "clicked", "at_least": 2.0}),
    ],
)
def test_a_label_is_given_or_named_or_the_only_one(
    changes: dict[str, Any], label: str | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    (found,) = (guess for guess in _guesses(tmp_path, label, **changes).values() if guess.role == "label")
    assert found.settings["column"] == expected["column"]
    assert ("at_least" in found.settings) == ("at_least" in expected)
    if "clicked" in changes and changes["clicked"] is not None:
        assert found.settings == expected


@pytest.mark.parametrize(
    ("changes", "label", "message"),
    [
        ({}, "click", r"--label: got 'click', which is not there; expected a known name; did you mean 'clicked'"),
        ({}, "city", r"'city' of type string; expected a column of numbers"),
        ({"clicked": None, "flag": None}, None, r"no column is clearly a label.*Pass --label"),
        ({"clicked": [0] * ROWS}, None, r"'clicked', which is 0 in all rows"),
        ({"clicked": [None] + [0, 1] * 199 + [1]}, None, r"1 missing values"),
        ({"clicked": [float("inf"), 1.0] * 200}, None, r"'clicked' with infinite values"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(
    changes: dict[str, Any], label: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _guesses(tmp_path, label, **changes)


def test_dates_split_by_time_and_text_files_are_read(tmp_path: Path) -> None:
    days = [datetime.datetime(2024, 1, 1) + datetime.timedelta(days=i) for i in range(ROWS)]
    found = _guesses(tmp_path, when=pa.array(days, pa.timestamp("us")), ts=None)
    assert found["when"].settings["at_least"].startswith("2024-12-25")
    lines = ["user\tgenres\tempty\tlabel"] + [
        f"u{i % 9}\ta|b{i % 3}\t{'' if i % 2 else 'x' + str(i % 5)}\t{i % 2}" for i in range(50)
    ]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    profile = profile_data(str(tmp_path / "a.tsv"))
    assert (profile.format, profile.rows, profile.total) == ("text", 50, 50)
    texts = {guess.column: guess for guess in guess_roles(profile)}
    assert texts["genres"].settings == {
        "column": "genres",
        "kind": "list",
        "separator": "|",
        "missing": "empty",
    }
    assert texts["empty"].settings["missing"] == "row"


@pytest.mark.parametrize(
    ("kind", "at_least"),
    [
        (pa.date32(), "2024-12-26"),
        (pa.timestamp("ns"), "2024-12-26"),
        (pa.timestamp("us", "UTC"), "2024-12-26 00:00:00+00:00"),
    ],
)
def test_a_split_by_any_type_of_time_opens(kind: pa.DataType, at_least: str, tmp_path: Path) -> None:
    days = pa.array([datetime.datetime(2024, 1, 1) + datetime.timedelta(days=i) for i in range(401)])
    columns = {"when": days.cast(pa.timestamp("us")).cast(kind), "user_id": [i % 9 for i in range(401)]}
    parquet.write_table(pa.table({**columns, "y": [i % 2 for i in range(401)]}), tmp_path / "data.parquet")
    profile = profile_data(str(tmp_path / "data.parquet"))
    guesses = guess_roles(profile)
    assert guesses[0].settings["at_least"].startswith(at_least)
    dataset = run_of_toml(run_text(profile, str(tmp_path / "data.parquet"), guesses)).data.open()
    assert sum(batch.batch_size for batch in dataset.held_out(64)) == 41


def test_columns_that_would_not_train_are_ignored_with_a_reason(tmp_path: Path) -> None:
    found = _guesses(
        tmp_path,
        price=[float("inf"), 1.0] * 200,
        views=[1e39, 1.0] * 200,
        weight=[None, 1.0, None, 2.0] * 100,
        ts=pa.array([None, *range(1, ROWS)], pa.timestamp("s")),
        constant=pa.array([0] * ROWS, pa.timestamp("s")),
        nothing=[{"a": 1}] * ROWS,
    )
    reasons = {name: found[name].why for name in ("price", "views", "weight", "ts", "constant", "nothing")}
    assert all(not found[name].role for name in reasons)
    assert reasons == {
        "price": "numbers that are infinite, or too large for float32",
        "views": "numbers that are infinite, or too large for float32",
        "weight": "named like a weight of samples, but 200 are missing",
        "ts": "a time, but 1 values are missing",
        "constant": "one value in all rows",
        "nothing": "a type without a role",
    }


def test_any_names_of_columns_give_a_run_file_that_opens(tmp_path: Path) -> None:
    names = ["a.b", "a_b", "x,y", "at@", "two words", "n\new"]
    columns = {name: [f"{name}{i % 9}" for i in range(ROWS)] for name in names}
    unread = {"one\nvalue": [1] * ROWS}
    parquet.write_table(pa.table({"y": [0, 1] * 200, **columns, **unread}), tmp_path / "data.parquet")
    profile = profile_data(str(tmp_path / "data.parquet"))
    run = run_of_toml(run_text(profile, str(tmp_path / "data.parquet"), guess_roles(profile)))
    dataset = run.data.open()
    assert [one.name for one in dataset.sparse_features] == ["a_b_", "a_b", "x_y", "at_", "two words", "n\new"]
    run.model.build(dataset, torch.device("cpu"))
    twice = pa.table([pa.array([0, 1]), pa.array([1, 2]), pa.array([1, 2])], ["y", "id", "id"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(InputError, match=r"twice.parquet: got column 'id' more than once; expected it once"):
        profile_data(str(tmp_path / "twice.parquet"))


def test_text_is_profiled_as_its_reader_reads_it(tmp_path: Path) -> None:
    lines = [f'{i % 9},"a, {i % 7}",{i % 3 == 0},{2**63 + i % 5},2024-01-{1 + i % 28:02}' for i in range(ROWS)]
    (tmp_path / "d.txt").write_text("\n".join(['"user_id",item, clicked ,long,day', *lines]) + "\n")
    profile = profile_data(str(tmp_path / "d.txt"))
    guesses = {guess.column: guess for guess in guess_roles(profile)}
    assert {name: guess.role for name, guess in guesses.items()} == {
        "user_id": "id", "item": "id", "clicked": "label", "long": "id", "day": "time",
    }  # fmt: skip
    dataset = run_of_toml(run_text(profile, str(tmp_path / "d.txt"), list(guesses.values()))).data.open()
    assert {str(dataset.schema.field(name).type) for name in ("item", "long", "day")} == {"binary"}
    batch = next(dataset.train(10_000))
    assert 0.2 < batch.labels.mean() < 0.45
    assert batch.sparse_features["long"].values().unique().numel() == 5
    folder = str(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    (tmp_path / "d.txt").rename(tmp_path / "folder" / "d.csv")
    profile = profile_data(folder)
    assert run_of_toml(run_text(profile, folder, guess_roles(profile))).data.open().row_count().rows == ROWS
    (tmp_path / "wide.csv").write_text("a,b\n1,0\n".replace("", "\0"))
    with pytest.raises(InputError, match=r"wide.csv: got a first line with null bytes.*iconv"):
        profile_data(str(tmp_path / "wide.csv"))


def test_sizes_grow_with_rows_that_were_not_read(tmp_path: Path) -> None:
    table = pa.table({"user_id": list(range(1000)) * 2, "y": [0, 1] * 1000, "few_id": [0, 1, 2, 3] * 500})
    parquet.write_table(table, tmp_path / "data.parquet", row_group_size=100)
    part = profile_data(str(tmp_path / "data.parquet"), most_rows=100)
    assert part.total == 2000
    assert part.rows >= 100
    assert table_rows(1) == 16
    assert table_rows(1000) == 1300
    assert table_rows(10**9) == 10_000_000
    assert words_of("userId_2") == ["user", "id"]


def test_a_first_run_file_is_a_run_with_a_reason_at_each_column(tmp_path: Path) -> None:
    _guesses(tmp_path)
    profile = profile_data(str(tmp_path / "data.parquet"))
    text = run_text(profile, str(tmp_path / "data.parquet"), guess_roles(profile))
    run = run_of_toml(text)
    dataset = run.data.open()
    assert dataset.tasks == ("clicked",)
    assert "# text; 20 distinct" in text
    assert "#   comment: texts of" in text
    batch = next(dataset.train(32))
    assert batch.batch_size == 32


def test_data_without_rows_or_features_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="got no rows"):
        profile_data(str(tmp_path / "empty.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"bad\.parquet: got .*readable Parquet file"):
        profile_data(str(tmp_path / "bad.parquet"))
    parquet.write_table(pa.table({"y": [0, 1]}), tmp_path / "alone.parquet")
    with pytest.raises(ConfigError, match="got no column to predict 'y' from"):
        guess_roles(profile_data(str(tmp_path / "alone.parquet")))


@pytest.mark.parametrize(
    ("form", "at_least"),
    [
        ("%Y-%m-%dT%H:%M:%S", "2024-06-01T06:00:00"),
        ("%Y-%m-%dT%H:%M:%SZ", "2024-06-01T06:00:00"),
        ("%Y-%m-%d %H:%M:%S", "2024-06-01 06:00:00"),
        ("%Y-%m-%dT%H:%M:%S.500", "2024-06-01T06:00:00"),
        ("%Y-%m-%dT%H:%M", "2024-06-01T06:00"),
        ("%Y-%m-%dT%H:%M:%S+02:00", ""),
    ],
)
def test_times_of_text_files_split_as_they_are_written(form: str, at_least: str, tmp_path: Path) -> None:
    start = datetime.datetime(2024, 6, 1)
    lines = [f"{(start + datetime.timedelta(minutes=i)).strftime(form)},{i % 9},{i % 2}" for i in range(401)]
    (tmp_path / "data.csv").write_text("\n".join(["when,user_id,click", *lines]) + "\n")
    profile = profile_data(str(tmp_path / "data.csv"))
    guesses = guess_roles(profile)
    (when,) = [guess for guess in guesses if guess.column == "when"]
    assert when.role == "time"
    assert when.settings.get("at_least", "") == at_least
    run = run_of_toml(run_text(profile, str(tmp_path / "data.csv"), guesses))
    dataset = run.data.open()
    assert isinstance(dataset, TableDataset)
    assert dataset.held_out_rows == (41 if at_least else 40)
