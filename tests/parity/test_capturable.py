"""Sharded tables whose optimizer is `capturable` have the bits of those whose is not: all rules, and in 2D."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity import harness
from tests.parity.harness import OPTIMIZERS, TILINGS, Case, Record, TableCase, run_virtual
from tests.parity.test_two_d import WORLDS, case_of, run
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import DataType
from tilerec.testing.virtual import run_virtual_ranks

NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"
RULES = [name for name in OPTIMIZERS if name != "none"]
HOSTS = ((0, 1), (2, 3))


def capturable(case: Case) -> Case:
    assert case.optimizer is not None
    return replace(case, optimizer=replace(case.optimizer, capturable=True))


def assert_same_bits(one: list[Record], other: list[Record]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.held.keys() == theirs.held.keys()
        for name, tiles in mine.held.items():
            for a, b in zip(tiles, theirs.held[name], strict=True):
                assert torch.equal(a.weight, b.weight), name
                assert a.state.keys() == b.state.keys()
                for slot, value in a.state.items():
                    assert torch.equal(value, b.state[slot]), (name, slot)
                    assert value.dim() or int(value) == 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tiling", ["two_tiles", *(["row_wise", "grid", "two_copies", "mixed"] if NIGHTLY else [])])
def test_tiles_have_the_bits_that_numbers_give(tiling: str, rule: str) -> None:
    """Rows that go on in other tiles (their rules run in phases), and bfloat16 ones that are rounded at random."""
    tables = (TableCase("t0", 9, 5, ("a", "b")), TableCase("t1", 6, 8, ("c",), DataType.BF16))
    tilings = {t.name: TILINGS[tiling](t.rows, t.dim, HOSTS, i) for i, t in enumerate(tables)}
    if tiling == "two_tiles" and not harness.adds_over_rows(OPTIMIZERS[rule]):
        tilings["t1"] = TILINGS["some_replicas"](6, 8, HOSTS, 1)
    case = Case(tables, tilings, HOSTS, OPTIMIZERS[rule], (2, 1, 0, 3))
    assert_same_bits(run_virtual(capturable(case)), run_virtual(case))


@pytest.mark.parametrize("rule", RULES if NIGHTLY else ["adam", "partial_rowwise_lamb"])
def test_replicas_in_2d_have_the_bits_that_numbers_give(rule: str) -> None:
    case, own = case_of("column_wise", "sum", rule, WORLDS["2x2"])
    assert_same_bits(run(capturable(case), own, WORLDS["2x2"]), run(case, own, WORLDS["2x2"]))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_averaged_moments_are_scaled_by_the_rate_that_updates_read(scale: float | None) -> None:
    """Row-wise Adagrad of groups that train apart: with a scale its rate is not what was written."""
    world = WORLDS["2x2"]
    case, own = case_of("row_wise", "sum", "rowwise_adagrad", world)
    case = replace(case, optimizer=RowWiseAdagrad(lr=0.1, weight_decay=0.1))

    def train(group: Any, case: Case, base: Any) -> list[torch.Tensor]:
        module = harness.copy.deepcopy(base)
        config = GroupConfig({"": own}, world.group_size)
        two = shard_2d(
            module,
            lambda: ([config], {}),
            group,
            ReplicaSettings("average", 2, moment_scale=scale),
            case.topology,
        )
        for features in harness.batches(case, group.rank):
            out = harness.outputs(case, module, features)
            harness.loss(case, out, float(world.group_size)).backward()
            two.sync_if_due()
        rows = [rows for table in module._leaves.tables for rows in table.tile_rows]
        assert all(own.updates == case.steps for own in rows)
        return [t for own in rows for t in (own.leaf.detach(), *own.slots)]

    runs = [run_virtual_ranks(world.size, train, chosen, harness.build(chosen)) for chosen in (case, capturable(case))]
    for mine, theirs in zip(*runs, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
