"""The optimizer's face over sharded tables: one entry per table, state of logical shapes, loaded all or nothing."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.sharding.one_table import (
    KEY,
    TILINGS,
    batch,
    collection,
    sharded,
    step,
    table_of,
    trained,
)
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.spec.optimizer import SGD, Adagrad, Adam
from tilerec.testing.virtual import run_virtual_ranks


@pytest.mark.parametrize("tiling", TILINGS)
def test_optimizer_state_has_logical_shapes_and_loads_into_any_tiling(tiling: str) -> None:
    base = collection()
    apply_optimizer_in_backward(Adam(lr=0.1), list(base.parameters()))
    reference = trained(base, 2)
    saved = {
        "state": {
            KEY: {n: v.clone() for n, v in reference.fused_optimizer.state_dict()["state"][KEY].items()},
        }
    }

    def run(group: Group) -> None:
        own = sharded(base, group, tiling)
        face = own.fused_optimizer
        assert isinstance(face, ShardedFusedOptimizer)
        assert list(face.params) == [KEY]
        face.load_state_dict(saved)
        got = face.full_state_dict()["state"][KEY]
        assert {n: tuple(v.shape) for n, v in got.items()} == {
            "exp_avg": (7, 6),
            "exp_avg_sq": (7, 6),
            "step": (),
        }
        assert all(torch.equal(got[n], v) for n, v in saved["state"][KEY].items())
        own.load_state_dict(reference.state_dict())
        step(own, batch(group.rank, 5), 2.0)
        if table_of(own).tiles:
            assert all(int(rows.updates) == 3 for rows in table_of(own).tile_rows)

    run_virtual_ranks(2, run)


def test_state_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    base = collection()
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))

    def run(group: Group) -> None:
        face = sharded(base, group, "two tiles").fused_optimizer
        fits = {"sum": torch.ones(7, 6), "step": torch.tensor(4)}
        for wrong, says in (
            ({}, "lacks"),
            ({KEY: {"sum": torch.ones(7, 6)}}, "lacks"),
            ({KEY: {**fits, "more": torch.ones(1)}}, "also has"),
            ({KEY: {**fits, "sum": torch.ones(7, 2)}}, r"expected a tensor of shape \(7, 6\)"),
            ({KEY: 3}, "expected a dict"),
        ):
            with pytest.raises(ConfigError, match=says):
                face.load_state_dict({"state": wrong})
        with pytest.raises(ConfigError, match="no 'state'"):
            face.load_state_dict({})
        assert float(cast(Any, face).full_state_dict()["state"][KEY]["sum"].abs().max()) == 0.0
        face.load_state_dict({"state": {KEY: {**fits, "step": 4}}})
        assert int(cast(Any, face).full_state_dict()["state"][KEY]["step"]) == 4

    run_virtual_ranks(2, run)


def test_a_written_learning_rate_holds_for_all_tiles() -> None:
    base = collection()
    apply_optimizer_in_backward(SGD(lr=0.5), list(base.parameters()))

    def run(group: Group) -> None:
        own = sharded(base, group, "two tiles")
        before = table_of(own).weight_of().full()
        face = own.fused_optimizer
        assert len(face.param_groups) == 1
        face.param_groups[0]["lr"] = 0.0
        face.step()
        step(own, batch(group.rank), 2.0)
        assert torch.equal(table_of(own).weight_of().full(), before)
        with pytest.raises(ConfigError, match="add_param_group"):
            face.add_param_group({"params": []})

    run_virtual_ranks(2, run)


def test_settings_are_saved_with_the_state_if_asked_for() -> None:
    base = collection()
    apply_optimizer_in_backward(SGD(lr=0.5), list(base.parameters()))

    def run(group: Group) -> None:
        face = sharded(base, group, "everywhere").fused_optimizer
        face.save_param_groups(True)
        saved = face.state_dict()
        saved["param_groups"][0]["lr"] = 0.25
        other = sharded(base, group, "everywhere").fused_optimizer
        other.save_param_groups(True)
        other.load_state_dict(saved)
        assert other.param_groups[0]["lr"] == 0.25
        with pytest.raises(ConfigError, match="param_groups"):
            other.load_state_dict({"state": saved["state"]})

    run_virtual_ranks(2, run)


def test_tables_that_are_not_sharded_are_shown_as_well() -> None:
    base = nn.ModuleDict({"here": collection(), "there": collection()})
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))

    def run(group: Group) -> None:
        own = copy.deepcopy(base)
        own["there"] = sharded(cast(EmbeddingBagCollection, own["there"]), group, "5 + 2 rows")
        face = ShardedFusedOptimizer(own)
        assert sorted(face.params) == [f"here.{KEY}", f"there.{KEY}"]
        saved = face.full_state_dict()
        assert all(slots["sum"].shape == (7, 6) for slots in saved["state"].values())
        saved["state"][f"here.{KEY}"]["sum"] = torch.ones(7, 6)
        saved["state"][f"there.{KEY}"]["sum"] = torch.full((7, 6), 2.0)
        face.load_state_dict(saved)
        now = face.full_state_dict()["state"]
        assert float(now[f"here.{KEY}"]["sum"].min()) == 1.0
        assert float(now[f"there.{KEY}"]["sum"].min()) == 2.0

    run_virtual_ranks(2, run)


def test_state_read_by_parameter_is_that_of_the_whole_table() -> None:
    base = collection()
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))

    def run(group: Group) -> None:
        own = sharded(base, group, "everywhere")
        state = own.fused_optimizer.state[table_of(own).weight]
        assert sorted(state) == ["step", "sum"]
        assert state["sum"] is table_of(own).rows.state["sum"]
        state["sum"] = torch.ones(7, 6)
        assert float(table_of(own).rows.state["sum"].min()) == 1.0
        with pytest.raises(KeyError):
            state["exp_avg"]
        with pytest.raises(ConfigError, match="belongs to the attached optimizer"):
            del state["sum"]

    run_virtual_ranks(2, run)
