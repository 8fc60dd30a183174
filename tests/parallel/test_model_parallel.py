"""`DistributedModelParallel`: the model's names and state, dense parameters averaged, tables trained as unsharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModule
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.parallel.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.traffic import traffic
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.sharders.fused_params import EmbOptimType
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, RowWiseAdagrad
from tilerec.spec.plan import ShardingPlan, Wire
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

Pool = Callable[[int], Ranks]

NAMES = [
    "ebc.embedding_bags.everywhere.weight",
    "ebc.embedding_bags.rows.weight",
    "ebc.embedding_bags.columns.weight",
    "ec.embeddings.sequence.weight",
    "over.weight",
    "over.bias",
]


class Model(nn.Module):
    """Tables of every kind, and a dense layer."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(7, 6, name, feature_names=[name]) for name in ("everywhere", "rows", "columns")]
        self.ebc = EmbeddingBagCollection(tables, device=device)
        self.ec = EmbeddingCollection([EmbeddingConfig(7, 6, "sequence", feature_names=["rows"])], device=device)
        self.over = nn.Linear(18, 1, device=device)
        self.register_buffer("seen", torch.zeros(1, device=device))

    def reset_parameters(self) -> None:
        nn.init.zeros_(cast(Tensor, self.seen))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = torch.cat([jagged.values() for jagged in self.ec(features).values()])
        pooled = self.ebc(features).values()
        return cast(Tensor, self.over(pooled * pooled).sum() + (rows * rows).sum())


def plan(size: int) -> dict[str, dict[str, Tiling]]:
    last = size - 1
    ebc = {
        "everywhere": [(0, 7, 0, 6, tuple(range(size)))],
        "rows": [(0, 5, 0, 6, 0), (5, 7, 0, 6, last)],
        "columns": [(0, 7, 0, 2, 0), (0, 7, 2, 4, last), (0, 7, 4, 6, 0)],
    }
    sequence = Tiling.of("sequence", 7, 6, [(0, 7, 0, 6, last)])
    return {
        "ebc": {name: Tiling.of(name, 7, 6, tiles) for name, tiles in ebc.items()},
        "ec": {"sequence": sequence},
    }


def model(device: str | None = None, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(device)


def batch(rank: int, step: int = 0) -> KeyedJaggedTensor:
    return random_batch(["everywhere", "rows", "columns"], 7, 4, seed=10 * step + rank)


def both(step: int = 0) -> KeyedJaggedTensor:
    return concat_batches([batch(0, step), batch(1, step)])


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# -------------------------------------------------------------------------------------------------- names and training


def names_and_training() -> list[str]:
    rank = dist.get_rank()
    base = model()
    attached = copy.deepcopy(base)
    for each in (base, attached):
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(each.ebc.parameters()))
        apply_optimizer_in_backward(Adam(lr=0.1), list(each.ec.parameters()))
    dmp = DistributedModelParallel(attached, plan=plan(2))
    assert dmp.module is attached
    assert isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
    assert isinstance(dmp.plan, ShardingPlan)
    assert list(dmp.state_dict()) == list(base.state_dict())
    assert sorted(dmp.fused_optimizer.params) == sorted(NAMES[:4])
    dense = torch.optim.SGD([p for n, p in dmp.named_parameters() if n.startswith("over")], lr=0.01)
    reference = torch.optim.SGD(base.over.parameters(), lr=0.01)
    for step in range(3):
        for optimizer in (dense, reference):
            optimizer.zero_grad()
        dmp(batch(rank, step)).mul(2).backward()  # ranks' gradients are averaged
        base(both(step)).backward()
        for optimizer in (dense, reference):
            optimizer.step()
    close(full_state_dict(dmp.module), base.state_dict())
    return [name for name, _ in dmp.named_parameters()]


