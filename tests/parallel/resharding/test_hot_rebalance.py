"""`rebalance` proposes hot rows by the ids that it counts, and they follow the ids as these drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, ReshardError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.hot_load import HotLoad, merged
from tilerec.parallel.resharding.measured_load import count_hot_ids, load_of
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.rebalance_decision import Rebalanced
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.parallel.shard import shard
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sharding.hot_counts import STRIDE, FrequentIds
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.cache import CacheParams
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.key_value import KeyValueParams
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.table import EmbeddingConfig
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

ROWS, DIM, SAMPLES, WORLD = 20_000, 64, 200, 4
WIRE = Wire(distinct=False)  # every id travels, so hot rows save bytes
HOT = 40
"""So many ids have nine tenths of all reads: 0.2 % of the rows, a size of heads that the planner tries."""


def batch(rank: int, step: int, first: int) -> KeyedJaggedTensor:
    """Ids of two features: nine in ten are one of 40 ids, `first`, `first + 100`, …"""
    generator = torch.Generator().manual_seed(100 * step + rank)
    hot = first + 100 * torch.randint(HOT, (2 * SAMPLES,), generator=generator)
    ids = torch.randint(ROWS, (2 * SAMPLES,), generator=generator)
    some = torch.rand(2 * SAMPLES, generator=generator) < 0.9
    lengths = torch.full((2 * SAMPLES // 10,), 10, dtype=torch.int32)
    return KeyedJaggedTensor(["f", "g"], torch.where(some, hot, ids), lengths=lengths)


def hot_ids(first: int) -> HotRows:
    return HotRows(first + 100 * np.arange(HOT))


def sharded(group: Group, hot: HotRows | None = None, folder: Path | None = None) -> Any:
    """A sequence collection of row-wise tables; folder: their rows are in files there, behind caches."""
    files: dict[str, Any] = {}
    if folder is not None:
        cache = CacheParams(load_factor=0.05)
        files = {"compute_kernel": "key_value", "cache_params": cache, "key_value_params": KeyValueParams(str(folder))}
    names = {"t": ["f"], "u": ["g"]}
    module = EmbeddingCollection([EmbeddingConfig(ROWS, DIM, name, feature_names=f) for name, f in names.items()])
    draw = torch.Generator().manual_seed(0)  # its own: virtual ranks are threads, which share torch's
    for weight in module.parameters():
        weight.data.uniform_(-0.1, 0.1, generator=draw)
    apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())
    return shard(module, {name: ParameterSharding("row_wise", wire=WIRE, hot=hot, **files) for name in names}, group)


def train(module: Any, rank: int, first: int, steps: int = 2 * STRIDE) -> None:
    for step in range(steps):
        found = module(batch(rank, step, first))
        torch.cat([own.values() for own in found.values()]).sum().backward()


def planner() -> EmbeddingShardingPlanner:
    limits = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in ("t", "u")}
    topology = Topology(WORLD, "cpu", intra_host_bw=1e4)  # slow links, where fewer bytes are worth more messages
    return EmbeddingShardingPlanner(topology, constraints=limits)


def moved(module: Any) -> Rebalanced:
    return rebalance(module, planner(), horizon=10**9, progress=False)


@pytest.mark.parametrize("in_files", [False, True])
def test_hot_rows_follow_the_ids_that_are_read(in_files: bool, tmp_path: Path) -> None:
    def live(group: Group) -> None:
        module = sharded(group, folder=tmp_path if in_files else None)
        count_hot_ids(module, 3 * HOT)
        for first, fresh in ((0, HOT), (7, HOT)):
            train(module, group.rank, first)
            before = {name: value.clone() for name, value in full_state_dict(module).items()}
            leaf = module._tables["t"].leaves()[0]
            place = leaf.data_ptr()
            sent = module.exchange.group.traffic.total()
            found = moved(module)
            assert found.moved is not None, str(found)
            for table in module._tables.values():
                head = table.tiling.head
                assert head is not None
                assert set(hot_ids(first).ids.tolist()) <= set(head.hot.ids.tolist()) or len(head.hot) <= HOT
                assert len(set(hot_ids(first).ids.tolist()) & set(head.hot.ids.tolist())) >= min(len(head.hot), HOT)
            # The rows that become hot travel from one rank to three others; nothing else does.
            assert leaf.data_ptr() == place
            rows = sum(len(table.tiling.head.hot) for table in module._tables.values())
            assert found.move_bytes == found.moved.bytes_sent <= rows * DIM * 4 * (WORLD - 1)
            assert module.exchange.group.traffic.total() - sent <= found.moved.bytes_sent
            assert fresh * DIM * 4 <= found.moved.bytes_sent
            assert all(torch.equal(full_state_dict(module)[name], value) for name, value in before.items())
            check_replicas(module)
            train(module, group.rank, first, steps=1)
            check_replicas(module)
            load_of(module)  # these ids are no part of the next counts
        # No ids drift: nothing moves.
        train(module, group.rank, 7)
        assert rebalance(module, planner(), horizon=10**9).moved is None

    run_virtual_ranks(WORLD, live)


def test_hot_rows_that_nobody_reads_any_longer_go() -> None:
    """Tables with hot rows are counted without a call. Ids that are even leave no id frequent enough to be hot."""

    def live(group: Group) -> None:
        module = sharded(group, hot_ids(0))
        train(module, group.rank, 7)
        own = load_of(module, reset=False).hot["", "t"]
        assert set(own.ids[:HOT]) == set(hot_ids(7).ids.tolist())
        assert own.counted == 2 * WORLD * SAMPLES
        found = moved(module)
        assert found.moved is not None
        head = module._tables["t"].tiling.head
        assert head is None or set(head.hot.ids.tolist()) & set(hot_ids(7).ids.tolist())

    run_virtual_ranks(WORLD, live)


def test_ids_are_not_counted_unless_asked_for_and_then_in_every_sixteenth_batch() -> None:
    def live(group: Group) -> None:
        module = sharded(group)
        train(module, group.rank, 0, steps=1)
        assert module.exchange.hot_counts is None
        assert load_of(module).hot == {}
        count_hot_ids(module, HOT)
        train(module, group.rank, 0, steps=STRIDE + 1)
        own = load_of(module).hot
        assert own["", "t"].counted == own["", "u"].counted == 2 * WORLD * SAMPLES
        assert load_of(module).hot == {}
        count_hot_ids(module, 0)
        assert module.exchange.hot_counts is None
        with pytest.raises(ConfigError, match=r"count_hot_ids: most: got -1; expected a whole number of ids"):
            count_hot_ids(module, -1)

    run_virtual_ranks(WORLD, live)


def test_a_failure_while_new_hot_rows_are_filled_leaves_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TableMove.fill_head

    def fails(move: TableMove) -> None:
        own(move)
        if move._group.rank == 1:
            raise RuntimeError("out of luck")

    def live(group: Group) -> None:
        module = sharded(group, hot_ids(0))
        train(module, group.rank, 7)
        before = {name: value.clone() for name, value in full_state_dict(module).items()}
        with pytest.raises(ReshardError, match=r"rank 1 failed .*out of luck"):
            moved(module)
        assert plan_of(module).plan[""]["t"].hot == hot_ids(0)
        assert all(torch.equal(full_state_dict(module)[name], value) for name, value in before.items())
        check_replicas(module)
        train(module, group.rank, 7, steps=1)

    monkeypatch.setattr(TableMove, "fill_head", fails)
    run_virtual_ranks(WORLD, live)


def test_counts_of_ranks_are_added_and_rare_or_uncertain_ids_left_out() -> None:
    def counted(error: int, **ids: int) -> FrequentIds:
        keys = np.array([int(name[1:]) for name in ids], np.int64)
        return FrequentIds(keys, np.array(list(ids.values()), np.int64), 100, error)

    both = [counted(0, a7=20, a3=5, a9=2), counted(0, a3=30, a9=1, a5=4), None]
    assert merged(both) == HotLoad((3, 7, 5), (35, 20, 4), 200)
    assert merged([counted(1, a7=20, a3=5)]) == HotLoad((7,), (20,), 100)
    assert merged([counted(0, a7=3)]) is None
    assert merged([None]) is None


def test_the_skew_of_counted_ids_has_their_curve_and_a_law_behind_it() -> None:
    skew = HotLoad((9, 4, 2), (40, 20, 10), 100).skew(1000)
    assert list(skew.hot) == [9, 4, 2]
    assert skew.curve == ((1, 0.4), (2, pytest.approx(0.6)), (3, pytest.approx(0.7)))
    assert (skew.distinct, skew.ordered) == (1000, False)
    assert 1.0 < skew.exponent < 3.0
    assert HotLoad((1, 0), (3, 1), 4).skew(2).curve[-1] == (2, 1.0)
