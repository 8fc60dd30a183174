"""Ids over many ranks: the map, evictions, counts and rows of one process, bit for bit, at any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.harness import TILINGS, WORLDS
from tests.sharding.managed_models import (
    COLUMNS,
    KEYS,
    POLICIES,
    ROWS,
    SAMPLES,
    STEPS,
    Ticks,
    alone,
    assert_same,
    build,
    configs,
    global_batch,
    local_batch,
    sizes_of,
    train,
    upstream,
)
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
)
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, data_parallel, row_wise, table_wise
from tilerec.sharding.buckets_view import BucketsView
from tilerec.sharding.header import FLAG_BITS, header_sizes_of
from tilerec.sharding.id_exchange import row_ranges
from tilerec.sharding.logical import Cover
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)
from tilerec.sharding.route import WEIGHTS_NEED_GRAD
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Rectangle
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

# ------------------------------------------------------------------------------------------------------------ same bits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_map_evictions_counts_and_weights_are_those_of_one_process(world: int, policy: str) -> None:
    maps, state, stats = alone(policy)
    plan = {"user": row_wise(), "item": column_wise([0, world - 1]), "plain": table_wise(rank=world - 1)}

    def fn(group: Group) -> Any:
        module = build(policy)
        for part in module.managed_collision_collection.modules_by_table.values():
            if isinstance(part._clock, Ticks):
                part._clock.off = 1000 * group.rank
        shard(module, {"_embedding_module": plan}, group, exact=True)
        own = train(module, group, sizes_of(world), range(STEPS))
        return own, full_state_dict(module), module.stats()

    results = run_virtual_ranks(world, fn)
    for step in range(STEPS):
        assert torch.equal(concat_batches([own[step] for own, _, _ in results]).values(), maps[step].values())
        assert torch.equal(concat_batches([own[step] for own, _, _ in results]).lengths(), maps[step].lengths())
    for _, full, counted in results:
        assert_same(full, state)
        assert {t: s.features for t, s in counted.items()} == {t: s.features for t, s in stats.items()}
        assert counted == stats
    assert stats["item"].total.evictions > 0
    assert stats["item"].live > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_do_not_look_at_their_devices_do_the_same(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ids were on devices: rows that lost their id come beside the batch's ids, and steps are tensors."""
    _, state, stats = alone(policy)
    monkeypatch.setattr(ManagedCollisionModule, "host_looks", property(lambda self: False))

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, {"_embedding_module": {name: row_wise() for name in ROWS}}, group, exact=True)
        train(module, group, sizes_of(3), range(STEPS))
        return full_state_dict(module), module.stats()

    for full, counted in run_virtual_ranks(3, fn):
        assert_same(full, state)
        assert counted == stats