def test_a_wrapped_model_keeps_its_names_and_trains_as_the_unsharded_one(pool: Pool) -> None:
    first, second = pool(2).run(names_and_training)
    assert second == NAMES
    assert sorted(set(first) - set(second)) == ["ebc.embedding_bags.columns.weight.1"]


def dense_tables() -> None:
    """Without an attached optimizer: `.grad` of plain leaves, stepped, accumulated and clipped by torch."""
    rank = dist.get_rank()
    base = model()
    dmp = DistributedModelParallel(copy.deepcopy(base), plan=plan(2))
    everywhere = dict(dmp.named_parameters())[NAMES[0]]
    assert type(everywhere) is nn.Parameter
    assert everywhere.is_leaf
    for step in range(2):  # accumulated
        dmp(batch(rank, step)).mul(2).backward()
        base(both(step)).backward()
    assert type(everywhere.grad) is Tensor
    want = base.ebc.embedding_bags["everywhere"].weight
    assert want.grad is not None
    torch.testing.assert_close(everywhere.grad, want.grad, rtol=1e-5, atol=1e-5)
    assert isinstance(dmp.module, Model)
    torch.testing.assert_close(dmp.module.over.weight.grad, base.over.weight.grad, rtol=1e-5, atol=1e-5)
    norms = [float(nn.utils.clip_grad_norm_([each], 0.5)) for each in (everywhere, want)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (dmp, base)]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    close(full_state_dict(dmp.module), base.state_dict())
    assert everywhere.grad is None


def test_data_parallel_tables_without_an_optimizer_have_plain_gradients_that_torch_steps(pool: Pool) -> None:
    pool(2).run(dense_tables)


def converted() -> None:
    """bfloat16 after wrapping: no parameter loses its table."""
    dmp = DistributedModelParallel(model().ebc, plan={"": plan(2)["ebc"]}).to(torch.bfloat16)
    optimizer = torch.optim.SGD(dmp.parameters(), lr=0.5)
    own = batch(dist.get_rank())
    before = dmp(own).values().detach().clone()
    dmp(own).values().sum().backward()
    optimizer.step()
    after = dmp(own).values()
    assert after.dtype == torch.bfloat16
    assert not torch.equal(before, after)
    assert not isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)  # nothing is dense


def test_a_conversion_keeps_parameters_and_tables_together_and_without_dense_parameters_nothing_is_wrapped(
    pool: Pool,
) -> None:
    pool(2).run(converted)


def converted_after_wrapping() -> None:
    """bfloat16 for the whole model, dense part and tables; two steps before and two after, DDP's gradients alike."""
    torch.manual_seed(0)
    dmp = DistributedModelParallel(Model(), plan=plan(2))
    optimizer = torch.optim.SGD(dmp.parameters(), 0.01)
    for step in range(4):
        if step == 2:
            assert dmp.to(torch.bfloat16) is dmp
            assert isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
        optimizer.zero_grad()
        before = dmp.module.over.weight.detach().clone()
        dmp(batch(dist.get_rank(), step)).backward()
        optimizer.step()
        assert not torch.equal(before, dmp.module.over.weight)
    assert {p.dtype for p in dmp.parameters()} == {torch.bfloat16}
    own = [dmp.module.over.weight.detach(), dmp.module.over.weight.grad]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, own)
    for mine, theirs in zip(everyone[0], everyone[1], strict=True):
        assert torch.equal(mine, theirs)
    wrapper = dmp._dmp_wrapped_module
    dmp.to(torch.bfloat16)  # changes nothing, so nothing is wrapped anew
    assert dmp._dmp_wrapped_module is wrapper


def test_a_conversion_after_wrapping_keeps_the_dense_part_in_step(pool: Pool) -> None:
    pool(2).run(converted_after_wrapping)


def frozen_dense() -> None:
    torch.manual_seed(dist.get_rank())
    model = Model()
    model.over.requires_grad_(False)
    dmp = DistributedModelParallel(model, plan=plan(2))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, dmp.module.over.weight.detach())
    assert torch.equal(everyone[0], everyone[1])


