"""`sync="average"` is local training and averaging, to the last double: against an oracle without any sharding.

oracle    R unsharded modules of float64, one per sharding group, each trained on its group's batches; every N
          steps weights and optimizer state become their means, counts of updates their maxima
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import harness
from tests.parity.harness import FORMS, OPTIMIZERS, TILINGS, Case
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.row_reset import reset_rows
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.two_d.rank_grid import RankGrid
from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.helpers import row_wise, table_wise
from tilerec.sharding.update import TileRows, with_moment_scale
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

HOSTS = ((0, 1), (2, 3))
STEPS = 5


@dataclass(frozen=True)
class World:
    """Sharding groups of a world of `size` ranks on two hosts."""

    size: int
    group_size: int
    across_hosts: bool

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        half = self.size // 2
        return (tuple(range(half)), tuple(range(half, self.size)))

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.size, self.group_size, self.across_hosts)


WORLDS = {
    "2x2": World(4, 2, False),
    "2x2 across hosts": World(4, 2, True),
    "4x1": World(4, 1, False),
    "3x2": World(6, 2, False),
    "2x3 across hosts": World(6, 3, True),
}


def case_of(tiling: str, form: str, optimizer: str, world: World) -> Case:
    """Float64 tables; tilings are those of one sharding group."""
    spec, mean = OPTIMIZERS[optimizer], form.endswith("mean")
    topology = Topology(world.size, "cpu", hosts=world.hosts)
    hosts = world.grid.hosts_of(0, topology)
    tables = (
        harness.TableCase("t0", 10, 4, ("a", "b"), DataType.FP64, mean),
        harness.TableCase("t2", 17, 20, ("d", "a"), DataType.FP64, mean),
    )
    own = {t.name: TILINGS[tiling](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}
    if harness.adds_over_rows(spec):
        own = {
            t.name: own[t.name] if harness.aligned(own[t.name]) else harness.two_tiles(t.rows, t.dim, hosts, i)
            for i, t in enumerate(tables)
        }  # fmt: skip
    return Case(
        tables, own, world.hosts, spec, (3, 2, 0, 1, 2, 2)[: world.size], pooled=form != "sequence",
        weighted=form.startswith("weighted"), steps=STEPS,
    )  # fmt: skip


def tables_of(module: Any) -> dict[str, Any]:
    return dict(module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings)


State = dict[str, Tensor]
"""`<table>.weight` and `<table>.<slot>`, whole."""


def run_rank(group: Group, case: Case, world: World, base: Any, interval: int | None) -> State:
    """Train in 2D, and what this rank's sharding group holds then."""
    module = copy.deepcopy(base)
    config = GroupConfig({"": case.tilings}, world.group_size, across_hosts=world.across_hosts)
    settings = ReplicaSettings("average", interval, moment_scale=1.0)
    two = shard_2d(module, lambda: ([config], {}), group, settings, case.topology)
    for features in harness.batches(case, group.rank):
        out = harness.outputs(case, module, features)
        harness.loss(case, out, float(world.group_size)).backward()
        two.sync_if_due(wait=group.rank % 2 == 0)  # how a rank waits is its own business
    state = full_state_dict(module)
    for name, table in tables_of(module).items():
        for slot in table.rows.state:
            state[f"{name}.{slot}"] = table.state_of(slot).full()
    return {key.removeprefix("embedding_bags.").removeprefix("embeddings."): v for key, v in state.items()}


@torch.no_grad()
def average(modules: Sequence[Any]) -> None:
    for name in tables_of(modules[0]):
        tables = [tables_of(module)[name] for module in modules]
        for slot in (None, *tables[0].rows.state):
            values = [t.weight if slot is None else t.rows.state[slot] for t in tables]
            together = torch.stack(list(values))
            mean = together.amax(0) if slot in ("step", "updates") else together.mean(0)
            for value in values:
                value.copy_(mean)


