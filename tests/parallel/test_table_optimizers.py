"""Which tables the backward pass updates: the plan's kernels, attached optimizers and sharders, each with an effect."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.test_model_parallel import Pool
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.in_backward import in_backward_optimizer_filter
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.shard import shard
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sharders.table_sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    get_default_sharders,
)
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

NAMES = ("a", "b")


class Model(nn.Module):
    """Two pooled tables."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, n, feature_names=[n]) for n in NAMES])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values().square().sum()


def batch(rank: int) -> KeyedJaggedTensor:
    return random_batch(list(NAMES), 6, 4, seed=rank)


def plan(*kernels: str | None) -> dict[str, dict[str, ParameterSharding]]:
    return {"ebc": {n: ParameterSharding("row_wise", k) for n, k in zip(NAMES, kernels, strict=True)}}


def alone(model: nn.Module | None = None, **options: Any) -> DistributedModelParallel:
    return DistributedModelParallel(model or Model(), ShardingEnv.from_local(1, 0), **options)


def sgd() -> EmbeddingBagCollectionSharder:
    return EmbeddingBagCollectionSharder({"learning_rate": 0.5})


def kernels_of(module: nn.Module) -> dict[str, str]:
    return {name: s.kernel.value for _, name, s in plan_of(module).tables() if s.kernel is not None}


# ------------------------------------------------------------------------------------------------------------ kernels


def kernel_by_kernel() -> None:
    """A dense table's gradient is that of the unsharded module; the other moves by it in the backward."""
    torch.manual_seed(0)
    model = Model()
    before = model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    whole = Model()
    whole.load_state_dict(before)
    for rank in range(2):
        (whole(batch(rank)) / 2).backward()
    dmp = DistributedModelParallel(model, plan=plan("dense", None), sharders=[sgd()])
    dmp(batch(dist.get_rank())).backward()
    a, b = (dmp.get_parameter(f"_dmp_wrapped_module.ebc.embedding_bags.{n}.weight") for n in NAMES)
    want = {n: whole.ebc.embedding_bags[n].weight for n in NAMES}
    own = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    assert a.grad is not None
    assert want["a"].grad is not None
    assert want["b"].grad is not None
    torch.testing.assert_close(a.grad, want["a"].grad[own])
    assert torch.equal(a.detach(), before["ebc.embedding_bags.a.weight"][own])
    assert b.grad is None
    moved = before["ebc.embedding_bags.b.weight"] - 0.5 * want["b"].grad
    torch.testing.assert_close(b.detach(), moved[own])
    assert kernels_of(dmp) == {"a": "dense", "b": "fused"}


def test_a_dense_table_keeps_its_gradient_where_a_sharder_gives_the_others_an_optimizer(pool: Pool) -> None:
    pool(2).run(kernel_by_kernel)


def test_a_kernel_left_open_becomes_what_it_is() -> None:
    model = Model()
    apply_optimizer_in_backward(SGD(lr=0.1), [model.ebc.embedding_bags["a"].weight])
    assert kernels_of(alone(model, plan=plan(None, None))) == {"a": "fused", "b": "dense"}
    assert kernels_of(alone(sharders=[sgd()])) == {"a": "fused", "b": "fused"}
    assert kernels_of(alone()) == {"a": "dense", "b": "dense"}


def test_an_attached_optimizer_stays_whatever_a_sharder_gives() -> None:
    model = Model()
    apply_optimizer_in_backward(Adam(lr=0.1), [model.ebc.embedding_bags["a"].weight])
    dmp = alone(model, plan=plan("fused", "fused"), sharders=[sgd()])
    kinds = [str(group["optimizer"]) for group in dmp.fused_optimizer.param_groups]
    assert sorted(kinds) == ["Adam", "SGD"]


@pytest.mark.parametrize("kind", ["data_parallel", "row_wise"])
def test_dense_takes_an_attached_optimizer_off_with_a_warning_and_gradients_are_those_of_ddp(
    kind: str,
) -> None:
    kernels, base = {"a": "dense", "b": None}, Model()

    def run(group: Group) -> None:
        model, plain = copy.deepcopy(base), copy.deepcopy(base)
        apply_optimizer_in_backward(SGD(lr=0.1), model.parameters())
        said = {"ebc": {n: ParameterSharding(kind, kernel) for n, kernel in kernels.items()}}
        shard(model, plan=said, mesh=group)
        assert kernels_of(model) == kernels | {"b": "fused"}
        left = dict(in_backward_optimizer_filter(model.named_parameters()))
        assert {name.split(".")[2] for name in left} == {"a"}
        for rank in range(group.size):
            (plain(batch(rank)) / group.size).backward()
        model(batch(group.rank)).backward()
        want, shards = plain.ebc.embedding_bags["a"].weight.grad, model.ebc.embedding_bags["a"]
        assert want is not None
        for leaf, tile in zip(shards.leaves(), shards.tiles, strict=True):  # type: ignore[operator, arg-type]
            torch.testing.assert_close(leaf.grad, want[tile.r0 : tile.r1, tile.c0 : tile.c1])
        assert model.ebc.embedding_bags["b"].weight.grad is None

    with pytest.warns(
        UserWarning, match="for table 'a' of module 'ebc', so its attached optimizer is detached"
    ) as seen:
        run_virtual_ranks(2, run)
    assert len(seen) == 2  # one on each rank


