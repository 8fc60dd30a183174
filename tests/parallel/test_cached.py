"""Cached tables of a sharded model give the same bits as the same tiles without a cache."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec import (
    CacheParams,
    ConfigError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
    apply_optimizer_in_backward,
    cache_tables,
    reshard,
    shard,
    uncache_tables,
)
from tilerec.comms.group import Group
from tilerec.modules.row_reset import reset_rows
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.sharding import tile_memory
from tilerec.spec.optimizer import LAMB, Adam, OptimizerSpec, PartialRowWiseLAMB, RowWiseAdagrad
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding
from tilerec.storage import cache_request
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

WORLD, KEYS, ROWS = 2, ["f", "g"], [150, 90]
CACHE = CacheParams(load_factor=0.3)
KINDS = ["row_wise", "column_wise", "table_wise", "data_parallel", "grid_shard"]


class Model(nn.Module):
    """Pooled tables, one of them with sums over whole rows cut by columns; and one that is looked up id by id."""

    def __init__(self, dtype: torch.dtype = torch.float32, weighted: bool = False) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(150, 8, "a", feature_names=["f"], dtype=dtype),
            EmbeddingBagConfig(90, 16, "b", feature_names=["g"], pooling=PoolingType.MEAN, dtype=dtype),
        ]
        self.ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
        self.ec = EmbeddingCollection([EmbeddingConfig(90, 8, "c", feature_names=["g"], dtype=dtype)])


def plan(kind: str, kernel: str = "fused", cache: CacheParams | None = None) -> dict[str, Any]:
    def of() -> ParameterSharding:
        return ParameterSharding(kind, kernel, [1] if kind == "table_wise" else None, cache_params=cache)

    return {"ebc": {"a": of(), "b": of()}, "ec": {"c": of()}}


def cached_plan(kind: str, cache: CacheParams = CACHE) -> dict[str, Any]:
    return plan(kind, "fused_uvm_caching", cache)


def batch(rank: int, step: int, weighted: bool = False) -> Any:
    return random_batch(KEYS, ROWS, 6, mean_length=4.0, exponent=1.05, weighted=weighted, seed=100 * step + rank)


def train(model: nn.Module, group: Group, steps: Sequence[int], ahead: bool = False) -> list[Tensor]:
    """Outputs (and gradients of weights); `ahead`: each batch is prefetched before the backward of the one before."""
    seen: list[Tensor] = []
    weighted = model.ebc.is_weighted()
    own = [batch(group.rank, step, weighted) for step in steps]
    routed: list[Any] = [(kjt, kjt) for kjt in own]
    for i, kjt in enumerate(own):
        if weighted:
            kjt.weights().requires_grad_()
        if ahead and i == 0:
            routed[0] = (model.ebc.prefetch(kjt), model.ec.prefetch(kjt))
        pooled, rows = model.ebc(routed[i][0]).values(), model.ec(routed[i][1])["g"].values()
        if ahead and i + 1 < len(own):
            routed[i + 1] = (model.ebc.prefetch(own[i + 1]), model.ec.prefetch(own[i + 1]))
        ((pooled * pooled).sum() + (rows * rows).sum()).backward()
        seen += [pooled.detach(), rows.detach()]
        if weighted:
            assert kjt.weights().grad is not None
            seen.append(kjt.weights().grad)
    return seen


def everything(model: nn.Module) -> list[Tensor]:
    """Whole weights and state."""
    own = list(full_state_dict(model).values())
    for part in (model.ebc, model.ec):
        for state in part.fused_optimizer.full_state_dict()["state"].values():
            own += [value for value in state.values() if isinstance(value, Tensor)]
    return own


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def both(base: Model, group: Group, spec: OptimizerSpec, kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model, sharded without and with caches."""
    models = []
    for own in (plan(kind), cached_plan(kind)):
        model = copy.deepcopy(base)
        apply_optimizer_in_backward(spec, model.parameters())
        models.append(shard(model, own, mesh=group, **options))
    return models[0], models[1]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_with_prefetch_is_the_same_bits(kind: str, exact: bool) -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), kind, exact=exact)
        assert_same(train(plain, group, range(4)), train(other, group, range(4), ahead=True))
        assert_same(everything(plain), everything(other))
        stats = [own for part in (other.ebc, other.ec) for own in part.cache_stats().values()]
        assert (sum(own.hits for own in stats) > 0) == (kind != "table_wise" or group.rank == 1)
        assert kernels(other) == dict.fromkeys("abc", "fused_uvm_caching")

    run_virtual_ranks(WORLD, run)