# Under `staggered`, row-wise Adagrad has nobody to add its row sums with.
@pytest.mark.parametrize("tiling", [name for name in TILINGS if name != "staggered"])
def test_rows_that_change_hands_begin_anew_under_every_tiling(tiling: str) -> None:
    hosts = WORLDS["2+2"]
    policy = "lru and lfu, shared rows"
    maps, state, _ = alone(policy)
    cut = {name: TILINGS[tiling](rows, dim, hosts, i) for i, (name, (rows, dim, _)) in enumerate(ROWS.items())}

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, {"_embedding_module": cut}, group, exact=True)
        train(module, group, sizes_of(4), range(STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(4, fn):
        assert_same(full, state)
    assert maps


def test_without_exact_mode_ids_are_the_same_and_weights_equal_to_rounding() -> None:
    policy = "lru and lfu, shared rows"

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group)
        train(module, group, sizes_of(3), range(STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(3, fn):
        assert_same(full, alone(policy)[1], exactly=False)


def test_weights_of_samples_travel_with_their_ids() -> None:
    policy = "rejected and admitted late"
    _, state, _ = alone(policy, True)

    def fn(group: Group) -> Any:
        module = build(policy, weighted=True)
        shard(module, row_wise(), group, exact=True)
        train(module, group, sizes_of(2), range(STEPS), weighted=True)
        return full_state_dict(module)

    for full in run_virtual_ranks(2, fn):
        assert_same(full, state, exactly=False)  # weights are no small whole numbers


def test_sequences_have_their_ids_rows() -> None:
    policy = "lru and lfu, shared rows"

    def fn(group: Group) -> Any:
        module = build(policy, pooled=False)
        shard(module, row_wise(), group, exact=True)
        assert type(module) is ShardedManagedCollisionEmbeddingCollection
        maps = train(module, group, sizes_of(group.size), range(3))
        out, remapped = module.eval()(local_batch(1, group, sizes_of(group.size)))
        full = full_state_dict(module)
        for table, (_, _, names) in ROWS.items():
            weight = full[f"_embedding_module.embeddings.{table}.weight"]
            for name in names:
                assert torch.equal(out[name].values(), weight[remapped[name].values()])
        return maps, full

    one, three = run_virtual_ranks(1, fn), run_virtual_ranks(3, fn)
    for step in range(3):
        together = concat_batches([maps[step] for maps, _ in three])
        assert torch.equal(together.values(), one[0][0][step].values())
    assert_same(three[2][1], one[0][1])


def test_variable_batches_keep_their_shape() -> None:
    policy = "rejected and admitted late"
    parts = [random_batch(list(KEYS), KEYS, 6, variable=True, seed=seed) for seed in range(3)]
    whole = build(policy)
    for _ in range(2):
        out, want = whole(concat_batches(parts))

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group, exact=True)
        for _ in range(2):
            pooled, remapped = module(parts[group.rank])
        assert remapped.stride_per_key() == parts[group.rank].stride_per_key()
        return pooled.values().detach(), remapped

    results = run_virtual_ranks(3, fn)
    together = concat_batches([remapped for _, remapped in results])
    assert torch.equal(together.values(), want.values())
    assert torch.equal(together.lengths(), want.lengths())
    assert torch.equal(torch.cat([pooled for pooled, _ in results]), out.values())


# ----------------------------------------------------------------------------------------------------------- face


def test_the_modules_become_sharded_ones_in_place() -> None:
    def fn(group: Group) -> Any:
        module = build("lru and lfu, shared rows")
        names = [name for name, _ in module.named_parameters()]
        shard(module, table_wise(rank=0), group)
        assert type(module) is ShardedManagedCollisionEmbeddingBagCollection
        assert isinstance(module, ManagedCollisionEmbeddingBagCollection)
        assert type(module.managed_collision_collection) is ShardedManagedCollisionCollection
        assert [name for name, _ in module.named_parameters()] == names
        own = module.managed_collision_collection.modules_by_table["user"]
        return own._buckets.first, own._buckets.last, own.ids.numel(), repr(own)

    first, second, third, last = run_virtual_ranks(4, fn)
    assert [(a, b) for a, b, _, _ in (first, second, third, last)] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert [n for _, _, n, _ in (first, second, third, last)] == [7, 14, 7, 14]
    assert "6 buckets, here: [1, 3)" in second[3]


def test_a_collection_of_ids_alone_is_sharded_too() -> None:
    tables = configs(EmbeddingBagConfig)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            user, item = POLICIES["lru and lfu, shared rows"]()
            self.ids = ManagedCollisionCollection({"user": user, "item": item}, tables)

    def fn(group: Group) -> Any:
        model: Any = Model()
        with pytest.warns(UserWarning, match="nothing to do"):
            shard(model, {}, group)
        maps = [model.ids(local_batch(step, group, sizes_of(group.size))) for step in range(STEPS)]
        return maps, model.ids.evict()["user"]

    one, two = alone("lru and lfu, shared rows"), run_virtual_ranks(2, fn)
    for step in range(STEPS):
        together = concat_batches([maps[step] for maps, _ in two])
        assert torch.equal(together.values(), one[0][step].values())
    # Nobody says who holds the rows, so every rank is told.
    assert two[0][1].sort().values.tolist() == two[1][1].sort().values.tolist()
    assert two[0][1].numel() == one[2]["user"].total.evictions


def test_inspect_finds_an_id_wherever_it_lives() -> None:
    policy = "lru and lfu, shared rows"
    whole = build(policy)
    for step in range(STEPS):
        whole(global_batch(step))

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group)
        train(module, group, sizes_of(3), range(STEPS))
        with pytest.raises(InputError, match="got feature 'z', which no table maps"):
            module.inspect("z", 1)
        return [module.inspect("u", id_) for id_ in range(0, 150, 7)]

    results = run_virtual_ranks(3, fn)
    assert results[0] == results[1] == results[2]
    ranks = set()
    for place in results[0]:
        own = whole.inspect("u", place.id)
        ranks.add(place.rank)
        assert (place.row, place.since, place.last, place.hits, place.sooner) == (
            own.row, own.since, own.last, own.hits, own.sooner,
        )  # fmt: skip
    assert ranks == {0, 1, 2}


def test_evaluation_reads_the_same_everywhere_and_changes_nothing() -> None:
    policy = "rejected and admitted late"

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group)
        train(module, group, sizes_of(3), range(3))
        before = full_state_dict(module)
        _, remapped = module.eval()(local_batch(9, group, sizes_of(3)))
        assert_same(full_state_dict(module), before)
        return remapped, {t: (s.total.reads, s.total.misses) for t, s in module.stats().items()}

    whole = build(policy)
    for step in range(3):
        whole(global_batch(step))
    _, want = whole.eval()(global_batch(9))
    results = run_virtual_ranks(3, fn)
    assert torch.equal(concat_batches([remapped for remapped, _ in results]).values(), want.values())
    counted = {t: (s.total.reads, s.total.misses) for t, s in whole.stats().items()}
    assert all(reads == counted for _, reads in results)