def oracle(case: Case, world: World, interval: int | None) -> list[State]:
    """What each sharding group holds."""
    modules = [harness.build(case) for _ in range(world.grid.replicas)]
    local = [harness.batches(case, rank) for rank in range(world.size)]
    for step in range(STEPS):
        for module, ranks in zip(modules, world.grid.sharding_groups, strict=True):
            features = concat_batches([local[rank][step] for rank in ranks])
            harness.loss(case, harness.outputs(case, module, features), 1.0).backward()
        if interval is not None and (step + 1) % interval == 0:
            average(modules)
    return [
        {
            f"{name}.{slot}": value
            for name, table in tables_of(module).items()
            for slot, value in (("weight", table.weight.detach()), *table.rows.state.items())
        }
        for module in modules
    ]


def assert_close(got: State, want: State, bound: float) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].shape == value.shape, key
        far = (got[key].double() - value.double()).abs() / (1 + value.double().abs())
        assert float(far.max()) <= bound, (key, float(far.max()))


Marks = tuple[str, str, str, str]


def covering() -> list[Marks]:
    worlds = list(WORLDS)
    attached = [name for name in OPTIMIZERS if name != "none"]
    return [
        (tiling, FORMS[(i + 4 * j) % len(FORMS)], optimizer, worlds[(7 * i + 4 * j) % len(worlds)])
        for i, tiling in enumerate(TILINGS)
        for j, optimizer in enumerate(attached)
        if (i + j) % 4 == 0
    ]


def test_the_subset_meets_every_tiling_optimizer_form_and_world() -> None:
    chosen = covering()
    for axis, names in enumerate((TILINGS, FORMS, set(OPTIMIZERS) - {"none"}, WORLDS)):
        assert {marks[axis] for marks in chosen} == set(names)


@pytest.mark.parametrize("marks", covering(), ids="-".join)
def test_averaging_equals_the_oracle(marks: Marks) -> None:
    """Every second step, with one step left over: replicas are apart at the end, each where its oracle is."""
    tiling, form, optimizer, name = marks
    world = WORLDS[name]
    case = case_of(tiling, form, optimizer, world)
    got = run_virtual_ranks(world.size, run_rank, case, world, harness.build(case), 2)
    want = oracle(case, world, 2)
    for rank, state in enumerate(got):
        assert_close(state, want[world.grid.team_of(rank)], 1e-11)


@pytest.mark.parametrize("interval", [1, 5, None])
def test_replicas_have_the_same_bits_just_after_an_average_and_only_then(interval: int | None) -> None:
    world = WORLDS["2x2"]
    case = case_of("row_wise", "sum", "adam", world)
    got = run_virtual_ranks(world.size, run_rank, case, world, harness.build(case), interval)
    same = all(torch.equal(got[0][key], state[key]) for state in got for key in state)
    assert same == (interval is not None)


# ---------------------------------------------------------------------------------------------------- what it means


def model(spec: OptimizerSpec, rows: int = 40, data_type: DataType = DataType.FP64) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    made = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(rows, 8, "a", data_type, ["a"]),
            EmbeddingBagConfig(rows, 4, "b", data_type, ["b"]),
        ]
    )
    apply_optimizer_in_backward(spec, list(made.parameters()))
    return made


def batch(rank: int, step: int, rows: int = 40) -> Any:
    return random_batch(["a", "b"], rows, 4, seed=100 * step + rank)


def in_2d(
    group: Group, base: EmbeddingBagCollection, size: int, sync: Any = "average", **options: Any
) -> tuple[EmbeddingBagCollection, TwoD]:
    module = copy.deepcopy(base)
    plan = {"a": row_wise(), "b": table_wise(rank=size - 1)}
    return module, shard_2d(module, lambda: ([GroupConfig(plan, size)], {}), group, ReplicaSettings(sync, **options))


def step(module: EmbeddingBagCollection, group: Group, at: int, scale: float, rows: int = 40) -> None:
    (module(batch(group.rank, at, rows)).values().double().square().sum() * scale).backward()


def test_sgd_averaged_at_every_step_is_training_with_all_gradients() -> None:
    """w - lr * mean over replicas of (mean over their ranks of g) = w - lr * mean over all ranks of g."""
    base = model(SGD(lr=0.05))

    def run(group: Group, sync: str) -> dict[str, Tensor]:
        module, two = in_2d(group, base, 2, sync)
        for at in range(4):
            step(module, group, at, 4.0)
            two.sync()
        return full_state_dict(module)

    averaged, exact = (run_virtual_ranks(4, run, sync)[0] for sync in ("average", "exact"))
    assert_close(averaged, exact, 1e-13)


