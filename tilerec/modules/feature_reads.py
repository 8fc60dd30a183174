"""`FeatureRead`: a table and a feature whose ids it is read with, in the order of the tables and of their features."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tilerec.errors import ConfigError, InputError
from tilerec.spec.table import AnyTableConfig


@dataclass(frozen=True)
class FeatureRead:
    """One (table, feature) pair of a collection."""

    table: str
    feature: str
    name: str  # of the result: the feature's name, or `feature@table` if it reads several tables
    dim: int
    mean: bool


def feature_reads(configs: Sequence[AnyTableConfig], kind: str) -> tuple[FeatureRead, ...]:
    """Return all reads of a collection after a check of the names of tables and features.

    Args:
        kind: class of the collection, for errors.
    """
    seen: set[str] = set()
    for config in configs:
        if not isinstance(config.name, str):
            raise ConfigError(
                f"{kind}: got table name {config.name!r} of type {type(config.name).__name__}; expected a str."
            )
        if not config.name or "." in config.name or "," in config.name or "@" in config.name:
            raise ConfigError(
                f"{kind}: got table name {config.name!r}; expected a non-empty name without '.', ',' or '@'."
            )
        if config.name in seen:
            raise ConfigError(
                f"{kind}: got two tables named '{config.name}'; expected unique names within a collection."
            )
        seen.add(config.name)
        for feature in config.feature_names:
            if not feature or "," in feature or "@" in feature:
                raise ConfigError(
                    f"Table '{config.name}': got feature {feature!r}; expected a non-empty name without ',' or '@'."
                )
    tables_read = Counter(feature for config in configs for feature in config.feature_names)
    return tuple(
        FeatureRead(
            config.name,
            feature,
            feature if tables_read[feature] == 1 else f"{feature}@{config.name}",
            config.embedding_dim,
            getattr(getattr(config, "pooling", None), "name", "") == "MEAN",
        )
        for config in configs
        for feature in config.feature_names
    )


def key_positions(kind: str, reads: Sequence[FeatureRead], keys: Sequence[str]) -> dict[str, int]:
    """Return the position of each key of a batch.

    Raises:
        InputError: the batch lacks a feature.
    """
    position = {key: k for k, key in enumerate(keys)}
    for read in reads:
        if read.feature not in position:
            raise_missing_feature(kind, read.feature, read.table, keys)
    return position


def raise_missing_feature(kind: str, feature: str, table: str, keys: Sequence[str]) -> NoReturn:
    """Raise the `InputError` for a feature that a batch lacks."""
    close = difflib.get_close_matches(feature, keys, n=1)
    nearest = f" The nearest key is '{close[0]}'." if close else ""
    raise InputError(
        f"{kind}: feature '{feature}' of table '{table}' is not in the batch, whose keys are {list(keys)[:20]}."
        f"{nearest} Add it (an empty feature has lengths of 0) or drop it from the table."
    )