def test_tables_on_meta_begin_with_empty_maps() -> None:
    def fn(group: Group) -> Any:
        tables = configs(EmbeddingBagConfig)[:1]
        module = HashZchManagedCollisionModule(48, "meta", 6)
        made = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables, device="meta"),
            ManagedCollisionCollection({"user": module}, tables),
        )
        shard(made, row_wise(), group)
        batch = KeyedJaggedTensor.from_lengths_sync(["u", "v"], torch.tensor([group.rank, 5]), torch.tensor([1, 1]))
        made(batch)
        return made.stats()["user"].live

    assert run_virtual_ranks(2, fn) == [3, 3]


def test_copies_map_on_their_own() -> None:
    def fn(group: Group) -> Any:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group, exact=True)
        train(module, group, sizes_of(2), range(2))
        twin = copy.deepcopy(module)
        before = full_state_dict(module)
        train(twin, group, sizes_of(2), range(2, STEPS))
        assert_same(full_state_dict(module), before)
        return full_state_dict(twin)

    for full in run_virtual_ranks(2, fn):
        assert_same(full, alone("lru and lfu, shared rows")[1])


def test_ids_of_rank_0_count_where_ranks_were_given_others() -> None:
    def fn(group: Group) -> Any:
        module = build("lru and lfu, shared rows")
        module(global_batch(group.rank))
        shard(module, row_wise(), group)
        return full_state_dict(module)

    whole = build("lru and lfu, shared rows")
    whole(global_batch(0))
    for full in run_virtual_ranks(3, fn):
        assert_same(full, dict(whole.state_dict()))


# -------------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("ahead", ["route", "prefetch"])
def test_a_batch_may_be_routed_while_the_one_before_goes_backward(ahead: str) -> None:
    """Rows that the next batch takes are reset when it is looked up, after the gradients of the old ids."""
    policy = "lru and lfu, shared rows"

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group, exact=True)
        sizes, first = sizes_of(2), sum(sizes_of(2)[: group.rank])
        begin = getattr(module, ahead)
        routed = begin(local_batch(0, group, sizes))
        for step in range(STEPS):
            looked = module.lookup(routed.wait())
            out, _ = module.combine(looked)
            if step + 1 < STEPS:
                routed = begin(local_batch(step + 1, group, sizes))
            grads = upstream(step, SAMPLES, COLUMNS)[first : first + sizes[group.rank]]
            (out.values() * grads * group.size).sum().backward()
        return full_state_dict(module)

    for full in run_virtual_ranks(2, fn):
        assert_same(full, alone(policy)[1])


