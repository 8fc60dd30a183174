"""Data configs of the recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from tilerec.data.criteo import Criteo
from tilerec.data.file_list import FilePath
from tilerec.data.movielens import MovieLens
from tilerec.data.synthetic import PowerLawFeature, SyntheticClicks
from tilerec.errors import ConfigError
from tilerec.train.config import DataConfig

_V = TypeVar("_V", int, float)


@dataclass(frozen=True)
class SyntheticData(DataConfig):
    """A planted click stream; see `SyntheticClicks`.

    Attributes:
        num_rows: rows of each table, one number per table.
        exponents, min_lengths, max_lengths: of each table; a single number applies to all tables.
        num_dense, train_rows, held_out_rows, seed, bias, dense_scale, main_scale, pair_scale: see `SyntheticClicks`.
    """

    num_rows: tuple[int, ...]
    exponents: tuple[float, ...] = (1.05,)
    min_lengths: tuple[int, ...] = (1,)
    max_lengths: tuple[int, ...] = (1,)
    num_dense: int = 4
    train_rows: int = 1 << 20
    held_out_rows: int = 1 << 16
    seed: int = 0
    bias: float = -1.5
    dense_scale: float = 0.5
    main_scale: float = 1.0
    pair_scale: float = 0.5

    def open(self) -> SyntheticClicks:
        count = len(self.num_rows)
        exponents = _for_each("exponents", self.exponents, count)
        min_lengths = _for_each("min_lengths", self.min_lengths, count)
        max_lengths = _for_each("max_lengths", self.max_lengths, count)
        features = [
            PowerLawFeature(f"feature_{index}", rows, exponent, low, high)
            for index, (rows, exponent, low, high) in enumerate(
                zip(self.num_rows, exponents, min_lengths, max_lengths, strict=True)
            )
        ]
        return SyntheticClicks(
            features,
            num_dense=self.num_dense,
            train_rows=self.train_rows,
            held_out_rows=self.held_out_rows,
            seed=self.seed,
            bias=self.bias,
            dense_scale=self.dense_scale,
            main_scale=self.main_scale,
            pair_scale=self.pair_scale,
        )


@dataclass(frozen=True)
class MovieLensData(DataConfig):
    """MovieLens ratings as likes; see `MovieLens`.

    Attributes:
        path: `ratings.csv` or the folder that contains it.
        held_out_per_user, like, on_bad_row, seed, shuffle_window: see `MovieLens`.
    """

    path: FilePath
    held_out_per_user: int = 10
    like: float = 4.0
    on_bad_row: Literal["error", "skip"] = "error"
    seed: int = 0
    shuffle_window: int = 1 << 20

    def open(self) -> MovieLens:
        return MovieLens(
            self.path,
            held_out_per_user=self.held_out_per_user,
            like=self.like,
            on_bad_row=self.on_bad_row,
            seed=self.seed,
            shuffle_window=self.shuffle_window,
        )


@dataclass(frozen=True)
class CriteoData(DataConfig):
    """Criteo clicks; see `Criteo`.

    Attributes:
        path: the file.
        num_rows: rows of each category's table: one number for all, or 26.
        missing, held_out_every, on_bad_row, seed, shuffle_window: see `Criteo`.
    """

    path: FilePath
    num_rows: tuple[int, ...] = (100_000,)
    missing: Literal["row", "empty"] = "row"
    held_out_every: int = 10
    on_bad_row: Literal["error", "skip"] = "error"
    seed: int = 0
    shuffle_window: int = 1 << 17

    def open(self) -> Criteo:
        return Criteo(
            self.path,
            num_rows=self.num_rows[0] if len(self.num_rows) == 1 else self.num_rows,
            missing=self.missing,
            held_out_every=self.held_out_every,
            on_bad_row=self.on_bad_row,
            seed=self.seed,
            shuffle_window=self.shuffle_window,
        )


def _for_each(name: str, values: tuple[_V, ...], count: int) -> tuple[_V, ...]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ConfigError(f"data.{name}: got {len(values)} numbers; expected 1, or one for each of the {count} tables.")
    return values
