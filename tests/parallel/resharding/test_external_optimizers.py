"""`reshard` under optimizers that step the tiles, under `DistributedModelParallel`, and with gradients that wait."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.clipping import GradientClippingOptimizer
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad as SteppedRowWiseAdagrad
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.sharding.retile import RowState
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch, split_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

Pool = Callable[[int], Ranks]

ROWS, DIM = 7, 6
NAMES = ["everywhere", "rows", "columns", "two", "one", "crossed"]
BY_ROWS = ["everywhere", "rows", "one"]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def tilings(size: int, turn: int, names: list[str]) -> dict[str, Tiling]:
    """A way to cut each table, `turn` ways further."""
    last = size - 1
    tiles: dict[str, list[tuple[Any, ...]]] = {
        "everywhere": [(0, 7, 0, 6, tuple(range(size)))],
        "rows": [(0, 5, 0, 6, 0), (5, 7, 0, 6, last)],
        "columns": [(0, 7, 0, 3, 0), (0, 7, 3, 6, last)],
        "two": [(0, 7, 0, 2, 0), (0, 7, 2, 4, last), (0, 7, 4, 6, 0)],
        "one": [(0, 7, 0, 6, last)],
        "crossed": [(0, 3, 0, 2, 0), (3, 7, 0, 2, last), (0, 4, 2, 6, last), (4, 7, 2, 6, 0)],
    }
    cuts = [tiles[name] for name in names]
    return {name: Tiling.of(name, ROWS, DIM, cuts[(i + turn) % len(cuts)]) for i, name in enumerate(names)}


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in names])
        self.over = nn.Linear(DIM * len(names), 1)

    def forward(self, features: Any) -> Tensor:
        pooled = self.ebc(features).values()
        return cast(Tensor, self.over(pooled * pooled).sum())


def model(names: list[str]) -> Model:
    torch.manual_seed(0)
    return Model(names)


def optimizer(module: nn.Module, kind: str) -> KeyedOptimizer:
    """One for the tables and one for the rest, as training code has it."""
    named = list(module.named_parameters())
    tables, dense = (
        KeyedOptimizerWrapper({n: p for n, p in named if n.startswith("ebc") == own}, OPTIMIZERS[kind])
        for own in (True, False)
    )
    return CombinedOptimizer([("tables", tables), ("dense", GradientClippingOptimizer(dense))])


def train(module: nn.Module, own: Optimizer, steps: range, names: list[str], rank: int, size: int) -> None:
    """Global batches of 6 samples; a rank has its share of each."""
    for step in steps:
        own.zero_grad()
        batch = random_batch(names, ROWS, 6, seed=step)
        (module(split_batch(batch, [6 // size] * size)[rank]) * size).backward()
        own.step()


def same(got: Any, want: Any, where: str = "") -> None:
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            same(got[key], want[key], f"{where} / {key}")
    elif isinstance(want, Tensor):
        assert torch.equal(whole(got), whole(want)), where
    else:
        assert got == want, where


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---------------------------------------------------------------------------------------------------------- processes


def goes_on(kind: str, dense: bool = True) -> None:
    """A model under DDP whose tables and optimizer move, beside one with that state under the new plan."""
    rank, size = dist.get_rank(), dist.get_world_size()
    base, other = model(NAMES), model(NAMES)
    for m in (base, other):
        m.over.requires_grad_(dense)
    dmp = DistributedModelParallel(base, plan={"ebc": tilings(size, 0, NAMES)})
    own = optimizer(dmp, kind)
    own.save_param_groups(True)
    wrapped = dmp._dmp_wrapped_module
    assert isinstance(wrapped, DistributedDataParallel) == dense
    groups = list(own.param_groups)
    train(dmp, own, range(2), NAMES, rank, size)
    keys, before = list(dmp.state_dict()), own.state_dict()
    weights = {name: value.clone() for name, value in full_state_dict(dmp).items()}
    state = {
        "state": {
            name: {slot: whole(value).clone() if isinstance(value, Tensor) else value for slot, value in slots.items()}
            for name, slots in before["state"].items()
        },
        "param_groups": before["param_groups"],
    }  # fmt: skip
    reshard(dmp, {"ebc": tilings(size, 1, NAMES)}, optimizers=[own])
    assert dmp._dmp_wrapped_module is wrapped
    assert dmp.plan.plan["ebc"]["rows"].tiling == tilings(size, 1, NAMES)["rows"]
    assert list(dmp.state_dict()) == keys
    assert all(a is b for a, b in zip(groups, own.param_groups, strict=True))
    same(full_state_dict(dmp), weights)
    same(own.state_dict()["state"], state["state"])

    twin = DistributedModelParallel(other, plan={"ebc": tilings(size, 1, NAMES)})
    theirs = optimizer(twin, kind)
    theirs.save_param_groups(True)
    twin.load_state_dict(weights)
    theirs.load_state_dict(state)
    for m, o in ((dmp, own), (twin, theirs)):
        train(m, o, range(2, 4), NAMES, rank, size)
    same(full_state_dict(dmp), full_state_dict(twin))
    same(own.state_dict(), theirs.state_dict())
    # And back again, from what the moved model has become.
    reshard(dmp, {"ebc": tilings(size, 3, NAMES)}, optimizers=[own])
    same(own.state_dict(), theirs.state_dict())
    train(dmp, own, range(4, 5), NAMES, rank, size)


@pytest.mark.parametrize("kind", ["Adam", "momentum", "NAdam"])
def test_optimizers_that_step_the_tiles_move_along(pool: Pool, kind: str) -> None:
    pool(2).run(goes_on, kind)


def test_on_three_ranks_too(pool: Pool) -> None:
    # The order in which DDP adds up three ranks' gradients depends on how many steps it has seen.
    pool(3).run(goes_on, "Adam", False)


# -------------------------------------------------------------------------------------------------------------- threads


def on_threads(names: list[str], live: Callable[[Group, Any], None], size: int = 2) -> None:
    base = model(names)
    run_virtual_ranks(
        size,
        lambda group: live(group, shard(copy.deepcopy(base), {"ebc": tilings(size, 0, names)}, group)),
    )


def tables(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if name.startswith("ebc")]


def steps(module: Any, own: Optimizer, group: Group, names: list[str], turns: range) -> None:
    train(module, own, turns, names, group.rank, group.size)


def test_a_bare_torch_optimizer_has_the_new_leaves_in_its_group() -> None:
    def live(group: Group, module: Any) -> None:
        own = torch.optim.Adam([{"params": tables(module), "lr": 0.1}, {"params": module.over.parameters()}])
        listed = own.param_groups[0]["params"]
        steps(module, own, group, NAMES, range(1))
        for turn in (1, 2, 3):
            reshard(module, {"ebc": tilings(2, 2 * turn, NAMES)}, optimizers=[own])
            assert own.param_groups[0]["params"] is listed
            assert [id(p) for p in listed] == [id(p) for p in tables(module)]
            assert {id(p) for p in own.state} == {id(p) for g in own.param_groups for p in g["params"]}
            for leaf in listed:
                assert own.state[leaf]["exp_avg"].shape == leaf.shape
                assert int(own.state[leaf]["step"]) == turn
            steps(module, own, group, NAMES, range(turn, turn + 1))

    on_threads(NAMES, live)


def test_named_parameters_of_torch_keep_their_names_in_order() -> None:
    def live(group: Group, module: Any) -> None:
        own = torch.optim.SGD(list(module.named_parameters()), lr=0.1)
        for turn in (1, 3, 0):
            reshard(module, {"ebc": tilings(2, turn, NAMES)}, optimizers=[own])
            assert own.param_groups[0]["param_names"] == [name for name, _ in module.named_parameters()]
            assert all(a is b for a, b in zip(own.param_groups[0]["params"], module.parameters(), strict=True))

    on_threads(NAMES, live)


def test_state_per_row_moves_between_cuts_by_rows_and_is_refused_by_name_for_columns() -> None:
    def live(group: Group, module: Any) -> None:
        own = KeyedOptimizerWrapper(
            {n: p for n, p in module.named_parameters() if n.startswith("ebc")},
            lambda p: SteppedRowWiseAdagrad(p, lr=0.1),
        )
        steps(module, own, group, BY_ROWS, range(2))
        table = module.ebc.embedding_bags["rows"]
        want = table._logical([own.state[leaf]["sum"] for leaf in table.leaves()]).full()
        reshard(module, {"ebc": tilings(2, 1, BY_ROWS)}, optimizers=[own])
        assert [id(p) for p in own._bystanders] == [id(p) for p in tables(module) if not p.numel()]
        assert torch.equal(table._logical([own.state[leaf]["sum"] for leaf in table.leaves()]).full(), want)
        steps(module, own, group, BY_ROWS, range(2, 3))
        before = {name: value.clone() for name, value in full_state_dict(module).items()}
        with pytest.raises(
            ConfigError, match=r"'sum' that RowWiseAdagrad keeps of table 'rows' of module 'ebc'.*cut by"
        ):
            reshard(module, {"ebc": {"rows": tilings(2, 0, NAMES)["columns"]}}, optimizers=[own])
        same(full_state_dict(module), before)
        steps(module, own, group, BY_ROWS, range(3, 4))

    on_threads(BY_ROWS, live)


def test_state_of_other_shapes_is_refused_by_name_before_anything_moves() -> None:
    def live(group: Group, module: Any) -> None:
        own = torch.optim.Adafactor([p for p in tables(module) if p.numel()], lr=0.1)
        steps(module, own, group, ["everywhere", "rows"], range(1))
        exchange = module.ebc.exchange
        with pytest.raises(ConfigError, match=r"Adafactor keeps of table 'everywhere' of module 'ebc': got shape"):
            reshard(module, {"ebc": {"everywhere": tilings(2, 0, NAMES)["one"]}}, optimizers=[own])
        assert module.ebc.exchange is exchange
        steps(module, own, group, ["everywhere", "rows"], range(1, 2))

    on_threads(["everywhere", "rows"], live)


def test_two_optimizers_of_one_kind_over_a_table_are_told_apart_by_their_order() -> None:
    def live(group: Group, module: Any) -> None:
        pair = [torch.optim.SGD(tables(module), lr=lr, momentum=0.9) for lr in (0.1, 0.2)]
        for own in pair:
            steps(module, own, group, NAMES, range(1))
        reshard(module, {"ebc": tilings(2, 1, NAMES)}, optimizers=pair)
        for own in pair:
            assert [id(p) for p in own.param_groups[0]["params"]] == [id(p) for p in tables(module)]
            steps(module, own, group, NAMES, range(1, 2))

    on_threads(NAMES, live)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_table_that_an_optimizer_steps_does_not_move_without_a_list_of_optimizers(wrapped: bool) -> None:
    def live(group: Group, module: Any) -> None:
        named = {n: p for n, p in module.named_parameters() if n.startswith("ebc")}
        own = KeyedOptimizerWrapper(named, OPTIMIZERS["Adam"]) if wrapped else OPTIMIZERS["Adam"](named.values())
        if not wrapped:  # a wrapper is known from the start
            steps(module, own, group, NAMES, range(1))
        exchange = module.ebc.exchange
        with pytest.raises(ConfigError, match=r"reshard: optimizers: got None, but Adam.* steps table 'columns'"):
            reshard(module, {"ebc": tilings(2, 1, NAMES)})
        with pytest.raises(ConfigError, match="rebalance: optimizers: got None, but Adam"):
            rebalance(module)
        assert rebalance(module, apply=False).moved is None
        assert module.ebc.exchange is exchange
        reshard(module, {"ebc": tilings(2, 1, NAMES)}, optimizers=[own])
        steps(module, own, group, NAMES, range(1, 2))

    on_threads(NAMES, live)


def test_an_optimizer_that_did_not_move_along_cannot_step_any_more() -> None:
    def live(group: Group, module: Any) -> None:
        stale, own, fresh, loaded, partial = (torch.optim.SGD(tables(module), lr=0.1, momentum=0.9) for _ in range(5))
        for one in (stale, own):
            steps(module, one, group, NAMES, range(1))
        loaded.load_state_dict(copy.deepcopy(stale.state_dict()))
        reshard(module, {"ebc": {"rows": tilings(2, 1, NAMES)["rows"]}}, optimizers=[own, fresh])
        for late in (stale, loaded):
            with pytest.raises(ConfigError, match="SGD: got table 'rows', which was resharded without this"):
                late.step()
        steps(module, own, group, NAMES, range(1, 2))
        new = torch.optim.SGD(tables(module), lr=0.1, momentum=0.9)
        for one in (new, fresh):
            steps(module, one, group, NAMES, range(2, 3))
        assert len(tables(module)) == len(partial.param_groups[0]["params"])
        one_leaf, two_leaves = tilings(2, 0, NAMES)["one"], tilings(2, 0, NAMES)["two"]
        reshard(module, {"ebc": {"one": two_leaves, "two": one_leaf}}, optimizers=[own, fresh, new])
        if group.rank == 0:  # its part of `one` has a second leaf now
            with pytest.raises(ConfigError, match=r"'one', which was resharded .* it lacks some of its tiles"):
                partial.step()
        reshard(module, {"ebc": tilings(2, 0, NAMES)}, optimizers=[])

    with pytest.warns(UserWarning, match="SGD has stepped tiles of tables that move and is not in optimizers="):
        on_threads(NAMES, live)


def test_an_optimizer_made_after_a_move_may_have_its_state_before_its_first_step() -> None:
    def live(group: Group, module: Any) -> None:
        reshard(module, {"ebc": tilings(2, 1, NAMES)})
        named = {n: p for n, p in module.named_parameters() if n.startswith("ebc")}
        own = KeyedOptimizerWrapper(named, OPTIMIZERS["Adam"])
        own.init_state()
        steps(module, own, group, NAMES, range(1))

    on_threads(NAMES, live)


def test_a_copied_model_has_no_steppers() -> None:
    def live(group: Group, module: Any) -> None:
        own = OPTIMIZERS["Adam"](tables(module))
        steps(module, own, group, NAMES, range(1))
        twin = copy.deepcopy(module)
        reshard(twin, {"ebc": tilings(2, 1, NAMES)})
        steps(module, own, group, NAMES, range(1, 2))

    on_threads(NAMES, live)


def test_optimizers_that_share_their_groups_have_each_tile_once() -> None:
    class Around(torch.optim.Optimizer):
        """As wrappers of other libraries are: the groups of the one inside."""

        def __init__(self, inner: Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], {})
            self.param_groups = inner.param_groups

    def live(group: Group, module: Any) -> None:
        own = torch.optim.SGD(tables(module), lr=0.1, momentum=0.9)
        around = Around(own)
        for turn in (1, 3, 4):
            reshard(module, {"ebc": tilings(2, turn, NAMES)}, optimizers=[own, around])
            assert [id(p) for p in own.param_groups[0]["params"]] == [id(p) for p in tables(module)]
        assert around.param_groups is own.param_groups

    on_threads(NAMES, live)


def test_an_optimizer_with_some_tiles_of_a_table_is_refused() -> None:
    def live(group: Group, module: Any) -> None:
        own = torch.optim.SGD([module.ebc.embedding_bags["two"].weight], lr=0.1)
        with pytest.raises(ConfigError, match="got some of the 2 tiles"):
            reshard(module, {"ebc": tilings(2, 1, NAMES)}, optimizers=[own])

    on_threads(NAMES, live)


def test_gradients_that_wait_for_a_step_move_with_their_cells() -> None:
    def live(group: Group, module: Any) -> None:
        twin = copy.deepcopy(module)
        pairs = []
        for m in (module, twin):
            own = torch.optim.SGD(tables(m), lr=0.1)
            (m(random_batch(NAMES, ROWS, 3, seed=group.rank))).backward()
            pairs.append((m, own))
        reshard(module, {"ebc": tilings(2, 1, NAMES)}, optimizers=[pairs[0][1]])
        for m, own in pairs:
            m(random_batch(NAMES, ROWS, 3, seed=7 + group.rank)).backward()
            own.step()
        for name, value in full_state_dict(twin).items():
            torch.testing.assert_close(full_state_dict(module)[name], value, rtol=1e-6, atol=1e-7)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in tables(module))

    on_threads(NAMES, live)


class Seen(RowState):
    """When each row was last seen."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.seen = [torch.arange(tile.r0, tile.r1)[:, None] * torch.tensor([10, 1]) for tile in table.tiles]

    def parts(self) -> dict[str, list[Tensor]]:
        return {"seen": self.seen}

    def take(self, parts: Any) -> None:
        assert len(self.table.tiles) == len(parts["seen"])
        self.seen = list(parts["seen"])


