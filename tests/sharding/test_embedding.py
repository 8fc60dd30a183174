"""The sharded collections: the unsharded module's face, values and outputs, over rows on many ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.harness import TILINGS, WORLDS, Hosts
from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tilerec.sharding.layout import rectangles
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

TABLE = torch.arange(80).view(20, 4) % 97.0
HOSTS: Hosts = WORLDS["2+2"]
CONFIGS = (
    EmbeddingBagConfig(20, 4, "user", feature_names=["u", "v"]),
    EmbeddingBagConfig(9, 6, "item", feature_names=["i"], pooling=PoolingType.MEAN),
)


def plan(name: str, hosts: Hosts = HOSTS) -> dict[str, Tiling]:
    make = TILINGS[name]
    return {c.name: make(c.num_embeddings, c.embedding_dim, hosts, i) for i, c in enumerate(CONFIGS)}


def shard(module: Any, group: Group, tilings: dict[str, Tiling], hosts: Any = HOSTS, **kwargs: Any) -> Any:
    topology = Topology(group.size, "cpu", hosts=hosts)
    shard_collection(module, tilings, group, group.split("route"), topology, **kwargs)
    return module


def collection(device: str | None = None) -> EmbeddingBagCollection:
    torch.manual_seed(5)
    return EmbeddingBagCollection(list(CONFIGS), device=device)


# ---------------------------------------------------------------------------------------------------- face


def test_a_collection_becomes_a_sharded_one_in_place_and_keeps_its_face() -> None:
    whole = collection()

    def fn(group: Group, base: EmbeddingBagCollection) -> Any:
        module = copy.deepcopy(base)
        shard(module, group, plan("row_wise"))
        assert type(module) is ShardedEmbeddingBagCollection
        assert isinstance(module, EmbeddingBagCollection)
        assert tuple(module.embedding_bag_configs()) == CONFIGS
        for parameter in module.parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.is_leaf
            assert parameter.requires_grad
        out = module(random_batch(["u", "v", "i"], 9, 3, seed=group.rank))
        return [name for name, _ in module.named_parameters()], out.keys(), out.length_per_key()

    for names, keys, dims in run_virtual_ranks(4, fn, whole):
        assert names == [name for name, _ in whole.named_parameters()]
        assert keys == ["u", "v", "i"]
        assert dims == [4, 4, 6]


def test_tiles_that_do_not_touch_are_numbered_parameters() -> None:
    whole = collection()

    def fn(group: Group) -> list[tuple[str, tuple[int, ...]]]:
        module = shard(copy.deepcopy(whole), group, plan("two_tiles"))
        return [(name, tuple(p.shape)) for name, p in module.named_parameters() if ".user." in name]

    first, second, third, last = run_virtual_ranks(4, fn)
    name = "embedding_bags.user.weight"
    assert first == [(name, (6, 2)), (f"{name}.1", (14, 2))]
    assert last == [(name, (14, 2)), (f"{name}.1", (6, 2))]
    assert second == third == [(name, (0, 4))]


def test_a_sequence_collection_becomes_its_sharded_twin() -> None:
    def fn(group: Group) -> Any:
        module = EmbeddingCollection([EmbeddingConfig(20, 4, "t", feature_names=["a"])], need_indices=True)
        with torch.no_grad():
            module.embeddings["t"].weight.copy_(TABLE)
        shard(module, group, {"t": rows(20, 2)}, None)
        assert type(module) is ShardedEmbeddingCollection
        return module(batch_of([[3, 13], [], [5]]))["a"]

    for out in run_virtual_ranks(2, fn):
        assert torch.equal(out.values(), TABLE[[3, 13, 5]])
        assert out.lengths().tolist() == [2, 0, 1]
        assert out.weights().tolist() == [
            3,
            13,
            5,
        ]  # need_indices: the ids, where the unsharded module has them


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", TILINGS)
def test_values_survive_sharding(name: str) -> None:
    whole = collection()
    with torch.no_grad():
        whole.embedding_bags["user"].weight.copy_(TABLE)  # a pretrained table

    def fn(group: Group) -> None:
        module = shard(copy.deepcopy(whole), group, plan(name))
        for table in module._leaves.tables:
            full = whole.embedding_bags[table.config.name].weight
            for tile, leaf in zip(table.tiles, table.leaves(), strict=False):
                assert torch.equal(leaf, full[tile.r0 : tile.r1, tile.c0 : tile.c1])

    run_virtual_ranks(4, fn)


@pytest.mark.parametrize("name", TILINGS)
def test_a_module_on_meta_gets_the_values_that_the_whole_table_would_have(name: str) -> None:
    on_meta, real = collection("meta"), collection()

    def fn(group: Group) -> int:
        module = shard(copy.deepcopy(on_meta), group, plan(name))
        cells = 0
        for table in module._leaves.tables:
            full = real.embedding_bags[table.config.name].weight
            for tile, leaf in zip(table.tiles, table.leaves(), strict=False):
                assert torch.equal(leaf, full[tile.r0 : tile.r1, tile.c0 : tile.c1])
                cells += leaf.numel()
        return cells

    cells = run_virtual_ranks(4, fn)
    tilings = plan(name)
    held = [sum(r.cells for t in tilings.values() for r in rectangles_of(t, rank)) for rank in range(4)]
    assert cells == held, "each rank materializes its tiles and nothing else"


def rectangles_of(tiling: Tiling, rank: int) -> list[Any]:
    return [tile.rectangle for tile in rectangles(tiling) if rank in tile.owners]


def test_the_optimizers_state_goes_with_its_rows() -> None:
    """Two steps unsharded, then sharded: state and step counts are those of the tiles' cells."""
    whole = collection()
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), whole.parameters())
    for step in range(2):
        whole(random_batch(["u", "v", "i"], 9, 4, seed=step)).values().square().sum().backward()

    def fn(group: Group) -> None:
        module = shard(copy.deepcopy(whole), group, plan("grid"))
        for table in module._leaves.tables:
            before = whole.embedding_bags[table.config.name].rows
            for tile, own in zip(table.tiles, table.tile_rows, strict=False):
                assert torch.equal(own.state["sum"], before.state["sum"][tile.r0 : tile.r1])
                assert own.updates == before.updates == 2

    run_virtual_ranks(4, fn)