def kernels(model: nn.Module) -> dict[str, str]:
    return {name: s.kernel.value for _, name, s in plan_of(model).tables() if s.kernel is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [RowWiseAdagrad(0.1, max_norm=0.5), LAMB(0.1), PartialRowWiseLAMB(0.1)])
@pytest.mark.parametrize("kind", ["column_wise", "row_wise"])
def test_rules_with_sums_over_whole_rows(kind: str, spec: OptimizerSpec, dtype: torch.dtype) -> None:
    base = Model(dtype)

    def run(group: Group) -> None:
        plain, other = both(base, group, spec, kind, exact=dtype == torch.bfloat16)
        assert_same(train(plain, group, range(3)), train(other, group, range(3), ahead=True))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(WORLD, run)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_weighted_bags_and_the_gradients_of_their_weights(kind: str) -> None:
    base = Model(weighted=True)

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), kind)
        assert_same(train(plain, group, range(3)), train(other, group, range(3)))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(WORLD, run)


def test_saved_state_of_cached_tables_is_that_of_the_others_and_loads_into_them() -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        train(plain, group, range(2))
        train(other, group, range(2))
        saved = {name: value.clone() for name, value in full_state_dict(other).items()}
        states = [copy.deepcopy(part.fused_optimizer.full_state_dict()) for part in (other.ebc, other.ec)]
        train(other, group, range(5, 7))  # goes astray
        other.load_state_dict(saved)
        for part, state in zip((other.ebc, other.ec), states, strict=True):
            part.fused_optimizer.load_state_dict(state)
        assert_same(everything(plain), everything(other))
        assert_same(train(plain, group, range(2, 4)), train(other, group, range(2, 4)))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(WORLD, run)


def test_state_that_is_loaded_while_a_lookup_waits_for_its_backward_stands() -> None:
    """Its rows are copied for the gradients of its weights: that brings no other table back into its cache."""
    base = Model(weighted=True)

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        saved = copy.deepcopy(plain.ebc.fused_optimizer.full_state_dict())
        for model in (plain, other):
            train(model, group, range(2))
            kjt = batch(group.rank, 2, True)
            kjt.weights().requires_grad_()
            out = model.ebc(kjt).values()
            model.ebc.fused_optimizer.load_state_dict(copy.deepcopy(saved))
            (out * out).sum().backward()
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(WORLD, run)


def test_replicas_that_agree_while_a_lookup_waits_for_its_backward_stand() -> None:
    plans = [GroupConfig({"ebc": {name: ParameterSharding("row_wise") for name in "ab"}}, 2)]
    base = Model(weighted=True)  # ranks are threads, which share the random generator

    def run(group: Group, lines: float | None) -> dict[str, Tensor]:
        model = nn.ModuleDict({"ebc": copy.deepcopy(base.ebc)})
        apply_optimizer_in_backward(Adam(0.1), model.parameters())
        if lines is not None:
            cache_tables(model, lines)
        two = shard_2d(model, lambda: (plans, {}), group, ReplicaSettings("average", 1000))
        for step in range(3):
            kjt = batch(group.rank, step, True)
            kjt.weights().requires_grad_()
            out = model["ebc"](kjt).values()
            if step == 2:
                two.sync()
            (out * out).sum().backward()
        two.sync()
        return full_state_dict(model)

    for plain, other in zip(run_virtual_ranks(4, run, None), run_virtual_ranks(4, run, 0.3), strict=True):
        assert_same(list(plain.values()), list(other.values()))


def test_cached_tables_are_cut_anew_with_their_newest_rows() -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        for model in (plain, other):
            train(model, group, range(2))
        for kind in ("column_wise", "table_wise", "row_wise"):
            ranks = [1] if kind == "table_wise" else None
            cuts = {"ebc": dict.fromkeys("ab", (kind, ranks)), "ec": {"c": (kind, ranks)}}
            for model in (plain, other):
                own = {p: {n: ParameterSharding(k, None, r) for n, (k, r) in part.items()} for p, part in cuts.items()}
                reshard(model, own)
            assert kernels(other) == dict.fromkeys("abc", "fused_uvm_caching")
            assert all(r.cache is not None for t in other.ebc._leaves.tables for r in t.tile_rows)
            assert_same(train(plain, group, range(2, 4)), train(other, group, range(2, 4)))
        assert_same(everything(plain), everything(other))
        with pytest.raises(ConfigError, match="Leave compute_kernel and cache_params out"):
            reshard(other, plan("column_wise"))

    run_virtual_ranks(WORLD, run)