def test_two_batches_may_be_routed_ahead() -> None:
    def fn(group: Group) -> Any:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group, exact=True)
        ahead = [module.route(local_batch(step, group, sizes_of(2))) for step in range(3)]
        assert len(module._resets) == 3
        for routed in ahead:
            out, _ = module(routed)
            out.values().sum().backward()
        return len(module._resets), full_state_dict(module)

    first, second = run_virtual_ranks(2, fn)
    assert first[0] == 0
    assert_same(first[1], second[1])


def steps_with_the_next_batch_routed(module: Any, group: Group, at: int, between: Callable[[], None]) -> None:
    """All steps, and `between` is called before the lookup of step `at`, when its ids have rows already."""
    sizes, first = sizes_of(group.size), sum(sizes_of(group.size)[: group.rank])
    routed = module.route(local_batch(0, group, sizes))
    for step in range(STEPS):
        if step == at:
            between()
        out, _ = module.combine(module.lookup(routed))
        if step + 1 < STEPS:
            routed = module.route(local_batch(step + 1, group, sizes))
        grads = upstream(step, SAMPLES, COLUMNS)[first : first + sizes[group.rank]]
        (out.values() * grads * group.size).sum().backward()


def test_tables_that_move_while_a_batch_is_routed_forget_what_old_ids_learned() -> None:
    policy = "lru and lfu, shared rows"

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group, exact=True)

        def move() -> None:
            assert any(rows is not None and rows.numel() for rows in module._resets[0][2].values())
            reshard(module, {"_embedding_module": dict.fromkeys(["user", "item"], column_wise([2, 0]))})

        steps_with_the_next_batch_routed(module, group, 3, move)
        return full_state_dict(module)

    for full in run_virtual_ranks(3, fn):
        assert_same(full, alone(policy)[1])


def test_saved_rows_are_those_of_the_saved_ids_while_a_batch_is_routed() -> None:
    policy = "lru and lfu, shared rows"

    def fn(group: Group) -> Any:
        module, other, saved = build(policy), build(policy), {}
        shard(module, row_wise(), group, exact=True)
        shard(other, row_wise(), group, exact=True)
        steps_with_the_next_batch_routed(module, group, 3, lambda: saved.update(copies(full_state_dict(module))))
        assert_same(full_state_dict(module), alone(policy)[1])
        fresh = build(policy)
        # Every row that an id took in step 3, and nobody has trained, has its initial values.
        since = saved["_managed_collision_collection._managed_collision_modules.user.since"]
        places = (since == 4).nonzero().squeeze(1)
        rows = places + places // 7  # one of eight is shared
        name = "_embedding_module.embedding_bags.user.weight"
        assert torch.equal(saved[name][rows], fresh.state_dict()[name][rows])
        return rows.numel()

    assert all(run_virtual_ranks(2, fn))


def copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def test_a_batch_that_was_routed_before_other_state_is_loaded_is_mapped_again() -> None:
    policy = "lru and lfu, shared rows"

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group, exact=True)
        train(module, group, sizes_of(2), range(2))
        saved = copies(full_state_dict(module))
        train(module, group, sizes_of(2), range(2, 5))
        routed = module.route(local_batch(2, group, sizes_of(2)))
        module.load_state_dict(saved)
        assert_same(full_state_dict(module), saved)
        return module(routed)[1]

    together = concat_batches(run_virtual_ranks(2, fn))
    assert torch.equal(together.values(), alone(policy)[0][2].values())


# ----------------------------------------------------------------------------------------------------- bad input


def test_a_clock_that_fails_on_one_rank_is_heard_on_all_and_changes_nothing() -> None:
    def fn(group: Group) -> str:
        module = build("times to live")
        shard(module, row_wise(), group)
        clock = module.managed_collision_collection.modules_by_table["item"]
        if group.rank == 1:
            clock._clock = lambda: 0.5
        with pytest.raises((InputError, ConfigError)) as caught:
            module(local_batch(0, group, sizes_of(2)))
        assert all(stats.live == 0 for stats in module.stats().values())
        return str(caught.value)

    first, second = run_virtual_ranks(2, fn)
    assert "Rank 1 refused its batch" in first
    assert "Table 'item': got 0.5 from its clock" in second