@pytest.mark.parametrize("name", TILINGS)
def test_attaching_after_sharding_is_attaching_before(name: str) -> None:
    whole = collection()
    batches = [random_batch(["u", "v", "i"], 9, 4, seed=rank) for rank in range(4)]

    def fn(group: Group, before: bool) -> list[Tensor]:
        module = copy.deepcopy(whole)
        if before:
            apply_optimizer_in_backward(SGD(lr=0.1, momentum=0.9), module.parameters())
        shard(module, group, plan(name))
        if not before:
            apply_optimizer_in_backward(SGD(lr=0.1, momentum=0.9), module.parameters())
        for _ in range(2):
            module(batches[group.rank]).values().square().sum().backward()
        return [p.detach() for p in module.parameters()]

    early, late = run_virtual_ranks(4, fn, True), run_virtual_ranks(4, fn, False)
    for one, other in zip(early, late, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------------------- verbs


def test_forward_is_route_lookup_combine_and_takes_what_is_routed() -> None:
    whole = collection()

    def fn(group: Group) -> None:
        module = shard(copy.deepcopy(whole), group, plan("grid"))
        features = random_batch(["u", "v", "i"], 9, 5, seed=group.rank)
        out = module(features).values()
        assert torch.equal(module(module.route(features)).values(), out)
        assert torch.equal(module.combine(module.lookup(module.route(features).wait())).values(), out)

    run_virtual_ranks(4, fn)


@pytest.mark.parametrize("name", ["row_wise", "column_wise", "data_parallel", "grid"])
def test_routing_a_batch_ahead_changes_no_bit(name: str) -> None:
    """The next batch is routed before the backward of this one; its rows are read after the update."""
    whole = collection()
    apply_optimizer_in_backward(SGD(lr=0.1), whole.parameters())
    batches = [[random_batch(["u", "v", "i"], 9, 4, seed=10 * rank + s) for s in range(4)] for rank in range(4)]

    def fn(group: Group, ahead: bool) -> list[Tensor]:
        module = shard(copy.deepcopy(whole), group, plan(name))
        own: list[Any] = list(batches[group.rank])
        if ahead:
            own[0] = module.route(own[0])
        seen = []
        for step in range(4):
            out = module(own[step]).values()
            if ahead and step < 3:
                own[step + 1] = module.route(own[step + 1])
            seen.append(out.detach().clone())
            out.square().sum().backward()
        return seen

    for one, other in zip(run_virtual_ranks(4, fn, True), run_virtual_ranks(4, fn, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_rows_of_a_routed_batch_may_be_looked_up_and_never_combined() -> None:
    """A step that is given up leaves the next one as it is."""

    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 2))
        module.lookup(module.route(batch_of([[1, 11]])))
        module.route(batch_of([[2, 12]]))
        return module(batch_of([[3, 13]])).values().detach()

    for out in run_virtual_ranks(2, fn):
        assert torch.equal(out, (TABLE[3] + TABLE[13])[None])


# ---------------------------------------------------------------------------------------------------- batches


def test_keys_come_in_any_order_and_may_be_more_than_the_tables_read() -> None:
    whole = collection()

    def fn(group: Group) -> Tensor:
        module = shard(copy.deepcopy(whole), group, plan("row_wise"))
        return module(random_batch(["x", "i", "v", "y", "u"], 9, 5, seed=group.rank)).values().detach()

    got = torch.cat(run_virtual_ranks(4, fn))
    batches = [random_batch(["x", "i", "v", "y", "u"], 9, 5, seed=rank) for rank in range(4)]
    assert torch.allclose(got, whole(concat_batches(batches)).values(), atol=1e-6)


def test_a_batch_may_put_its_keys_in_another_order_on_every_rank() -> None:
    def fn(group: Group) -> Tensor:
        module = sharded(group, rows(20, 2), ("a", "b"))
        if group.rank:
            return module(batch_of([[11], [2]], keys=("b", "a"))).values().detach()
        return module(batch_of([[2], [11]], keys=("a", "b"))).values().detach()

    one, other = run_virtual_ranks(2, fn)
    assert torch.equal(one, other)


def test_variable_batches_need_their_inverse_indices_on_the_rank_that_has_them() -> None:
    def fn(group: Group) -> str:
        module = sharded(group, rows(20, 2), ("a", "b"))
        features = KeyedJaggedTensor(
            ["a", "b"], torch.tensor([1, 2, 13]), lengths=torch.tensor([1, 1, 1]),
            stride_per_key_per_rank=[[2], [1]],
        )  # fmt: skip
        with pytest.raises(InputError, match="inverse_indices") as caught:
            module(features)
        return str(caught.value)

    run_virtual_ranks(2, fn)


# ---------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("name", ["row_wise", "two_tiles", "data_parallel"])
def test_a_converted_module_trains_in_its_new_type(name: str) -> None:
    """Parameter and storage stay one thing: the step is visible in the next forward, which has the new type."""
    whole = collection()
    apply_optimizer_in_backward(SGD(lr=0.5), whole.parameters())

    def fn(group: Group) -> None:
        module = shard(copy.deepcopy(whole), group, plan(name)).to(torch.bfloat16)
        features = random_batch(["u", "v", "i"], 9, 6, seed=group.rank)
        before = module(features).values()
        assert before.dtype == torch.bfloat16
        before.float().sum().backward()
        after = module(features).values()
        for table in module._leaves.tables:
            assert all(rows.leaf is leaf for rows, leaf in zip(table.tile_rows, table.leaves(), strict=True))
            assert all(leaf.dtype == torch.bfloat16 for leaf in table.leaves())
        assert not torch.equal(before, after)

    run_virtual_ranks(4, fn)


def test_a_module_in_float64_is_exact_to_float64() -> None:
    whole = collection().double()
    batches = [random_batch(["u", "v", "i"], 9, 5, seed=rank) for rank in range(4)]

    def fn(group: Group) -> Tensor:
        module = shard(copy.deepcopy(whole), group, plan("grid"))
        return module(batches[group.rank]).values().detach()

    got = torch.cat(run_virtual_ranks(4, fn))
    assert float((got - whole(concat_batches(batches)).values().detach()).abs().max()) < 1e-14


def test_two_collections_that_share_a_channel_keep_their_batches_apart() -> None:
    whole = collection()

    def fn(group: Group) -> None:
        route, topology = group.split("route"), Topology(4, "cpu", hosts=HOSTS)
        one, other = copy.deepcopy(whole), copy.deepcopy(whole)
        shard_collection(one, plan("row_wise"), group, route, topology)
        shard_collection(other, plan("grid"), group, route, topology)
        first = random_batch(["u", "v", "i"], 9, 5, seed=group.rank)
        second = random_batch(["u", "v", "i"], 9, 3, seed=10 + group.rank)
        routed = one.route(first), other.route(second)
        got = other(routed[1]).values(), one(routed[0]).values()
        (got[0].sum() + got[1].sum()).backward()
        assert torch.allclose(got[1], whole(first).values(), atol=1e-6)
        assert torch.allclose(got[0], whole(second).values(), atol=1e-6)

    run_virtual_ranks(4, fn)


@pytest.mark.parametrize("name", ["row_wise", "grid"])
def test_an_evaluation_in_inference_mode_may_come_before_training(name: str) -> None:
    whole = collection()
    apply_optimizer_in_backward(SGD(lr=1.0), whole.parameters())

    def fn(group: Group) -> Tensor:
        module = shard(copy.deepcopy(whole), group, plan(name))
        kjt = random_batch(["u", "v", "i"], 9, 3, seed=group.rank)
        with torch.inference_mode():
            before = module(kjt).values().clone()
        module(kjt).values().sum().backward()
        with torch.inference_mode():
            module(kjt)
        module(kjt).values().sum().backward()
        return before

    for rank, out in enumerate(run_virtual_ranks(4, fn)):
        kjt = random_batch(["u", "v", "i"], 9, 3, seed=rank)
        torch.testing.assert_close(out.clone(), whole(kjt).values().detach())


@pytest.mark.parametrize("name", ["row_wise", "column_wise", "data_parallel"])
def test_functional_call_gives_the_gradient_to_the_tensors_it_was_given(name: str) -> None:
    """The tiles are neither read nor updated, whatever is attached."""

    whole = collection()

    def fn(group: Group, attached: bool) -> list[Tensor]:
        module = copy.deepcopy(whole)
        if attached:
            apply_optimizer_in_backward(SGD(lr=0.5), module.parameters())
        shard(module, group, plan(name))
        before = [leaf.detach().clone() for leaf in module.parameters()]
        given = {key: leaf.detach() + 1 for key, leaf in module.named_parameters()}
        given = {key: tensor.requires_grad_() for key, tensor in given.items()}
        features = random_batch(["u", "v", "i"], 9, 5, seed=group.rank)
        torch.func.functional_call(module, given, (features,)).values().square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
        assert all(tensor.grad is not None for tensor in given.values())
        return [tensor.grad.to_dense() for tensor in given.values() if tensor.grad is not None]

    for got, want in zip(run_virtual_ranks(4, fn, True), run_virtual_ranks(4, fn, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("hosts", [HOSTS, WORLDS["1"]], ids=["four", "one"])
def test_a_batch_that_was_routed_before_the_tables_became_float64_is_summed_in_float64(hosts: Hosts) -> None:
    whole, size = collection(), sum(map(len, hosts))

    def fn(group: Group) -> None:
        module = shard(copy.deepcopy(whole), group, plan("row_wise", hosts), hosts)
        features = random_batch(["u", "v", "i"], 9, 5, seed=group.rank)
        ahead = module.prefetch(features)
        module.double()
        assert torch.equal(module(ahead).values(), module(features).values())

    run_virtual_ranks(size, fn)


def test_lengths_of_the_next_batch_are_no_divisors_of_one_that_is_routed() -> None:
    """Memory of a batch may be used again once its ids are on their way."""
    whole = collection()

    def fn(group: Group) -> None:
        module = shard(copy.deepcopy(whole), group, plan("row_wise"))
        features = random_batch(["u", "v", "i"], 9, 5, seed=group.rank)
        want, routed = module(features).values(), module.route(features)
        features.lengths().fill_(7)
        assert torch.equal(module(routed).values(), want)

    run_virtual_ranks(4, fn)


def test_a_routed_batch_is_neither_copied_nor_pickled() -> None:
    whole = collection()

    def fn(group: Group) -> None:
        routed = shard(copy.deepcopy(whole), group, plan("row_wise")).route(random_batch(["u", "v", "i"], 9, 5))
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ConfigError, match="copy the features, and route those"):
                way(routed)

    run_virtual_ranks(4, fn)


def test_a_table_of_a_mib_has_memory_of_its_own_and_smaller_ones_share_theirs() -> None:
    """Large memory is free as soon as its table has moved; small tables cost no allocation each."""
    rows = {"small": 100, "less": 1023, "mib": 1024}  # of 1 KiB
    configs = [EmbeddingBagConfig(count, 256, name, feature_names=[name]) for name, count in rows.items()]
    tilings = {name: Tiling.of(name, count, 256, [(0, count, 0, 256, 0)]) for name, count in rows.items()}

    def fn(group: Group) -> dict[str, int]:
        module = shard(EmbeddingBagCollection(configs), group, tilings, [[0]])
        return {name: module.embedding_bags[name].weight.untyped_storage().data_ptr() for name in rows}

    (memory,) = run_virtual_ranks(1, fn)
    assert memory["small"] == memory["less"]
    assert memory["mib"] != memory["less"]
