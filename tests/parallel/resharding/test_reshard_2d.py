"""`reshard` in 2D parallelism: all sharding groups follow one plan, and replicas stay what they were to each other."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity import harness
from tests.parity.harness import OPTIMIZERS, TILINGS, Case, TableCase
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, ReshardError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.interrupts import Interrupts
from tilerec.parallel.resharding.mover import MoveOptions
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.reshard_2d import reshard_2d
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.parallel.two_d.rank_grid import RankGrid
from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.sharding.table import ShardedTable
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

HOSTS = ((0, 1), (2, 3))
TABLES = (
    TableCase("t0", 10, 4, ("a", "b")),
    TableCase("t1", 7, 3, ("c",)),
    TableCase("t2", 17, 20, ("d", "a")),
)


def case_of(optimizer: str, exact: bool = False, steps: int = 4) -> Case:
    return Case(TABLES, {}, HOSTS, OPTIMIZERS[optimizer], (5, 3, 0, 2), exact=exact, steps=steps)


def group_plan(kinds: tuple[str, ...], case: Case, across: bool) -> dict[str, Tiling]:
    """Tilings of a sharding group of two ranks."""
    hosts = RankGrid(4, 2, across).hosts_of(0, case.topology)
    return {
        t.name: TILINGS[kind](t.rows, t.dim, hosts, i) for i, (kind, t) in enumerate(zip(kinds, TABLES, strict=True))
    }


def move(module: Any, two_d: TwoD, plan: Any, **options: Any) -> Any:
    budget, progress = options.pop("budget", None), options.pop("progress", False)
    return reshard_2d(module, two_d, plan, MoveOptions(budget, progress, None, time.monotonic(), Interrupts()))


def train(case: Case, module: Any, own: list[Any]) -> list[torch.Tensor]:
    seen = []
    for features in own:
        out = harness.outputs(case, module, features)
        seen += [y.detach().clone() for y in out]
        harness.loss(case, out, float(case.world_size)).backward()
    return seen


def same_tiles(module: Any, twin: Any) -> None:
    for name, want in twin._tables.items():
        got: ShardedTable = module._tables[name]
        assert (got.tiling, got.tiles) == (want.tiling, want.tiles)
        for i, tile in enumerate(got.tiles):
            assert torch.equal(got.leaves()[i], want.leaves()[i]), (name, tile)
            rows, other = got.tile_rows[i], want.tile_rows[i]
            assert rows.peers.replicas == other.peers.replicas
            assert (rows.peers.teams is None) == (other.peers.teams is None)
            for slot in rows.state:
                assert torch.equal(rows.state[slot], other.state[slot]), (name, slot)
            if other.touched is not None:
                assert rows.touched is not None
                assert torch.equal(rows.touched.marks, other.touched.marks)
                assert rows.touched.updates == other.touched.updates


FIRST, SECOND = ("row_wise", "column_wise", "table_wise"), ("column_wise", "data_parallel", "two_tiles")


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_exact_replicas_go_on_with_the_bits_of_ones_that_never_moved(optimizer: str, across: bool) -> None:
    case = case_of(optimizer, exact=True)
    base = harness.build(case)

    def live(group: Group) -> None:
        config = GroupConfig({"": group_plan(FIRST, case, across)}, 2, across_hosts=across)
        pair = [copy.deepcopy(base) for _ in range(2)]
        module, still = pair
        two_d, _ = (
            shard_2d(m, lambda: ([config], {}), group, ReplicaSettings("exact", exact=True), case.topology)
            for m in pair
        )
        own = harness.batches(case, group.rank)
        for m in pair:
            train(case, m, own[:2])
        report = move(module, two_d, {"": group_plan(SECOND, case, across)})
        assert len(report.tables) == 3
        for got, want in zip(train(case, module, own[2:]), train(case, still, own[2:]), strict=True):
            assert torch.equal(got, want)
        for name, table in still._tables.items():
            assert torch.equal(module._tables[name].weight_of().full(), table.weight_of().full())
            for slot in table.rows.state:
                assert torch.equal(module._tables[name].state_of(slot).full(), table.state_of(slot).full())
        grid = two_d.parts[0].plan.grid
        for name, tiling in group_plan(SECOND, case, across).items():
            assert two_d.parts[0].plan.tiling("", name) == tiling
            assert module._tables[name].tiling == grid.over_replicas(name, tiling)
            assert plan_of(module).plan[""][name].tiling == module._tables[name].tiling

    run_virtual_ranks(4, live)


@pytest.mark.parametrize("across", [False, True])
def test_groups_that_train_apart_move_alike_and_bring_along_what_they_have_touched(across: bool) -> None:
    """Away and back: weights, state and marks are those of a twin that stayed; averages are, too."""
    case = case_of("adam")
    base = harness.build(case)

    def live(group: Group) -> None:
        config = GroupConfig({"": group_plan(FIRST, case, across)}, 2, across_hosts=across)
        pair = [copy.deepcopy(base) for _ in range(2)]
        module, still = pair
        both = [shard_2d(m, lambda: ([config], {}), group, ReplicaSettings("average"), case.topology) for m in pair]
        own = harness.batches(case, group.rank)
        for m, two_d in zip(pair, both, strict=True):
            train(case, m, own[:1])
            two_d.sync()
            train(case, m, own[1:2])
        move(module, both[0], {"": group_plan(SECOND, case, across)})
        assert both[0].unsynced_steps == both[1].unsynced_steps == 1
        assert plan_of(module).plan[""]["t0"].tiling == group_plan(SECOND, case, across)["t0"]
        move(module, both[0], {"": group_plan(FIRST, case, across)})
        same_tiles(module, still)
        move(module, both[0], {"": group_plan(SECOND, case, across)})
        for two_d in both:
            two_d.sync()
        move(module, both[0], {"": group_plan(FIRST, case, across)})
        same_tiles(module, still)
        for m in pair:
            train(case, m, own[2:])
        same_tiles(module, still)

    run_virtual_ranks(4, live)


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_what_fails_in_one_sharding_group_stops_all_of_them(sync: Any) -> None:
    case = case_of("rowwise_adagrad")
    base = harness.build(case)

    def live(group: Group) -> None:
        config = GroupConfig({"": group_plan(FIRST, case, False)}, 2)
        module = copy.deepcopy(base)
        two_d = shard_2d(module, lambda: ([config], {}), group, ReplicaSettings(sync), case.topology)

        def progress(moving: Any) -> None:
            if group.rank == 3 and moving.tables:
                raise MemoryError("full")

        with pytest.raises(ConfigError, match="needs") as caught:
            move(module, two_d, {"": group_plan(SECOND, case, False)}, budget=1)
        least = int(str(caught.value).split("needs ")[1].split(" ")[0].replace(",", ""))
        with pytest.raises(ReshardError, match=r"rank 3 failed .*MemoryError: full"):
            move(module, two_d, {"": group_plan(SECOND, case, False)}, budget=least, progress=progress)
        now = {name: two_d.parts[0].plan.tiling("", name) for name in module._tables}
        moved = [n for n in now if now[n] == group_plan(SECOND, case, False)[n]]
        assert 0 < len(moved) < 3
        grid = two_d.parts[0].plan.grid
        for name, table in module._tables.items():
            assert table.tiling == (grid.over_replicas(name, now[name]) if sync == "exact" else now[name])
        train(case, module, harness.batches(case, group.rank)[:1])
        move(module, two_d, {"": group_plan(SECOND, case, False)})
        train(case, module, harness.batches(case, group.rank)[1:2])
        return sorted(moved)

    assert len({tuple(moved) for moved in run_virtual_ranks(4, live)}) == 1


def test_a_plan_of_another_number_of_ranks_is_refused_on_all_of_them() -> None:
    case = case_of("rowwise_adagrad")
    base = harness.build(case)

    def live(group: Group) -> None:
        config = GroupConfig({"": group_plan(FIRST, case, False)}, 2)
        module = copy.deepcopy(base)
        two_d = shard_2d(module, lambda: ([config], {}), group, ReplicaSettings("exact"), case.topology)
        with pytest.raises(ConfigError, match="got a plan for 4 ranks; expected one for the 2 ranks"):
            move(module, two_d, ShardingPlan(plan_of(module).plan, 4))
        with pytest.raises(ConfigError, match="pass the DMPCollection itself"):
            reshard(module, {"": group_plan(SECOND, case, False)})
        with pytest.raises(ConfigError):
            move(module, two_d, {"": {"t0": group_plan((SECOND, FIRST)[group.rank % 2], case, False)["t0"]}})

    run_virtual_ranks(4, live)


def on_processes() -> None:
    torch.manual_seed(0)
    model = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, n, feature_names=[n]) for n in "ab"])
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), model.parameters())
    rows = {n: Tiling.of(n, 8, 4, [(0, 4, 0, 4, 0), (4, 8, 0, 4, 1)]) for n in "ab"}
    columns = {n: Tiling.of(n, 8, 4, [(0, 8, 0, 2, 1), (0, 8, 2, 4, 0)]) for n in "ab"}
    dmp = DMPCollection(torch.nn.ModuleDict({"ebc": model}), "cpu", {"ebc": rows}, 4, 2)
    keys = list(dmp.state_dict())
    batch = random_batch(["a", "b"], 8, 4, seed=dist.get_rank())
    dmp.module["ebc"](batch).values().sum().backward()
    before = {name: value.full_tensor() for name, value in dmp.state_dict().items()}
    found = rebalance(dmp, apply=False)
    assert found.load.steps == 1
    assert {n for path, n, _ in found.plan.tables()} == {"a", "b"}
    reshard(dmp, {"ebc": columns})
    assert dmp.plan.plan["ebc"]["a"].tiling == columns["a"]
    assert list(dmp.state_dict()) == keys
    for name, value in dmp.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name])
    dmp.module["ebc"](batch).values().sum().backward()


def test_dmp_collection_is_taken_as_it_is(pool: Any) -> None:
    ranks: Ranks = pool(4)
    ranks.run(on_processes)
