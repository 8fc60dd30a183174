"""`plan_of`: the plan that a sharded model stores."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tilerec.errors import ConfigError
from tilerec.spec.plan import ShardingPlan

_KEPT = "_sharding_plan"


def plan_of(module: nn.Module) -> ShardingPlan:
    """Return the plan of a model that `shard` or `DistributedModelParallel` has sharded; printable.

    It is the same object as `module.plan`, unless the model has its own attribute of that name.

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
        "DistributedModelParallel, after that call."
    )


def store_plan(module: nn.Module, plan: ShardingPlan) -> None:
    """Store the plan in the module, also as `module.plan` unless the model has its own `plan`."""
    ours = vars(module).get(_KEPT)
    if not hasattr(module, "plan") or (ours is not None and module.plan is ours):
        vars(module)["plan"] = plan
    vars(module)[_KEPT] = plan


def stored_plans(module: nn.Module) -> Iterator[tuple[str, ShardingPlan]]:
    """Yield the plans stored in a module and its submodules, each with the path of its module."""
    for path, part in module.named_modules():
        plan = vars(part).get(_KEPT)
        if isinstance(plan, ShardingPlan):
            yield path, plan
