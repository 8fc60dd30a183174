"""Sharded: gradients of sample weights belong to the rows that their forward read, and all ranks refuse alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import TILINGS, Hosts
from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.row_reset import reset_rows
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings, Sync
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, PoolingType
from tilerec.spec.topology import Topology
from tilerec.storage.row_cache import RowCache
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

HOSTS: dict[int, Hosts] = {1: ((0,),), 2: ((0,), (1,)), 3: ((0, 1), (2,)), 4: ((0, 1), (2, 3))}
CONFIGS = (
    EmbeddingBagConfig(20, 4, "user", feature_names=["u", "v"]),
    EmbeddingBagConfig(9, 6, "item", feature_names=["i", "u"], pooling=PoolingType.MEAN),
)


def whole(attach: tuple[str, ...] = ("user", "item")) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(list(CONFIGS), is_weighted=True)
    for name in attach:
        apply_optimizer_in_backward(SGD(lr=1.0), [module.embedding_bags[name].weight])
    return module


def sharded(group: Group, base: Any, tiling: str, cached: bool = False) -> Any:
    hosts, module = HOSTS[group.size], copy.deepcopy(base)
    tilings = {c.name: TILINGS[tiling](c.num_embeddings, c.embedding_dim, hosts, i) for i, c in enumerate(CONFIGS)}
    caches = {c.name: RowCache(c.name, None) for c in CONFIGS} if cached else None
    topology = Topology(group.size, "cpu", hosts=hosts)
    shard_collection(module, tilings, group, group.split("route"), topology, caches=caches)
    return module


def batch(rank: int, seed: int) -> KeyedJaggedTensor:
    kjt = random_batch(["v", "u", "i"], 9, 3 if rank else 0, seed=10 * seed + rank, weighted=True)
    kjt.weights().requires_grad_()
    return kjt


def loss(module: Any, kjt: KeyedJaggedTensor) -> Tensor:
    return (module(kjt).values() ** 2).sum()


def want(base: Any, kjt: KeyedJaggedTensor) -> Tensor:
    """The gradient at the whole module's rows."""
    twin = copy.deepcopy(base).requires_grad_(False)
    own = kjt.weights().detach().clone().requires_grad_()
    loss(twin, KeyedJaggedTensor(kjt.keys(), kjt.values(), own, kjt.lengths())).backward()
    assert own.grad is not None
    return own.grad


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tiling", TILINGS)
def test_two_forwards_then_two_backwards_under_every_tiling(tiling: str, world: int, cached: bool) -> None:
    base = whole()

    def fn(group: Group) -> None:
        module = sharded(group, base, tiling, cached)
        batches = [batch(group.rank, seed) for seed in range(2)]
        losses = [loss(module, kjt) for kjt in batches]
        for one in losses:
            one.backward()
        for kjt in batches:
            torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(world, fn)


@pytest.mark.parametrize("tiling", ["row_wise", "column_wise", "data_parallel", "two_tiles"])
def test_one_backward_of_two_lookups_reads_both_before_it_writes(tiling: str) -> None:
    base = whole()

    def fn(group: Group) -> int:
        module = sharded(group, base, tiling)
        batches = [batch(group.rank, seed) for seed in range(2)]
        (loss(module, batches[0]) + loss(module, batches[1])).backward()
        for kjt in batches:
            torch.testing.assert_close(kjt.weights().grad, want(base, kjt))
        return max(table.rows.updates for table in module._leaves.tables if table.tiles)

    assert run_virtual_ranks(2, fn) == [1, 1]


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_two_forwards_then_two_backwards_in_2d(sync: Sync) -> None:
    base = whole()

    def fn(group: Group) -> None:
        module = copy.deepcopy(base)
        own = {c.name: TILINGS["row_wise"](c.num_embeddings, c.embedding_dim, ((0, 1),), 0) for c in CONFIGS}
        two_d = shard_2d(module, lambda: ([GroupConfig({"": own}, 2)], {}), group, ReplicaSettings(sync))
        batches = [batch(group.rank, seed) for seed in range(3)]
        losses = [loss(module, kjt) for kjt in batches]
        losses[0].backward()
        two_d.sync()  # an average writes rows, too
        for one in losses[1:]:
            one.backward()
        for kjt in batches:
            torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(4, fn)