def test_ranks_that_ask_for_different_ids_are_named() -> None:
    def fn(group: Group) -> str:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group)
        with pytest.raises(InputError) as caught:
            module.inspect("u", 5 + group.rank)
        with pytest.raises(InputError, match="of type str" if group.rank else "inspects"):
            module.inspect("u", "5" if group.rank else 5)
        return str(caught.value)

    assert "rank 0 inspects (u, 5) and rank 1 inspects (u, 6)" in run_virtual_ranks(2, fn)[0]


def test_more_ranks_than_buckets_are_refused_before_anything_changes() -> None:
    def fn(group: Group) -> str:
        module = build("rejected and admitted late")
        with pytest.raises(ConfigError) as caught:
            shard(module, row_wise(), group)
        module(global_batch(0))
        return str(caught.value)

    for words in run_virtual_ranks(6, fn):
        assert "Table 'item': 5 buckets cannot be shared by 6 ranks" in words
        assert "use at least 6 buckets" in words


def test_as_many_ranks_as_buckets_hold_one_each() -> None:
    policy = "rejected and admitted late"

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, row_wise(), group, exact=True)
        train(module, group, [2, 2, 2, 3, 3], range(STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(5, fn):
        assert_same(full, alone(policy)[1])


def test_ranks_with_other_settings_are_named() -> None:
    def fn(group: Group) -> str:
        module = build("lru and lfu, shared rows")
        if group.rank == 1:
            ids = module.managed_collision_collection.modules_by_table["user"]
            ids.settings = replace(ids.settings, max_probe=3)
        with pytest.raises(ConfigError) as caught:
            shard(module, row_wise(), group)
        return str(caught.value)

    for words in run_virtual_ranks(3, fn):
        assert "user.max_probe is 128 on ranks 0, 2 and 3 on rank 1" in words


def test_a_batch_that_one_rank_refuses_is_heard_on_all_and_changes_nothing() -> None:
    def fn(group: Group) -> Any:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group, exact=True)
        train(module, group, sizes_of(3), range(2))
        before = full_state_dict(module)
        batch = local_batch(2, group, sizes_of(3))
        wrong = batch.permute([0, 2, 3]) if group.rank == 1 else batch
        with pytest.raises(InputError) as caught:
            module(wrong)
        assert_same(full_state_dict(module), before)
        train(module, group, sizes_of(3), range(2, STEPS))
        return str(caught.value), full_state_dict(module)

    words, full = zip(*run_virtual_ranks(3, fn), strict=True)
    assert "feature 'i' of table 'item' is not in the batch" in words[1]
    assert "Rank 1 refused its batch" in words[0]
    assert "Rank 1 refused its batch" in words[2]
    assert_same(full[0], alone("lru and lfu, shared rows")[1])


def test_rows_reset_for_a_batch_that_could_not_be_routed_are_reset_for_the_next() -> None:
    """The tables fail on a batch on rank 1; the map has given rows of old ids away by then."""

    def fn(group: Group) -> Any:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group, exact=True)
        train(module, group, sizes_of(2), range(2))
        batch = local_batch(2, group, sizes_of(2))
        tables = module.embedding_module
        if group.rank == 1:
            tables._batch = None  # not to be called
        with pytest.raises(TypeError if group.rank == 1 else InputError):
            module(batch)
        if group.rank == 1:
            del tables._batch
        fresh = dict(module._resets[0][2])
        assert len(module._resets) == 1
        module(local_batch(2, group, sizes_of(2)))
        assert not module._resets
        return {t: None if rows is None else rows.numel() for t, rows in fresh.items()}

    assert any(count for told in run_virtual_ranks(2, fn) for count in told.values() if count)


def test_training_here_and_evaluating_there_is_heard_on_all() -> None:
    def fn(group: Group) -> str:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group)
        module.train(group.rank != 1)
        with pytest.raises(InputError) as caught:
            module(local_batch(0, group, sizes_of(3)))
        module.train()
        module(local_batch(0, group, sizes_of(3)))
        return str(caught.value)

    for words in run_virtual_ranks(3, fn):
        assert "rank 0 trains and rank 1 evaluates" in words


