"""`shard`: every collection below a model becomes this rank's tiles; what must agree is checked once."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.test_model_parallel import Pool
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection
from tilerec.sharding.table import ShardedTable
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adagrad, Adam, RowWiseAdagrad
from tilerec.spec.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    Wire,
)
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.ranks import run_ranks
from tilerec.testing.virtual import run_virtual_ranks


def rows_at(rows: int, dim: int, *cuts: int) -> Tiling:
    """Rows [0, cuts[0]) on rank 0, then [cuts[0], cuts[1]) on rank 1, …, the rest on the last."""
    edges = [0, *cuts, rows]
    return Tiling.of("t", rows, dim, [(a, b, 0, dim, r) for r, (a, b) in enumerate(itertools.pairwise(edges))])


def on(rows: int, dim: int, *ranks: int) -> Tiling:
    """Whole on these ranks."""
    return Tiling.of("t", rows, dim, [(0, rows, 0, dim, ranks)])


class Model(nn.Module):
    """Two collections, one table in both, and a dense layer."""

    def __init__(self, device: str | None = None, *, tied: bool = True) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(7, 4, "items", feature_names=["clicked", "bought"]),
                EmbeddingBagConfig(5, 4, "users", feature_names=["user"]),
            ],
            device=device,
        )
        self.ec = EmbeddingCollection([EmbeddingConfig(7, 4, "items", feature_names=["clicked"])], device=device)
        if tied:
            self.ec.embeddings["items"].weight = self.ebc.embedding_bags["items"].weight  # type: ignore[index]
        self.over = nn.Linear(12, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = torch.cat([jagged.values() for jagged in self.ec(features).values()])
        return cast(Tensor, self.over(self.ebc(features).values()).sum() + (rows * rows).sum())


def plan(first: Tiling | None = None, second: Tiling | None = None) -> dict[str, dict[str, Tiling]]:
    items = first or rows_at(7, 4, 5)
    return {"ebc": {"items": items, "users": on(5, 4, 1)}, "ec": {"items": second or items}}


def batch(rank: int, step: int = 0) -> KeyedJaggedTensor:
    return random_batch(["clicked", "bought", "user"], [7, 7, 5], 3, seed=10 * step + rank)


def raised(size: int, run: Callable[[Group], Any]) -> str:
    """The message of the ConfigError that every rank raises."""
    messages: list[str] = []

    def each(group: Group) -> None:
        with pytest.raises(ConfigError) as caught:
            run(group)
        messages.append(str(caught.value))

    run_virtual_ranks(size, each)
    assert len(messages) == size
    return messages[0]


# ---------------------------------------------------------------------------------------------- in place


def test_every_collection_below_the_model_is_sharded_in_place_under_its_names() -> None:
    torch.manual_seed(0)
    base = Model()
    names = list(base.state_dict())

    def run(group: Group) -> list[tuple[int, ...]]:
        model = copy.deepcopy(base)
        assert shard(model, plan=plan(), mesh=group) is model
        assert isinstance(model.ebc, ShardedEmbeddingBagCollection)
        assert list(dict(model.named_parameters(remove_duplicate=False))) == names
        assert all(p.is_leaf for p in model.parameters())
        return [tuple(p.shape) for p in model.parameters()][:2]

    assert run_virtual_ranks(2, run) == [[(5, 4), (0, 4)], [(2, 4), (5, 4)]]


def test_a_collection_can_be_the_model_itself() -> None:
    def run(group: Group) -> None:
        model = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["t"])])
        shard(model, plan={"t": rows_at(5, 4, 3)}, mesh=group)
        assert isinstance(model, ShardedEmbeddingBagCollection)
        assert list(cast(Any, model).plan.plan) == [""]

    run_virtual_ranks(2, run)


def test_values_of_a_pretrained_table_survive_with_its_optimizer_state() -> None:
    torch.manual_seed(0)
    base = Model()
    apply_optimizer_in_backward(Adam(lr=0.1), list(base.ebc.parameters()))
    base(batch(0)).backward()
    with torch.no_grad():
        base.ebc.embedding_bags["users"].weight.fill_(3.0)
    want = {name: value.clone() for name, value in base.state_dict().items()}
    state = base.ebc.fused_optimizer.state_dict()["state"]

    def run(group: Group) -> None:
        model = shard(copy.deepcopy(base), plan=plan(), mesh=group)
        got = full_state_dict(model)
        assert list(got) == list(want)
        assert all(torch.equal(got[name], want[name]) for name in want)
        for name, slots in cast(Any, model).ebc.fused_optimizer.full_state_dict()["state"].items():
            assert all(torch.equal(value, state[name][slot]) for slot, value in slots.items())
            assert int(slots["step"]) == 1

    run_virtual_ranks(2, run)


def test_tiles_of_a_table_on_meta_get_the_bits_of_the_whole_table() -> None:
    torch.manual_seed(3)
    whole = Model()
    torch.manual_seed(3)
    base = Model("meta")

    def run(group: Group) -> None:
        model = shard(copy.deepcopy(base), plan=plan(), mesh=group)
        got = full_state_dict(model)
        assert all(torch.equal(got[n], v) for n, v in whole.state_dict().items() if n.startswith("e"))

    run_virtual_ranks(2, run)


@pytest.mark.parametrize("device", [None, "meta"])
def test_ranks_that_drew_other_seeds_or_read_other_values_get_rank_0s(device: str | None) -> None:
    torch.manual_seed(0)
    bases = [Model(device), Model(device)]
    for base in bases:
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(base.ebc.parameters()))
    bases[0].over.load_state_dict(bases[1].over.state_dict())
    assert bases[0].ebc.seed != bases[1].ebc.seed
    if device is None:
        bases[0](batch(0)).backward()
        want = {name: value.clone() for name, value in bases[0].state_dict().items()}
        state = bases[0].ebc.fused_optimizer.state_dict()["state"]
    both = plan(on(7, 4, 0, 1))

    def run(group: Group) -> tuple[dict[str, Tensor], int]:
        model = cast(Any, shard(copy.deepcopy(bases[group.rank]), plan=both, mesh=group))
        got = {"items": model.ebc.embedding_bags["items"].weight.detach(), **full_state_dict(model)}
        if device is None:
            assert all(torch.equal(got[name], want[name]) for name in want)
            sums = model.ebc.fused_optimizer.full_state_dict()["state"]
            assert all(torch.equal(sums[name]["sum"], state[name]["sum"]) for name in state)
        return got, group.traffic.total()

    (first, _), (second, _) = run_virtual_ranks(2, run)
    assert all(torch.equal(first[name], second[name]) for name in first if not name.startswith("over"))


def test_equal_models_send_no_values() -> None:
    torch.manual_seed(0)
    base = Model()

    def run(group: Group) -> int:
        shard(copy.deepcopy(base), plan=plan(), mesh=group)
        return group.traffic.total()

    assert run_virtual_ranks(2, run) == [0, 0]


def meta_table_of_4_gib() -> tuple[int, int]:
    rows, dim = 2**24, 64
    model = EmbeddingBagCollection([EmbeddingBagConfig(rows, dim, "t", feature_names=["t"])], device="meta")
    tiles = [(0, 2**16, 0, dim, 0), (2**16, rows, 0, dim, 1)]
    device = "cpu" if ProcessGroupComms().rank == 0 else "meta"
    before = _peak_bytes()
    shard(model, plan={"t": Tiling.of("t", rows, dim, tiles)}, device=device)
    return _peak_bytes() - before, sum(p.nbytes for p in model.parameters() if not p.is_meta)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_of_a_meta_table_is_its_tiles() -> None:
    (grown, held), _ = run_ranks(2, meta_table_of_4_gib)
    assert held == 2**16 * 64 * 4
    assert grown < held + 64 * 2**20  # the whole table is 4 GiB


# ---------------------------------------------------------------------------------------------- plans


def test_a_plan_may_be_an_object_a_file_or_words(tmp_path: Path) -> None:
    spelled = ShardingPlan(
        {
            "ebc": EmbeddingModuleShardingPlan(
                {
                    "items": ParameterSharding(ShardingType.ROW_WISE),
                    "users": ParameterSharding("table_wise", ranks=[1], wire=Wire("bf16", "bf16")),
                }
            ),
            "ec": EmbeddingModuleShardingPlan({"items": ParameterSharding("row_wise")}),
        }
    )
    path = tmp_path / "plan.json"
    spelled.save(path)
    torch.manual_seed(0)
    base = Model()

    def run(group: Group) -> None:
        plans = [spelled, path, str(path), {"ebc": dict(spelled.plan["ebc"]), "ec": dict(spelled.plan["ec"])}]
        made = [cast(Any, shard(copy.deepcopy(base), plan=each, mesh=group)) for each in plans]
        assert len({model.plan.fingerprint() for model in made}) == 1
        whole = made[0].plan
        assert whole.world_size == 2
        assert whole.hosts == ((0, 1),)
        assert whole.plan["ebc"]["items"].tiling == rows_at(7, 4, 4)
        assert whole.plan["ebc"]["users"].wire == Wire("bf16", "bf16")
        assert all(name in str(whole) for name in ("items", "users", "row_wise", "table_wise"))

    run_virtual_ranks(2, run)


def test_without_a_plan_the_planner_makes_one_and_tied_tables_lie_alike() -> None:
    torch.manual_seed(0)
    base = Model()
    want = base.state_dict()

    def run(group: Group) -> ShardingPlan:
        model = cast(Any, shard(copy.deepcopy(base), mesh=group))
        got = full_state_dict(model)
        assert all(torch.equal(got[name], want[name]) for name in want)
        return cast(ShardingPlan, model.plan)

    first, second = run_virtual_ranks(2, run)
    assert first == second
    assert first.plan["ebc"]["items"].tiling == first.plan["ec"]["items"].tiling


def test_a_plan_that_forgets_a_table_is_refused() -> None:
    forgetful = plan()
    del forgetful["ebc"]["users"]
    assert "'users' of module 'ebc'" in raised(2, lambda group: shard(Model(), plan=forgetful, mesh=group))
    assert "module 'ec'" in raised(2, lambda group: shard(Model(), plan={"ebc": plan()["ebc"]}, mesh=group))


def test_a_plan_for_another_model_or_world_is_refused() -> None:
    other = {**plan(), "tower.ebc": plan()["ebc"]}
    assert "module 'tower.ebc'" in raised(2, lambda group: shard(Model(), plan=other, mesh=group))
    far = plan(on(7, 4, 0, 3))
    assert "rank 3" in raised(2, lambda group: shard(Model(), plan=far, mesh=group))
    bigger = plan(rows_at(8, 4, 4))
    assert "7 x 4" in raised(2, lambda group: shard(Model(), plan=bigger, mesh=group))
    parts = {path: EmbeddingModuleShardingPlan({}) for path in ("ebc", "ec")}
    message = raised(2, lambda group: shard(Model(), plan=ShardingPlan(parts, world_size=4), mesh=group))
    assert "got a plan for 4 ranks; expected one for the 2 ranks" in message
    elsewhere = ShardingPlan(parts, hosts=[[0, 1], [2, 3]])
    assert "hosts" in raised(2, lambda group: shard(Model(), plan=elsewhere, mesh=group))
    made_for_2 = ShardingPlan(parts, world_size=2, hosts=[[0], [1]])
    assert "got a plan for 2 ranks; expected one for the 3 ranks" in raised(
        3, lambda group: shard(Model(), plan=made_for_2, mesh=group)
    )


def test_a_rank_that_refuses_is_heard_by_the_others() -> None:
    def run(group: Group) -> None:
        model = Model() if group.rank != 1 else nn.ModuleDict({"ebc": Model().ebc})
        shard(model, plan=plan(), mesh=group)

    messages: list[str] = []

    def each(group: Group) -> None:
        with pytest.raises(ConfigError) as caught:
            run(group)
        messages.append(str(caught.value))

    run_virtual_ranks(3, each)
    assert len(messages) == 3
    heard = [message for message in messages if "'passed' on ranks 0, 2" in message and "rank 1" in message]
    assert len(heard) == 2  # the third is rank 1's own error, whole


def test_what_a_plan_knows_of_bags_reaches_the_layout() -> None:
    single = ParameterSharding("row_wise", ids_per_bag=1.0)
    words = {"ebc": {"items": single, "users": on(5, 4, 1)}, "ec": {"items": single}}

    def run(group: Group) -> None:
        model = cast(Any, shard(Model(), plan=words, mesh=group))
        assert [table.fan_in for table in model.ebc.exchange.layout.tables] == [1.0, 2.0]

    run_virtual_ranks(2, run)


@pytest.mark.parametrize("wrong", [3, {"ebc": 1}, {"ebc": {"items": "row_wise"}}])
def test_what_is_no_plan_is_named(wrong: Any) -> None:
    assert "; expected " in raised(1, lambda group: shard(Model(), plan=wrong, mesh=group))


def test_ranks_with_different_plans_are_named() -> None:
    def run(group: Group) -> None:
        shard(Model(), plan=plan(rows_at(7, 4, 4 + group.rank)), mesh=group)

    message = raised(2, run)
    assert "plan.ebc." in message
    assert "items" in message
    assert "rank 1" in message


def test_ranks_with_different_tables_or_options_are_named() -> None:
    def other_features(group: Group) -> None:
        feature = "b" if group.rank == 2 else "a"
        model = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "t", feature_names=[feature])])
        shard(model, plan={"t": on(6, 4, 0, 1, 2)}, mesh=group)

    message = raised(3, other_features)
    assert "features" in message
    assert "rank 2" in message

    def other_options(group: Group) -> None:
        shard(Model(), plan=plan(), mesh=group, exact=group.rank == 0)

    assert "exact" in raised(2, other_options)

    def other_optimizers(group: Group) -> None:
        model = Model()
        apply_optimizer_in_backward(Adagrad(lr=0.1 + group.rank), list(model.ebc.parameters()))
        shard(model, plan=plan(), mesh=group)

    assert ".optimizer.lr is" in raised(2, other_optimizers)


def test_a_tiling_that_the_optimizer_cannot_add_rows_under_is_refused_before_anything_changes() -> None:
    crossed = Tiling.of("t", 7, 4, [(0, 3, 0, 2, 0), (3, 7, 0, 2, 1), (0, 4, 2, 4, 1), (4, 7, 2, 4, 0)])
    models: list[Model] = []

    def run(group: Group) -> None:
        model = Model()
        models.append(model)
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), [model.ebc.embedding_bags["items"].weight])
        shard(model, plan=plan(crossed), mesh=group)

    message = raised(2, run)
    assert "RowWiseAdagrad needs sums over whole rows" in message
    assert not any(isinstance(part, ShardedTable) for model in models for part in model.modules())


def test_a_topology_for_another_number_of_ranks_is_refused() -> None:
    message = raised(2, lambda group: shard(Model(), plan=plan(), mesh=group, topology=Topology(4, "cpu")))
    assert "4 ranks" in message


def test_hosts_come_from_the_topology_or_the_plan() -> None:
    hosts = ((0, 1), (2, 3))
    by_type = {"ebc": {"items": ParameterSharding("table_row_wise", ranks=[2, 3]), "users": on(5, 4, 1)}}
    by_type["ec"] = {"items": by_type["ebc"]["items"]}

    def run(group: Group) -> None:
        told = cast(Any, shard(Model(), plan=by_type, mesh=group, topology=Topology(4, "cpu", hosts=hosts)))
        assert told.plan.hosts == hosts
        assert told.plan.plan["ebc"]["items"].tiling.ranks() == (2, 3)
        planned = cast(Any, shard(Model(), plan=told.plan, mesh=group))
        assert planned.plan.hosts == planned.ebc.exchange.topology.hosts == hosts

    run_virtual_ranks(4, run)


def launched() -> list[tuple[tuple[int, ...], ...]]:
    made = []
    for group in (ProcessGroupComms(), ProcessGroupComms().partition("pairs", [[0, 2], [1, 3]])):
        model = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "t", feature_names=["t"])])
        shard(model, plan={"t": on(6, 4, 0)}, mesh=group)
        made.append(cast(Any, model).plan.hosts)
    return made


def test_hosts_come_from_the_launcher_otherwise_also_for_a_part_of_the_ranks() -> None:
    whole, part = run_ranks(4, launched, hosts=2)[0]
    assert whole == ((0, 1), (2, 3))
    assert part == ((0,), (1,))


# ---------------------------------------------------------------------------------------------- ties


@pytest.mark.parametrize("exact", [False, True])
def test_a_table_of_two_collections_stays_one_table_with_one_state(exact: bool) -> None:
    torch.manual_seed(0)
    base = Model()
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.ebc.parameters()))
    reference = copy.deepcopy(base)
    for step in range(3):
        loss = reference(concat_batches([batch(0, step), batch(1, step)]))
        loss.backward()

    def run(group: Group) -> None:
        model = cast(Any, shard(copy.deepcopy(base), plan=plan(), mesh=group, exact=exact))
        one, other = model.ebc.embedding_bags["items"], model.ec.embeddings["items"]
        assert one.weight is other.weight
        assert one.rows is other.rows
        assert isinstance(other, ShardedTable)
        for step in range(3):
            (2 * model(batch(group.rank, step))).backward()
        got = full_state_dict(model)
        for name in ("ebc.embedding_bags.items.weight", "ec.embeddings.items.weight"):
            torch.testing.assert_close(got[name], reference.state_dict()[name], rtol=1e-5, atol=1e-6)
        state = model.ebc.fused_optimizer.full_state_dict()["state"]["embedding_bags.items.weight"]
        assert int(state["step"]) == 3

    run_virtual_ranks(2, run)


def test_tied_tables_stay_one_through_a_conversion() -> None:
    def run(group: Group) -> None:
        model = cast(Any, shard(Model(), plan=plan(), mesh=group)).to(torch.bfloat16)
        assert model.ebc.embedding_bags["items"].weight is model.ec.embeddings["items"].weight
        assert model.ec.embeddings["items"].weight.dtype == torch.bfloat16

    run_virtual_ranks(2, run)


def test_plans_that_cut_a_tied_table_in_two_ways_are_refused() -> None:
    apart = plan(rows_at(7, 4, 5), rows_at(7, 4, 4))
    assert "same table" in raised(2, lambda group: shard(Model(), plan=apart, mesh=group))


def test_a_table_that_is_tied_to_a_collection_outside_is_refused() -> None:
    keep = Model()
    message = raised(1, lambda group: shard(keep.ebc, plan={"items": on(7, 4, 0), "users": on(5, 4, 0)}, mesh=group))
    assert "shared with a collection" in message


def test_a_table_module_of_two_collections_is_not_sharded_with_one_of_them_first() -> None:
    def run(group: Group) -> None:
        configs = [EmbeddingBagConfig(7, 4, "items", feature_names=["f"])]
        first, second = EmbeddingBagCollection(configs), EmbeddingBagCollection(configs)
        second.embedding_bags["items"] = first.embedding_bags["items"]
        whole = {"items": on(7, 4, 0)}
        shard(first, plan=whole, mesh=group)
        with pytest.raises(ConfigError, match="is also in a collection that is sharded already"):
            shard(second, plan=whole, mesh=group)

    run_virtual_ranks(1, run)


# ---------------------------------------------------------------------------------------------- others


def test_a_model_is_sharded_once() -> None:
    def run(group: Group) -> None:
        model = shard(Model(), plan=plan(), mesh=group)
        with pytest.raises(ConfigError, match="sharded already"):
            shard(model, plan=plan(), mesh=group)

    run_virtual_ranks(2, run)


def test_a_model_without_tables_is_warned_about() -> None:
    def run(group: Group) -> None:
        with pytest.warns(UserWarning, match="nothing to do"):
            shard(nn.Linear(2, 2), mesh=group)

    run_virtual_ranks(1, run)


# ---------------------------------------------------------------------------------------------- TorchRec's arguments


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in ("a", "b")])


def tilings_of(module: nn.Module) -> dict[str, Tiling]:
    return {name: cast(Tiling, s.tiling) for _, name, s in plan_of(module).tables()}


def test_shard_takes_its_arguments_in_torchrecs_order() -> None:
    def run(group: Group) -> None:
        module = bags()
        sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5}, Wire("bf16", "bf16"))
        by_hand = construct_module_sharding_plan(
            module, apply_to_all(module, row_wise()), sharder, world_size=2, local_size=2, device_type="cpu"
        )
        shard(module, by_hand, group, torch.device("cpu"), sharder)
        assert set(tilings_of(module).values()) == {rows_at(8, 4, 4)}
        assert {s.wire for _, _, s in plan_of(module).tables()} == {Wire("bf16", "bf16")}
        assert [str(g["optimizer"]) for g in cast(Any, module).fused_optimizer.param_groups] == ["SGD"]

    run_virtual_ranks(2, run)


def on_an_environment() -> list[tuple[int, ...]]:
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    modules = [
        shard(bags(), row_wise(), env),
        shard(bags(), row_wise(), mesh=env),
        shard(bags(), row_wise(), dist.group.WORLD),
    ]
    return [tilings_of(module)["a"].ranks() for module in modules]


def test_an_environment_a_process_group_or_nothing_says_the_ranks(pool: Pool) -> None:
    assert pool(2).run(on_an_environment) == [[(0, 1)] * 3] * 2
    env = ShardingEnv.from_local(1, 0)
    assert tilings_of(shard(bags(), None, env))["a"].ranks() == (0,)
    with pytest.raises(ConfigError, match="got both env and mesh, two names of one argument"):
        shard(bags(), None, env, mesh=env)
    with pytest.raises(ConfigError, match="shard: env: got a str; expected a ShardingEnv"):
        shard(bags(), None, "world")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard: mesh: got a int; expected a ShardingEnv"):
        shard(bags(), mesh=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shard: plan: got a ShardingEnv; expected a ShardingPlan"):
        shard(bags(), env, env)  # type: ignore[arg-type]


def test_what_helpers_return_is_a_plan_of_a_table_of_a_module_or_of_all() -> None:
    rows, whole = rows_at(8, 4, 4), on(8, 4, 1)

    def run(group: Group) -> None:
        assert tilings_of(shard(bags(), row_wise(), group)) == {"a": rows, "b": rows}
        mixed = {"a": row_wise(), "b": table_wise(rank=1)}
        assert tilings_of(shard(bags(), mixed, group)) == {"a": rows, "b": whole}
        assert tilings_of(shard(bags(), {"": table_wise(1)}, group)) == {"a": whole, "b": whole}
        assert tilings_of(shard(bags(), {"a": whole, "b": row_wise()}, group)) == {"a": whole, "b": rows}
        uneven = row_wise(([2, 6], "cpu"))
        assert tilings_of(shard(bags(), uneven, group))["a"] == rows_at(8, 4, 2)
        model = shard(Model(tied=False), {"ebc": row_wise(), "ec": {"items": table_wise(1)}}, group)
        assert plan_of(model).plan["ec"]["items"].tiling == on(7, 4, 1)
        assert plan_of(shard(Model(), column_wise(), group)).plan["ebc"]["users"].kind == "column_wise"
        dense = shard(bags(), row_wise(compute_kernel="dense"), group)
        assert {s.compute_kernel for _, _, s in plan_of(dense).tables()} == {"dense"}

    run_virtual_ranks(2, run)


def test_helpers_of_hosts_cut_by_the_hosts_of_this_world() -> None:
    hosts = ((0, 1), (2, 3))

    def run(group: Group) -> None:
        topology = Topology(4, "cpu", hosts=hosts)
        cut = tilings_of(shard(bags(), {"a": table_row_wise(1), "b": row_wise()}, group, topology=topology))
        assert cut["a"].ranks() == (2, 3)
        part = EmbeddingModuleShardingPlan({"a": table_row_wise(1), "b": row_wise()}, hosts=hosts)  # type: ignore
        assert tilings_of(shard(bags(), part, group)) == cut

    run_virtual_ranks(4, run)


def test_a_cut_of_what_the_model_lacks_is_refused_with_its_place() -> None:
    message = raised(2, lambda group: shard(Model(), {"items": row_wise()}, group))
    assert "plan: got 'items'; expected paths of the model's collections, ['ebc', 'ec']" in message
    assert "plan={'ebc': {'items': …}}" in message
    message = raised(2, lambda group: shard(Model(), {"ebc": {"shop": row_wise()}}, group))
    assert "plan['ebc']: got table 'shop'; expected the tables of the module, ['items', 'users']" in message
    message = raised(2, lambda group: shard(bags(), {"a": table_wise(5), "b": row_wise()}, group))
    assert "names rank 5; the world has ranks 0 to 1" in message
    message = raised(2, lambda group: shard(bags(), {"a": row_wise()}, group))
    assert "table 'b'" in message
    assert "called, not the helper itself" in raised(
        2, lambda group: shard(bags(), {"a": row_wise, "b": row_wise}, group)
    )


def test_a_sharder_of_shard_is_one_or_a_list_and_is_named_if_it_is_none() -> None:
    alone = ShardingEnv.from_local(1, 0)
    both = [EmbeddingBagCollectionSharder({"learning_rate": 0.5}), EmbeddingCollectionSharder()]
    model = shard(Model(tied=False), None, alone, sharder=both)
    assert plan_of(model).plan["ebc"]["items"].compute_kernel == "fused"
    assert plan_of(model).plan["ec"]["items"].compute_kernel == "dense"
    with pytest.raises(ConfigError, match=r"shard: sharder is the class Emb.*wanted a sharder of it"):
        shard(bags(), None, alone, sharder=EmbeddingBagCollectionSharder)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"shard: sharder is a str; wanted a sharder"):
        shard(bags(), None, alone, sharder="fused")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"shard: sharders\[0\] and sharders\[1\] are both for"):
        shard(bags(), None, alone, sharder=[both[0], both[0]])


@pytest.mark.parametrize("planner", ["shard's own", "the caller's"])
def test_a_format_that_a_planner_has_put_into_the_plan_has_an_effect(planner: str) -> None:
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=Wire("bf16", "fp16"))
    model = bags()
    plan = None if planner == "shard's own" else EmbeddingShardingPlanner().plan(model, [sharder])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(model, plan, ShardingEnv.from_local(1, 0), sharder=[sharder])
    assert {s.wire for _, _, s in plan_of(model).tables()} == {Wire("bf16", "fp16")}


def test_a_collection_without_tables_is_left_as_it_is() -> None:
    def run(group: Group) -> None:
        tables = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["a"])])
        model = nn.ModuleList([EmbeddingBagCollection([]), tables])
        shard(model, {"1": {"t": row_wise()}}, group)
        assert isinstance(model[1], ShardedEmbeddingBagCollection)
        batch = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        assert model[0](batch).values().shape == (2, 0)
        assert model[1](batch).values().shape == (2, 4)

    run_virtual_ranks(2, run)
