"""Statistics of a data set's ids, as input of the planner, from one pass in bounded memory.

Nouns
  source      ids, block by block (`tilerec/data/ids.py`)
  feature     one key: its samples, ids, distinct ids, most frequent ids, and the power law of their counts
  statistics  those of all features; a JSON file

Memory per feature: 2^14 bytes of registers and 2,048 counters, whatever the length of the stream.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow

from tilerec.atomic_file import write_file
from tilerec.data.hyperloglog import HyperLogLog
from tilerec.data.ids import Ids, IdSource, Progress
from tilerec.data.rows import hash_values
from tilerec.data.zipf import fit
from tilerec.errors import ConfigError
from tilerec.json_document import MOST_NUMBER, JsonValue, check_version, read_json
from tilerec.ops.hot.heavy_hitters import HeavyHitters
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.frequency import bucket_edges, curve_problem
from tilerec.planner.cost.workload import MOST_EXPONENT, Skew

VERSION = 1
SHOWN = 32  # most frequent ids in the file, by default
MOST_HOT = 1_000_000
COUNTERS = 2048  # fewest counters of a feature
_LABEL_BYTES = 64


class ReadTable(Protocol):
    """A table's config, as `Statistics.constraints` reads it: an `EmbeddingBagConfig` or an `EmbeddingConfig`."""

    @property
    def name(self) -> str: ...
    @property
    def num_embeddings(self) -> int: ...
    @property
    def feature_names(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of one feature's ids.

    Attributes:
        samples: number of samples.
        ids: number of ids.
        empty: number of samples without an id.
        longest: largest number of ids of a sample.
        distinct: approximate number of distinct ids.
        distinct_error: standard error of `distinct`, as a fraction.
        population: number of distinct ids including those that have not occurred yet, by the fitted power law.
        exponent: exponent of Zipf's law; 0 if ids are even, or too few for a fit.
        distance: largest error of the law, as a fraction of all ids (`ZipfFit.distance`).
        ordered: True if ids are numbered by frequency, the most frequent first.
        heavy: (id, count) of the most frequent ids.
        heavy_error: maximum error of these counts, which are too low.
        curve: points (k, share of all ids that the k most frequent ones have), as far as they were counted.
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
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def ids_per_sample(self) -> float:
        """The pooling factor: mean number of ids per sample."""
        return self.ids / self.samples if self.samples else 0.0

    def skew(self, rows: int, *, table_rows: bool) -> Skew | None:
        """Return the skew of row accesses in a table of `rows` rows; None if there were no ids.

        If there are more values than rows, values share rows: R (1 - (1 - 1/R)^D) of R rows are expected to be read.

        Args:
            table_rows: True if ids are rows of tables already.
        """
        if not self.ids:
            return None
        distinct = min(self.population, rows)
        if self.population > rows > 1 and not table_rows:
            distinct = max(1, round(rows * -math.expm1(self.population * math.log1p(-1.0 / rows))))
        # Of values that share rows, the curve of the rows is not known.
        curve = self.curve if distinct == self.population else ()
        ids = [id for id, _ in self.heavy if table_rows and not self.ordered and isinstance(id, int)]
        return Skew(distinct, self.exponent, self.ordered and table_rows, curve, ids[:distinct])


@dataclass(frozen=True)
class Statistics:
    """Statistics of all features.

    Attributes:
        source: name of the source.
        rows: number of samples.
        skipped: number of bad lines left out.
        table_rows: True if ids are rows of tables; False if they are raw values.
        features: statistics by feature name.
    """

    source: str
    rows: int
    skipped: int
    table_rows: bool
    features: Mapping[str, FeatureStatistics]

    def constraints(
        self, tables: Iterable[ReadTable], *, like: Mapping[str, ParameterConstraints] | None = None
    ) -> dict[str, ParameterConstraints]:
        """Return constraints for `EmbeddingShardingPlanner(constraints=…)` from the statistics of each table's ids.

        A table gets the pooling factors of its features, and the skew of its feature with the most ids. Values that
        `like` sets for a table stay. A table without any counted feature gets nothing. A table that names no features
        is read by a feature of its own name, as in the planner.

        Args:
            tables: configs with `name`, `num_embeddings` and `feature_names`.
            like: constraints to extend.

        Raises:
            ConfigError: no table reads any of the features, or a frequent id is beyond the rows of its table. These
                are statistics of other tables.
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
            self._check_rows(table, names)
            given = found.get(table.name, ParameterConstraints())
            factors, skew = given.pooling_factors, given.skew
            if factors is None:
                # A feature without statistics counts one id per bag, the planner's default.
                factors = [
                    round(self.features[name].ids_per_sample, 6) if name in self.features else 1.0 for name in names
                ]
            if skew is None:
                most = max(seen, key=lambda s: s.ids)
                skew = most.skew(table.num_embeddings, table_rows=self.table_rows)
            found[table.name] = replace(given, pooling_factors=factors, skew=skew)
        if unknown and not matched:
            raise ConfigError(
                f"Statistics of {self.source}: got the features {_shown_names(self.features)}; expected one of those "
                f"that the tables read: {_shown_names(unknown)}. Count the data of these tables (tilerec stats), or "
                "give feature_names these names."
            )
        return found

    def _check_rows(self, table: ReadTable, names: Iterable[str]) -> None:
        """Raise if ids are rows of tables, and one of them is no row of this table."""
        for name in names:
            if not self.table_rows or name not in self.features:
                continue
            beyond = [
                id for id, _ in self.features[name].heavy if isinstance(id, str) or not 0 <= id < table.num_embeddings
            ]
            if beyond:
                raise ConfigError(
                    f"Statistics of {self.source}: got id {beyond[0]!r} of feature {name!r}; expected row numbers of "
                    f"table {table.name!r}, 0 to {table.num_embeddings - 1}. Count the data of these tables (tilerec "
                    "stats)."
                )

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a dict of JSON values."""
        out = {"version": VERSION, **asdict(self)}
        for name, one in self.features.items():
            for key in ("heavy", "curve"):
                out["features"][name][key] = [list(pair) for pair in getattr(one, key)]
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> Statistics:
        """Return the statistics of a dict that `to_json` made.

        Raises:
            ConfigError: the data are no statistics, or have another version.
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
        """Write a JSON file, one line per feature; an existing file is replaced atomically.

        Raises:
            FileError: the file cannot be written.
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
            FileError: the file cannot be read.
            ConfigError: the file holds no statistics.
        """
        return Statistics.from_json(read_json(path, "Statistics"))


_WHOLE = ("samples", "ids", "empty", "longest", "distinct", "population", "heavy_error")
_NUMBERS = ("distinct_error", "exponent", "distance")


def _feature(value: JsonValue) -> FeatureStatistics:
    names = [each.name for each in fields(FeatureStatistics)]
    found = value.record(names, [name for name in names if name != "curve"], "Count again (tilerec stats).")
    heavy: list[tuple[int | str, int]] = []
    for pair in found["heavy"].items("a list of [id, count]"):
        both = pair.items("[id, count]")
        if len(both) != 2:
            raise pair.error("[id, count]")
        first = both[0].value
        heavy.append((first if isinstance(first, str) else both[0].whole(-MOST_NUMBER - 1), both[1].whole()))
    values: dict[str, Any] = {name: found[name].whole() for name in _WHOLE}
    values |= {name: found[name].number(0) for name in _NUMBERS}
    curve = []
    for point in found["curve"].items("a list of [number of ids, share]") if "curve" in found else ():
        ends = point.items("[number of ids, share]")
        if len(ends) != 2:
            raise point.error("[number of ids, share]")
        curve.append((ends[0].whole(), ends[1].number(0)))
    feature = FeatureStatistics(**values, ordered=found["ordered"].flag(), heavy=tuple(heavy), curve=tuple(curve))
    _check_counts(found, feature)
    return feature


def _check_counts(found: Mapping[str, JsonValue], feature: FeatureStatistics) -> None:
    """Raise if the numbers of a feature contradict each other: a plan would follow them without a word."""
    move = "Count again (tilerec stats)."
    for name, most, what in (
        ("empty", feature.samples, "samples"),
        ("longest", feature.ids, "ids"),
        ("distinct", feature.ids, "ids"),
    ):
        if getattr(feature, name) > most:
            raise found[name].error(f"at most {most}, the number of {what}", move)
    if feature.population < feature.distinct:
        raise found["population"].error(f"at least {feature.distinct}, the number of distinct ids", move)
    if feature.distance > 1:
        raise found["distance"].error("a fraction of all ids, 0 to 1", move)
    if feature.exponent > MOST_EXPONENT:
        raise found["exponent"].error(f"0 to {MOST_EXPONENT}", move)
    ids, counts = [id for id, _ in feature.heavy], [count for _, count in feature.heavy]
    if len(set(ids)) < len(ids):
        raise found["heavy"].error("each id once", move)
    if counts != sorted(counts, reverse=True):
        raise found["heavy"].error("the most frequent id first", move)
    if sum(counts) > feature.ids:
        raise found["heavy"].error(f"counts that add up to at most {feature.ids}, the number of ids", move)
    if len(ids) > feature.population:
        raise found["heavy"].error(f"at most {feature.population} ids, the number of distinct ids", move)
    wrong = curve_problem(feature.curve, feature.population)
    if wrong is not None:
        raise found["curve"].error(wrong, move)


def gather(source: IdSource, watch: Callable[[Progress], None] | None = None, *, hot: int = SHOWN) -> Statistics:
    """Read a source once and return its statistics.

    Args:
        watch: called with the progress after every block.
        hot: number of most frequent ids to name. Memory per feature grows with it: at least twice as many counters.

    Raises:
        ConfigError: `hot` is no number of ids.
    """
    if not 1 <= hot <= MOST_HOT:
        raise ConfigError(f"--hot: got {hot}; expected 1 to {MOST_HOT:,} ids. Name fewer.")
    counters: dict[str, _Counter] = {}
    for block in source.blocks():
        for name, ids in block.items():
            if name not in counters:
                counters[name] = _Counter(hot)
            counters[name].add(ids)
        if watch is not None:
            watch(source.progress)
    found = {name: counter.found() for name, counter in counters.items()}
    return Statistics(source.name, source.count.rows, source.count.skipped, source.table_rows, found)


class _Counter:
    """Sketches of one feature, filled while the source is read."""

    def __init__(self, hot: int) -> None:
        self._hot = hot
        self._samples = self._ids = self._empty = self._longest = 0
        self._distinct = HyperLogLog()
        self._heavy = HeavyHitters(max(COUNTERS, 2 * hot))
        self._texts: dict[int, str] = {}  # text of each key that has a counter
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
        """Keep the texts of keys that have counters, and drop all others."""
        held = self._heavy.keys.tolist()
        place = np.minimum(np.searchsorted(sorted_n, self._heavy.keys), len(sorted_n) - 1).tolist()
        named: dict[int, str] = {}
        for key, at in zip(held, place, strict=True):
            text = self._texts.get(key)
            if text is None:
                # The key is new to the counters, so it is in this block.
                text = texts[int(order[at])].as_py()[:_LABEL_BYTES].decode("utf-8", "replace")
            named[key] = text
        self._texts = named

    def found(self) -> FeatureStatistics:
        distinct = self._distinct.count()
        keys, counts = self._heavy.top(self._hot)
        _, all_counts = self._heavy.top(len(self._heavy.keys))
        # Counts are too low by up to `error`; keep those for which that is a tenth at most.
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
            ordered=not self._textual and _ordered(keys[:SHOWN]),
            heavy=tuple(zip(names, counts.tolist(), strict=True)),
            heavy_error=self._heavy.error,
            curve=_curve(sure, self._ids, law.population),
        )


def _curve(counts_m: Any, ids: int, population: int) -> tuple[tuple[int, float], ...]:
    """Return the points of a curve at the edges of the planner's buckets, as far as ids were counted."""
    most = min(len(counts_m), population)
    ends = sorted({min(int(edge) - 1, most) for edge in bucket_edges(most)} - {0}) if most else []
    shares = np.cumsum(counts_m) / max(ids, 1)
    points = [(k, round(float(shares[k - 1]), 6)) for k in ends]
    if points and points[-1][0] == population:
        points[-1] = population, 1.0  # all ids were counted
    return tuple(points)


def _shown_names(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(repr(name) for name in listed[:most]) + more


def _ordered(most_frequent: Any) -> bool:
    """Return True if the most frequent ids are the lowest: at least 90% of the first k are below 2 k, with k >= 16."""
    k = len(most_frequent)
    return bool(k >= 16 and int(((most_frequent >= 0) & (most_frequent < 2 * k)).sum()) * 10 >= 9 * k)
