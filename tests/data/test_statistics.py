from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tilerec.data.ids import Ids, IdSource, open_ids
from tilerec.data.statistics import FeatureStatistics, Statistics, gather
from tilerec.data.synthetic import PowerLawFeature, SyntheticClicks
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Skew, TableWork, Workload
from tilerec.spec.table import EmbeddingBagConfig


class _Blocks(IdSource):
    def __init__(self, blocks: list[dict[str, Ids]], table_rows: bool = False) -> None:
        super().__init__("blocks", table_rows=table_rows)
        self._blocks = blocks

    def blocks(self):
        for block in self._blocks:
            self.count.rows += len(next(iter(block.values())).lengths)
            yield block


def _zipf(exponent: float, population: int, draws: int) -> np.ndarray:
    cdf = np.cumsum(np.arange(1, population + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cdf / cdf[-1], np.random.default_rng(1).random(draws))


def test_a_stream_is_told_within_the_sketches_errors() -> None:
    draws = 400_000
    stream = _zipf(1.1, 100_000, draws)
    lengths = np.full(1_000, 4)
    parts = stream.reshape(-1, 4_000)
    one = gather(_Blocks([{"f": Ids(part, lengths)} for part in parts], table_rows=True)).features["f"]
    true = Counter(stream.tolist())
    assert (one.samples, one.ids, one.ids_per_sample) == (100_000, draws, 4.0)
    assert abs(one.distinct - len(true)) <= 4 * one.distinct_error * len(true)
    assert one.exponent == pytest.approx(1.1, abs=0.03)
    assert one.population == pytest.approx(100_000, rel=0.15)
    assert [key for key, _ in one.heavy[:10]] == [key for key, _ in true.most_common(10)]
    for key, count in one.heavy:
        assert count <= true[key] <= count + one.heavy_error
    assert one.ordered


def test_texts_keep_their_names_and_numbers_their_values(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("word,tags\n" + "the,a b\n" * 50 + "of,\n" * 30 + "Ünicode,c\n")
    found = gather(open_ids(path, features=["word", "tags"], separator=" ", block_bytes=64))
    assert found.features["word"].heavy == (("the", 50), ("of", 30), ("Ünicode", 1))
    tags = found.features["tags"]
    assert sorted(tags.heavy) == [("a", 50), ("b", 50), ("c", 1)]
    assert (tags.empty, tags.longest, tags.ids, tags.distinct) == (30, 2, 101, 3)
    assert (found.rows, found.skipped, found.table_rows) == (81, 0, False)


def test_names_are_right_where_counters_come_and_go(tmp_path: Path) -> None:
    # 6,000 different words through 2,048 counters, in blocks of a few lines.
    words = [f"w{i}" for i in range(6_000)] + ["often"] * 3_000 + ["seldom"] * 500
    order = np.random.default_rng(0).permutation(len(words))
    path = tmp_path / "x.csv"
    path.write_text("w\n" + "\n".join(words[i] for i in order) + "\n")
    one = gather(open_ids(path, features=["w"], block_bytes=4096)).features["w"]
    assert [name for name, _ in one.heavy[:2]] == ["often", "seldom"]
    assert len({name for name, _ in one.heavy}) == len(one.heavy)


def test_data_sets_are_counted_as_training_reads_them() -> None:
    from tilerec.data.ids import BatchIds

    clicks = SyntheticClicks(
        [PowerLawFeature("a", 1_000, 1.2, 1, 3), PowerLawFeature("b", 50, 0.0, 1, 1)],
        num_dense=1, train_rows=20_000, held_out_rows=10, seed=0,
    )  # fmt: skip
    found = gather(BatchIds(lambda: clicks.train(1_000), "clicks"))
    assert found.table_rows
    assert found.rows == 20_000
    assert found.features["a"].ids_per_sample == pytest.approx(2.0, abs=0.02)
    # The continuous law that clicks are drawn from is flatter than Zipf's at its head.
    assert found.features["a"].exponent == pytest.approx(1.2, abs=0.15)
    assert found.features["a"].population == pytest.approx(1_000, rel=0.05)
    assert not found.features["a"].ordered
    assert (found.features["b"].distinct, found.features["b"].population) == (50, 50)
    assert found.features["b"].exponent < 0.1


def test_the_file_round_trips_and_is_the_same_each_time(tmp_path: Path) -> None:
    def made() -> Statistics:
        return gather(_Blocks([{"f": Ids(_zipf(1.0, 500, 5_000), np.ones(5_000, np.int64))}]))

    made().save(tmp_path / "a.json")
    made().save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert Statistics.load(tmp_path / "a.json") == made()


def _feature(**changes: object) -> FeatureStatistics:
    given = {
        "samples": 10, "ids": 25, "empty": 0, "longest": 3, "distinct": 20, "distinct_error": 0.01, "population": 30,
        "exponent": 1.0, "distance": 0.0, "ordered": True, "heavy": (), "heavy_error": 0,
    }  # fmt: skip
    return FeatureStatistics(**{**given, **changes})  # type: ignore[arg-type]


def test_skew_is_that_of_a_tables_rows() -> None:
    assert _feature().skew(1_000, table_rows=True) == Skew(30, 1.0, True)
    # Raw values are hashed: their order is lost, and values share rows where there are fewer.
    assert _feature().skew(1_000, table_rows=False) == Skew(30, 1.0, False)
    assert _feature().skew(10, table_rows=False) == Skew(10, 1.0, False)
    assert _feature(population=1_500).skew(1_000, table_rows=False) == Skew(777, 1.0, False)
    assert _feature(ids=0).skew(10, table_rows=True) is None


def test_tables_get_what_is_known_of_their_features() -> None:
    seen = Statistics("x", 10, 0, True, {"a": _feature(), "b": _feature(ids=5, population=5)})
    tables = [
        EmbeddingBagConfig(100, 8, "t", feature_names=["a", "b", "c"]),
        EmbeddingBagConfig(100, 8, "unseen", feature_names=["d"]),
        EmbeddingBagConfig(100, 8, "said", feature_names=["b"]),
    ]
    like = {"said": ParameterConstraints(["row_wise"], pooling_factors=[7.0])}
    found = seen.constraints(tables, like=like)
    assert set(found) == {"t", "said"}
    assert found["t"].pooling_factors == (2.5, 0.5, 1.0)
    assert found["said"].pooling_factors == (7.0,)
    assert found["said"].sharding_types == like["said"].sharding_types
    assert (found["t"].skew, found["said"].skew) == (Skew(30, 1.0, True), Skew(5, 1.0, True))


def test_a_table_without_feature_names_is_read_by_its_own() -> None:
    seen = Statistics("x", 10, 0, True, {"a": _feature(), "b": _feature()})
    found = seen.constraints([EmbeddingBagConfig(100, 8, "a")])
    assert (found["a"].pooling_factors, found["a"].skew) == ((2.5,), Skew(30, 1.0, True))


def test_statistics_of_other_tables_are_refused() -> None:
    seen = Statistics("ratings.csv", 10, 0, False, {f"f{i}": _feature() for i in range(9)})
    with pytest.raises(ConfigError, match=r"ratings\.csv: got the features 'f0', .*'f7' and 1 more; .*read: 'user'"):
        seen.constraints([EmbeddingBagConfig(100, 8, "t", feature_names=["user"])])
    assert seen.constraints([]) == {}
    tables = [EmbeddingBagConfig(100, 8, "t", feature_names=["a"])]
    rows = Statistics("x", 10, 0, True, {"a": _feature(heavy=((3, 9), (100, 2)))})
    with pytest.raises(ConfigError, match="got id 100 of feature 'a'; expected row numbers of table 't', 0 to 99"):
        rows.constraints(tables)
    # Raw values are hashed to rows: any value is fine.
    assert "t" in dataclasses.replace(rows, table_rows=False).constraints(tables)


@pytest.mark.parametrize(("exponent", "abs_error"), [(0.0, 0.1), (0.8, 0.02), (1.05, 0.02), (1.5, 0.02)])
def test_exponents_are_recovered_through_the_sketches(exponent: float, abs_error: float) -> None:
    draws = 500_000
    # Ids as hashes are: any 64 bits, negative ones too.
    stream = (_zipf(exponent, 50_000, draws).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    assert stream.min() < 0
    one = np.ones(10_000, np.int64)
    found = gather(_Blocks([{"f": Ids(part, one)} for part in stream.reshape(-1, 10_000)])).features["f"]
    true = Counter(stream.tolist())
    assert found.exponent == pytest.approx(exponent, abs=abs_error)
    assert abs(found.distinct - len(true)) <= 4 * found.distinct_error * len(true)
    assert not found.ordered
    for key, count in found.heavy:
        assert count <= true[int(key)] <= count + found.heavy_error


def test_a_feature_without_ids_is_counted_as_one(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,\n2,\n")
    found = gather(open_ids(tmp_path / "x.csv", features=["a", "b"]))
    empty = found.features["b"]
    assert (empty.samples, empty.ids, empty.empty, empty.distinct, empty.population) == (2, 0, 2, 0, 0)
    assert (empty.heavy, empty.exponent, empty.ids_per_sample) == ((), 0.0, 0.0)
    said = found.constraints([EmbeddingBagConfig(10, 8, "t", feature_names=["b"])])["t"]
    assert (said.pooling_factors, said.skew) == ((0.0,), None)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Statistics("x", 1, 0, False, {"a": _feature()}).save(tmp_path)


def _other(**fields: object) -> dict[str, object]:
    feature = Statistics("x", 1, 0, False, {"a": _feature()}).to_json()["features"]["a"]
    return {**feature, **fields}


def _file(**fields: object) -> str:
    return json.dumps({**Statistics("x", 1, 0, False, {"a": _feature()}).to_json(), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", r"s\.json: got \[\]; expected an object with"),
        ('{"version": 99, "features": {}}', "got an object without .*Count again"),
        (_file(version=99), "version: got 99; expected 1"),
        (_file(features=3), "features: got 3; expected an object of features"),
        (_file(rows="many"), "rows: got .many.; expected a whole number from 0"),
        (_file(table_rows=1), "table_rows: got 1; expected true or false"),
        (_file(features={"a": {"ids": 3}}), r"features\.a: got an object without"),
        (_file(features={"a": _other(ids=2.5)}), r"features\.a\.ids: got 2\.5"),
        (_file(features={"a": _other(exponent=True)}), r"features\.a\.exponent: got true; expected a number"),
        (_file(features={"a": _other(distance=None)}), r"features\.a\.distance: got null"),
        (
            _file(features={"a": _other(heavy=[[1, 2, 3]])}),
            r"features\.a\.heavy\[0\]: got \[1, 2, 3\]; expected",
        ),
        (_file(features={"a": _other(empty=11)}), r"a\.empty: got 11; expected at most 10, the number of samples"),
        (_file(features={"a": _other(longest=26)}), r"a\.longest: got 26; expected at most 25, the number of ids"),
        (_file(features={"a": _other(distinct=26)}), r"a\.distinct: got 26; expected at most 25"),
        (_file(features={"a": _other(population=19)}), r"a\.population: got 19; expected at least 20"),
        (_file(features={"a": _other(distance=50)}), r"a\.distance: got 50; expected a fraction of all ids"),
        (_file(features={"a": _other(exponent=9)}), r"a\.exponent: got 9; expected 0 to 8"),
        (_file(features={"a": _other(heavy=[[1, 2], [1, 2]])}), r"a\.heavy: got .*; expected each id once"),
        (_file(features={"a": _other(heavy=[[1, 2], [2, 3]])}), r"a\.heavy: got .*; expected the most frequent"),
        (_file(features={"a": _other(heavy=[[1, 20], [2, 6]])}), r"a\.heavy: got .*add up to at most 25"),
        (
            _file(features={"a": _other(population=20, heavy=[[i, 1] for i in range(21)])}),
            r"a\.heavy: .*at most 20 ids",
        ),
        (
            _file(features={"a": _other(curve=[[1, 0.5, 2]])}),
            r"a\.curve\[0\]: got .*; expected \[number of ids, share\]",
        ),
        (
            _file(features={"a": _other(curve=[[31, 0.5]])}),
            r"a\.curve: got .*; expected numbers of ids that rise, up to 30",
        ),
        (_file(features={"a": _other(curve=[[2, 0.5], [2, 0.6]])}), r"a\.curve: got .*numbers of ids that rise"),
        (_file(features={"a": _other(curve=[[1, 0.5], [2, 0.4]])}), r"a\.curve: got .*shares that rise, up to 1"),
        (_file(features={"a": _other(curve=[[1, 0.5], [2, 1.2]])}), r"a\.curve: got .*shares that rise, up to 1"),
        (
            _file(features={"a": _other(curve=[[1, 0.2], [2, 0.5]])}),
            r"a\.curve: got .*adds no more than the one before",
        ),
        (_file(features={"a": _other(curve=[[30, 0.9]])}), r"a\.curve: got .*shares that reach 1 at 30"),
    ],
)
def test_files_that_are_no_statistics_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Statistics.load(tmp_path / "s.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: got .No such file"):
        Statistics.load(tmp_path / "none.json")


def test_json_has_a_line_for_each_feature(tmp_path: Path) -> None:
    Statistics("x", 1, 0, False, {"</script>": _feature(), "b": _feature()}).save(tmp_path / "s.json")
    text = (tmp_path / "s.json").read_text()
    assert list(json.loads(text)["features"]) == ["</script>", "b"]
    assert sum('"samples"' in line for line in text.splitlines()) == 2


def test_the_curve_is_that_of_the_most_frequent_ids_and_hot_names_them() -> None:
    """Shares of the first k ids at the planner's buckets, to the sketch's error; the planner reads them as they are."""
    ids = _zipf(1.1, 3_000, 60_000)
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    found = gather(_Blocks([{"f": Ids(ids, np.ones(60_000, np.int64))}]), hot=100).features["f"]
    assert [k for k, _ in found.curve][:12] == [1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 17, 21]
    for k, share in found.curve:
        assert share == pytest.approx(counts[:k].sum() / 60_000, rel=0.02), k
    values, all_counts = np.unique(ids, return_counts=True)
    order = np.lexsort((values, -all_counts))
    assert [id for id, _ in found.heavy] == values[order][:100].tolist()
    skew = found.skew(5_000, table_rows=True)
    assert skew is not None
    assert skew.curve == found.curve
    load = Workload([TableWork("t", 5_000, 8, skew=dataclasses.replace(skew, ordered=True))])
    for k, share in found.curve:
        assert float(load.share(0, 0, k)) == pytest.approx(share, abs=1e-3)
    # Values that share rows have another curve than the rows.
    assert found.skew(100, table_rows=False) == Skew(100, found.exponent)


def test_a_curve_of_all_ids_sums_to_one() -> None:
    found = gather(_Blocks([{"f": Ids(np.repeat(np.arange(4), [8, 4, 2, 2]), np.ones(16, np.int64))}])).features["f"]
    assert found.curve == ((1, 0.5), (2, 0.75), (3, 0.875), (4, 1.0))


@pytest.mark.parametrize("hot", [0, -1, 1_000_001])
def test_a_number_of_hot_ids_is_checked(hot: int) -> None:
    with pytest.raises(ConfigError, match=r"--hot: got .*; expected 1 to 1,000,000 ids"):
        gather(_Blocks([]), hot=hot)


def test_files_without_a_curve_are_read(tmp_path: Path) -> None:
    old = {key: value for key, value in _other().items() if key != "curve"}
    (tmp_path / "s.json").write_text(_file(features={"a": old}))
    assert Statistics.load(tmp_path / "s.json").features["a"].curve == ()