def test_a_dense_part_that_is_not_trained_is_rank_0s_too(pool: Pool) -> None:
    pool(2).run(frozen_dense)


def position_weighted() -> None:
    torch.manual_seed(0)
    names = ["everywhere", "rows", "columns"]
    tables = EmbeddingBagCollection(
        [EmbeddingBagConfig(7, 6, name, feature_names=[name]) for name in names], is_weighted=True
    )
    processors: dict[str, Any] = {name: PositionWeightedModule(12) for name in names}
    base = FeatureProcessedEmbeddingBagCollection(tables, processors)
    apply_optimizer_in_backward(SGD(lr=0.1), list(tables.parameters()))
    dmp = DistributedModelParallel(copy.deepcopy(base), plan={"_embedding_bag_collection": plan(2)["ebc"]})
    assert isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
    weights = [[p for n, p in each.named_parameters() if "position_weight" in n] for each in (dmp, base)]
    optimizers = [torch.optim.SGD(own, lr=0.1) for own in weights]
    for step in range(3):
        for each, features, scale in ((dmp, batch(dist.get_rank(), step), 2.0), (base, both(step), 1.0)):
            each.zero_grad()
            values = each(features).values()
            ((values * values).sum() * scale).backward()
        for optimizer in optimizers:
            optimizer.step()
    close(full_state_dict(dmp.module), base.state_dict())


def test_position_weights_are_dense_parameters_and_train_as_unsharded(pool: Pool) -> None:
    pool(2).run(position_weighted)


# ------------------------------------------------------------------------------------------------------ starting values


def built_on_meta(seeds: list[int]) -> tuple[dict[str, Tensor], list[float]]:
    dmp = DistributedModelParallel(model("meta", seeds[dist.get_rank()]), plan=plan(2))
    first = {name: value.clone() for name, value in full_state_dict(dmp.module).items()}
    with torch.no_grad():
        for parameter in dmp.parameters():
            parameter.fill_(dist.get_rank())
    torch.manual_seed(seeds[dist.get_rank()] + 7)
    dmp.reset_parameters()
    again = full_state_dict(dmp.module)
    assert all(torch.equal(again[name], first[name]) for name in NAMES[:4])
    return first, again["over.weight"].flatten().tolist()


def test_a_model_on_meta_gets_the_same_initial_values_on_every_rank(pool: Pool) -> None:
    (one, reset), (other, reset_there) = pool(2).run(built_on_meta, [3, 4])
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    whole = model(seed=3).state_dict()
    assert all(torch.equal(one[name], whole[name]) for name in NAMES[:4])
    assert float(one["over.weight"].abs().max()) > 0.0
    assert reset == reset_there


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))


def alone() -> ShardingEnv:
    return ShardingEnv.from_local(1, 0)


def test_a_dense_module_on_meta_that_cannot_be_reset_is_named() -> None:
    with (
        pytest.warns(UserWarning, match="nothing is sharded"),
        pytest.raises(ConfigError, match=r"module '0' \(NoReset\)"),
    ):
        DistributedModelParallel(nn.Sequential(NoReset()), alone())
    with pytest.warns(UserWarning, match="nothing is sharded"):
        kept = DistributedModelParallel(nn.Sequential(nn.Linear(2, 2)), alone(), init_parameters=False)
    assert list(kept.state_dict()) == ["0.weight", "0.bias"]


# --------------------------------------------------------------------------------------------------------- sharders


