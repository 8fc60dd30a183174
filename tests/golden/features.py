"""Cases of single features: caches, resharding, managed collision, clamped ids, warm-up, initial values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.golden import inputs
from tests.golden.digest import digest
from tests.golden.inputs import Numbers
from tests.golden.optimizers import OPTIMIZERS
from tests.golden.training import (
    STEPS,
    TABLES,
    TYPES,
    Marks,
    Run,
    back,
    build,
    features,
    joined,
    marks_of,
    state_of,
    step_of,
    values_of,
)
from tilerec import (
    CacheParams,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    apply_optimizer_in_backward,
    cache_tables,
    reshard,
    shard,
)
from tilerec.comms import Group
from tilerec.modules import FeatureProcessedEmbeddingBagCollection, PositionWeightedModuleCollection
from tilerec.optim import WarmupOptimizer, WarmupPolicy, WarmupStage
from tilerec.parallel import full_state_dict
from tilerec.planner import ParameterSharding
from tilerec.testing import run_virtual_ranks

# ---------------------------------------------------------------------------------------------------- caches


def cached_alone(optimizer: str, form: str, algorithm: str) -> Marks:
    """One process; a third of the rows have cache lines."""
    run = Run("table_wise", optimizer, form, "1", "types")
    module = build(run)
    cache_tables(module, 0.3, algorithm)
    outputs = [step_of(module, features(run, 0, step), 1.0) for step in range(STEPS)]
    return marks_of(outputs, module.state_dict(), state_of(module), [])


def cached(kind: str, optimizer: str, form: str, world: str, algorithm: str, ahead: bool) -> Marks:
    """Ranks whose tiles lie behind caches. `ahead`: each batch is prefetched before the step before it ends."""
    run = Run(kind, optimizer, form, world, "types")
    base = build(run)
    ranks = {"table_wise": [1], "table_row_wise": [0, 2]}.get(kind)

    def live(group: Group) -> Any:
        params = CacheParams(algorithm, load_factor=0.3)
        sharding = ParameterSharding(kind, "fused_uvm_caching", ranks, cache_params=params)
        plan = {table.name: sharding for table in TABLES}
        module: Any = shard(copy.deepcopy(base), {"": plan}, group, topology=run.topology)
        own = [features(run, group.rank, step) for step in range(STEPS)]
        routed: list[Any] = [module.prefetch(own[0]), *own[1:]] if ahead else [*own]
        outputs = []
        for step in range(STEPS):
            values = values_of(module(routed[step]))
            if ahead and step + 1 < STEPS:
                routed[step + 1] = module.prefetch(own[step + 1])
            outputs.append(back(values, own[step], float(run.size)))
        return outputs, full_state_dict(module), state_of(module), []

    return joined(run_virtual_ranks(run.size, live))


# ---------------------------------------------------------------------------------------------------- resharding


def resharded(before: str, after: str, optimizer: str, world: str, form: str) -> Marks:
    """Two steps under one plan, one step under the other, and one under the first again."""
    run = Run(before, optimizer, form, world, "types")
    base = build(run)

    def live(group: Group) -> Any:
        module = shard(copy.deepcopy(base), {"": run.plan}, group, topology=run.topology)
        outputs = []
        for step, then in enumerate((None, None, after, before)):
            if then is not None:
                reshard(module, {"": run.plan_of(then)}, progress=False)
            outputs.append(step_of(module, features(run, group.rank, step), float(run.size)))
        return outputs, full_state_dict(module), state_of(module), []

    return joined(run_virtual_ranks(run.size, live))


# ---------------------------------------------------------------------------------------------------- ids and rates


def clamped(world: str) -> Marks:
    """Ids out of range are clamped, and counted."""
    run = Run("row_wise", "adagrad", "sum", world)
    torch.manual_seed(11)
    base = EmbeddingBagCollection(
        [EmbeddingBagConfig(t.rows, t.dim, t.name, feature_names=t.features) for t in TABLES],
        on_bad_id="clamp",
    )
    spec = OPTIMIZERS["adagrad"]
    assert spec is not None
    apply_optimizer_in_backward(spec, list(base.parameters()))

    def live(group: Group) -> Any:
        module: Any = shard(copy.deepcopy(base), {"": run.plan}, group, topology=run.topology)
        outputs: list[Any] = []
        for step in range(STEPS):
            batch = features(run, group.rank, step)
            if batch.values().numel():
                batch.values()[::3] += 1000
                batch.values()[1::3] -= 1000
            outputs.append(step_of(module, batch, float(run.size)))
        return [*outputs, module.clamped_ids], full_state_dict(module), state_of(module), []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the ids
        return joined(run_virtual_ranks(run.size, live))


def skipped(optimizer: str, world: str) -> Marks:
    """Rows whose gradients are not finite keep their weights and state (`non_finite="skip"`)."""
    run = Run("row_wise", "none", "sum", world)
    spec = OPTIMIZERS[optimizer]
    assert spec is not None
    base = build(run)
    settings = {**spec.to_json(), "non_finite": "skip"}
    apply_optimizer_in_backward(type(spec).from_json(settings), list(base.parameters()))

    def live(group: Group) -> Any:
        module: Any = shard(copy.deepcopy(base), {"": run.plan}, group, topology=run.topology)
        outputs = []
        for step in range(STEPS):
            y = module(features(run, group.rank, step)).values()
            gradient = y.detach() + 0.125
            if gradient.numel() and group.rank == 0:
                gradient[0, step] = float("inf")
                gradient[-1, -1] = float("nan")
            y.backward(gradient)
            outputs.append(y.detach().clone())
        return outputs, full_state_dict(module), state_of(module), []

    return joined(run_virtual_ranks(run.size, live))


def warmed_up(world: str, optimizer: str) -> Marks:
    """The learning rate of attached optimizers follows a list of stages."""
    run = Run("mixed", optimizer, "sum", world)
    base = build(run)
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, 2, 0.25),
        WarmupStage(WarmupPolicy.POLY, 4, 2.0, lr_scale=0.5, decay_iters=8),
        WarmupStage(WarmupPolicy.STEP, 6, 0.5, decay_iters=2),
    ]

    def live(group: Group) -> Any:
        module: Any = shard(copy.deepcopy(base), {"": run.plan}, group, topology=run.topology)
        rates = WarmupOptimizer(module.fused_optimizer, stages, lr=0.125)
        outputs = []
        for step in range(7):
            outputs.append(step_of(module, features(run, group.rank, step), float(run.size)))
            rates.step()
        return outputs, full_state_dict(module), state_of(module), []

    return joined(run_virtual_ranks(run.size, live))


def looked_up_twice(world: str, tiling: str) -> Marks:
    """Two lookups of every table meet in one backward pass."""
    run = Run(tiling, "rowwise_adagrad_l2", "sum", world)
    base = build(run)

    def live(group: Group) -> Any:
        module: Any = shard(copy.deepcopy(base), {"": run.plan}, group, topology=run.topology)
        outputs = []
        for step in range(STEPS):
            pair = [module(features(run, group.rank, 2 * step + turn)).values() for turn in (0, 1)]
            torch.autograd.backward(pair, [y.detach() + 0.25 for y in pair])
            outputs.append([y.detach().clone() for y in pair])
        return outputs, full_state_dict(module), state_of(module), []

    return joined(run_virtual_ranks(run.size, live))


def by_position() -> Marks:
    """Weights by position, and their gradients."""
    torch.manual_seed(11)
    rows = {"a": 10, "c": 7}
    tables = [EmbeddingBagConfig(count, 4, f"t{key}", feature_names=[key]) for key, count in rows.items()]
    weights = PositionWeightedModuleCollection({"a": 5, "c": 6})
    module = FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables, is_weighted=True), weights)
    with torch.no_grad():
        for position, parameter in enumerate(weights.parameters()):
            parameter.copy_(Numbers(position).eighths(*parameter.shape))
    seen = []
    for step in range(STEPS):
        module.zero_grad()
        y = module(inputs.batch(rows, 5, step)).values()
        y.backward(y.detach())
        seen.append([y.detach(), *(p.grad for p in module.parameters())])
    return {"outputs": digest(seen)}


# ---------------------------------------------------------------------------------------------------- initial values


def initial(data_type: str, limits: tuple[float, float] | None, drawn: bool) -> Marks:
    """Initial values of whole tables and of tables that get their memory as tiles."""

    def draw(values: Tensor) -> None:
        values.random_(0, 65).sub_(32).div_(64)  # exact: torch's uniform_ rounds as the machine can

    def made(device: str) -> EmbeddingBagCollection:
        torch.manual_seed(23)
        low, high = limits or (None, None)
        return EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    t.rows, t.dim, t.name, kind, t.features, init_fn=draw if drawn else None,
                    weight_init_min=low, weight_init_max=high,
                )
                for t, kind in zip(TABLES, TYPES[data_type], strict=True)
            ],
            device=device,
        )  # fmt: skip

    run = Run("mixed", "none", world="2+1")
    base = made("meta")

    def live(group: Group) -> Any:
        module = shard(copy.deepcopy(base), {"": run.plan}, group, device="cpu", topology=run.topology)
        return [], full_state_dict(module), None, []

    return {"whole": digest(made("cpu").state_dict()), "tiles": joined(run_virtual_ranks(3, live))["weights"]}


CASES: dict[str, Callable[[], Marks]] = {
    **{
        f"cached/alone-{optimizer}-{form}-{algorithm}": partial(cached_alone, optimizer, form, algorithm)
        for optimizer, form, algorithm in (
            ("rowwise_adagrad", "sum", "lru"),
            ("adam", "sequence", "lfu"),
            ("partial_rowwise_lamb", "weighted", "lru"),
        )
    },
    **{
        f"cached/{kind}-{optimizer}-{form}-{world}-{algorithm}{'-ahead' * ahead}": partial(
            cached, kind, optimizer, form, world, algorithm, ahead
        )
        for kind, optimizer, form, world, algorithm, ahead in (
            ("row_wise", "rowwise_adagrad_l2", "sum", "2", "lru", False),
            ("row_wise", "adamw", "sequence", "2+1", "lfu", True),
            ("column_wise", "lamb", "weighted", "2+2", "lru", False),
            ("table_wise", "sgd_momentum", "mean", "1+1", "lfu", False),
            ("data_parallel", "adagrad", "sum", "2", "lru", True),
            ("table_row_wise", "partial_rowwise_adam", "variable", "2+2", "lru", False),
        )
    },
    **{
        f"resharded/{before}-{after}-{optimizer}-{world}-{form}": partial(
            resharded, before, after, optimizer, world, form
        )
        for before, after, optimizer, world, form in (
            ("row_wise", "column_wise", "adam", "2", "sum"),
            ("column_wise", "row_wise", "rowwise_adagrad_l2", "1+1", "mean"),
            ("table_wise", "data_parallel", "adagrad", "2+1", "weighted"),
            ("data_parallel", "grid_shard", "sgd_nesterov", "2+2", "sequence"),
            ("grid_shard", "table_wise", "partial_rowwise_adam_row_step", "2+2", "sum"),
            ("table_row_wise", "table_column_wise", "lamb", "2+2", "variable"),
            ("mixed", "uneven", "partial_rowwise_lamb", "2+2+2+2", "sum"),
            ("copies", "mixed", "lars_sgd", "2+1", "sum"),
            ("checkerboard", "copies", "rowwise_adagrad_max_norm", "2", "sequence"),
        )
    },
    **{f"clamped/row_wise-{world}": partial(clamped, world) for world in ("1", "2+1")},
    **{
        f"skipped/{optimizer}-{world}": partial(skipped, optimizer, world)
        for optimizer, world in (("adam_row_step", "1"), ("rowwise_adagrad", "2"), ("lamb", "2+1"))
    },
    **{
        f"warmed_up/{optimizer}-{world}": partial(warmed_up, world, optimizer)
        for optimizer, world in (("adamw", "1"), ("sgd", "2"))
    },
    **{
        f"looked_up_twice/{tiling}-{world}": partial(looked_up_twice, world, tiling)
        for tiling, world in (("mixed", "1"), ("row_wise", "2"), ("column_wise", "2+2"))
    },
    "by_position/weights": by_position,
    **{f"initial/{kind}": partial(initial, kind, None, False) for kind in TYPES},
    "initial/limits": partial(initial, "fp32", (-0.125, 3.0), False),
    "initial/init_fn": partial(initial, "types", None, True),
}