@pytest.mark.parametrize("tiling", ["table_wise", "row_wise", "two_tiles", "uneven"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_a_torch_optimizer_in_between_is_known_on_every_rank(tiling: str, fused: bool) -> None:
    """A table that is stepped by hand beside one that is attached; some ranks hold nothing of one of them."""
    base = whole(attach=("user",))

    def fn(group: Group) -> None:
        module = sharded(group, base, tiling)
        item = [p for n, p in module.named_parameters() if ".item." in n]
        step = torch.optim.SGD(item, lr=1.0, fused=fused).step
        batches = [batch(group.rank, seed) for seed in range(2)]
        losses = [loss(module, kjt) for kjt in batches]
        losses[0].backward()
        step()
        losses[1].backward()
        for kjt in batches:
            torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(3, fn)


@pytest.mark.parametrize("tiling", ["table_wise", "row_wise"])
def test_what_is_written_by_hand_in_between_is_refused_on_every_rank(tiling: str) -> None:
    base = whole(attach=("user",))

    def fn(group: Group) -> str:
        module = sharded(group, base, tiling)
        batches = [batch(group.rank, seed) for seed in range(2)]
        losses = [loss(module, kjt) for kjt in batches]
        losses[0].backward()
        with torch.no_grad():
            for name, p in module.named_parameters():
                if ".item." in name:
                    p.mul_(2.0)
        with pytest.raises(InputError, match="Table 'item': its rows were written") as caught:
            losses[1].backward()
        loss(module, batch(group.rank, 5)).backward()
        return str(caught.value)

    assert len(set(run_virtual_ranks(3, fn))) == 1


def test_loading_a_checkpoint_in_between_is_known_on_every_rank() -> None:
    base = whole(attach=())

    def fn(group: Group) -> None:
        module, kjt = sharded(group, base, "two_tiles"), batch(group.rank, 0)
        out = loss(module, kjt)
        ones = {name: torch.ones_like(value) for name, value in base.state_dict().items()}
        module.load_state_dict(ones)
        out.backward()
        torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(3, fn)


@pytest.mark.parametrize("tiling", ["table_wise", "row_wise", "column_wise", "two_tiles", "uneven"])
def test_rows_that_are_reset_in_between_are_known_on_every_rank(tiling: str) -> None:
    """Ranks that hold nothing of the table are told of the rows, too, and must not take them for written."""
    base = whole(attach=())
    with torch.no_grad():
        for table in base.embedding_bags.values():
            table.weight.add_(1.0)  # initial values are others

    def fn(group: Group) -> None:
        module, kjt = sharded(group, base, tiling), batch(group.rank, 0)
        out = loss(module, kjt)
        for table in module._leaves.tables:
            table._warned_of_eviction = True
            reset_rows(table, torch.arange(-1, 9))
        out.backward()
        torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(3, fn)


def test_rows_are_those_of_the_lookup_where_an_update_comes_before_combine() -> None:
    base = whole()

    def fn(group: Group) -> None:
        module = sharded(group, base, "row_wise")
        kjt, other = batch(group.rank, 0), batch(group.rank, 1)
        looked = module.lookup(module.route(kjt))
        loss(module, other).backward()
        (module.combine(looked).values() ** 2).sum().backward()
        torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(2, fn)


def test_a_lookup_that_is_combined_twice_may_have_two_backwards() -> None:
    base = whole()

    def fn(group: Group) -> None:
        module, kjt = sharded(group, base, "row_wise"), batch(group.rank, 0)
        looked = module.lookup(module.route(kjt))
        losses = [(module.combine(looked).values() ** 2).sum() for _ in range(2)]
        for one in losses:
            one.backward()
        torch.testing.assert_close(kjt.weights().grad, 2 * want(base, kjt))

    run_virtual_ranks(2, fn)


def test_a_backward_again_needs_a_graph_that_was_kept() -> None:
    base = whole(attach=())

    def fn(group: Group) -> None:
        module, kjt = sharded(group, base, "table_wise"), batch(group.rank, 0)
        out = module(kjt).values().sum()
        out.backward(retain_graph=True)
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()

    run_virtual_ranks(3, fn)


def test_a_rule_in_phases_reads_before_it_writes() -> None:
    base = whole(attach=())
    apply_optimizer_in_backward(RowWiseAdagrad(lr=1.0), base.parameters())

    def fn(group: Group) -> None:
        module = sharded(group, base, "column_wise")
        batches = [batch(group.rank, seed) for seed in range(2)]
        for one in [loss(module, kjt) for kjt in batches]:
            one.backward()
        for kjt in batches:
            torch.testing.assert_close(kjt.weights().grad, want(base, kjt))

    run_virtual_ranks(3, fn)