def sharded_by_sharders() -> tuple[dict[str, str], int]:
    sharders = [
        EmbeddingBagCollectionSharder(
            {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}, Wire("bf16", "bf16")
        ),
        EmbeddingCollectionSharder({"optimizer": "adam"}),
    ]
    own = model()
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), [own.ebc.embedding_bags["rows"].weight])
    dmp = DistributedModelParallel(own, plan=plan(2), sharders=sharders)
    dmp(batch(dist.get_rank())).backward()
    assert all(p.grad is None for n, p in dmp.named_parameters() if not n.startswith("over"))
    assert dmp.plan.plan["ebc"]["rows"].wire == Wire("bf16", "bf16")
    assert dmp.plan.plan["ec"]["sequence"].wire == Wire()
    kinds = {
        name: str(group["optimizer"])
        for group in dmp.fused_optimizer.param_groups
        for name, leaf in dmp.fused_optimizer.params.items()
        if any(leaf is p for p in group["params"])
    }
    assert str(dmp.traffic()) == str(traffic(dmp))
    assert "rows" in str(dmp.traffic())
    return kinds, dmp.traffic().total()


def test_sharders_give_optimizers_to_tables_that_have_none_and_formats_to_the_wire(pool: Pool) -> None:
    (kinds, sent), _ = pool(2).run(sharded_by_sharders)
    assert kinds == dict(zip(NAMES[:4], ["SGD", "RowWiseAdagrad", "SGD", "Adam"], strict=True))
    assert sent > 0


@pytest.mark.parametrize("sharders", [None, [], [EmbeddingCollectionSharder()]])
def test_every_kind_of_collection_is_sharded_with_or_without_a_sharder(sharders: Any) -> None:
    dmp = DistributedModelParallel(model(), alone(), plan=plan(1), sharders=sharders)
    assert set(dmp.plan.plan) == {"ebc", "ec"}
    assert dmp.fused_optimizer.state_dict() == {"state": {}}


# ------------------------------------------------------------------------------------------------- wrapping and copies


class Recorder(DataParallelWrapper):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        self.seen.append((dmp, env, device))


def test_the_dense_part_is_wrapped_once_by_the_given_wrapper() -> None:
    wrapper = Recorder()
    dmp = DistributedModelParallel(
        model(), alone(), plan=plan(1), init_data_parallel=False, data_parallel_wrapper=wrapper
    )
    assert wrapper.seen == []
    dmp.init_data_parallel()
    dmp.init_data_parallel()
    assert [(seen[0] is dmp, seen[2]) for seen in wrapper.seen] == [(True, torch.device("cpu"))]


def wrapped_later() -> None:
    rank = dist.get_rank()
    wrapper = DefaultDataParallelWrapper(allreduce_comm_precision="bf16", params_to_ignore=["over.bias"])
    dmp = DistributedModelParallel(model(), plan=plan(2), init_data_parallel=False, data_parallel_wrapper=wrapper)
    assert dmp._dmp_wrapped_module is dmp.module
    dmp.init_data_parallel()
    dmp(batch(rank)).mul(rank).backward()
    assert isinstance(dmp.module, Model)
    weight, bias = dmp.module.over.weight.grad, dmp.module.over.bias.grad
    assert weight is not None
    assert bias is not None
    assert float(bias) == rank * 4.0
    seen = [torch.zeros_like(weight) for _ in range(2)]
    dist.all_gather(seen, weight)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(weight, weight.bfloat16().float())


def test_parameters_to_ignore_are_left_to_their_rank_and_gradients_travel_in_the_format_asked_for(
    pool: Pool,
) -> None:
    pool(2).run(wrapped_later)


def copied() -> None:
    rank = dist.get_rank()
    base = model()
    apply_optimizer_in_backward(SGD(lr=0.1), list(base.ebc.parameters()))
    dmp = DistributedModelParallel(base, plan=plan(2))
    for twin in (dmp.copy("cpu"), copy.deepcopy(dmp)):
        assert isinstance(twin._dmp_wrapped_module, DistributedDataParallel)
        before = full_state_dict(dmp.module)
        before = {name: value.clone() for name, value in before.items()}
        twin(batch(rank)).backward()
        assert isinstance(twin.module, Model)
        assert twin.module.over.weight.grad is not None
        after = full_state_dict(dmp.module)
        assert all(torch.equal(after[name], before[name]) for name in before)
        moved = full_state_dict(twin.module)
        assert not torch.equal(moved[NAMES[1]], before[NAMES[1]])
        assert twin.plan == dmp.plan