def test_an_owner_that_cannot_map_is_heard_on_all() -> None:
    def fn(group: Group) -> str:
        module = build("lru and lfu, shared rows")
        shard(module, row_wise(), group)
        if group.rank == 1:
            module.managed_collision_collection.modules_by_table["item"].ids = torch.zeros(3)
        with pytest.raises(InputError) as caught:
            module(local_batch(0, group, sizes_of(3)))
        return str(caught.value)

    words = run_virtual_ranks(3, fn)
    assert "Rank 1 could not map the ids of its buckets" in words[0]
    assert "ids is torch.float32" in words[1]


def test_a_module_of_some_buckets_is_not_sharded() -> None:
    def fn(group: Group) -> None:
        config = [EmbeddingBagConfig(48, 4, "t", feature_names=["a"])]
        module = HashZchManagedCollisionModule(48, "cpu", 6, start_bucket=1)
        made = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(config), ManagedCollisionCollection({"t": module}, config)
        )
        with pytest.raises(ConfigError, match=r"holds buckets \[1, 6\) of 6 only"):
            shard(made, row_wise(), group)

    run_virtual_ranks(2, fn)


def test_capacity_of_a_sharded_table_is_changed_with_its_plan() -> None:
    def fn(group: Group) -> None:
        module = build("lru and lfu, shared rows")
        shard(module, data_parallel(), group)
        with pytest.raises(ConfigError, match=r"Table 'user' is sharded: call tilerec\.parallel\.resize_ids"):
            module.resize("user", 96)

    run_virtual_ranks(2, fn)


# ------------------------------------------------------------------------------------------------------- pieces


def test_rows_of_rectangles_are_joined_where_they_meet() -> None:
    tiles = [
        Rectangle(4, 8, 0, 2),
        Rectangle(0, 4, 0, 2),
        Rectangle(6, 7, 2, 4),
        Rectangle(9, 9, 0, 2),
        Rectangle(10, 12, 0, 2),
    ]
    assert row_ranges(tiles) == ((0, 8), (10, 12))
    assert row_ranges([]) == ()


def test_a_view_says_where_each_bucket_lies() -> None:
    def fn(group: Group) -> Any:
        view = BucketsView(group, (0, 1, 3))
        own = torch.arange([2, 4][group.rank]) + 2 * group.rank
        table = own.view(-1, 1) * torch.ones(1, 3, dtype=torch.int64)
        assert isinstance(view.logical(own, 2).cover, Cover)
        return view.logical(own, 2).full(), view.logical(table[: [1, 2][group.rank]], 1).full()

    for rows, counts in run_virtual_ranks(2, fn):
        assert rows.tolist() == [0, 1, 2, 3, 4, 5]
        assert counts.shape == (3, 3)


def test_headers_of_a_channel_with_ids_are_whole_int64_numbers() -> None:
    """Headers of ids are int64, those of other collections int32 words, of which there may be an odd number."""

    def fn(group: Group) -> tuple[list[int], list[int]]:
        module = build("lru and lfu, shared rows")
        shard(module, {"_embedding_module": {name: row_wise() for name in ROWS}}, group)
        room = header_sizes_of(module.managed_collision_collection.exchange.group)
        room.enter(room.number(), [2**10 + 1] * 2, [2**10 + 3] * 2)
        return room.sizes([0] * 2, [0] * 2)

    assert run_virtual_ranks(2, fn) == [([2**10 + 2] * 2, [2**10 + 4] * 2)] * 2


@pytest.mark.parametrize(("flag", "refused"), [(0, False), (1, True), (WEIGHTS_NEED_GRAD, False)])
def test_a_header_of_ids_has_the_flags_of_a_lookups(flag: int, refused: bool) -> None:
    """Both may meet on a channel: a lookup whose weights need gradients is no batch that was refused."""

    def fn(group: Group) -> str:
        module = build("lru and lfu, shared rows")
        shard(module, {"_embedding_module": {name: row_wise() for name in ROWS}}, group)
        exchange = module.managed_collision_collection.exchange
        header = [exchange.facts.digest() << FLAG_BITS | flag] + [0] * exchange._width
        try:
            exchange._check([header])
        except InputError as error:
            return str(error)
        return ""

    (said,) = run_virtual_ranks(1, fn)
    assert said.startswith("Rank 0 refused its batch") is refused
    assert bool(said) is refused
