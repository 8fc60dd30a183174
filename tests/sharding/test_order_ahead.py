"""What a routed batch is ordered by ahead is what its update asks for: on every rank, under every tiling.

Nothing is sorted here: the orders are made on GPUs only (`tests/cuda/test_sharded_ahead.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.gradient.record import GradientRecord
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.storage import prefetched_orders as order_ahead
from tilerec.storage.prefetched_orders import PrefetchedOrders
from tilerec.storage.table_rows import TableRows
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

WORLD, KEYS, ROWS = 2, ["x", "y"], 30
Asked = list[bool]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Per update: whether there was an order for it."""
    found: Asked = []
    real = PrefetchedOrders.take

    def order(self: TableRows, sinks: Sequence[Any], record: GradientRecord) -> None:
        handles = [sink.handle for sink in sinks]
        self.orders.made.keep(order_ahead._sources(record, handles), [], record.ids.device)

    def take(self: PrefetchedOrders, handles: Sequence[int], record: GradientRecord) -> None:
        found.append(real(self, handles, record) is not None)

    monkeypatch.setattr(TableRows, "order", order)
    monkeypatch.setattr(TableRows, "order_sums", order)
    monkeypatch.setattr(PrefetchedOrders, "take", take)
    return found


def pooled(weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(ROWS, 8, "a", feature_names=["x", "y"]),
            EmbeddingBagConfig(ROWS, 16, "b", feature_names=["y"], pooling=PoolingType.MEAN),
        ],
        is_weighted=weighted,
    )


def sequences() -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(ROWS, 8, "a", feature_names=["y"]),
        EmbeddingConfig(ROWS, 8, "b", feature_names=["x"]),
    ]
    return EmbeddingCollection(tables)


def plan(kind: str) -> dict[str, ParameterSharding]:
    return {name: ParameterSharding(kind, ranks=[t] if kind == "table_wise" else None) for t, name in enumerate("ab")}


def batch(rank: int, at: int, weighted: bool) -> KeyedJaggedTensor:
    return random_batch(KEYS, ROWS, 4, weighted=weighted, seed=10 * at + rank)


def step(module: nn.Module, group: Group, steps: int, weighted: bool = False) -> None:
    for at in range(steps):
        features = batch(group.rank, at, weighted)
        if weighted:
            features.weights().requires_grad_()
        routed = module.route(features)
        module._order_routed(routed)
        out = module(routed)
        values = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
        torch.stack([value.square().sum() for value in values]).sum().backward()


def attached(module: nn.Module, spec: OptimizerSpec, kind: str, group: Group, **options: Any) -> nn.Module:
    apply_optimizer_in_backward(spec, module.parameters())
    shard(module, plan(kind), mesh=group, **options)
    return module


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "grid_shard"])
@pytest.mark.parametrize("make", [pooled, sequences])
def test_an_order_is_there_for_every_update(kind: str, make: Any, asked: Asked) -> None:
    base = make()

    def run(group: Group) -> None:
        step(attached(copy.deepcopy(base), Adam(lr=0.1), kind, group), group, 2)

    run_virtual_ranks(WORLD, run)
    assert len(asked) >= 2
    assert all(asked)


@pytest.mark.parametrize("exact", [False, True])
def test_tables_of_several_optimizers_have_an_order_each(exact: bool, asked: Asked) -> None:
    base = pooled(True)

    def run(group: Group) -> None:
        module = copy.deepcopy(base)
        apply_optimizer_in_backward(SGD(lr=0.1), [module.embedding_bags.a.weight])
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), [module.embedding_bags.b.weight])
        shard(module, plan("row_wise"), mesh=group, exact=exact)
        step(module, group, 2, True)

    run_virtual_ranks(WORLD, run)
    assert asked == [True] * 4 * WORLD


def test_frozen_tables_and_those_without_an_optimizer_are_left_out(asked: Asked) -> None:
    base = pooled()

    def run(group: Group) -> None:
        for frozen in (True, False):
            module = copy.deepcopy(base)
            apply_optimizer_in_backward(SGD(lr=0.1), [module.embedding_bags.a.weight])
            module.embedding_bags.b.weight.requires_grad_(not frozen)
            shard(module, plan("row_wise"), mesh=group)
            step(module, group, 2)

    run_virtual_ranks(WORLD, run)
    assert asked == [True] * 4 * WORLD


def test_what_was_not_known_ahead_is_sorted_when_it_is(asked: Asked) -> None:
    """A table is frozen behind the order; a batch is looked up twice."""
    base = pooled()

    def run(group: Group) -> None:
        module = attached(copy.deepcopy(base), SGD(lr=0.1), "row_wise", group)
        routed = module.prefetch(batch(group.rank, 0, False))  # makes none on a CPU
        module._order_routed(routed)
        module.embedding_bags.b.weight.requires_grad_(False)
        out = module(routed)
        out.values().sum().backward()
        module.embedding_bags.b.weight.requires_grad_(True)
        module._order_routed(routed)
        (module(routed).values() + module(routed).values()).sum().backward()
        with torch.no_grad():
            module._order_routed(routed)
        (module(routed).values()).sum().backward()

    run_virtual_ranks(WORLD, run)
    # The third finds the order that the second did not take: the batch is the same.
    assert sorted(asked) == [False] * 2 * WORLD + [True] * WORLD


def test_sums_of_rows_that_go_on_in_other_columns_have_an_order(asked: Asked) -> None:
    base = pooled()

    def run(group: Group) -> None:
        step(attached(copy.deepcopy(base), RowWiseAdagrad(lr=0.1), "column_wise", group), group, 2)

    run_virtual_ranks(WORLD, run)
    assert asked == [True] * 2 * WORLD


def test_tables_whose_replicas_tell_their_ids_with_the_gradients_have_none(asked: Asked) -> None:
    base = pooled()

    def run(group: Group) -> None:
        module = attached(copy.deepcopy(base), SGD(lr=0.1), "data_parallel", group)
        step(module, group, 2)
        assert not any(rows.orders.made for rows in module._leaves.rows())

    run_virtual_ranks(WORLD, run)
    assert asked == [False] * 2 * WORLD