def settings_that_differ() -> list[str]:
    rank = dist.get_rank()
    messages = []
    different: list[dict[str, Any]] = [
        {"init_data_parallel": rank != 1},
        {"init_parameters": rank != 1},
        {"data_parallel_wrapper": Recorder() if rank == 1 else None},
        {"data_parallel_wrapper": DefaultDataParallelWrapper(static_graph=rank == 0)},
        {"data_parallel_wrapper": DefaultDataParallelWrapper(allreduce_comm_precision="bf16" if rank else None)},
        {"data_parallel_wrapper": DefaultDataParallelWrapper(params_to_ignore=["over.bias"] * rank)},
    ]
    for given in different:
        base = model()
        with pytest.raises(ConfigError) as caught:
            DistributedModelParallel(base, plan=plan(2), **given)
        assert type(base.ebc) is EmbeddingBagCollection
        messages.append(str(caught.value))
    wrapper = Recorder()
    if rank == 1:
        wrapper.options = lambda: {"reduce": model}  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        DistributedModelParallel(model(), plan=plan(2), data_parallel_wrapper=wrapper)
    assert "got a value of type function, which ranks cannot compare" in str(caught.value)
    if rank == 1:
        wrapper.options = lambda: {"reduce": 1 // 0}  # type: ignore[method-assign]
    for make in (
        lambda: DistributedModelParallel(model(), plan=plan(2), data_parallel_wrapper=wrapper),
        lambda: DMPCollection(model(), "cpu", plan(2), 2, 2, data_parallel_wrapper=wrapper),
    ):
        with pytest.raises(ZeroDivisionError if rank else ConfigError) as failed:
            make()
        assert rank or "is 'passed' on rank 0 and 'ZeroDivisionError" in str(failed.value)
    with pytest.raises(MemoryError if rank else ConfigError) as broken:
        DistributedModelParallel(Broken(model()))
    assert rank or "its dense part failed on rank 1 with MemoryError: no memory" in str(broken.value)
    return messages


class Broken(nn.Module):
    """A dense part that one rank has no memory for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.meta = nn.Linear(2, 2, device="meta")
        if dist.get_rank() == 1:
            self.meta.reset_parameters = self._fail  # type: ignore[method-assign]

    def _fail(self) -> None:
        raise MemoryError("no memory")


def test_ranks_that_treat_the_dense_part_differently_all_raise_with_ranks_and_values(pool: Pool) -> None:
    first, second = pool(2).run(settings_that_differ)
    assert first == second
    assert "init_data_parallel is True on rank 0 and False on rank 1" in first[0]
    assert "init_parameters is True on rank 0 and False on rank 1" in first[1]
    assert "data_parallel_wrapper is 'DefaultDataParallelWrapper' on rank 0 and 'Recorder'" in first[2]
    assert "wrapper_options.static_graph is True on rank 0 and False on rank 1" in first[3]
    assert "wrapper_options.allreduce_comm_precision is None on rank 0 and 'bf16'" in first[4]
    assert "params_to_ignore (length) is 0 on rank 0 and 1 on rank 1" in first[5]


def test_a_copy_trains_on_its_own_over_the_same_ranks(pool: Pool) -> None:
    pool(2).run(copied)


# ------------------------------------------------------------------------------------------------------------- the rest


def test_state_loads_under_the_models_names_with_a_prefix_or_without() -> None:
    dmp = DistributedModelParallel(model(), alone(), plan=plan(1))
    want = model(seed=5).state_dict()
    dmp.load_state_dict({f"model.{name}": value for name, value in want.items()}, "model.")
    close(dmp.state_dict(), want)
    assert list(dmp.state_dict(prefix="model.")) == [f"model.{name}" for name in want]
    result = dmp.load_state_dict({}, False)
    assert sorted(result.missing_keys) == sorted(want)
    with pytest.raises(RuntimeError, match="Missing key"):
        dmp.load_state_dict({})


def nested() -> None:
    """A module that holds the wrapped model saves and loads it like any child."""
    outer = nn.ModuleDict({"ranker": DistributedModelParallel(model(), plan=plan(2))})
    want = model(seed=5).state_dict()
    assert list(outer.state_dict()) == [f"ranker.{name}" for name in want]
    outer.load_state_dict({f"ranker.{name}": value for name, value in want.items()})
    assert isinstance(outer["ranker"], DistributedModelParallel)
    close(full_state_dict(outer["ranker"].module), want)
    outer.load_state_dict(outer.state_dict())
    close(full_state_dict(outer["ranker"].module), want)


def test_a_wrapped_model_can_be_a_part_of_another(pool: Pool) -> None:
    pool(2).run(nested)


def test_names_of_tables_with_sparse_gradients_are_told() -> None:
    own = model()
    set_sparse_grad([own.ebc.embedding_bags["rows"].weight])
    dmp = DistributedModelParallel(own, alone(), plan=plan(1))
    assert dmp.sparse_grad_parameter_names() == [NAMES[1]]
    assert dmp.sparse_grad_parameter_names(["more"], "m") == ["more", f"m.{NAMES[1]}"]
    assert [name for name, _ in dmp.bare_named_parameters()] == [name for name, _ in dmp.named_parameters()]
    assert [name for name, _ in dmp.named_buffers("m")] == ["m.seen"]


def test_a_world_of_one_needs_no_process_group() -> None:
    base = model()
    apply_optimizer_in_backward(SGD(lr=0.1), list(base.ebc.parameters()))
    reference = copy.deepcopy(base)
    dmp = DistributedModelParallel(base, alone(), torch.device("cpu"), plan(1))
    for each in (dmp, reference):
        each(batch(0)).backward()
    close(dmp.state_dict(), reference.state_dict())


def test_without_a_plan_the_planner_makes_one_for_the_environments_ranks() -> None:
    dmp = DistributedModelParallel(model(), alone())
    assert dmp.plan.world_size == 1
    assert sorted(dmp.plan.plan["ebc"]) == ["columns", "everywhere", "rows"]
    close(dmp.state_dict(), model().state_dict())


def test_without_a_process_group_the_way_out_is_told() -> None:
    with pytest.raises(ConfigError, match="from_local"):
        DistributedModelParallel(model())
    with pytest.raises(ConfigError, match="from_process_group"):
        ShardingEnv.from_local(2, 0)


def test_ranks_may_be_threads_if_the_dense_part_is_not_trained_by_ddp() -> None:
    def run(group: Group) -> dict[str, Tensor]:
        torch.manual_seed(group.rank)
        own = model()
        with pytest.raises(ConfigError, match="env: got a str; expected a ShardingEnv"):
            DistributedModelParallel(own, "cpu")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="got ranks that are threads, and DistributedDataParallel"):
            DistributedModelParallel(model(), group, plan=plan(2))
        for part in own.children():
            part.requires_grad_(False)
        dmp = DistributedModelParallel(own, ShardingEnv.from_group(group), plan=plan(2))
        dmp(batch(group.rank))
        return full_state_dict(dmp)

    first, second = run_virtual_ranks(2, run)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_tracker_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="model_tracker_configs has no effect"):
        DistributedModelParallel(model(), alone(), plan=plan(1), model_tracker_configs={})


def environment() -> tuple[int, int]:
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    assert isinstance(env.group(), ProcessGroupComms)
    return env.world_size, env.rank


def test_an_environment_has_its_process_groups_ranks(pool: Pool) -> None:
    assert pool(2).run(environment) == [(2, 0), (2, 1)]
    with pytest.raises(ConfigError, match="rank: got 2; expected"):
        ShardingEnv(2, 2)
