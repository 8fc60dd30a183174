"""`shard_2d`: plans of one sharding group, parts with groups of other sizes, hosts, and what ranks must agree on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import LRU_EvictionPolicy
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.interrupts import Interrupts
from tilerec.parallel.resharding.mover import MoveOptions
from tilerec.parallel.resharding.reshard_2d import reshard_2d
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.helpers import grid_shard, row_wise, table_row_wise, table_wise
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, RowWiseAdagrad
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks


class Model(nn.Module):
    """Two collections, one of them deeper."""

    def __init__(self, init_fn: Callable[[Tensor], None] | None = None, device: str | None = None) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(12, 8, name, feature_names=[name], init_fn=init_fn) for name in ("a", "b")]
        self.ebc = EmbeddingBagCollection(tables, device=device)
        self.deep = nn.ModuleDict(
            {"ec": EmbeddingCollection([EmbeddingConfig(9, 4, "c", feature_names=["c"])], device=device)}
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = torch.cat([jagged.values() for jagged in self.deep["ec"](features).values()])
        return self.ebc(features).values().square().sum() + rows.square().sum()


def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(made.parameters()))
    return made


def batch(rank: int, step: int = 0) -> KeyedJaggedTensor:
    return random_batch(["a", "b", "c"], {"a": 12, "b": 12, "c": 9}, 3, seed=10 * step + rank)


def train(module: Model, group: Group, two: TwoD | None = None, steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        (module(batch(group.rank, step)) * group.size).backward()
        if two is not None:
            two.sync_if_due()
    return full_state_dict(module)


def unsharded(size: int, steps: int = 3) -> dict[str, Tensor]:
    module = model()
    for step in range(steps):
        module(concat_batches([batch(rank, step) for rank in range(size)])).backward()
    return {name: p.detach() for name, p in module.named_parameters()}


def assert_like(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.allclose(got[name], value, rtol=1e-6, atol=1e-6), name


EXACT, AVERAGE = ReplicaSettings("exact"), ReplicaSettings("average", 1)


# ---------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("settings", [EXACT, AVERAGE], ids=["exact", "average"])
def test_the_users_plan_stays_as_it_was_and_serves_two_worlds_at_once(settings: ReplicaSettings) -> None:
    """One process, one plan object, models of two group sizes whose steps interleave."""
    half = {"a": Tiling.of("a", 12, 8, [(0, 5, 0, 8, 0), (5, 12, 0, 8, 1)]), "b": table_wise(rank=1)}
    plan: dict[str, Any] = {"ebc": half, "deep.ec": row_wise()}
    before = copy.deepcopy(plan["ebc"]["a"]), dict(plan["ebc"])
    base, want = model(), unsharded(4)

    def run(group: Group) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        first, second = copy.deepcopy(base), copy.deepcopy(base)
        one = shard_2d(first, lambda: ([GroupConfig(plan, 2)], {}), group, settings)
        other = shard_2d(second, lambda: ([GroupConfig(None, 4)], {}), group, settings)
        for step in range(3):
            for module, two in ((first, one), (second, other)):
                (module(batch(group.rank, step)) * 4).backward()
                two.sync_if_due()
        return full_state_dict(first), full_state_dict(second)

    for first, second in run_virtual_ranks(4, run):
        assert_like(second, want)  # one replica: whatever keeps replicas together
        if settings is EXACT:
            assert_like(first, want)
    assert (plan["ebc"]["a"], plan["ebc"]) == before


def test_without_a_plan_one_sharding_group_is_planned_for() -> None:
    base, want = model(), unsharded(4)

    def run(group: Group) -> tuple[dict[str, Tensor], int | None, int | None, str]:
        module = copy.deepcopy(base)
        two = shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, EXACT)
        plan = two.parts[0].plan
        assert plan.report is not None
        return train(module, group), plan.group_plan.world_size, plan_of(module).world_size, str(plan)

    for state, of_group, of_world, text in run_virtual_ranks(4, run):
        assert_like(state, want)
        assert (of_group, of_world) == (2, 4)
        assert "4 ranks = 2 replicas x 2 shards" in text
        assert "plan for 2 ranks" in text


def test_a_saved_plan_may_be_passed_again(tmp_path: Any) -> None:
    base, path = model(), tmp_path / "plan.json"

    def run(group: Group) -> bool:
        plan = {"ebc": row_wise(), "deep.ec": row_wise()}
        first = shard_2d(copy.deepcopy(base), lambda: ([GroupConfig(plan, 2)], {}), group, EXACT).parts[0].plan
        if group.rank == 0:
            first.save(path)
        group.barrier()
        second = shard_2d(copy.deepcopy(base), lambda: ([GroupConfig(str(path), 2)], {}), group, EXACT).parts[0].plan
        assert first.held_by(group.rank) == second.held_by(group.rank)
        return first.group_plan == second.group_plan

    assert all(run_virtual_ranks(4, run))


def refused(base: nn.Module, config: GroupConfig, size: int = 4, settings: ReplicaSettings = EXACT) -> list[str]:
    def run(group: Group) -> str:
        module = copy.deepcopy(base)
        names = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
        with pytest.raises(ConfigError) as caught:
            shard_2d(module, lambda: ([config], {}), group, settings)
        assert [(name, tuple(p.shape)) for name, p in module.named_parameters()] == names, "as it was"
        return str(caught.value)

    return run_virtual_ranks(size, run)


def test_a_plan_of_another_number_of_ranks_is_refused_on_all_ranks() -> None:
    base = model()
    whole = {"ebc": row_wise(), "deep.ec": row_wise()}

    def planned(group: Group) -> ShardingPlan:
        module = copy.deepcopy(base)
        return shard_2d(module, lambda: ([GroupConfig(whole, 4)], {}), group, EXACT).parts[0].plan.group_plan

    plan = run_virtual_ranks(4, planned)[0]
    for text in refused(base, GroupConfig(plan, 2)):
        assert "got a plan for 4 ranks" in text
        assert "a plan is for one sharding group: 2 ranks, numbered from 0, of the 4 ranks of the world" in text
    for text in refused(base, GroupConfig({"ebc": table_wise(rank=2), "deep.ec": row_wise()}, 2)):
        assert "a plan is for one sharding group: 2 ranks" in text
    for text in refused(base, GroupConfig({"ebc": row_wise()}, 2)):
        assert "'deep.ec'" in text


def test_group_sizes_and_node_group_sizes_that_do_not_fit_are_refused_on_all_ranks() -> None:
    base = model()
    for text in refused(base, GroupConfig(None, 3)):
        assert "got 3; expected a divisor of the world size 4: 1, 2, 4." in text
    for node in (0, 3, True):
        for text in refused(base, GroupConfig(None, 2, node)):
            assert f"node_group_size: got {node!r}; expected" in text


# ---------------------------------------------------------------------------------------------------- hosts


HOSTS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("config", "hosts", "said"),
    [
        (GroupConfig(None, 4), ((0, 1), (2, 3)), "as the machines are"),
        (GroupConfig(None, 4, across_hosts=True), ((0, 1, 2, 3),), "as the machines are"),
        (GroupConfig(None, 4, 1), ((0,), (1,), (2,), (3,)), "runs of node_group_size members"),
        (GroupConfig(None, 4, 2), ((0, 1), (2, 3)), "runs of node_group_size members"),
    ],
)
def test_hosts_of_a_group_are_the_machines_or_what_node_group_size_says(
    config: GroupConfig, hosts: tuple[tuple[int, ...], ...], said: str
) -> None:
    torch.manual_seed(0)
    base = EmbeddingBagCollection([EmbeddingBagConfig(12, 8, name, feature_names=["a"]) for name in ("x", "y")])
    plan = {"x": table_row_wise(host_index=len(hosts) - 1), "y": grid_shard([0])}
    topology = Topology(8, "cpu", hosts=HOSTS)

    def run(group: Group) -> tuple[Any, str]:
        own = GroupConfig(plan, config.group_size, config.node_group_size, config.across_hosts)
        plan_ = shard_2d(copy.deepcopy(base), lambda: ([own], {}), group, EXACT, topology).parts[0].plan
        return (plan_.tiling("", "x").ranks(), plan_.tiling("", "y").ranks(), plan_.group_plan.hosts), str(plan_)

    for got, text in run_virtual_ranks(8, run):
        assert got == (hosts[-1], hosts[0], hosts)
        assert f"hosts below      {said}" in text


def test_a_node_group_size_that_does_not_divide_the_group_is_warned_of() -> None:
    base = model()

    def run(group: Group) -> Any:
        return (
            shard_2d(copy.deepcopy(base), lambda: ([GroupConfig(None, 4, 3)], {}), group, EXACT)
            .parts[0]
            .plan.group_plan.hosts
        )

    with pytest.warns(UserWarning, match="node_group_size=3 does not divide the sharding group's 4 ranks"):
        assert run_virtual_ranks(4, run) == [((0, 1, 2), (3,))] * 4


def test_a_topology_of_one_sharding_group_is_refused() -> None:
    def run(group: Group) -> str:
        with pytest.raises(ConfigError) as caught:
            shard_2d(model(), lambda: ([GroupConfig(None, 2)], {}), group, EXACT, Topology(2, "cpu"))
        return str(caught.value)

    assert all("of all ranks, not of one sharding group" in text for text in run_virtual_ranks(4, run))


# ---------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_parts_of_a_model_have_groups_of_their_own_size(sync: Any) -> None:
    base, want = model(), unsharded(4)

    def run(group: Group) -> tuple[dict[str, Tensor], list[str], list[int]]:
        module = copy.deepcopy(base)
        configs = [GroupConfig(None, 2), GroupConfig(None, 4, across_hosts=True, paths=("deep.ec",))]
        two = shard_2d(module, lambda: (configs, {}), group, ReplicaSettings(sync, 1 if sync == "average" else None))
        state = train(module, group, two)
        kinds = [type(part).__name__ for part in (module.ebc, module.deep["ec"])]
        plan = plan_of(module)
        assert set(plan.plan) == {"ebc", "deep.ec"}
        # Averaged parts lie on groups of different sizes: no number of ranks is that of all.
        assert plan.world_size == (4 if sync == "exact" else None)
        assert plan.plan["deep.ec"]["c"].tiling == module.deep["ec"]._tables["c"].tiling
        return state, kinds, [part.plan.grid.group_size for part in two.parts]

    for state, kinds, sizes in run_virtual_ranks(4, run):
        assert kinds == ["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]
        assert sizes == [2, 4]
        name = "deep.ec.embeddings.c.weight"
        assert torch.allclose(state[name], want[name], atol=1e-6)
        if sync == "exact":
            assert_like(state, want)


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_a_plan_is_of_the_parts_that_have_tables(sync: Any) -> None:
    """All of them may be in a sub-config; then there is nothing in the first part."""
    base = model()

    def run(group: Group) -> None:
        module = copy.deepcopy(base)
        configs = [GroupConfig(None, 2), GroupConfig(None, 4, paths=("ebc", "deep.ec"))]
        shard_2d(module, lambda: (configs, {}), group, ReplicaSettings(sync))
        assert (set(plan_of(module).plan), plan_of(module).world_size) == ({"ebc", "deep.ec"}, 4)

    run_virtual_ranks(4, run)


def test_the_plan_of_averaged_parts_stays_that_of_all_when_one_moves() -> None:
    base = model()

    def run(group: Group) -> None:
        module = copy.deepcopy(base)
        rows = {"ebc": row_wise(), "deep.ec": row_wise()}
        two = shard_2d(
            module,
            lambda: ([GroupConfig(rows, 2), GroupConfig(rows, 4, paths=("deep.ec",))], {}),
            group,
            AVERAGE,
        )
        train(module, group, two, steps=1)
        plan = {"ebc": {"a": table_wise(rank=1), "b": row_wise()}, "deep.ec": table_wise(rank=3)}
        reshard_2d(module, two, plan, MoveOptions(None, False, None, 0.0, Interrupts()))
        now = plan_of(module)
        assert now.world_size is None
        assert now.plan["ebc"]["a"].tiling == module.ebc._tables["a"].tiling
        assert now.plan["deep.ec"]["c"].ranks == (3,)
        assert now.plan["ebc"]["a"].ranks == (1,)
        train(module, group, two, steps=1)

    run_virtual_ranks(4, run)


def test_a_plan_file_leaves_out_what_other_parts_plan(tmp_path: Path) -> None:
    base = model()

    def run(group: Group, plan: Any) -> list[str]:
        module = copy.deepcopy(base)
        configs = [GroupConfig(plan, 2), GroupConfig(None, 4, paths=("deep.ec",))]
        return [
            part.plan.group_plan.dumps()
            for part in shard_2d(module, lambda: (configs, {}), group, ReplicaSettings()).parts
        ]

    def planned(group: Group) -> str:
        two = shard_2d(copy.deepcopy(base), lambda: ([GroupConfig(None, 2)], {}), group, ReplicaSettings())
        return two.parts[0].plan.group_plan.dumps()

    path = tmp_path / "plan.json"
    path.write_text(run_virtual_ranks(4, planned)[0])
    for plan in (path, str(path)):
        assert run_virtual_ranks(4, run, plan) == run_virtual_ranks(4, run, ShardingPlan.load(path))


# ---------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    ("settings", "config", "word"),
    [
        (ReplicaSettings("average", 1), GroupConfig(None, 2), "sync"),
        (ReplicaSettings("exact", exact=True), GroupConfig(None, 2), "exact"),
        (EXACT, GroupConfig(None, 4), "sharding_group_size"),
        (EXACT, GroupConfig(None, 3), "checks"),
        (EXACT, GroupConfig(None, 2, across_hosts=True), "use_inter_host_allreduce"),
        (EXACT, GroupConfig({"ebc": row_wise(), "deep.ec": table_wise(rank=1)}, 2), "plan"),
        (ReplicaSettings("average", 0), GroupConfig(None, 2), "checks"),
        (ReplicaSettings("average", 4), GroupConfig(None, 2), "sync"),
    ],
)
def test_ranks_with_different_settings_hear_it_on_all_ranks(
    settings: ReplicaSettings, config: GroupConfig, word: str
) -> None:
    base = model()
    plain = {"ebc": row_wise(), "deep.ec": row_wise()}

    def run(group: Group) -> str:
        odd = group.rank == 2
        own = config if odd else GroupConfig(plain, 2)
        if odd and own.plan is None:
            own = GroupConfig(plain, config.group_size, None, config.across_hosts)
        module = copy.deepcopy(base)
        with pytest.raises(ConfigError) as caught:
            shard_2d(module, lambda: ([own], {}), group, settings if odd else EXACT)
        assert type(module.ebc) is EmbeddingBagCollection
        return str(caught.value)

    texts = run_virtual_ranks(4, run)
    for rank, text in enumerate(texts):
        assert rank == 2 or ("differs between ranks" in text and word in text), text


def test_ranks_that_hold_other_values_start_from_rank_0s_in_every_group() -> None:
    def run(group: Group, sync: Any) -> dict[str, Tensor]:
        module = Model()
        generator = torch.Generator().manual_seed(group.rank)
        for parameter in module.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        apply_optimizer_in_backward(SGD(lr=0.1), list(module.parameters()))
        shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, ReplicaSettings(sync))
        return full_state_dict(module)

    generator = torch.Generator().manual_seed(0)
    want = {name: torch.randn(p.shape, generator=generator) for name, p in Model().named_parameters()}
    for sync in ("exact", "average"):
        for state in run_virtual_ranks(4, run, sync):
            assert all(torch.equal(state[name], value) for name, value in want.items())


def test_values_that_a_users_function_draws_are_the_same_in_every_group() -> None:
    """From a generator that nobody seeds alike."""

    def run(group: Group, sync: Any) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(group.rank)

        def init(weight: Tensor) -> None:
            weight.copy_(torch.randn(weight.shape, generator=generator))

        module = Model(init, "meta")
        apply_optimizer_in_backward(SGD(lr=0.1), list(module.parameters()))
        shard_2d(
            module,
            lambda: ([GroupConfig({"ebc": row_wise(), "deep.ec": row_wise()}, 2)], {}),
            group,
            ReplicaSettings(sync),
        )
        return full_state_dict(module)

    for sync in ("exact", "average"):
        first, *others = run_virtual_ranks(4, run, sync)
        assert float(first["ebc.embedding_bags.a.weight"].std()) > 0
        for state in others:
            assert all(torch.equal(state[name], value) for name, value in first.items())


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_an_init_fn_that_fails_in_one_sharding_group_fails_on_all_ranks_and_changes_nothing(
    sync: Any,
) -> None:
    """Ranks 1 and 3 are a group; both parts have such tables, and a part of real values stands before them."""

    def run(group: Group) -> str:
        def init(weight: Tensor) -> None:
            if group.rank == 3:
                raise RuntimeError("no such file")
            weight.fill_(1.0)

        module = Model(init, "meta")
        module.deep["ec"] = EmbeddingCollection([EmbeddingConfig(9, 4, "c", feature_names=["c"])])
        module.more = EmbeddingBagCollection(
            [EmbeddingBagConfig(8, 4, "d", feature_names=["a"], init_fn=init)], device="meta"
        )
        before = [(name, p.device, tuple(p.shape)) for name, p in module.named_parameters()]
        plan = {"deep.ec": row_wise(), "ebc": row_wise(), "more": row_wise()}
        configs = [GroupConfig(plan, 2), GroupConfig(plan, 2, across_hosts=True, paths=("more",))]
        with pytest.raises(RuntimeError if group.rank == 3 else ConfigError) as caught:
            shard_2d(module, lambda: (configs, {}), group, ReplicaSettings(sync))
        assert [(name, p.device, tuple(p.shape)) for name, p in module.named_parameters()] == before
        assert not isinstance(module.ebc, ShardedCollection)
        assert not hasattr(module, "plan")
        return str(caught.value)

    *others, own = run_virtual_ranks(4, run, timeout_s=20)
    assert own == "no such file"
    for text in others:
        assert "initial values failed on rank 3 with RuntimeError: no such file" in text


def test_the_plan_of_another_model_may_be_passed_as_it_is() -> None:
    base = model()

    def run(group: Group) -> None:
        whole = {"ebc": row_wise(), "deep.ec": table_wise(rank=1)}
        first = shard_2d(copy.deepcopy(base), lambda: ([GroupConfig(whole, 2)], {}), group, EXACT).parts[0].plan
        second = shard_2d(copy.deepcopy(base), lambda: ([GroupConfig(first, 2)], {}), group, AVERAGE).parts[0].plan
        assert second.group_plan == first.group_plan
        with pytest.raises(ConfigError, match=r"pass its .group_plan, .* or its .world_plan\(\)"):
            shard(copy.deepcopy(base), first, mesh=group)
        shard(copy.deepcopy(base), first.world_plan(), mesh=group)

    run_virtual_ranks(4, run)


@pytest.mark.parametrize(
    ("settings", "config", "word"),
    [
        (
            ReplicaSettings("exact", exact="no"),
            GroupConfig(None, 2),
            "exact: got 'no'; expected True or False",
        ),
        (
            ReplicaSettings("average", refuse_together=1),
            GroupConfig(None, 2),
            "refuse_together: got 1; expected True or False",
        ),
        (
            EXACT,
            GroupConfig(None, 2, across_hosts="yes"),
            "use_inter_host_allreduce: got 'yes'; expected True",
        ),
        (EXACT, GroupConfig(None, "2"), "sharding_group_size: got '2'; expected an integer from 1"),
    ],
)
def test_words_that_python_takes_for_true_are_refused(settings: Any, config: Any, word: str) -> None:
    assert all(word in text for text in refused(model(), config, settings=settings))


def test_ids_that_no_collection_reads_are_spread_over_all_ranks() -> None:
    """A map of ids by itself, beside tables: all ranks give an id the same row."""

    def run(group: Group, sync: Any) -> list[list[int]]:
        module = nn.Module()
        module.ebc = EmbeddingBagCollection([EmbeddingBagConfig(12, 8, "a", feature_names=["a"])])
        mch = MCHManagedCollisionModule(16, "cpu", LRU_EvictionPolicy(), 1, buckets=4)
        module.ids = ManagedCollisionCollection({"m": mch}, [EmbeddingConfig(16, 4, "m", feature_names=["f"])])
        shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, ReplicaSettings(sync))
        out = []
        order = torch.arange(12).roll(5 * group.rank) + 1000  # other ids come first on every rank
        for ids in (order.tolist(), list(range(1000, 1012))):
            features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
            out.append(module.ids(features).values().tolist())
        return out

    for sync in ("exact", "average"):
        told = [second for _, second in run_virtual_ranks(4, run, sync)]
        assert all(rows == told[0] for rows in told)
        assert len(set(told[0])) == 12


def test_a_batch_that_one_group_refuses_is_refused_by_all_if_asked() -> None:
    base = model()

    def run(group: Group) -> list[str]:
        module = copy.deepcopy(base)
        two = shard_2d(
            module,
            lambda: ([GroupConfig(None, 2)], {}),
            group,
            ReplicaSettings("average", refuse_together=True),
        )
        said = []
        for bad in ([], [2], [0, 3]):
            features = batch(group.rank, len(said))
            if group.rank in bad:
                values = features.values().clone()
                values[0] = 99
                features = KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())
            try:
                module(features).backward()
                said.append("")
            except InputError as error:
                said.append(str(error))
        two.sync()
        return said

    rows = run_virtual_ranks(4, run)
    assert [texts[0] for texts in rows] == [""] * 4
    own, inside, outside = rows[2][1], rows[0][1], rows[1][1]
    assert "99" in own
    assert inside.startswith("Rank 2 refused its batch"), "by its number in the world"
    assert outside == rows[3][1]
    assert outside.startswith("Rank 2 refused its batch in another sharding group")
    assert all(texts[2] for texts in rows)


@pytest.mark.parametrize("settings", [EXACT, AVERAGE], ids=["exact", "average"])
def test_an_optimizer_that_cannot_be_made_on_one_rank_is_made_on_none(settings: ReplicaSettings) -> None:
    torch.manual_seed(0)
    base = Model()

    def run(group: Group) -> tuple[str, ...]:
        module, said = copy.deepcopy(base), []
        shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, settings)

        for bad in (2, None):
            rate = functools.partial(divmod, 1, group.rank != bad)
            try:
                KeyedOptimizerWrapper(
                    dict(module.named_parameters()), lambda p, rate=rate: torch.optim.SGD(p, rate()[0])
                )
                said.append("")
            except (ZeroDivisionError, ConfigError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return tuple(said)

    first, second = zip(*run_virtual_ranks(4, run), strict=True)
    assert second == ("",) * 4
    assert first[2].startswith("ZeroDivisionError")
    for text in (first[0], first[1], first[3]):
        assert "making the optimizer" in text
        assert "failed on rank 2 with ZeroDivisionError" in text


def test_replicas_that_were_asked_for_different_averages_all_say_so() -> None:
    """Of state, by a hook, of another optimizer; the other replica group goes on."""
    base = model()

    def run(group: Group, differ: str) -> tuple[str, int]:
        module = copy.deepcopy(base)
        two = shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, ReplicaSettings("average"))
        odd = group.rank == 1
        if differ == "hook" and odd:
            two.set_hook(lambda tensors: None)
        if differ == "rule" and odd:
            apply_optimizer_in_backward(SGD(lr=0.1), list(module.parameters()), replace=True)
        if differ == "rate" and odd:
            module.ebc.fused_optimizer.param_groups[0]["lr"] = 0.7
        before = [p.detach().clone() for p in module.parameters()]
        try:
            two.sync(include_optimizer_state=not (differ == "state" and odd))
        except ConfigError as error:
            assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
            return str(error), two.unsynced_steps
        return "", two.unsynced_steps

    for differ, word in (("state", "include_optimizer_state is True on rank 0 and False on rank 1"),
                         ("hook", "['a hook averages'] is False on rank 0 and True on rank 1"),
                         ("rule", "is 'RowWiseAdagrad' on rank 0 and 'SGD' on rank 1"),
                         ("rate", ".lr is '0.1' on rank 0 and '0.7' on rank 1")):  # fmt: skip
        first, second, *others = run_virtual_ranks(4, run, differ)
        assert word in first[0], first
        assert first[0] == second[0]
        assert others == [("", 0), ("", 0)]


def test_a_copy_averages_for_itself() -> None:
    base = model()

    def run(group: Group) -> tuple[int, int]:
        module = copy.deepcopy(base)
        two = shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, ReplicaSettings("average"))
        train(module, group, steps=2)
        two.settle()
        twin = copy.deepcopy(module)
        theirs = two.of_copy(twin)
        train(twin, group, steps=1)
        theirs.sync()
        return two.unsynced_steps, theirs.unsynced_steps

    got = run_virtual_ranks(4, run)
    assert max(mine for mine, _ in got) == 2
    assert all(theirs == 0 for _, theirs in got)


def test_a_rule_that_a_tiling_does_not_serve_is_refused_before_anything_changes() -> None:
    """Of the second part: the first has not been sharded."""
    base = model()
    staggered = Tiling.of("c", 9, 4, [(0, 4, 0, 2, 0), (4, 9, 0, 2, 1), (0, 5, 2, 4, 0), (5, 9, 2, 4, 1)])

    def run(group: Group) -> str:
        module = copy.deepcopy(base)
        configs = [GroupConfig(None, 2), GroupConfig({"deep.ec": {"c": staggered}}, 2, paths=("deep.ec",))]
        with pytest.raises(ConfigError) as caught:
            shard_2d(module, lambda: (configs, {}), group, EXACT)
        assert type(module.ebc) is EmbeddingBagCollection
        return str(caught.value)

    assert all("RowWiseAdagrad needs sums over whole rows" in text for text in run_virtual_ranks(4, run))