def test_an_optimizer_that_dense_took_off_is_back_if_sharding_is_refused() -> None:
    crossed = Tiling.of("b", 6, 4, [(0, 3, 0, 2, 0), (3, 6, 0, 2, 1), (0, 2, 2, 4, 1), (2, 6, 2, 4, 0)])

    def run(group: Group) -> list[str]:
        model = Model()
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), model.parameters())
        said = {"ebc": {"a": ParameterSharding("row_wise", "dense"), "b": crossed}}
        with pytest.raises(ConfigError, match="'b'"):
            shard(model, said, group)
        return list(model.ebc.fused_optimizer.params)

    with pytest.warns(UserWarning, match="is detached"):
        results = run_virtual_ranks(2, run)
    assert results == [[f"embedding_bags.{n}.weight" for n in NAMES]] * 2


def test_fused_without_any_optimizer_is_warned_about_by_table() -> None:
    with pytest.warns(
        UserWarning, match=r"'fused' for table 'b' of module 'ebc', but no optimizer is attached"
    ) as seen:
        dmp = alone(plan=plan(None, "fused"))
    assert len(seen) == 1
    dmp(batch(0)).backward()
    assert all(p.grad is not None for p in dmp.parameters())


def test_kernels_that_are_not_in_use_are_fused_in_device_memory_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="got compute_kernel 'ssd_virtual_table', which acts as 'fused'"):
        dmp = alone(plan=plan("ssd_virtual_table", "fused"), sharders=[sgd()])
    dmp(batch(0)).backward()
    assert all(p.grad is None for p in dmp.parameters())
    with (
        pytest.warns(UserWarning, match="'ssd_virtual_table' for table 'a' of module 'ebc', but no optimizer"),
        pytest.warns(UserWarning, match="acts as 'fused'"),
    ):
        alone(plan=plan("ssd_virtual_table", None))


