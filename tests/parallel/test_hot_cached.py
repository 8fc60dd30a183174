"""Hot rows beside cached tables: copies on the device, rows in host memory or in files, the bits of neither."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.parallel.test_cached import Model, assert_same, everything, kernels, plan, train
from tilerec import (
    CacheParams,
    KeyValueParams,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
    reshard,
    shard,
    uncache_tables,
)
from tilerec.comms.group import Group
from tilerec.modules.cached_tables import iter_table_rows
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.resharding.measured_load import load_of
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.sharding.update import TileRows
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.optimizer import LAMB, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.tile import Tiling
from tilerec.storage.row_file import file_of
from tilerec.testing.virtual import run_virtual_ranks

HOT = {"a": [0, 1, 2, 3, 80, 149], "b": [0, 1, 5, 60], "c": [0, 2, 44, 45, 89]}
OTHER_HOT = {"a": [1, 3, 7, 100], "b": [], "c": [0, 1, 2, 45]}


def hot_plan(
    kind: str, kernel: str | None, folder: Path | None = None, hot: dict[str, list[int]] = HOT
) -> dict[str, Any]:
    """The plan with hot rows, behind caches by its kernel."""
    files = KeyValueParams(folder) if kernel == "key_value" and folder is not None else None
    cache = CacheParams(load_factor=0.3) if kernel in ("fused_uvm_caching", "key_value") else None
    ranks = [1] if kind == "table_wise" else None
    return {
        path: {
            name: ParameterSharding(
                kind, kernel, ranks, cache_params=cache, key_value_params=files,
                hot=HotRows(np.array(hot[name], dtype=np.int64)),
            )
            for name in names
        }
        for path, names in (("ebc", "ab"), ("ec", "c"))
    }  # fmt: skip


def both(
    base: Model, group: Group, spec: OptimizerSpec, kind: str, kernel: str = "fused_uvm_caching",
    folder: Path | None = None,
) -> tuple[nn.Module, nn.Module]:  # fmt: skip
    """The same model in device memory without hot rows, and behind caches with them."""
    models = []
    for own in (plan(kind), hot_plan(kind, kernel, folder)):
        model = copy.deepcopy(base)
        apply_optimizer_in_backward(spec, model.parameters())
        models.append(shard(model, own, mesh=group, exact=True))
    return models[0], models[1]


def heads(model: nn.Module) -> list[TileRows]:
    found = [rows for _, rows in iter_table_rows(model) if rows.names is not None]
    assert all(isinstance(rows, TileRows) and rows.cache is None for rows in found)
    return found  # type: ignore[return-value]


NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="further tilings: nightly")
CASES = [
    ("row_wise", "fused_uvm_caching", Adam(0.1), 2),
    ("row_wise", "key_value", RowWiseAdagrad(0.1), 2),
    ("column_wise", "fused_uvm_caching", RowWiseAdagrad(0.1), 2),
    ("table_wise", "key_value", Adam(0.1), 2),
    pytest.param("column_wise", "key_value", Adam(0.1), 2, marks=NIGHTLY),
    pytest.param("table_wise", "fused_uvm_caching", LAMB(0.1), 3, marks=NIGHTLY),
    pytest.param("grid_shard", "fused_uvm_caching", LAMB(0.1), 2, marks=NIGHTLY),
    pytest.param("row_wise", "fused_uvm", Adam(0.1), 2, marks=NIGHTLY),
]


@pytest.mark.parametrize(("kind", "kernel", "spec", "world"), CASES)
def test_cached_tables_with_hot_rows_have_the_bits_of_tables_with_neither(
    kind: str, kernel: str, spec: OptimizerSpec, world: int, tmp_path: Path
) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, spec, kind, kernel, tmp_path)
        assert len(heads(other)) == 3
        assert kernels(other) == dict.fromkeys("abc", kernel)
        assert all(file_of(rows.leaf) is None for rows in heads(other))
        for steps in (range(3), range(3, 5)):
            assert_same(train(plain, group, steps), train(other, group, steps, ahead=True))
            assert_same(everything(plain), everything(other))
            check_replicas(other)

    run_virtual_ranks(world, run)


def test_a_pass_writes_no_hot_row_to_host_memory_and_a_flush_writes_all() -> None:
    base = Model()

    def run(group: Group) -> None:
        _, model = both(base, group, Adam(0.1), "row_wise")
        home, head = model.ebc.embedding_bags["a"].tile_rows
        assert head.names is not None
        first, last = home.place.row_offset, home.place.row_offset + home.leaf.shape[0]
        at = (head.names >= first) & (head.names < last)
        own = head.names[at] - first
        before = [tensor[own].clone() for tensor in home.host()]
        train(model, group, range(2))
        newer = [tensor[at].clone() for tensor in head.host()]
        assert torch.equal(newer[0], before[0]) == (group.rank == 1)  # whose hot rows no batch reads
        assert_same([tensor[own] for tensor in home.host()], before)
        flush_caches(model)
        assert_same([tensor[own] for tensor in home.host()], newer)
        assert home.newer is None

    run_virtual_ranks(2, run)


def test_hot_ids_are_no_requests_of_the_caches() -> None:
    base = Model()

    def run(group: Group) -> None:
        every = {"a": list(range(150)), "b": list(range(90)), "c": list(range(90))}
        model = copy.deepcopy(base)
        apply_optimizer_in_backward(Adam(0.1), model.parameters())
        model = shard(model, hot_plan("row_wise", "fused_uvm_caching", hot=every), mesh=group)
        train(model, group, range(2))
        assert [own.rows for part in (model.ebc, model.ec) for own in part.cache_stats().values()] == [0, 0, 0]

    run_virtual_ranks(2, run)


@pytest.mark.parametrize("kernel", ["fused_uvm_caching", "key_value"])
def test_hot_rows_of_cached_tables_come_and_go_and_their_tiles_move(kernel: str, tmp_path: Path) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise", kernel, tmp_path)
        moves: list[tuple[str, dict[str, list[int]]]] = [
            ("row_wise", OTHER_HOT), ("table_wise", OTHER_HOT), ("table_wise", {"a": [], "b": [], "c": []}),
            ("column_wise", HOT), ("row_wise", OTHER_HOT),
        ]  # fmt: skip
        for step, (kind, hot) in enumerate(moves):
            assert_same(train(plain, group, [step]), train(other, group, [step], ahead=True))
            reshard(other, hot_plan(kind, None, hot=hot), progress=False)
            reshard(plain, plan(kind), progress=False)
            assert kernels(other) == dict.fromkeys("abc", kernel)
            assert len(heads(other)) == sum(map(bool, hot.values()))
            for _, rows in iter_table_rows(other):
                assert (rows.cache is None) == (rows.names is not None)
                assert (rows.cache_beside is None) == (rows.names is None)
                in_file = rows.cache is not None and rows.leaf.numel() > 0 and kernel == "key_value"
                assert (file_of(rows.leaf) is not None) == in_file
            check_replicas(other)
            assert_same(everything(plain), everything(other))
        assert_same(train(plain, group, [9]), train(other, group, [9]))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(2, run)


def test_a_rebalance_drops_hot_rows_of_cached_tables_that_save_nothing() -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "table_wise")
        assert_same(train(plain, group, range(2)), train(other, group, range(2)))
        assert load_of(other, reset=False).hot
        done = rebalance(other, least_gain=0.0, horizon=10**12, progress=False)
        assert done.moved is not None, str(done)
        assert not [table for _, table, sharding in done.plan.tables() if sharding.hot], str(done)
        assert_same(everything(plain), everything(other))
        check_replicas(other)

    run_virtual_ranks(2, run)


def test_caches_that_come_and_go_after_the_sharding_leave_the_copies_where_they_are(tmp_path: Path) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "table_wise")
        for step, act in enumerate((
            uncache_tables,
            lambda model: cache_tables(model, 0.2, "lfu", folder=tmp_path),
            uncache_tables,
            lambda model: cache_tables(model, 0.4),
        )):  # fmt: skip
            train(plain, group, [step])
            train(other, group, [step])
            act(other)
            assert len(heads(other)) == 3
            reshard(other, {"ebc": {"a": ParameterSharding("table_wise", None, [step % 2])}}, progress=False)
            want = ("fused", "key_value", "fused", "fused_uvm_caching")[step]
            assert kernels(other) == dict.fromkeys("abc", want), step
            assert_same(everything(plain), everything(other))
        train(plain, group, [7])
        train(other, group, [7])
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(2, run)


def test_another_optimizer_begins_with_the_newest_rows() -> None:
    base = Model()

    def run(group: Group) -> None:
        models = both(base, group, Adam(0.1), "row_wise")
        for model in models:
            train(model, group, range(2))
            apply_optimizer_in_backward(RowWiseAdagrad(0.1), model.parameters(), replace=True)
            train(model, group, range(2, 4))
        assert_same(everything(models[0]), everything(models[1]))

    run_virtual_ranks(2, run)


def test_another_precision_keeps_the_newest_rows_of_every_cached_tile() -> None:
    base = Model()
    tiles = [(0, 40, 0, 8, 0), (40, 60, 0, 8, 1), (60, 100, 0, 8, 0), (100, 150, 0, 8, 1)]
    cuts = Tiling.of("a", 150, 8, tiles)

    def run(group: Group) -> None:
        models = []
        for hot in (None, HotRows(np.array(HOT["a"]))):
            for kernel in ("fused", "fused_uvm_caching"):
                model = copy.deepcopy(base)
                apply_optimizer_in_backward(Adam(0.1), model.parameters())
                own = hot_plan("row_wise", kernel)
                own["ebc"]["a"] = ParameterSharding("explicit", kernel, tiling=cuts, hot=hot or HotRows())
                models.append(shard(model, own, mesh=group, exact=True))
        for model in models:
            train(model, group, range(2))
            model.to(torch.float64)
            train(model, group, range(2, 4))
        for other in models[1:]:
            assert_same(everything(models[0]), everything(other))

    run_virtual_ranks(2, run)