def test_numbers_per_row_of_others_move_with_the_table() -> None:
    def live(group: Group, module: Any) -> None:
        states = {}
        for name, table in module.ebc._tables.items():
            states[name] = Seen(table)
            table.row_states = [states[name]]
        for turn in (1, 2, 3, 4, 5):
            reshard(module, {"ebc": tilings(2, turn, NAMES)})
            for name, table in module.ebc._tables.items():
                fresh = Seen(table)
                assert len(fresh.seen) == len(states[name].seen)
                assert all(torch.equal(a, b) for a, b in zip(fresh.seen, states[name].seen, strict=True))

    on_threads(NAMES, live)


def test_tables_that_are_frozen_or_attached_ask_for_no_optimizer() -> None:
    base = model(NAMES)
    for name in NAMES[1:]:
        base.ebc.embedding_bags[name].weight.requires_grad_(False)

    def live(group: Group) -> None:
        module = shard(copy.deepcopy(base), {"ebc": tilings(2, 0, NAMES)}, group)
        before = {name: value.clone() for name, value in full_state_dict(module).items()}
        reshard(module, {"ebc": tilings(2, 1, NAMES)})
        same(full_state_dict(module), before)
        leaves = dict(module.named_parameters())
        assert all(p.requires_grad == ("everywhere" in name or "over" in name) for name, p in leaves.items())
        module(random_batch(NAMES, ROWS, 3, seed=0)).backward()

    run_virtual_ranks(2, live)