class Tied(nn.Module):
    """One table in two collections."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "a", feature_names=["a"])])
        self.ec = EmbeddingCollection([EmbeddingConfig(6, 4, "a", feature_names=["b"])])
        self.ec.embeddings["a"] = self.ebc.embedding_bags["a"]


def test_two_kernels_or_two_optimizers_for_one_tied_table_are_refused() -> None:
    def tied(*kernels: str | None, **options: Any) -> DistributedModelParallel:
        parts = zip(("ebc", "ec"), kernels, strict=True)
        return alone(Tied(), plan={p: {"a": ParameterSharding("row_wise", k)} for p, k in parts}, **options)

    with pytest.raises(ConfigError, match="names 'a' of module 'ebc', 'a' of module 'ec': got compute_kernel 'dense'"):
        tied("dense", "fused")
    other = EmbeddingCollectionSharder({"optimizer": "adam"})
    with pytest.raises(ConfigError, match=r"got SGD.* from EmbeddingBagCollectionSharder and Adam"):
        tied(None, None, sharders=[sgd(), other])
    assert kernels_of(tied("dense", None, sharders=[EmbeddingBagCollectionSharder()])) == {"a": "dense"}
    same = EmbeddingCollectionSharder({"learning_rate": 0.5})
    assert len(tied(None, None, sharders=[same, sgd()]).fused_optimizer.param_groups) == 1


def test_a_planners_plan_with_the_same_sharders_attaches_as_it_says() -> None:
    sharders = [sgd()]
    made = EmbeddingShardingPlanner().plan(Model(), sharders)
    assert kernels_of(alone(plan=made, sharders=sharders)) == {"a": "fused", "b": "fused"}
    without = EmbeddingShardingPlanner().plan(Model())
    assert kernels_of(alone(plan=without, sharders=sharders)) == {"a": "fused", "b": "fused"}


def test_the_file_of_a_sharded_models_plan_shards_it_again_as_it_was(tmp_path: Path) -> None:
    wire = EmbeddingBagCollectionSharder({"learning_rate": 0.5}, Wire("bf16", "bf16"))
    first = alone(plan=plan("dense", None), sharders=[wire])
    first.plan.save(tmp_path / "plan.json")
    again = alone(plan=tmp_path / "plan.json", sharders=[sgd()])
    assert again.plan == first.plan
    assert kernels_of(again) == {"a": "dense", "b": "fused"}
    model = Model()
    apply_optimizer_in_backward(SGD(lr=0.1), list(model.parameters()))
    with pytest.warns(UserWarning, match="its attached optimizer is detached"):
        attached = alone(model, plan=tmp_path / "plan.json")
    assert kernels_of(attached) == {"a": "dense", "b": "fused"}


# ----------------------------------------------------------------------------------------------------------- sharders


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (sgd(), r"sharders is a EmbeddingBagCollectionSharder; .*sharders=\[Embed"),
        (EmbeddingBagCollectionSharder, "wanted a list"),
        ([EmbeddingBagCollectionSharder], r"sharders\[0\] is the class"),
        (["fused"], r"sharders\[0\] is a str; wanted a sharder"),
        ([sgd(), EmbeddingBagCollectionSharder()], r"sharders\[0\] and sharders\[1\] are both for"),
    ],
)
def test_what_are_no_sharders_is_refused_before_anything_changes(wrong: Any, message: str) -> None:
    model = Model()
    with pytest.raises(ConfigError, match="DistributedModelParallel: .*" + message):
        alone(model, sharders=wrong)
    assert type(model.ebc) is EmbeddingBagCollection
    assert model.ebc.fused_optimizer.state_dict() == {"state": {}}


@pytest.mark.parametrize(
    ("sharder", "message"),
    [
        (
            EmbeddingCollectionSharder({"learning_rate": 1.0}, Wire("bf16", "bf16")),
            "its fused_params and qcomm_codecs_registry have no effect: the model has no EmbeddingCollection",
        ),
        (sgd(), "its fused_params have no effect: every table .* has an optimizer attached"),
        (
            EmbeddingBagCollectionSharder(qcomm_codecs_registry=Wire("bf16", "bf16")),
            "its qcomm_codecs_registry has no effect: the plan has others for every table",
        ),
    ],
)
def test_a_sharder_that_changes_nothing_is_named(sharder: Any, message: str) -> None:
    model = Model()
    apply_optimizer_in_backward(SGD(lr=0.1), list(model.parameters()))
    wire = Wire("fp16", "fp16")
    plan = {"ebc": {n: ParameterSharding("row_wise", wire=wire) for n in NAMES}}
    with pytest.warns(UserWarning, match=f"{type(sharder).__name__}: {message}") as seen:
        alone(model, plan=plan, sharders=[sharder])
    assert len(seen) == 1


def test_a_wire_that_the_plan_names_wins_over_a_sharders_and_fp32_is_a_name() -> None:
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=Wire("bf16", "bf16"))
    said = {"ebc": {"a": ParameterSharding("row_wise", wire=Wire()), "b": ParameterSharding("row_wise")}}
    dmp = alone(plan=said, sharders=[sharder])
    assert {name: s.wire for _, name, s in dmp.plan.tables()} == {"a": Wire(), "b": Wire("bf16", "bf16")}
    assert {s.wire for _, _, s in alone(plan=plan(None, None)).plan.tables()} == {Wire()}
    with pytest.warns(UserWarning, match="the plan has others for every table"):
        alone(plan={"ebc": dict.fromkeys(NAMES, said["ebc"]["a"])}, sharders=[sharder])


@pytest.mark.parametrize("where", ["by its own rule", "by another rank"])
def test_a_sharders_optimizer_is_taken_off_again_if_sharding_is_refused(where: str) -> None:
    crossed = Tiling.of("a", 6, 4, [(0, 3, 0, 2, 0), (3, 6, 0, 2, 1), (0, 2, 2, 4, 1), (2, 6, 2, 4, 0)])
    rowwise = EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"})

    def run(group: Group) -> None:
        model = Model()
        apply_optimizer_in_backward(Adam(lr=0.1), [model.ebc.embedding_bags["b"].weight])
        before = model.ebc.fused_optimizer.state_dict()
        said: dict[str, Any] = {"a": ParameterSharding("row_wise"), "b": ParameterSharding("row_wise")}
        if where == "by its own rule":
            said["a"] = crossed
        elif group.rank:
            said["b"] = ParameterSharding("row_wise", ranks=[1, 0])
        with pytest.raises(ConfigError):
            shard(model, {"ebc": said}, group, sharder=rowwise)
        assert type(model.ebc) is EmbeddingBagCollection
        assert [str(g["optimizer"]) for g in model.ebc.fused_optimizer.param_groups] == ["Adam"]
        assert str(model.ebc.fused_optimizer.state_dict()) == str(before)
        model(batch(group.rank)).backward()
        assert model.ebc.embedding_bags["a"].weight.grad is not None
        shard(model, plan(None, None), group)
        assert kernels_of(model) == {"a": "dense", "b": "fused"}

    run_virtual_ranks(2, run)


def test_sharders_that_say_nothing_or_change_something_are_not_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone(sharders=get_default_sharders())
        alone(sharders=[sgd()])
        model = Model()
        apply_optimizer_in_backward(SGD(lr=0.1), [model.ebc.embedding_bags["a"].weight])
        alone(model, sharders=[sgd()])


# ---------------------------------------------------------------------------------------------------- without tables


def no_tables() -> tuple[bool, list[float]]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 1), nn.EmbeddingBag(3, 2))
    with pytest.warns(UserWarning, match=r"Sequential has no EmbeddingBagCollection .* \['1'\] are torch's own"):
        dmp = DistributedModelParallel(model, sharders=get_default_sharders())
    linear = dmp.module[0]  # type: ignore[index]
    assert isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
    assert "no tables" in str(dmp.plan)
    return True, linear.weight.flatten().tolist()


def test_a_model_without_tables_is_warned_about_and_works_as_under_ddp(pool: Pool) -> None:
    (_, first), (_, second) = pool(2).run(no_tables)
    assert first == second
