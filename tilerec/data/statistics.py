"""What a data set's ids are like, from one pass in bounded memory: what a planner wants to know of them.

Nouns
  source      ids, block by block (`tilerec/data/ids.py`)
  feature     one key: samples, ids, how many different ones, which are frequent, and the power law they follow
  statistics  those of all features; a JSON file

Memory per feature: 2^14 bytes of registers and 2,048 counters, whatever the length of the stream.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow

from tilerec.atomic_file import write_file
from tilerec.data.heavy_hitters import HeavyHitters
from tilerec.data.hyperloglog import HyperLogLog
from tilerec.data.ids import Ids, IdSource, Progress
from tilerec.data.rows import hash_values
from tilerec.data.zipf import fit
from tilerec.json_document import MOST_NUMBER, JsonValue, check_version, read_json
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Skew

VERSION = 1
SHOWN = 32  # heavy hitters in the file
_LABEL_BYTES = 64


class ReadTable(Protocol):
    """What `Statistics.constraints` asks of a table: an `EmbeddingBagConfig` or an `EmbeddingConfig`."""

    @property
    def name(self) -> str: ...
    @property
    def num_embeddings(self) -> int: ...
    @property
    def feature_names(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class FeatureStatistics:
    """One feature's ids.

    Attributes:
        samples, ids: how many there were.
        empty: samples without an id. longest: the most ids of a sample.
        distinct: different ids, about; distinct_error is the standard error, as a share.
        population: different ids there are, those that have not occurred included: what a power law that fits says.
        exponent: of Zipf's law; 0 if ids are even, or too few to tell.
        distance: how far the law is off, as a share of all ids (`ZipfFit.distance`).
        ordered: ids are numbered by frequency, the most frequent first.
        heavy: (id, count) of the most frequent ones; counts are low by at most heavy_error.
    """

    samples: int
    ids: int
    empty: int
    longest: int
    distinct: int
    distinct_error: float
    population: int
    exponent: float
    distance: float
    ordered: bool
    heavy: tuple[tuple[int | str, int], ...]
    heavy_error: int

    @property
    def ids_per_sample(self) -> float:
        """The pooling factor."""
        return self.ids / self.samples if self.samples else 0.0

    def skew(self, rows: int, *, table_rows: bool) -> Skew | None:
        """The law on a table of so many rows; None where there were no ids.

        More values than rows share rows: R (1 - (1 - 1/R)^D) of R rows are then expected to be read at all.

        Args:
            table_rows: ids were rows already.
        """
        if not self.ids:
            return None
        distinct = min(self.population, rows)
        if self.population > rows > 1 and not table_rows:
            distinct = max(1, round(rows * -math.expm1(self.population * math.log1p(-1.0 / rows))))
        return Skew(distinct, self.exponent, self.ordered and table_rows)


@dataclass(frozen=True)
class Statistics:
    """All features' statistics.

    Attributes:
        source: what was read. rows: samples; skipped: bad lines left out.
        table_rows: ids are rows of tables; otherwise raw values.
        features: by name.
    """

    source: str
    rows: int
    skipped: int
    table_rows: bool
    features: Mapping[str, FeatureStatistics]

    def constraints(
        self, tables: Iterable[ReadTable], *, like: Mapping[str, ParameterConstraints] | None = None
    ) -> dict[str, ParameterConstraints]:
        """What is known about each table's ids, for `EmbeddingShardingPlanner(constraints=…)`.

        A table gets the pooling factors of its features and the skew of the one with the most ids. What `like` says
        of a table stays; a table none of whose features was seen gets nothing. A table that names no features is read
        by one of its own name, as the planner has it. Warns if no table reads any of the features.

        Args:
            tables: configs with `name`, `num_embeddings` and `feature_names`.
            like: constraints to add to.
        """
        found = dict(like or {})
        unknown: list[str] = []
        matched = False
        for table in tables:
            names = tuple(table.feature_names) or (table.name,)
            seen = [self.features[name] for name in names if name in self.features]
            if not seen:
                unknown += names
                continue
            matched = True
            said = found.get(table.name, ParameterConstraints())
            factors, skew = said.pooling_factors, said.skew
            if factors is None:
                # A feature that was not seen counts one id per bag, as it does unsaid.
                factors = [
                    round(self.features[name].ids_per_sample, 6) if name in self.features else 1.0
                    for name in names
                ]
            if skew is None:
                most = max(seen, key=lambda s: s.ids)
                skew = most.skew(table.num_embeddings, table_rows=self.table_rows)
            found[table.name] = replace(said, pooling_factors=factors, skew=skew)
        if unknown and not matched:
            warnings.warn(
                f"Statistics of {self.source} have no effect: they know the features {_some(self.features)}, and the "
                f"tables read {_some(unknown)}; name features alike (feature_names of the tables).",
                stacklevel=2,
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        out = {"version": VERSION, **asdict(self)}
        for name, one in self.features.items():
            out["features"][name]["heavy"] = [list(pair) for pair in one.heavy]
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> Statistics:
        """The inverse of `to_json`.

        Raises:
            ConfigError: these are no statistics, or ones of another version.
        """
        value = JsonValue.of(data, "Statistics JSON")
        names = ("version", "source", "rows", "skipped", "table_rows", "features")
        found = value.record(names, names, "Count again (tilerec stats).")
        check_version(found, VERSION, "Count again (tilerec stats).")
        return Statistics(
            found["source"].text(),
            found["rows"].whole(),
            found["skipped"].whole(),
            found["table_rows"].flag(),
            {name: _feature(one) for name, one in found["features"].members("an object of features").items()},
        )

    def save(self, path: str | Path) -> None:
        """Write a JSON file, one line per feature; an earlier one is replaced whole or not at all.

        Raises:
            FileError: it cannot be written.
        """
        data = self.to_json()
        head = [f" {json.dumps(key)}: {json.dumps(data[key])}," for key in data if key != "features"]
        body = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in data["features"].items()]
        text = "\n".join(["{", *head, ' "features": {', ",\n".join(body), " }", "}", ""])
        write_file(path, text, "Statistics")

    @staticmethod
    def load(path: str | Path) -> Statistics:
        """Read a file that `save` wrote.

        Raises:
            FileError: it cannot be read. ConfigError: these are no statistics.
        """
        return Statistics.from_json(read_json(path, "Statistics"))


_WHOLE = ("samples", "ids", "empty", "longest", "distinct", "population", "heavy_error")
_NUMBERS = ("distinct_error", "exponent", "distance")


def _feature(value: JsonValue) -> FeatureStatistics:
    names = [each.name for each in fields(FeatureStatistics)]
    found = value.record(names, names, "Count again (tilerec stats).")
    heavy: list[tuple[int | str, int]] = []
    for pair in found["heavy"].items("a list of [id, count]"):
        both = pair.items("[id, count]")
        if len(both) != 2:
            raise pair.error("[id, count]")
        first = both[0].value
        heavy.append((first if isinstance(first, str) else both[0].whole(-MOST_NUMBER - 1), both[1].whole()))
    values: dict[str, Any] = {name: found[name].whole() for name in _WHOLE}
    values |= {name: found[name].number(0) for name in _NUMBERS}
    return FeatureStatistics(**values, ordered=found["ordered"].flag(), heavy=tuple(heavy))


def gather(source: IdSource, watch: Callable[[Progress], None] | None = None) -> Statistics:
    """Read a source once.

    Args:
        watch: called after every block.
    """
    counters: dict[str, _Counter] = {}
    for block in source.blocks():
        for name, ids in block.items():
            if name not in counters:
                counters[name] = _Counter()
            counters[name].add(ids)
        if watch is not None:
            watch(source.progress)
    found = {name: counter.found() for name, counter in counters.items()}
    return Statistics(source.name, source.count.rows, source.count.skipped, source.table_rows, found)


class _Counter:
    """One feature's sketches while it is read."""

    def __init__(self) -> None:
        self._samples = self._ids = self._empty = self._longest = 0
        self._distinct = HyperLogLog()
        self._heavy = HeavyHitters()
        self._texts: dict[int, str] = {}  # of the keys that have a counter
        self._textual = False

    def add(self, ids: Ids) -> None:
        lengths_n = ids.lengths
        self._samples += len(lengths_n)
        self._ids += len(ids.values)
        self._empty += int((lengths_n == 0).sum())
        self._longest = max(self._longest, int(lengths_n.max(initial=0)))
        if not len(ids.values):
            return
        if isinstance(ids.values, np.ndarray):
            keys_n, counts_n = np.unique(ids.values, return_counts=True)
            self._distinct.add(hash_values(keys_n))
            self._heavy.add(keys_n, counts_n)
            return
        self._textual = True
        # Each text of the block is hashed once.
        table = arrow.value_counts(ids.values)
        texts, counts = table.field("values"), table.field("counts").to_numpy()
        hashes_n = hash_values(texts)
        self._distinct.add(hashes_n)
        keys_n = hashes_n.view(np.int64)
        order = np.argsort(keys_n, kind="stable")
        self._heavy.add(keys_n[order], counts[order])
        self._name(texts, keys_n[order], order)

    def _name(self, texts: pa.BinaryArray, sorted_n: Any, order: Any) -> None:
        """Keep the texts of keys that have counters, and of no others."""
        held = self._heavy.keys.tolist()
        place = np.minimum(np.searchsorted(sorted_n, self._heavy.keys), len(sorted_n) - 1).tolist()
        named: dict[int, str] = {}
        for key, at in zip(held, place, strict=True):
            text = self._texts.get(key)
            if text is None:
                # New to the counters, so it is of this block.
                text = texts[int(order[at])].as_py()[:_LABEL_BYTES].decode("utf-8", "replace")
            named[key] = text
        self._texts = named

    def found(self) -> FeatureStatistics:
        distinct = self._distinct.count()
        keys, counts = self._heavy.top(SHOWN)
        _, all_counts = self._heavy.top(len(self._heavy.keys))
        # Of counts that are low by as much as `error`, those that it changes by a tenth at most.
        sure = all_counts[all_counts >= 10 * self._heavy.error]
        law = fit(sure, self._ids, min(distinct, float(self._ids)))
        names: list[int | str] = [self._texts[k] for k in keys.tolist()] if self._textual else keys.tolist()
        return FeatureStatistics(
            samples=self._samples,
            ids=self._ids,
            empty=self._empty,
            longest=self._longest,
            distinct=min(round(distinct), self._ids),
            distinct_error=round(self._distinct.standard_error, 6),
            population=law.population if self._ids else 0,
            exponent=law.exponent,
            distance=law.distance,
            ordered=not self._textual and _ordered(keys),
            heavy=tuple(zip(names, counts.tolist(), strict=True)),
            heavy_error=self._heavy.error,
        )


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(repr(name) for name in listed[:most]) + more


def _ordered(most_frequent: Any) -> bool:
    """Whether the most frequent ids are the lowest: nine of ten of the first k are below 2 k, and k is 16 or more."""
    k = len(most_frequent)
    return bool(k >= 16 and int(((most_frequent >= 0) & (most_frequent < 2 * k)).sum()) * 10 >= 9 * k)
