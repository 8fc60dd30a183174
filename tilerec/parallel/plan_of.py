"""Where a sharded model keeps its plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tilerec.errors import ConfigError
from tilerec.spec.plan import ShardingPlan

_KEPT = "_sharding_plan"


def plan_of(module: nn.Module) -> ShardingPlan:
    """Which rank holds what of a model that `shard` or `DistributedModelParallel` has sharded; printable.

    The same as `module.plan`, unless the model has something of its own under that name.

    Raises:
        ConfigError: the model is not sharded as a whole.
    """
    inner = getattr(module, "module", None)  # of DistributedModelParallel
    for holder in (module, inner):
        plan = vars(holder).get(_KEPT) if isinstance(holder, nn.Module) else None
        if isinstance(plan, ShardingPlan):
            return plan
    raise ConfigError(
        f"plan_of: this {type(module).__name__} has no plan; pass the module that was given to shard() or to "
        "DistributedModelParallel, after that."
    )


def keep_plan(module: nn.Module, plan: ShardingPlan) -> None:
    """Keep the plan, and show it as `module.plan` unless the model has a `plan` of its own."""
    ours = vars(module).get(_KEPT)
    if not hasattr(module, "plan") or (ours is not None and module.plan is ours):
        vars(module)["plan"] = plan
    vars(module)[_KEPT] = plan


def kept_plans(module: nn.Module) -> Iterator[tuple[str, ShardingPlan]]:
    """The plans that a module and those below it keep, each with the path of its keeper."""
    for path, part in module.named_modules():
        plan = vars(part).get(_KEPT)
        if isinstance(plan, ShardingPlan):
            yield path, plan
