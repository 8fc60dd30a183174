"""Headers carry what all ranks' lookups have in common; a rank that differs stops all of them, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import LFU_EvictionPolicy
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise, table_wise
from tilerec.sharding import header
from tilerec.sharding.header import HeaderSizes
from tilerec.spec.optimizer import SGD, Adam
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks


def model(group: Group, tables: dict[str, int]) -> nn.ModuleDict:
    """Collections by name, each of so many tables that read feature "f", rows in halves."""
    made = nn.ModuleDict(
        {
            name: EmbeddingBagCollection(
                [EmbeddingBagConfig(20, 4, f"{name}{t}", feature_names=["f"]) for t in range(count)]
            )
            for name, count in tables.items()
        }
    )
    apply_optimizer_in_backward(SGD(lr=0.1), made.parameters())
    shard(made, dict.fromkeys(tables, row_wise()), group)
    return made


def error_of(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except InputError as error:
        return str(error)
    return "no error"


def in_another_order(group: Group, tables: dict[str, int], moved: bool = False) -> str:
    own = model(group, tables)
    if moved:
        reshard(own, {"a": {"a0": table_wise(rank=1)}}, progress=False)
    batch = random_batch(["f"], 20, 4, seed=group.rank)
    order = list(tables) if group.rank == 0 else list(tables)[::-1]
    return error_of(lambda: [own[name](batch) for name in order])


def in_another_order_of_processes(tables: dict[str, int]) -> str:
    return in_another_order(ProcessGroupComms(), tables)


@pytest.fixture(scope="module")
def processes() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


SAID = "Lookups: rank 0 looks up 'a' and rank 1 'b'; expected the same collection on all ranks."


def managed(name: str, tables: int) -> ManagedCollisionCollection:
    """Ids of so many tables, which no collection reads."""
    configs = [EmbeddingBagConfig(20, 4, f"{name}{t}", feature_names=[f"f{t}" if t else "f"]) for t in range(tables)]
    modules = {own.name: MCHManagedCollisionModule(20, "cpu", LFU_EvictionPolicy(), 2, buckets=2) for own in configs}
    return ManagedCollisionCollection(modules, configs)


def ids_in_another_order(sizes: tuple[int, int]) -> str:
    group = ProcessGroupComms()
    own = nn.ModuleDict({name: managed(name, size) for name, size in zip("ab", sizes, strict=True)})
    own["c"] = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, "t", feature_names=["f"])])
    shard(own, {"c": row_wise()}, group)
    batch = random_batch(["f", "f1", "f2"], 20, 4, seed=group.rank)
    for name in "abc":
        own[name](batch)
    other = "b" if sizes[0] == sizes[1] else "c"
    return error_of(lambda: own["a" if group.rank == 0 else other](batch))


@pytest.mark.parametrize(("sizes", "other"), [((2, 2), "the ids of 'b0', 'b1'"), ((3, 1), "'c'")])
def test_ids_of_managed_collision_in_another_order_are_named_by_processes(
    sizes: tuple[int, int], other: str, processes: Ranks
) -> None:
    for said in processes.run(ids_in_another_order, sizes):
        assert f"and rank 1 {other}; expected the same collection on all ranks." in said


@pytest.mark.parametrize("tables", [{"a": 1, "b": 1}, {"a": 1, "b": 5}], ids=["of one shape", "of several shapes"])
@pytest.mark.parametrize("moved", [False, True], ids=["as sharded", "resharded"])
def test_collections_in_another_order_are_named_on_all_ranks(tables: dict[str, int], moved: bool) -> None:
    for said in run_virtual_ranks(2, in_another_order, tables, moved):
        assert said.startswith(SAID)


def test_collections_of_several_shapes_in_another_order_are_named_by_processes(processes: Ranks) -> None:
    """Gloo ends a process that receives a longer message than it expects."""
    for said in processes.run(in_another_order_of_processes, {"a": 1, "b": 5}):
        assert said.startswith(SAID)


def test_a_rank_that_evaluates_while_others_train_is_named_on_all_ranks() -> None:
    def fn(group: Group) -> str:
        own, batch = model(group, {"a": 1})["a"], random_batch(["f"], 20, 4)
        with torch.set_grad_enabled(group.rank != 1):
            return error_of(lambda: own(batch))

    for said in run_virtual_ranks(2, fn):
        assert said.startswith("Lookups of 'a': rank 0 trains and rank 1 evaluates")


def test_ranks_may_differ_in_gradients_where_all_tables_are_frozen() -> None:
    def fn(group: Group) -> str:
        own, batch = model(group, {"a": 1})["a"], random_batch(["f"], 20, 4)
        own.requires_grad_(False)
        with torch.set_grad_enabled(group.rank != 1):
            return error_of(lambda: own(batch))

    assert run_virtual_ranks(2, fn) == ["no error"] * 2


@pytest.mark.parametrize(
    ("number", "value", "text"),
    [
        ("lr", 0.7, "0.1 on ranks 0, 2, 0.7 on rank 1"),
        ("non_finite", "skip", "'error' on ranks 0, 2, 'skip' on rank 1"),
    ],
)
def test_optimizer_numbers_that_differ_are_named_on_all_ranks(number: str, value: Any, text: str) -> None:
    def fn(group: Group) -> str:
        own, batch = model(group, {"a": 1})["a"], random_batch(["f"], 20, 4)
        own(batch).values().sum().backward()
        if group.rank == 1:
            own.fused_optimizer.param_groups[0][number] = value
        return error_of(lambda: own(batch))

    for said in run_virtual_ranks(3, fn):
        assert said.startswith(f"Table 'a0': its optimizer's {number} is {text}; expected one value")


def test_a_schedule_that_all_ranks_follow_is_no_difference() -> None:
    def fn(group: Group) -> str:
        own, batch = model(group, {"a": 1})["a"], random_batch(["f"], 20, 4)
        for step in range(3):
            own(batch).values().sum().backward()
            own.fused_optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
        return error_of(lambda: own(batch))

    assert run_virtual_ranks(2, fn) == ["no error"] * 2


def test_a_rate_in_a_tensor_is_not_read() -> None:
    """Reading it would have the host wait for a GPU."""

    def fn(group: Group) -> str:
        own = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, "t", feature_names=["f"])])
        apply_optimizer_in_backward(Adam(lr=0.1, capturable=True), own.parameters())
        shard(own, row_wise(), group)
        own.fused_optimizer.param_groups[0]["lr"] = torch.tensor(0.1 * (group.rank + 1))
        return error_of(lambda: own(random_batch(["f"], 20, 4)))

    assert run_virtual_ranks(2, fn) == ["no error"] * 2


def test_headers_are_as_long_as_the_longest_between_two_ranks() -> None:
    room = HeaderSizes()
    room.enter(room.number(), [3, 9], [5, 5])
    room.enter(room.number(), [7, 1], [5, 6])
    assert room.sizes([3, 9], [5, 5]) == ([7, 9], [5, 6])
    room.enter(room.number(), [2, 2], [2, 2], unit=2)
    assert room.sizes([0, 0], [0, 0]) == ([8, 10], [6, 6])


def test_an_error_lists_eight_ranks_and_no_more() -> None:
    assert header._ranks([3]) == "rank 3"
    assert header._ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert header._ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, …"
