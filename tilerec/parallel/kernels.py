"""Which tables the backward pass updates: what the user attached, what sharders give, what the plan says.

attached     its optimizer stays, whatever sharders give; a plan that says `dense` contradicts it
`dense`      no optimizer: gradients go to `.grad`, for an optimizer of the user's
otherwise    the optimizer of the collection's sharder, if it gives one
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.sharders import ModuleSharder
from tilerec.parallel.tables import Name
from tilerec.planner.sharder import sharder_of
from tilerec.spec.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    Wire,
)

DENSE, FUSED = EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED

Gifts = list[tuple[ModuleSharder, list[nn.Parameter]]]
"""Each sharder with the tables that it gives its optimizer to."""


def gifts_of(
    plan: ShardingPlan,
    collections: Mapping[str, TableCollection],
    ties: Sequence[Mapping[Name, Table]],
    sharders: Sequence[ModuleSharder],
) -> Gifts:
    """What sharders give to which tables; changes nothing.

    Args:
        ties: the distinct tables, each under all its names.

    Raises:
        ConfigError: the plan says `dense` of a table with an attached optimizer, or two things of one table; two
            sharders give two optimizers to one table.
    """
    members: dict[int, list[nn.Parameter]] = {}
    for names in ties:
        kernels = {name: plan.plan[name[0]][name[1]].kernel for name in names}
        said = {name: kernel is DENSE for name, kernel in kernels.items() if kernel is not None}
        if len(set(said.values())) > 1:
            raise ConfigError(
                f"shard: one table has the names {_listed(names)}, and the plan says compute_kernel 'dense' of one of "
                "them and another kernel of the other; say the same of all of them."
            )
        dense, table = any(said.values()), next(iter(names.values()))
        if table.rows.spec is not None:
            if dense:
                raise ConfigError(
                    f"shard: the plan says compute_kernel 'dense' of table {_listed(names)}, but "
                    f"{type(table.rows.spec).__name__} is attached to it and updates it in the backward pass; leave "
                    "compute_kernel out of the plan (or say 'fused'), or attach no optimizer."
                )
            continue
        givers: dict[int, ModuleSharder] = {}
        for path, _ in names:
            sharder = sharder_of(collections[path], sharders)
            if sharder is not None and sharder.optimizer is not None:
                givers[id(sharder)] = sharder
        if dense or not givers or not table.weight.requires_grad:
            continue
        first, *others = givers.values()
        for other in others:
            if other.optimizer != first.optimizer:
                raise ConfigError(
                    f"shard: one table has the names {_listed(names)}, and {type(first).__name__} gives it "
                    f"{first.optimizer}, {type(other).__name__} {other.optimizer}; give both the same fused_params, or "
                    "attach its optimizer with apply_optimizer_in_backward."
                )
            members.setdefault(id(other), [])  # it gives what the first gives
        members.setdefault(id(first), []).append(table.weight)
    return [(sharder, members[id(sharder)]) for sharder in sharders if id(sharder) in members]


def attach(gifts: Gifts) -> None:
    """The optimizers of the sharders, attached. Tables of one sharder share their numbers."""
    for sharder, params in gifts:
        assert sharder.optimizer is not None
        if params:
            apply_optimizer_in_backward(sharder.optimizer, params)


def with_kernels(plan: ShardingPlan, collections: Mapping[str, TableCollection]) -> ShardingPlan:
    """The plan with the kernel of every table: as it came where the plan left it open.

    Warns of tables that the plan wants updated in the backward pass and that no optimizer is attached to.
    """
    bare: list[Name] = []

    def filled(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        table = collections[path]._tables[name]
        if sharding.kernel is None:
            return replace(sharding, compute_kernel=DENSE if table.rows.spec is None else FUSED)
        if sharding.kernel is not DENSE and table.rows.spec is None and table.weight.requires_grad:
            bare.append((path, name))
        return sharding

    whole = _mapped(plan, filled)
    if bare:
        path, name = bare[0]
        kernel = plan.plan[path][name].kernel
        assert kernel is not None
        warnings.warn(
            f"shard: the plan says compute_kernel '{kernel.value}' of table {_listed(bare)}, but no optimizer is "
            "attached and no sharder gives one: gradients go to .grad. Attach one with apply_optimizer_in_backward, "
            "give a sharder fused_params, or say 'dense'.",
            stacklevel=6,
        )
    return whole


def with_wires(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], sharders: Sequence[ModuleSharder]
) -> ShardingPlan:
    """The plan with the wire of every table: where it names none, the sharders' formats, or fp32."""

    def filled(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        if sharding.wire is not None:
            return sharding
        sharder = sharder_of(collections[path], sharders)
        given = None if sharder is None else sharder.wire
        return replace(sharding, wire=given or Wire())

    return _mapped(plan, filled)


def _mapped(
    plan: ShardingPlan, change: Callable[[str, str, ParameterSharding], ParameterSharding]
) -> ShardingPlan:
    parts = {
        path: EmbeddingModuleShardingPlan({name: change(path, name, s) for name, s in part.items()})
        for path, part in plan.plan.items()
    }
    return replace(plan, plan=parts)


def warn_of_idle(
    gifts: Gifts,
    given: ShardingPlan,
    collections: Mapping[str, TableCollection],
    sharders: Sequence[ModuleSharder],
) -> None:
    """Name the sharders that say something and change nothing.

    Args:
        given: the plan without the formats of sharders.
    """
    giving = {id(sharder) for sharder, _ in gifts}
    for sharder in sharders:
        who, kind = type(sharder).__name__, sharder.module_type.__name__
        own = [path for path, part in collections.items() if sharder_of(part, sharders) is sharder]
        says = [
            word
            for word, value in (
                ("fused_params", sharder.optimizer),
                ("qcomm_codecs_registry", None if sharder.wire == Wire() else sharder.wire),
            )
            if value is not None
        ]
        if says and not own:
            warnings.warn(
                f"{who}: its {' and '.join(says)} have no effect, as the model has no {kind}; it has "
                f"{sorted({type(part).__name__ for part in collections.values()})}.",
                stacklevel=6,
            )
            continue
        if sharder.optimizer is not None and id(sharder) not in giving:
            warnings.warn(
                f"{who}: its fused_params have no effect: every table of a {kind} has an optimizer attached, is "
                "frozen, or is 'dense' in the plan.",
                stacklevel=6,
            )
        if "qcomm_codecs_registry" in says and all(
            sharding.wire is not None for path in own for sharding in given.plan[path].values()
        ):
            warnings.warn(
                f"{who}: its qcomm_codecs_registry has no effect: the plan names the wire of every table of a {kind}.",
                stacklevel=6,
            )


def _listed(names: Sequence[Name] | Mapping[Name, Table], most: int = 8) -> str:
    texts = [f"'{table}' of module '{path}'" if path else f"'{table}'" for path, table in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
