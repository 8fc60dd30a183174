"""Use of tables and time of stages between two log events, on one process and on ranks; evaluations do not count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.pipelines import StageTimes
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.files import FilesData
from tilerec.recipes.model import DLRMConfig
from tilerec.sharding import distinct_ids
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing import Ranks
from tilerec.train.config import ParallelConfig, RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.table_stats import TableStats
from tilerec.train.world import World

TABLES = ("feature_0_table", "feature_1_table")
STAGES = {"read", "copy", "finish_route", "route", "forward", "prefetch", "backward", "update", "lookup", "step"}


class _Events(Watcher):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def _run(eval_every: int = 0, log_every: int = 2, **parallel: Any) -> RunConfig:
    return RunConfig(
        name="small",
        data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=512, held_out_rows=120),
        model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(batch_size=64, eval_batch_size=50, log_every=log_every, eval_every=eval_every),
        parallel=ParallelConfig(**parallel),
    )


def _trained(config: RunConfig, group: ProcessGroupComms | None) -> list[dict[str, float]]:
    """Values of the training events."""
    log = _Events()
    train(config, watchers=[log], group=group)
    return [{**event.values, "step": event.step} for event in log.events if event.kind == "train"]


def _on_rank(config: RunConfig, gain: float) -> tuple[list[dict[str, float]], list[int]]:
    """Values of the training events, and the bytes that this rank had sent for its tables at each of them."""
    sent: list[int] = []
    inner = TableStats.values

    def values(stats: TableStats, seconds: float, steps: int) -> dict[str, float]:
        lines = {line.name: line.total for traffic in stats._traffic() for line in traffic}
        sent.append(sum(lines.get(name, 0) for name in ("header", "ids", "rows", "gradients")))
        return inner(stats, seconds, steps)

    with patch.object(distinct_ids, "GAIN", gain), patch.object(TableStats, "values", values):
        return _trained(config, ProcessGroupComms()), sent


def _of(event: dict[str, float], kind: str) -> dict[str, float]:
    """Values of one kind by what follows the slash."""
    return {name.partition("/")[2]: value for name, value in event.items() if name.partition("/")[0] == kind}


def _check_common(event: dict[str, float], steps: int) -> None:
    """Compare the values that one process and ranks have in common. Every sample has one id per table."""
    seconds = event["ms_per_step/step"] * steps / 1e3
    rates = _of(event, "ids_per_second")
    assert set(rates) == set(TABLES)
    for rate in rates.values():
        assert rate == pytest.approx(64 * steps / seconds)
    distinct = _of(event, "distinct_rate")
    assert set(distinct) == set(TABLES)
    assert all(1 / 64 <= rate <= 1 for rate in distinct.values())
    times = _of(event, "ms_per_step")
    assert set(times) <= STAGES
    assert {"read", "forward", "lookup", "backward", "update", "step"} <= set(times)
    assert times["lookup"] <= times["forward"]
    assert sum(time for name, time in times.items() if name not in ("lookup", "step")) <= times["step"]


@pytest.mark.parametrize("eval_every", [0, 3])
def test_one_process_logs_ids_distinct_rates_load_and_stages(eval_every: int) -> None:
    events = _trained(_run(eval_every), None)
    assert [event["step"] for event in events] == [2, 4, 6, 8]
    for event in events:
        _check_common(event, 2)
        assert event["reads_per_step/rank_0"] == 128
        assert event["imbalance"] == 1
        assert event["wire_bytes_per_step"] == 0
        assert not _of(event, "max_ms_per_step")


def test_files_of_a_log_have_all_values(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = _Events()
    train(replace(_run(), log_dir=str(folder)), watchers=[log])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [event for event in log.events if event.kind == "train"]
    for event, line in zip(trained, (line for line in lines if line["kind"] == "train"), strict=True):
        assert {"ids_per_second/feature_0_table", "distinct_rate/feature_1_table", "ms_per_step/step"} <= set(line)
        assert {name: line[name] for name in event.values} == event.values

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    for name in trained[0].values:
        points = board.Scalars(f"train/{name}")
        assert [point.step for point in points] == [event.step for event in trained if name in event.values]
        assert [point.value for point in points] == pytest.approx(
            [event.values[name] for event in trained if name in event.values], rel=1e-6
        )


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("eval_every", [0, 3])
def test_ranks_log_the_sums_of_all_of_them(eval_every: int, two_ranks: Ranks) -> None:
    (events, _), (others, _) = two_ranks.run(_on_rank, _run(eval_every, sharding="row_wise"), 1.0)
    assert [event["step"] for event in events] == [2, 4, 6, 8]
    for own, other in zip(events, others, strict=True):  # but for the clock of a rank
        assert {**own, "samples_per_second": 0} == {**other, "samples_per_second": 0}
    for number, event in enumerate(events):
        _check_common(event, 2)
        # Ids travel up to two batches ahead of their step: the first event has more, the last one fewer.
        reads = [event["reads_per_step/rank_0"], event["reads_per_step/rank_1"]]
        assert sum(reads) == pytest.approx(2 * 64 * [1.5, 1, 1, 0.5][number])
        assert event["imbalance"] == pytest.approx(max(reads) * 2 / sum(reads))
        slowest = _of(event, "max_ms_per_step")
        assert set(slowest) == set(_of(event, "ms_per_step"))
        assert all(slowest[stage] >= mean for stage, mean in _of(event, "ms_per_step").items())


def test_wire_bytes_are_those_of_the_tables_of_all_ranks(two_ranks: Ranks) -> None:
    """Messages of logs, such as metrics, are not among them."""
    (events, sent), (_, sent_by_other) = two_ranks.run(_on_rank, _run(sharding="row_wise"), 1.0)
    before = (0, 0)
    for event, *after in zip(events, sent, sent_by_other, strict=True):
        own, other = (now - then for now, then in zip(after, before, strict=True))
        assert event["wire_bytes_per_step"] == (own + other) / 2
        assert event["max_wire_bytes_per_step"] == max(own, other) / 2
        before = tuple(after)


def test_ids_that_travel_once_count_once_in_reads_and_every_time_in_ids_per_second(two_ranks: Ranks) -> None:
    (events, _), _ = two_ranks.run(_on_rank, _run(log_every=8, sharding="row_wise"), 0.0)
    (event,) = events
    _check_common(event, 8)
    reads = event["reads_per_step/rank_0"] + event["reads_per_step/rank_1"]
    distinct = sum(_of(event, "distinct_rate").values())
    assert reads < 128
    assert reads == pytest.approx(64 * distinct, rel=0.3)  # the rate is that of the latest batch


def _lists(folder: Path) -> RunConfig:
    """A managed table of sparse ids, and lists of 0 to 3 ids: 120 rows, 180 ids in the lists."""
    rows = range(120)
    table = {
        "click": [float(row % 3 == 0) for row in rows],
        "price": [float(row) for row in rows],
        "user": [10**12 * (row % 7) for row in rows],
        "friends": pa.array([list(range(row % 4)) for row in rows], pa.list_(pa.int64())),
    }
    parquet.write_table(pa.table(table), folder / "rows.parquet")
    ids = (IdColumn("user"), IdColumn("friends", kind="list"))
    tables = (TableRows("user", 20, "managed"), TableRows("friends", 40))
    return RunConfig(
        name="lists",
        data=FilesData(
            (str(folder),),
            Columns((LabelColumn("click"),), (DenseColumn("price"),), ids, tables),
            hold_out=HoldOut(every=0),
        ),
        model=DLRMConfig(embedding_dim=4, dense_arch=(4,), over_arch=(4,)),
        train=TrainConfig(batch_size=16, log_every=100),
    )


def test_managed_tables_and_lists_count_their_ids_on_one_process_and_on_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    config = _lists(tmp_path)
    of_ranks, _ = two_ranks.run(_on_rank, replace(config, parallel=ParallelConfig(sharding="row_wise")), 1.0)[0]
    for (event,) in (_trained(config, None), of_ranks):
        seconds = event["ms_per_step/step"] * event["step"] / 1e3
        counts = {table: rate * seconds for table, rate in _of(event, "ids_per_second").items()}
        assert counts == {"user": pytest.approx(120), "friends": pytest.approx(180)}
        reads = sum(_of(event, "reads_per_step").values()) * event["step"]
        assert reads == pytest.approx(300)
        assert set(_of(event, "distinct_rate")) == {"user", "friends"}


def _stats(module: torch.nn.Module) -> TableStats:
    return TableStats(module, World(None), StageTimes(), ["forward"])


def _batch(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64))


def _table() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(1000, 4, "t", feature_names=["f"])]).requires_grad_(False)


def _rates(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if "_rate/" in name}


def test_caches_report_hits_and_distinct_ids_since_the_last_event() -> None:
    module = cache_tables(_table(), load_factor=0.5)
    stats = _stats(module)
    assert _rates(stats.values(1.0, 1)) == {}
    module(_batch([1, 2, 3, 3]))
    assert _rates(stats.values(1.0, 1)) == {"distinct_rate/t": 0.75, "cache_hit_rate/t": 0.0}
    with stats.paused():
        module(_batch([4, 4, 4, 4, 4, 4]))
    assert _rates(stats.values(1.0, 1)) == {}
    module(_batch([1, 2, 2, 9]))
    assert _rates(stats.values(1.0, 1)) == {"cache_hit_rate/t": pytest.approx(2 / 3), "distinct_rate/t": 0.75}


def test_values_are_those_since_the_last_event() -> None:
    module, times = _table(), StageTimes()
    stats = TableStats(module, World(None), times, ["forward"])
    module(_batch([1, 1, 2]))
    module(_batch([5]))
    with stats.paused():  # an event reads its values inside of a pause
        values = stats.values(2.0, 4)
        module(_batch([7, 7, 7, 7]))
    assert values["ids_per_second/t"] == 2.0
    assert values["reads_per_step/rank_0"] == 1.0
    assert values["distinct_rate/t"] == 1.0  # of the latest batch
    assert values["ms_per_step/step"] == 500.0
    module(_batch([3, 3]))
    values = stats.values(1.0, 1)
    assert values["ids_per_second/t"] == 2.0
    assert values["distinct_rate/t"] == 0.5
    stats.close()


def test_no_steps_have_no_values() -> None:
    assert _stats(_table()).values(0.0, 0) == {}


def test_a_model_without_tables_has_the_times_only() -> None:
    assert set(_stats(torch.nn.Linear(1, 1)).values(1.0, 2)) == {"ms_per_step/step"}