def test_tables_that_are_cached_or_not_any_more_after_the_sharding_are_cut_anew_as_they_are() -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        cache_tables(plain, 0.2, "lfu")
        uncache_tables(other)
        cuts = {"ebc": dict.fromkeys("ab", "column_wise"), "ec": {"c": "row_wise"}}
        for model in (plain, other):
            train(model, group, range(2))
            reshard(model, {p: {n: ParameterSharding(k) for n, k in part.items()} for p, part in cuts.items()})
        assert kernels(plain) == dict.fromkeys("abc", "fused_uvm_caching")
        assert kernels(other) == dict.fromkeys("abc", "fused")
        assert all(r.cache is not None for t in plain.ebc._leaves.tables for r in t.tile_rows)
        assert all(r.cache is None for t in other.ebc._leaves.tables for r in t.tile_rows)
        assert_same(train(plain, group, range(2, 4)), train(other, group, range(2, 4)))
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(WORLD, run)


def test_rows_are_reset_and_copies_are_made() -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        for model in (plain, other):
            train(model, group, range(2))
            reset_rows(model.ebc.embedding_bags["a"], torch.tensor([0, 1, 80, 149]))
        twin = copy.deepcopy(other)
        assert_same(train(plain, group, range(2, 4)), train(twin, group, range(2, 4)))
        assert_same(everything(plain), everything(twin))
        train(other, group, range(2, 4))
        assert_same(everything(plain), everything(other))
        for model in (plain, other):
            model.ebc.reset_parameters()
        assert_same(everything(plain), everything(other))

    run_virtual_ranks(WORLD, run)


def test_a_batch_that_is_only_looked_at_lets_go_of_its_lines() -> None:
    base = Model()

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        kjt = batch(group.rank, 0)
        with torch.no_grad():
            assert torch.equal(plain.ebc(kjt).values(), other.ebc(other.ebc.prefetch(kjt)).values())
        for table in other.ebc._leaves.tables:
            assert all(not rows.cache.in_flight for rows in table.tile_rows)

    run_virtual_ranks(WORLD, run)