def test_a_hook_that_keeps_an_accumulator_alive_sees_gradients_of_the_new_shape() -> None:
    def live(group: Group, module: Any) -> None:
        shapes: list[torch.Size] = []
        leaf = module.ebc.embedding_bags["rows"].weight
        kept = leaf.view_as(leaf).grad_fn.next_functions[0][0]
        leaf.register_post_accumulate_grad_hook(lambda p: shapes.append(p.grad.shape))
        reshard(module, {"ebc": tilings(2, 1, NAMES)})
        module(random_batch(NAMES, ROWS, 3, seed=0)).backward()
        assert shapes == [leaf.shape]
        assert kept is not None

    on_threads(NAMES, live)


def test_attached_and_stepped_tables_move_together() -> None:
    from tilerec.optim.attach import apply_optimizer_in_backward

    base = model(NAMES)
    apply_optimizer_in_backward(SGD(lr=0.1, momentum=0.9), [base.ebc.embedding_bags["two"].weight])

    def live(group: Group) -> None:
        module = shard(copy.deepcopy(base), {"ebc": tilings(2, 0, NAMES)}, group)
        stepped = [p for n, p in module.named_parameters() if "two" not in n]
        own = torch.optim.Adam(stepped, lr=0.1)
        steps(module, own, group, NAMES, range(1))
        reshard(module, {"ebc": tilings(2, 2, NAMES)}, optimizers=[own])
        assert len(own.param_groups[0]["params"]) == len([n for n, _ in module.named_parameters() if "two" not in n])
        steps(module, own, group, NAMES, range(1, 2))

    run_virtual_ranks(2, live)
