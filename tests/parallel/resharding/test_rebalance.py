"""Loads are counted as they were; decisions follow from prescribed loads, never from times."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.measured_load import FeatureLoad, Load, load_of
from tilerec.parallel.resharding.measured_request import measured_request, present_tables
from tilerec.parallel.resharding.move_reduction import moved_bytes, permute_ranks
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.rebalance_decision import Rebalanced
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.workload import Workload
from tilerec.planner.helpers import row_wise, table_wise
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import ParameterSharding, ShardingPlan, ShardingType, Wire
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

NAMES = ["a", "b", "c", "d"]
ROWS, DIM = 1000, 16


def base(rows: int = ROWS) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    model = EmbeddingBagCollection([EmbeddingBagConfig(rows, DIM, n, feature_names=[n]) for n in NAMES])
    apply_optimizer_in_backward(SGD(lr=0.1), model.parameters())
    return model


def on(rank: int, rows: int = ROWS) -> ParameterSharding:
    return ParameterSharding("table_wise", tiling=Tiling.of("t", rows, DIM, [(0, rows, 0, DIM, rank)]))


def together(first: int, rows: int = ROWS) -> dict[str, ParameterSharding]:
    """a and b on one rank, c and d on the other."""
    return {n: on(first if n in "ab" else 1 - first, rows) for n in NAMES}


def load(ids: dict[str, float], bags: float = 512.0) -> Load:
    return Load(10, {("", n): (FeatureLoad(n, bags, ids[n]),) for n in NAMES})


EVEN = load(dict.fromkeys(NAMES, 5120.0))
HOT = load({"a": 50_000.0, "b": 50_000.0, "c": 512.0, "d": 512.0})
"""The tables that lie together on one rank are the hot ones."""

WHOLE = {n: ParameterConstraints(sharding_types=["table_wise"]) for n in NAMES}


def planner(world: int = 2, **options: Any) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(Topology(world, "cpu"), constraints=WHOLE, **options)


def decide(own: Load, plan: Any = None, **options: Any) -> list[Rebalanced]:
    model_of = base()

    def live(group: Group) -> Rebalanced:
        model = shard(copy.deepcopy(model_of), plan or together(0), group)
        before = {name: value.clone() for name, value in full_state_dict(model).items()}
        found = rebalance(model, options.pop("planner", None) or planner(), load=own, **options)
        assert all(torch.equal(full_state_dict(model)[name], value) for name, value in before.items())
        now = {name: s.tiling for _, name, s in plan_of(model).tables()}
        if found.moved is None:
            assert now == {n: s.tiling for n, s in (plan or together(0)).items()}
        else:
            assert now == {name: s.tiling for _, name, s in found.plan.tables()}
        return found

    return run_virtual_ranks(2, live)


# ------------------------------------------------------------------------------------------------------------ decisions


def test_two_hot_tables_on_one_rank_are_parted_and_one_of_them_stays() -> None:
    first, second = decide(HOT, horizon=10_000)
    assert (first.before_s, first.after_s, first.why) == (second.before_s, second.after_s, second.why)
    assert first.pays
    assert first.moved is not None
    owner = {name: s.tiling.ranks() for _, name, s in first.plan.tables()}
    assert owner["a"] != owner["b"]
    assert (0,) in (owner["a"], owner["b"]), "one of them stays"
    assert len(first.moved.tables) <= 2
    assert first.after_s < 0.8 * first.before_s
    assert first.moved.bytes_sent == first.move_bytes == len(first.moved.tables) * ROWS * DIM * 4


def test_a_load_that_the_plan_fits_moves_nothing() -> None:
    found = decide(EVEN)[0]
    assert not found.pays
    assert found.moved is None
    assert found.after_s == found.before_s
    assert "no better plan than the present one" in found.why


def test_a_move_that_does_not_pay_within_the_horizon_is_not_made() -> None:
    found = decide(HOT, horizon=1, step_seconds=1e-6)[0]
    assert not found.pays
    assert "more than the horizon of 1" in found.why
    assert found.pays_after > 1
    assert found.gain_s > 0


def test_a_gain_below_the_least_is_not_made() -> None:
    found = decide(HOT, least_gain=0.99)[0]
    assert not found.pays
    assert "less than least_gain, 99.0%" in found.why


def test_seconds_as_measured_scale_the_prediction_and_decide_when_it_pays() -> None:
    slow, fast = (decide(HOT, step_seconds=seconds, horizon=10**6)[0] for seconds in (1.0, 0.001))
    assert slow.before_s == pytest.approx(1.0)
    assert fast.before_s == pytest.approx(0.001)
    assert slow.after_s / slow.before_s == pytest.approx(fast.after_s / fast.before_s)
    assert slow.pays_after < fast.pays_after


def test_apply_false_only_says_what_it_would_do() -> None:
    found = decide(HOT, horizon=10_000, apply=False)[0]
    assert found.pays
    assert found.moved is None


def test_constraints_of_the_planner_hold() -> None:
    limits = {**WHOLE, "a": ParameterConstraints(sharding_types=["table_wise"], ranks=[0])}
    own = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=limits)
    found = decide(HOT, horizon=10_000, planner=own)[0]
    owner = {name: s.tiling.ranks() for _, name, s in found.plan.tables()}
    assert owner["a"] == (0,)
    assert owner["b"] == (1,)


def test_without_reads_there_is_nothing_to_go_by() -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), together(0), group)
        found = rebalance(model)
        assert not found.pays
        assert "nothing was read" in found.why
        assert "nothing was read" in str(found)

    run_virtual_ranks(2, live)


@pytest.mark.parametrize(
    "options",
    [
        {"horizon": 0},
        {"horizon": 1.5},
        {"least_gain": -0.1},
        {"step_seconds": float("nan")},
        {"planner": "no"},
        {"planner": EmbeddingShardingPlanner(Topology(3, "cpu"))},
        {"progress": 1},
    ],
)
def test_options_that_make_no_sense_are_refused_on_every_rank(options: dict[str, Any]) -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), together(0), group)
        with pytest.raises(ConfigError, match=r"rebalance|reshard: progress"):
            rebalance(model, load=HOT, **options)

    run_virtual_ranks(2, live)


def test_what_one_rank_gets_wrong_is_heard_by_all() -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), together(0), group)
        with pytest.raises(ConfigError, match="horizon"):
            rebalance(model, load=HOT, horizon=0 if group.rank else 5)

    run_virtual_ranks(2, live)


# ------------------------------------------------------------------------------------------------------------ loads


def batch(lengths: dict[str, list[int]], rows: int = ROWS, seed: int = 0) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    flat = torch.tensor([n for own in lengths.values() for n in own])
    return KeyedJaggedTensor.from_lengths_sync(
        list(lengths), torch.randint(0, rows, (int(flat.sum()),), generator=draw), flat
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("cut", ["tables", "rows", "columns", "copies"])
def test_reads_are_counted_by_table_and_by_the_rank_that_looks_up(cut: str, exact: bool) -> None:
    model_of = base()
    tilings: dict[str, Any] = {
        "tables": together(0),
        "rows": {n: Tiling.of(n, ROWS, DIM, [(0, 250, 0, DIM, 0), (250, ROWS, 0, DIM, 1)]) for n in NAMES},
        "columns": {n: Tiling.of(n, ROWS, DIM, [(0, ROWS, 0, 4, 0), (0, ROWS, 4, DIM, 1)]) for n in NAMES},
        "copies": {n: Tiling.of(n, ROWS, DIM, [(0, ROWS, 0, DIM, (0, 1))]) for n in NAMES},
    }[cut]
    lengths = [{"a": [3, 1], "b": [0, 0], "c": [1, 2], "d": [5, 0]}, {"a": [2], "b": [1], "c": [0], "d": [4]}]

    def live(group: Group) -> tuple[Load, KeyedJaggedTensor]:
        model = shard(copy.deepcopy(model_of), tilings, group, exact=exact)
        own = batch(lengths[group.rank], seed=group.rank)
        for _ in range(3):
            model(own)
        kept = load_of(model, reset=False)
        assert kept == load_of(model)
        assert load_of(model).steps == 0
        return kept, own

    (found, first), (other, second) = run_virtual_ranks(2, live)
    assert found == other
    assert found.steps == 3
    for name in NAMES:
        (feature,) = found.features[("", name)]
        ids = [sum(own[name]) for own in lengths]
        assert feature.bags == 1.5
        assert feature.ids == sum(ids) / 2
        rows = [own[name].values() for own in (first, second)]
        low = sum(int((r < 250).sum()) for r in rows)
        want = {
            "tables": (sum(ids), 0) if name in "ab" else (0, sum(ids)),
            "rows": (low, sum(ids) - low),
            "columns": (sum(ids), sum(ids)),
            "copies": tuple(ids),
        }[cut]
        assert found.reads[("", name)] == want
    assert found.reads_per_rank == tuple(sum(found.reads[("", name)][rank] for name in NAMES) for rank in range(2))
    assert found.imbalance >= 1


@pytest.mark.parametrize("distinct", [None, False], ids=["once", "each"])
@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_repeated_ids_count_in_a_load_whether_they_travel_or_not(kind: str, distinct: bool | None) -> None:
    """Prices under the load count what travels: within the few percent by which batches differ."""
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.1

    def live(group: Group) -> tuple[Load, dict[str, int], ShardingPlan]:
        sharding = ParameterSharding(kind, ranks=[1] if kind == "table_wise" else None, wire=Wire(distinct=distinct))
        model: Any = shard(base(), plan={"": dict.fromkeys(NAMES, sharding)}, mesh=group)
        generator = torch.Generator().manual_seed(group.rank)
        ids = {n: torch.multinomial(weights, 2000, replacement=True, generator=generator) for n in NAMES}
        traffic(model).reset()
        model(KeyedJaggedTensor(NAMES, torch.cat(list(ids.values())), lengths=torch.ones(8000, dtype=torch.int32)))
        return load_of(model), {line.name: line.total for line in traffic(model)}, plan_of(model)

    (found, sent, plan), (_, received, _) = run_virtual_ranks(2, live)
    for name in NAMES:
        (feature,) = found.features[("", name)]
        assert (feature.bags, feature.ids) == (2000, 2000)
        assert (feature.distinct is None) == (distinct is False)
        if feature.distinct is not None:
            assert 0.1 < feature.distinct < 0.3
            # The owner of a whole table reads its own batch with all repetitions.
            own = 2000 if kind == "table_wise" else 2000 * feature.distinct
            assert sum(found.reads[("", name)]) == pytest.approx(own + 2000 * feature.distinct)
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"))
    tables = present_tables(base(), plan)
    works = measured_request(planner, tables, found).works()
    tilings = [plan.plan[""][work.name.split(".")[-1]].tiling for work in works]
    predicted = price([t for t in tilings if t is not None], Model(Workload(works), Topology(2, "cpu")))
    for name in ("ids", "rows"):
        counted = sent.get(name, 0) + received.get(name, 0)
        assert sum(predicted.sent[name]) == pytest.approx(counted, rel=0.05), name


def test_sequences_and_shared_features_are_counted_too() -> None:
    torch.manual_seed(0)
    model_of = EmbeddingCollection(
        [
            EmbeddingConfig(ROWS, DIM, "x", feature_names=["a", "b"]),
            EmbeddingConfig(ROWS, DIM, "y", feature_names=["a"]),
        ]
    )

    def live(group: Group) -> Load:
        model = shard(copy.deepcopy(model_of), row_wise(), group)
        model(batch({"a": [3, 1], "b": [0, 4]}))
        return load_of(model)

    found, _ = run_virtual_ranks(2, live)
    assert [(f.feature, f.bags, f.ids) for f in found.features[("", "x")]] == [("a", 2, 4), ("b", 2, 4)]
    assert [(f.feature, f.bags, f.ids) for f in found.features[("", "y")]] == [("a", 2, 4)]
    assert sum(found.reads[("", "x")]) == 16
    assert "1 steps" in str(found)


def test_a_measured_drift_leads_to_the_move_that_its_load_asks_for() -> None:
    """Counted, not timed: first all tables alike, then two of them on one rank are read fifty times as much."""
    model_of = base()
    even = {n: [4] * 16 for n in NAMES}
    drifted = {"a": [200] * 16, "b": [200] * 16, "c": [4] * 16, "d": [4] * 16}

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), together(0), group)
        for seed in range(2):
            model(batch(even, seed=seed)).values().sum().backward()
        assert rebalance(model, planner(), horizon=10**6).moved is None
        for seed in range(2):
            model(batch(drifted, seed=seed)).values().sum().backward()
        found = rebalance(model, planner(), horizon=10**6)
        assert found.load.steps == 2
        assert found.load.imbalance > 1.9
        assert found.moved is not None
        model(batch(drifted)).values().sum().backward()
        assert load_of(model).imbalance < 1.1
        assert "done" in str(found)

    run_virtual_ranks(2, live)


# ------------------------------------------------------------------------------------------------------ the least move


def test_ranks_that_are_alike_are_renamed_so_that_less_moves() -> None:
    topology = Topology(4, "cpu", hosts=((0, 1), (2, 3)))
    now = ShardingPlan({"": {n: on(k) for k, n in enumerate(NAMES)}}, 4, topology.host_ranks)  # type: ignore[dict-item]
    swapped = ShardingPlan(
        {"": {n: on(rank) for rank, n in zip((3, 2, 0, 1), NAMES, strict=True)}},
        4,
        topology.host_ranks,  # type: ignore[dict-item]
    )
    made = permute_ranks(swapped, now, dict.fromkeys([("", n) for n in NAMES], 4), topology)
    assert made.plan[""] == now.plan[""]
    # A host's ranks stay together: what lies on one host in the plan does so with other names.
    parted = ShardingPlan(
        {"": {n: on(rank) for rank, n in zip((0, 2, 1, 3), NAMES, strict=True)}},
        4,
        topology.host_ranks,  # type: ignore[dict-item]
    )
    made = permute_ranks(parted, now, dict.fromkeys([("", n) for n in NAMES], 4), topology)
    hosts = {n: topology.host_of(s.tiling.ranks()[0]) for n, s in made.plan[""].items()}
    assert hosts["a"] == hosts["c"] != hosts["b"] == hosts["d"]


def test_renaming_keeps_what_a_sharding_type_says() -> None:
    topology = Topology(2, "cpu")
    rows = ParameterSharding(
        ShardingType.ROW_WISE,
        tiling=Tiling.of("t", ROWS, DIM, [(0, 500, 0, DIM, 0), (500, ROWS, 0, DIM, 1)]),
    )
    copies = ParameterSharding(
        ShardingType.DATA_PARALLEL, tiling=Tiling.of("t", ROWS, DIM, [(0, ROWS, 0, DIM, (0, 1))])
    )
    now = ShardingPlan({"": {"a": on(0), "b": rows, "c": copies, "d": on(1)}}, 2)  # type: ignore[dict-item]
    plan = ShardingPlan({"": {"a": on(1), "b": rows, "c": copies, "d": on(0)}}, 2)  # type: ignore[dict-item]
    made = permute_ranks(plan, now, {("", "a"): 8, ("", "b"): 4, ("", "c"): 4, ("", "d"): 8}, topology)
    assert made.plan[""]["a"].tiling == on(0).tiling
    assert made.plan[""]["b"].kind is ShardingType.ROW_WISE
    assert made.plan[""]["b"].ranks == (1, 0)
    assert made.plan[""]["c"].tiling == copies.tiling


def test_bytes_of_a_move_are_those_that_travel() -> None:
    topology = Topology(2, "cpu")
    halves = Tiling.of("t", 10, 4, [(0, 5, 0, 4, 0), (5, 10, 0, 4, 1)])
    whole = Tiling.of("t", 10, 4, [(0, 10, 0, 4, 0)])
    assert moved_bytes(halves, whole, 4, topology) == 5 * 4 * 4
    assert moved_bytes(whole, whole, 4, topology) == 0


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_parts_with_sharding_groups_of_their_own_sizes_are_planned_one_by_one(sync: Any) -> None:
    """Two hot tables of either part lie on one rank; each part parts them over its own group."""
    hot, cold = ["a", "b"], ["c", "d"]
    torch.manual_seed(0)
    base = torch.nn.ModuleDict(
        {
            path: EmbeddingBagCollection(
                [EmbeddingBagConfig(200, 64, name, feature_names=[name]) for name in [*hot, *cold]]
            )
            for path in ("x", "y")
        }
    )
    apply_optimizer_in_backward(SGD(lr=0.1), base.parameters())
    one = {name: table_wise(rank=0 if name in hot else 1) for name in [*hot, *cold]}
    whole = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in [*hot, *cold]}
    lengths = torch.tensor([[40] * 64] * 2 + [[1] * 64] * 2).view(-1)

    def live(group: Group) -> None:
        model = copy.deepcopy(base)
        configs = [GroupConfig({"x": one}, 2), GroupConfig({"y": one}, 4, paths=("y",))]
        two_d = shard_2d(model, lambda: (configs, {}), group, ReplicaSettings(sync))
        draw = torch.Generator().manual_seed(group.rank)
        batch = KeyedJaggedTensor(
            [*hot, *cold], torch.randint(200, (int(lengths.sum()),), generator=draw), lengths=lengths
        )
        for part in model.values():
            part(batch)
        vars(model)["_two_d"] = two_d  # as a DMPCollection keeps it
        loads = load_of(model, reset=False)
        assert set(loads.reads) == {(path, name) for path in ("x", "y") for name in [*hot, *cold]}
        planner = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=whole)
        found = rebalance(model, planner, step_seconds=10.0)
        owners = {
            (path, name): s.tiling.tiles()[0].owners for path, name, s in found.plan.tables() if s.tiling is not None
        }
        assert found.pays
        assert found.moved is not None
        now = {(path, name): table.tiling for path, part in model.items() for name, table in part._tables.items()}
        assert now == {(path, name): s.tiling for path, name, s in found.plan.tables()} or sync == "exact"
        for path in ("x", "y"):
            assert owners[(path, "a")] != owners[(path, "b")]
        with pytest.raises(ConfigError, match="load: got a int"):
            rebalance(model, planner, load=3)  # type: ignore[arg-type]

    run_virtual_ranks(4, live)