def test_a_prefetch_asks_once_for_all_tables_where_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the lookup behind it asks for nothing, and knows by the batch where its ids lie."""
    base, real = Model(), cache_request.request
    seen: list[int] = []

    def run(group: Group) -> None:
        plain, other = both(base, group, Adam(0.1), "row_wise")
        kjt = batch(group.rank, 0)
        mine = [rows.cache for table in other.ebc._leaves.tables for rows in table.tile_rows]

        def counted(asks: Any, *rest: Any) -> None:
            if any(ask.cache is cache for ask in asks for cache in mine):
                seen.append(len(asks))
            real(asks, *rest)

        if group.rank == 0:
            monkeypatch.setattr(cache_request, "request", counted)
        group.barrier()
        routed = other.ebc.prefetch(kjt)
        (batch_,) = mine[0].in_flight
        assert batch_.bags is not None
        assert torch.equal(plain.ebc(kjt).values(), other.ebc(routed).values())
        group.barrier()

    run_virtual_ranks(WORLD, run)
    assert seen == [2]


def alone(**options: Any) -> DistributedModelParallel:
    return DistributedModelParallel(Model(), ShardingEnv.from_local(1, 0), **options)


def both_sharders(**fused_params: Any) -> list[Any]:
    own = {"learning_rate": 0.1, **fused_params}
    return [EmbeddingBagCollectionSharder(own), EmbeddingCollectionSharder(own)]


def caches(dmp: DistributedModelParallel) -> dict[str, Any]:
    model = dmp.module
    return {
        name: None if table.rows.cache is None else table.rows.cache.params
        for part in (model.ebc, model.ec)
        for name, table in part._tables.items()
    }


def test_a_plan_a_sharder_or_neither_says_what_the_cache_is_like() -> None:
    said = alone(plan=cached_plan("row_wise"), sharders=both_sharders())
    assert caches(said) == dict.fromkeys("abc", CACHE)
    unsaid = alone(plan=plan("row_wise", "fused_uvm_caching"), sharders=both_sharders())
    assert caches(unsaid) == dict.fromkeys("abc", CacheParams("lru", 0.2))
    given = both_sharders(cache_load_factor=0.5, cache_algorithm="lfu", cache_reserved_memory=64.0)
    sharder = alone(plan=plan("row_wise", "fused_uvm_caching"), sharders=given)
    assert caches(sharder) == dict.fromkeys("abc", CacheParams("lfu", 0.5, 64.0))
    loss = sharder.module.ebc(batch(0, 0)).values().square().sum()
    loss.backward()
    assert sharder.module.ebc.cache_stats()["a"].rows
    with pytest.warns(UserWarning, match="about the cache have no effect"):
        alone(plan=plan("row_wise"), sharders=given)


def test_host_rows_without_a_cache_are_fused_rows_on_a_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmp = alone(plan=plan("row_wise", "fused_uvm"), sharders=both_sharders())
    assert caches(dmp) == dict.fromkeys("abc")
    assert kernels(dmp) == dict.fromkeys("abc", "fused_uvm")


def test_a_cached_module_that_is_sharded_keeps_its_caches() -> None:
    model = cache_tables(Model(), 0.3)
    apply_optimizer_in_backward(Adam(0.1), model.parameters())
    dmp = DistributedModelParallel(
        model,
        ShardingEnv.from_local(1, 0),
        plan={
            path: {name: ParameterSharding("row_wise") for name in names}
            for path, names in {"ebc": "ab", "ec": "c"}.items()
        },
    )
    assert caches(dmp) == dict.fromkeys("abc", CACHE)
    assert set(kernels(dmp).values()) == {EmbeddingComputeKernel.FUSED_UVM_CACHING.value}


def test_a_cached_table_without_an_optimizer_is_refused_before_anything_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"'a' of module 'ebc' is planned for host memory .* has no optimizer"):
        alone(plan=cached_plan("row_wise"))
    frozen = Model()
    frozen.requires_grad_(False)
    dmp = DistributedModelParallel(frozen, ShardingEnv.from_local(1, 0), plan=cached_plan("row_wise"))
    assert dmp.module.ebc(batch(0, 0)).values().shape == (6, 24)
    assert all(not table.rows.cache.in_flight for table in dmp.module.ebc._tables.values())  # no update is to come


def test_no_host_memory_for_the_rows_is_told_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> list[Tensor]:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(tile_memory, "flat_memory", none)
    with pytest.raises(
        ConfigError, match=r"Table 'a': no host memory for 0\.0 GiB of this rank's rows of \['a', 'b'\]"
    ):
        alone(plan=cached_plan("row_wise"), sharders=both_sharders())
    with pytest.raises(RuntimeError, match="can't allocate"):
        alone(plan=plan("row_wise"), sharders=both_sharders())


def test_tied_tables_in_two_memories_are_refused() -> None:
    model = Model()
    model.ec.embeddings["c"] = EmbeddingCollection([EmbeddingConfig(90, 8, "c", feature_names=["g"])]).embeddings["c"]
    bags = EmbeddingBagCollection([EmbeddingBagConfig(90, 8, "c", feature_names=["g"])])
    bags.embedding_bags["c"] = model.ec.embeddings["c"]
    both_parts = nn.ModuleDict({"bags": bags, "ec": model.ec})
    apply_optimizer_in_backward(Adam(0.1), both_parts.parameters())
    own = {
        "bags": {"c": ParameterSharding("row_wise", "fused")},
        "ec": {"c": ParameterSharding("row_wise", "fused_uvm_caching")},
    }
    with pytest.raises(ConfigError, match="in host memory, or behind a cache, under one"):
        DistributedModelParallel(both_parts, ShardingEnv.from_local(1, 0), plan=own)


def test_a_cached_table_beside_one_without_an_optimizer_trains() -> None:
    """One rank holds both, the other the cached one only."""

    def build() -> EmbeddingBagCollection:
        made = EmbeddingBagCollection([EmbeddingBagConfig(90, 8, n, feature_names=[n]) for n in ("cached", "plain")])
        with torch.no_grad():
            for parameter in made.parameters():  # ranks share torch's generator
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7)
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), [made.embedding_bags["cached"].weight])
        return made

    def own_batch(rank: int) -> Any:
        return random_batch(["cached", "plain"], 90, 4, seed=rank)

    whole = build()
    (whole(concat_batches([own_batch(rank) for rank in range(2)])).values().square().sum() / 2).backward()

    def run(group: Group) -> tuple[Tensor, Tensor]:
        rows = ParameterSharding("row_wise", "fused_uvm_caching", cache_params=CACHE)
        module = shard(build(), {"cached": rows, "plain": ParameterSharding("table_wise", "dense", ranks=[1])}, group)
        module(own_batch(group.rank)).values().square().sum().backward()
        return full_state_dict(module)["embedding_bags.cached.weight"], module.embedding_bags["plain"].weight.grad

    for rank, (cached_rows, grad) in enumerate(run_virtual_ranks(2, run)):
        torch.testing.assert_close(cached_rows, whole.embedding_bags["cached"].weight.detach())
        if rank == 1:
            torch.testing.assert_close(grad, whole.embedding_bags["plain"].weight.grad)