def test_an_optimizer_that_is_attached_afterwards_is_averaged_too() -> None:
    torch.manual_seed(0)
    base = EmbeddingBagCollection(
        [EmbeddingBagConfig(40, dim, name, DataType.FP64, [name]) for name, dim in (("a", 8), ("b", 4))]
    )

    def run(group: Group, sync: str) -> dict[str, Tensor]:
        module, two = in_2d(group, base, 2, sync)
        apply_optimizer_in_backward(SGD(lr=0.05), list(module.parameters()))
        for at in range(3):
            step(module, group, at, 4.0)
            assert two.unsynced_steps == (sync == "average")
            two.sync()
        return full_state_dict(module)

    averaged, exact = (run_virtual_ranks(4, run, sync)[0] for sync in ("average", "exact"))
    assert_close(averaged, exact, 1e-13)


def test_a_row_that_one_replica_touched_is_averaged_over_all() -> None:
    base = model(SGD(lr=1.0))
    before = {name: p.detach().clone() for name, p in base.named_parameters()}

    def run(group: Group) -> dict[str, Tensor]:
        module, two = in_2d(group, base, 1)
        if group.rank == 1:  # a world of groups of one rank: no other takes part in its step
            module(random_batch(["a", "b"], 1, 1, empty=0.0, mean_length=1.0)).values().sum().backward()
        two.sync()
        return full_state_dict(module)

    for state in run_virtual_ranks(4, run):
        for name, want in before.items():
            moved = want - state[name]
            assert torch.allclose(moved[0], torch.full_like(moved[0], 0.25)), "lr * 1 on one of 4 replicas"
            assert torch.equal(moved[1:], torch.zeros_like(moved[1:]))


def test_only_rows_that_were_touched_travel() -> None:
    """Of tables of a thousand rows, those of the batches: 8 + 4 weights and two sums of 4 bytes a row, in a ring."""
    base = model(RowWiseAdagrad(lr=0.1), 1000, DataType.FP32)

    def run(group: Group) -> tuple[int, int, int]:
        module, two = in_2d(group, base, 1)
        for at in range(3):
            step(module, group, at, 1.0, 1000)
        group.traffic.reset()
        two.sync()
        sent = group.traffic["replica rows"]
        two.sync()
        again = group.traffic["replica rows"]
        return sent.calls, sent.total, again.total - sent.total

    touched = {
        key: {int(row) for rank in range(4) for at in range(3) for row in batch(rank, at, 1000)[key].values()}
        for key in ("a", "b")
    }
    elements = len(touched["a"]) * (8 + 1) + len(touched["b"]) * (4 + 1)
    assert 0 < len(touched["a"]) < 300
    counted = run_virtual_ranks(4, run)
    assert sum(total for _, total, _ in counted) == 2 * (4 - 1) * elements * 4
    assert [(calls, again) for calls, _, again in counted] == [(1, 0)] * 4


def test_state_that_a_sync_leaves_out_comes_along_with_the_next() -> None:
    base = model(RowWiseAdagrad(lr=0.1))

    def run(group: Group) -> list[bool]:
        module, two = in_2d(group, base, 1)
        table = module.embedding_bags["a"]
        step(module, group, 0, 1.0)

        def same() -> list[bool]:
            facts = [table.weight.detach().tolist(), table.rows.state["sum"].tolist()]
            everyone = group.all_gather_object(facts)
            return [all(other[i] == facts[i] for other in everyone) for i in range(2)]  # type: ignore[index]

        found = same()
        two.sync(include_optimizer_state=False)
        found += same()
        two.sync()
        return found + same()

    assert run_virtual_ranks(4, run) == [[False, False, True, False, True, True]] * 4


