"""Use of tables between two log events: ids, load of ranks, bytes, caches; evaluations do not count."""

from __future__ import annotations

import pytest
import torch

from tilerec.comms.process import ProcessGroupComms
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.sharding import distinct_ids
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.ranks import run_ranks
from tilerec.train.config import ParallelConfig, RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.table_stats import TableStats


class _Events(Watcher):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def _on_rank(eval_every: int) -> list[dict[str, float]]:
    config = RunConfig(
        name="small",
        data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=512, held_out_rows=120),
        model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(batch_size=64, eval_batch_size=50, log_every=2, eval_every=eval_every),
        parallel=ParallelConfig(sharding="row_wise"),
    )
    log = _Events()
    distinct_ids.GAIN = 1.0  # every id travels
    train(config, watchers=[log], group=ProcessGroupComms())
    return [{**event.values, "step": event.step} for event in log.events if event.kind == "train"]


@pytest.mark.parametrize("eval_every", [0, 3])
def test_logged_ids_and_load_are_those_of_the_training_steps(eval_every: int) -> None:
    """Every sample of the synthetic stream has one id per table: 64 ids a step and table, over both ranks."""
    for events in run_ranks(2, _on_rank, eval_every):
        assert [event["step"] for event in events] == [2, 4, 6, 8]
        # Ids count when they are routed, up to two batches ahead of their step; the per-step mean is exact.
        for event in events[:-1]:
            reads = [event["reads_per_step/rank_0"], event["reads_per_step/rank_1"]]
            assert sum(reads) == pytest.approx(2 * 64)
            assert event["imbalance"] == pytest.approx(max(reads) / 64)
            assert event["wire_bytes_per_step"] > 0
            rates = {name: value for name, value in event.items() if name.startswith("ids_per_second/")}
            assert len(rates) == 2
            assert len(set(rates.values())) == 1  # the same number of ids in both tables


def _batch(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64))


def test_caches_report_hits_and_distinct_rows_since_the_last_event() -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=1000, feature_names=["f"])
    module = cache_tables(EmbeddingBagCollection([config]).requires_grad_(False), load_factor=0.5)
    stats = TableStats(module, None)
    assert stats.values(1.0) == {}
    module(_batch([1, 2, 3, 3]))
    assert stats.values(1.0) == {"cache_hit_rate/t": 0.0, "distinct_rate/t": 0.75}
    stats.pause()
    module(_batch([4, 4, 4, 4, 4, 4]))
    stats.resume()
    assert stats.values(1.0) == {}
    module(_batch([1, 2, 2, 9]))
    assert stats.values(1.0) == {"cache_hit_rate/t": pytest.approx(2 / 3), "distinct_rate/t": 0.75}


def test_tables_without_counts_report_nothing() -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])
    module = EmbeddingBagCollection([config])
    stats = TableStats(module, None)
    module(_batch([1]))
    assert stats.values(1.0) == {}
