"""`MovieLensTableData`: MovieLens ratings with genres and years, for models of any features and tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow.compute as arrow

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.file_list import FilePath
from tilerec.data.hold_out import HoldOut
from tilerec.data.movielens_table import MovieLensTable, movielens_table
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError
from tilerec.train.config import DataConfig


@dataclass(frozen=True)
class MovieLensTableData(DataConfig):
    """Ratings of a MovieLens edition with features: user, movie, genres, year, age of the movie.

    Attributes:
        path: the folder with `ratings.csv` and `movies.csv`.
        likes: a task per number: 1 for ratings of at least it.
        split: "user" holds out the last ratings of each user, "time" the latest of all.
        held_out_per_user: of each user, with split = "user".
        held_out_share: of all ratings, with split = "time".
        validation: leave the held-out part out, and hold out the ratings before it: to choose settings.
        seed: of the order of the training part.
    """

    path: FilePath
    likes: tuple[float, ...] = (4.0,)
    split: Literal["user", "time"] = "user"
    held_out_per_user: int = 10
    held_out_share: float = 0.1
    validation: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in ("user", "time"):
            raise ConfigError(f"data.split: got {self.split!r}; expected 'user' or 'time'. Use one of them.")
        if not self.likes:
            raise ConfigError("data.likes: got none; expected at least one rating. Name the smallest rating of a like.")
        if self.held_out_per_user < 1 or not 0 < self.held_out_share <= 0.4:
            raise ConfigError(
                f"data: got held_out_per_user={self.held_out_per_user} and held_out_share={self.held_out_share}; "
                "expected at least 1, and above 0 to 0.4. Correct them."
            )

    def open(self) -> TableDataset:
        table = self.table()
        return TableDataset(
            table.rows,
            self._columns(table),
            hold_out=HoldOut(column="part", at_least="1" if self.validation else "2"),
            seed=self.seed,
        )

    def table(self) -> MovieLensTable:
        """Read the ratings with their features and parts."""
        return movielens_table(
            self.path,
            per_user=self.held_out_per_user,
            latest=self.held_out_share if self.split == "time" else 0.0,
            validation=self.validation,
        )

    def _columns(self, table: MovieLensTable) -> Columns:
        trained = table.rows.filter(arrow.less(table.rows["part"], 1 if self.validation else 2))

        def scaled(name: str) -> DenseColumn:
            values = trained[name].drop_null().to_numpy()
            mean, std = (float(values.mean()), float(values.std())) if len(values) else (0.0, 1.0)
            return DenseColumn(name, transform="normalize", mean=mean, std=std if std > 0 else 1.0, missing="zero")

        return Columns(
            labels=tuple(LabelColumn("rating", task=f"rating_{one:g}", at_least=one) for one in self.likes),
            dense=(scaled("year"), scaled("age")),
            ids=(IdColumn("user"), IdColumn("movie"), IdColumn("genres", kind="list")),
            tables=(
                TableRows("user", table.users, "rows"),
                TableRows("movie", table.movies, "rows"),
                TableRows("genres", table.genres, "rows"),
            ),
        )