def test_a_sync_that_is_not_waited_for_ends_before_rows_are_read_written_or_saved() -> None:
    base = model(Adam(lr=0.01))

    def run(group: Group, how: str) -> dict[str, Tensor]:
        module, two = in_2d(group, base, 2)
        step(module, group, 0, 2.0)
        looked = module.lookup(module.route(batch(group.rank, 1))) if how == "update" else None
        two.sync(wait=how == "wait")
        rows = module.embedding_bags["a"].rows
        assert rows.touched is not None
        assert (rows.touched.pending is None) == (how == "wait")
        if how == "update":  # by a lookup of before: its gradients are for the rows as they were
            assert looked is not None
            (module.combine(looked).values().square().sum() * 2.0).backward()
            assert rows.touched.pending is None
        elif how == "lookup":
            routed = module.route(batch(group.rank, 1))
            assert rows.touched.pending is not None, "ids travel meanwhile"
            looked = module.lookup(routed)
            assert rows.touched.pending is None
            module.combine(looked)
        state = full_state_dict(module)
        assert rows.touched.pending is None
        return state

    waited, looked, saved = (run_virtual_ranks(4, run, how) for how in ("wait", "lookup", "state"))
    for one, other, third in zip(waited, looked, saved, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert all(torch.equal(one[key], third[key]) for key in one)
    updated = run_virtual_ranks(4, run, "update")
    assert not torch.equal(updated[0]["embedding_bags.a.weight"], waited[0]["embedding_bags.a.weight"])


def test_a_row_that_is_reset_while_it_travels_stays_reset() -> None:
    base = model(RowWiseAdagrad(lr=0.1))
    first = {name: p.detach()[0].clone() for name, p in base.named_parameters()}

    def run(group: Group) -> dict[str, Tensor]:
        module, two = in_2d(group, base, 1)
        step(module, group, 0, 1.0)
        two.sync(wait=False)
        for table in module.embedding_bags.values():
            reset_rows(table, torch.tensor([0]))
        return full_state_dict(module)

    for state in run_virtual_ranks(4, run):
        assert all(torch.equal(state[name][0], want) for name, want in first.items())


def test_counts_of_updates_become_the_largest_and_count_steps() -> None:
    base = model(Adam(lr=0.01))

    def run(group: Group) -> list[int]:
        module, two = in_2d(group, base, 1)
        for at in range(1 + group.rank):
            step(module, group, at, 1.0)
        rows = module.embedding_bags["a"].rows
        found = [rows.updates, two.unsynced_steps]
        two.sync()
        return [*found, rows.updates, two.unsynced_steps]

    assert run_virtual_ranks(4, run) == [[n, n, 4, 0] for n in (1, 2, 3, 4)]


def test_counts_are_not_read_table_by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each would be a wait; `fetch` reads them together."""
    base = model(Adam(lr=0.01, capturable=True))

    def run(group: Group) -> None:
        module, two = in_2d(group, base, 1)
        step(module, group, 0, 1.0)
        two.sync()

    monkeypatch.setattr(TileRows, "updates", property(lambda rows: pytest.fail("a count by itself")))
    run_virtual_ranks(4, run)


def test_state_left_out_of_a_sync_counts_as_unsynced_and_comes_with_the_next() -> None:
    base = model(RowWiseAdagrad(lr=0.1))

    def run(group: Group) -> tuple[int, Tensor]:
        module, two = in_2d(group, base, 2)
        step(module, group, 0, 1.0)
        two.sync(include_optimizer_state=False)
        left = two.unsynced_steps
        two.sync_all()
        assert two.unsynced_steps == 0
        return left, module.embedding_bags["a"].state_of("sum").full()

    found = run_virtual_ranks(4, run)
    assert [left for left, _ in found] == [1] * 4
    assert all(torch.equal(found[0][1], state) for _, state in found)


def test_state_of_before_does_not_move_the_interval() -> None:
    base = model(Adam(lr=0.01))

    def run(group: Group) -> list[int]:
        module, two = in_2d(group, base, 2, interval=2)
        after = []
        for at in range(6):
            if at == 3:
                for rows in two.averages[0].rows():  # what loading an earlier state does
                    rows.state[rows._counter].fill_(0)
            step(module, group, at, 1.0)
            two.sync_if_due()
            after.append(two.unsynced_steps)
        return after

    assert run_virtual_ranks(4, run) == [[1, 0, 1, 0, 1, 0]] * 4


def test_another_optimizer_keeps_in_mind_what_was_touched() -> None:
    base = model(SGD(lr=0.1))

    def run(group: Group) -> Tensor:
        module, two = in_2d(group, base, 2)
        step(module, group, 0, 1.0)
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(module.parameters()), replace=True)
        two.sync()
        return full_state_dict(module)["embedding_bags.a.weight"]

    found = run_virtual_ranks(4, run)
    assert all(torch.equal(found[0], weight) for weight in found)


def test_a_hook_that_fails_leaves_the_average_for_the_next_time() -> None:
    base = model(SGD(lr=0.1))

    def fail(_: list[Tensor]) -> None:
        raise RuntimeError("no")

    def run(group: Group, wait: bool) -> Tensor:
        module, two = in_2d(group, base, 2)
        two.set_hook(fail)
        step(module, group, 0, 1.0)
        with pytest.raises(RuntimeError, match="no"):
            two.sync(wait=wait)
        two.set_hook(None)
        assert two.unsynced_steps == 1
        two.sync()
        return full_state_dict(module)["embedding_bags.a.weight"]

    for wait in (True, False):
        found = run_virtual_ranks(4, run, wait)
        assert all(torch.equal(found[0], weight) for weight in found)


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 3; expected a function"):
        ReplicaSettings("average", hook=3).check("DMPCollection")  # type: ignore[arg-type]


def test_one_replica_has_nothing_left_after_a_sync() -> None:
    base = model(SGD(lr=0.1))

    def run(group: Group) -> list[int]:
        module, two = in_2d(group, base, 2)
        step(module, group, 0, 1.0)
        before = two.unsynced_steps
        two.sync()
        return [before, two.unsynced_steps]

    assert run_virtual_ranks(2, run) == [[1, 0]] * 2


def test_models_that_differ_between_groups_are_refused_before_anything_is_cut() -> None:
    def run(group: Group) -> str:
        base = model(SGD(lr=0.2 if group.rank == 2 else 0.1))
        with pytest.raises(ConfigError) as raised:
            in_2d(group, base, 2)
        assert not hasattr(base.embedding_bags["a"], "tile_rows")
        return str(raised.value)

    assert all("lr" in message and "rank" in message for message in run_virtual_ranks(4, run))


def test_a_hook_averages_in_place_of_the_all_reduce() -> None:
    base = model(SGD(lr=0.1))

    def run(group: Group, hooked: bool) -> dict[str, Tensor]:
        calls = []

        def hook(tensors: list[Tensor]) -> None:
            for tensor in tensors:
                calls.append(tensor.numel())
                two.parts[0].axis.all_reduce_("mine", tensor).wait()
                tensor /= two.parts[0].axis.size

        module, two = in_2d(group, base, 2)
        two.set_hook(hook if hooked else None)
        step(module, group, 0, 2.0)
        two.sync()
        assert bool(calls) == hooked
        return full_state_dict(module)

    one, other = run_virtual_ranks(4, run, True), run_virtual_ranks(4, run, False)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_narrow_tables_are_averaged_in_fp32_and_rounded_once(data_type: DataType) -> None:
    base = model(SGD(lr=0.1), data_type=data_type)

    def run(group: Group) -> tuple[Tensor, Tensor]:
        module, two = in_2d(group, base, 1)
        step(module, group, 0, 1.0)
        before = module.embedding_bags["a"].weight.detach().clone()
        two.sync()
        return before, module.embedding_bags["a"].weight.detach()

    got = run_virtual_ranks(3, run)
    mean = sum(before.float() for before, _ in got) / 3
    for _, after in got:
        assert after.dtype == got[0][0].dtype
        assert torch.equal(after, mean.to(after.dtype))  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------- moments


@pytest.mark.parametrize("mode", ["none", "l2", "decoupled"])
def test_the_moment_scale_is_what_its_formula_says(mode: Any) -> None:
    """`sum += c mean(g'^2); w = ... - lr g' / (sqrt(sum) + eps)`, in float64, written out."""
    c, lr, eps, decay = 0.3, 0.1, 1e-3, 0.0 if mode == "none" else 0.05
    spec = RowWiseAdagrad(lr=lr, eps=eps, weight_decay=decay, weight_decay_mode=mode)
    torch.manual_seed(0)
    module = EmbeddingBagCollection([EmbeddingBagConfig(5, 6, "t", DataType.FP64, ["t"])])
    apply_optimizer_in_backward(with_moment_scale(spec, c), list(module.parameters()))
    w = module.embedding_bags["t"].weight.detach().clone()
    s = torch.zeros(5, dtype=torch.float64)
    for at in range(4):
        features = random_batch(["t"], 5, 3, seed=at)
        out = module(features).values()
        coefficients = torch.arange(6, dtype=torch.float64) + 1
        (out * coefficients).sum().backward()
        counts = torch.bincount(features.values(), minlength=5).double()
        for row in counts.nonzero()[:, 0].tolist():
            g = counts[row] * coefficients + (decay * w[row] if mode == "l2" else 0.0)
            s[row] += c * (g * g).mean()
            if mode == "decoupled":
                w[row] *= 1 - lr * decay
            w[row] -= lr * g / (s[row].sqrt() + eps)
    table = module.embedding_bags["t"]
    assert_close({"w": table.weight.detach(), "s": table.rows.state["sum"]}, {"w": w, "s": s}, 1e-12)


def test_averaged_row_wise_adagrad_has_moments_of_one_dimensional_size() -> None:
    """Independent gradients of a row: a group's mean of G has R times the variance of the world's mean of W."""
    rows = 200
    base = model(RowWiseAdagrad(lr=0.0), rows)  # rows stand still, so that gradients do
    ids = torch.arange(rows).repeat(2)
    every = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones_like(ids))

    def run(group: Group, sync: str, scale: float | None) -> float:
        module = copy.deepcopy(base)
        settings = ReplicaSettings(sync, moment_scale=scale)  # type: ignore[arg-type]
        two = shard_2d(module, lambda: ([GroupConfig(row_wise(), 1)], {}), group, settings)
        noise = torch.Generator().manual_seed(group.rank)
        for _ in range(3):
            out = module(every).values()
            (out * torch.randn(rows, 12, generator=noise, dtype=torch.float64)).sum().backward()
        two.sync()
        return float(module.embedding_bags["a"].rows.state["sum"].mean())

    exact, plain, scaled = (
        run_virtual_ranks(4, run, *how)[0] for how in (("exact", None), ("average", 1.0), ("average", None))
    )
    assert plain / exact == pytest.approx(4, rel=0.05)
    assert scaled / exact == pytest.approx(1, rel=0.05)
    assert scaled == pytest.approx(plain / 4)


# ---------------------------------------------------------------------------------------------------- not attached


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("sync", ["average", "exact"])
def test_tables_without_an_attached_optimizer_have_the_gradients_of_all_ranks(sync: Any, sparse: bool) -> None:
    torch.manual_seed(0)
    base = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, "a", DataType.FP64, ["a"])])
    if sparse:
        set_sparse_grad(list(base.parameters()))
    whole = copy.deepcopy(base)
    every = concat_batches([random_batch(["a"], 9, 3, seed=rank) for rank in range(4)])
    whole(every).values().square().sum().backward()
    want = whole.embedding_bags["a"].weight.grad
    assert want is not None

    def run(group: Group) -> tuple[Tensor, int]:
        module = copy.deepcopy(base)
        two = shard_2d(module, lambda: ([GroupConfig(row_wise(), 2)], {}), group, ReplicaSettings(sync))
        (module(random_batch(["a"], 9, 3, seed=group.rank)).values().square().sum() * 4.0).backward()
        grad = module.embedding_bags["a"].weight.grad
        assert grad is not None
        two.sync()
        return grad.to_dense(), two.parts[0].plan.grid.member_of(group.rank)

    for grad, member in run_virtual_ranks(4, run):
        assert torch.allclose(grad, want.to_dense()[5 * member : 5 * member + 5], rtol=0, atol=1e-13)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (ReplicaSettings("mean"), "'exact' or 'average'"),  # type: ignore[arg-type]
        (ReplicaSettings("average", 0), "sync_interval: got 0"),
        (ReplicaSettings("average", 1.5), "sync_interval: got 1.5"),  # type: ignore[arg-type]
        (ReplicaSettings("average", True), "sync_interval: got True"),
        (ReplicaSettings("average", moment_scale=0.0), "moment_scale: got 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: ReplicaSettings, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        settings.check("DMPCollection")
