"""Paths in plans: TorchRec's plans name a managed-collision module in place of the collection inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.planner.helpers import Cut
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.torch_private import submodules


def with_table_paths(plan: Any, module: nn.Module) -> Any:
    """Return the plan with `<path>._embedding_module` in place of the path of each managed-collision module.

    A plan without such paths is returned unchanged. If the module itself has managed collision, `{table: …}` is the
    plan of its tables.
    """
    inside = {
        path: f"{path}._embedding_module" if path else "_embedding_module"
        for path, part in module.named_modules()
        if isinstance(part, ManagedCollisionEmbeddings)
    }
    if not inside:
        return plan
    if isinstance(plan, (str, Path)):
        plan = ShardingPlan.load(plan)
    if isinstance(plan, ShardingPlan):
        named = {inside.get(path, path): part for path, part in plan.plan.items()}
        return plan if list(named) == list(plan.plan) else replace(plan, plan=named)
    if not isinstance(plan, Mapping):
        return plan
    if "" in inside and plan and all(isinstance(item, ParameterSharding | Tiling | Cut) for item in plan.values()):
        own = submodules(module)["_embedding_module"]
        names = set(getattr(own, "_tables", ()))
        if set(plan) <= names:
            return {"_embedding_module": plan}
    return {inside.get(path, path): part for path, part in plan.items()}
