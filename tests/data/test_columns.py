"""Column roles: names, shared tables, and settings that contradict."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.errors import ConfigError

Y = (LabelColumn("y"),)


def test_columns_that_share_a_table_name_it_in_their_features() -> None:
    columns = Columns(
        Y,
        ids=(
            IdColumn("user"),
            IdColumn("friends", kind="list", table="user"),
            IdColumn("age", boundaries=(18.0, 65.0)),
        ),
        tables=(TableRows("user", 100),),
    )
    features = columns.sparse_features
    assert [(f.name, f.num_rows, f.table) for f in features] == [
        ("user", 100, "user"),
        ("friends", 100, "user"),
        ("age", 3, "age"),
    ]
    assert columns.names == ("y", "user", "friends", "age")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Columns(Y, ids=(IdColumn("user"),), tables=(TableRows("usr", 9),)),
            "'usr', which no id column uses",
        ),
        (lambda: Columns(Y, ids=(IdColumn("user"),)), r"got table 'user', which columns.tables lacks"),
        (lambda: Columns(Y, dense=(DenseColumn("a"), DenseColumn("a"))), "dense column 'a' more than once"),
        (lambda: Columns((*Y, *Y)), "task 'y' more than once"),
        (lambda: IdColumn("c", kind="sequence"), "max_length=0 for kind='sequence'; expected at least 1"),
        (lambda: IdColumn("c", max_length=4), "kind='single'; expected a list"),
        (lambda: IdColumn("c", boundaries=(2.0, 1.0)), "expected ascending finite numbers"),
        (lambda: IdColumn("c", kind="lists"), r"kind: got 'lists'; expected a known name; did you mean 'list'\?"),  # type: ignore[arg-type]
        (lambda: DenseColumn("x", std=0.0), "a std above 0"),
        (lambda: DenseColumn("x", mean=1.0), "expected transform='normalize'"),
        (lambda: TableRows("t", 0), "expected at least 1"),
        (
            lambda: Columns(Y, ids=(IdColumn("c", missing="row"),), tables=(TableRows("c", 1),)),
            "row 0 is for missing ids; expected at least 2",
        ),
        (
            lambda: Columns(Y, ids=(IdColumn("c", boundaries=(1.0,)),), tables=(TableRows("c", 9, "hash"),)),
            "expected at least 2 rows and ids='rows'",
        ),
    ],
)
def test_settings_that_contradict_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_names_that_models_do_not_take_are_refused_with_another_one() -> None:
    for name, where in (
        ("user.id", "table='user_id' on the column, and"),
        ("a,b", "name='a_b'"),
        ("x@y", "name='x_y'"),
    ):
        with pytest.raises(ConfigError, match=rf"id column '{name}': got .* name '{name}'; expected .* Set {where}"):
            Columns(ids=(IdColumn(name),), tables=(TableRows(name, 5),))
    assert Columns(ids=(IdColumn("user.id", table="user_id"),), tables=(TableRows("user_id", 5),))
