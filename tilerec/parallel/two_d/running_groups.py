"""`TwoD`: the sharded tables of a model in 2D parallelism, with its sharding groups and replica groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.parallel.two_d.replica_sync import ReplicaSync
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.parallel.two_d.settings import AverageHook, ReplicaSettings, check_hook
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.tile import Tiling
from tilerec.torch_private import state_dict_pre_hooks


@dataclass(frozen=True)
class RunningGroup:
    """Sharded collections in 2D parallelism.

    Args:
        paths: paths of the collections.
        plan: their plan.
        shard: this rank's sharding group.
        axis: this rank's replica group.
        average: synchronization of the replicas; None with `sync="exact"`.
    """

    paths: tuple[str, ...]
    plan: ReplicatedPlan
    shard: Group
    axis: Group
    average: ReplicaSync | None


@final
class TwoD:
    """A model's tables in 2D parallelism, returned by `shard_2d`.

    Args:
        world: all ranks.
        parts: the parts; the first holds all collections outside sub-configs.
        settings: settings for keeping replicas equal.
    """

    def __init__(self, world: Group, parts: Sequence[RunningGroup], settings: ReplicaSettings) -> None:
        self.world, self.parts, self.settings = world, tuple(parts), settings

    @property
    def averages(self) -> list[ReplicaSync]:
        """The synchronization of each part; empty with `sync="exact"`."""
        return [part.average for part in self.parts if part.average is not None]

    @property
    def unsynced_steps(self) -> int:
        """Updates since weights and optimizer state were last averaged; 0 with `sync="exact"`."""
        return max([average.unsynced_steps for average in self.averages], default=0)

    def sync(self, include_optimizer_state: bool = True, *, wait: bool = True) -> None:
        """Average the rows touched since the last sync, over the replicas. Collective; with "exact" it does nothing.

        Args:
            include_optimizer_state: False: average weights only; a later sync averages the state of these rows.
            wait: False: return early; the average ends before the tables are next looked up, updated or saved. Until
                then no code may write rows of the tables.

        Raises:
            ConfigError: replicas differ in their settings or optimizers. All replicas raise, before any row is written.
        """
        for average in self.averages:
            average(state=bool(include_optimizer_state), wait=wait)

    def sync_if_due(self, *, wait: bool = True) -> bool:
        """Average if `interval` updates were made since the last average, and return True if so. Collective."""
        interval, due = self.settings.interval, False
        for average in self.averages:
            if interval is not None and average.steps >= interval:
                average(wait=wait)
                due = True
        return due

    def sync_all(self) -> None:
        """Average weights and optimizer state of rows touched since the last sync, over the replicas. Collective."""
        for average in self.averages:
            average()

    def sync_before_state_dict(self, module: nn.Module) -> None:
        """Average replicas before every `state_dict` of a module, so that the saved state is that of all of them."""
        hooks = state_dict_pre_hooks(module)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _SyncBeforeStateDict)]:
            del hooks[key]
        module.register_state_dict_pre_hook(_SyncBeforeStateDict(self))

    def settle(self) -> None:
        """Complete a `sync(wait=False)`."""
        for average in self.averages:
            average.settle()

    def set_hook(self, hook: AverageHook | None) -> None:
        """Set the hook of all parts; see `ReplicaSettings.hook`."""
        check_hook(hook, "set_all_reduce_hook")
        if hook is not None and not self.averages:
            why = {"reduce_hook": "sync='exact' exchanges gradients and does not average"}
            warn_ignored_settings("set_all_reduce_hook", {"reduce_hook": hook}, why, 3)
        for average in self.averages:
            average.hook = hook

    def retile(self, path: str, table: str, change: Callable[[Tiling], Tiling]) -> None:
        """Change the tiling of a table in the group plan of its part."""
        parts = []
        for part in self.parts:
            if path in part.paths:
                plan, sharding = part.plan.group_plan, part.plan.group_plan.plan[path][table]
                tiling = change(part.plan.tiling(path, table))
                hot = None if tiling.head is None else tiling.head.hot
                plan = plan.replaced(path, table, replace(sharding, tiling=tiling, hot=hot))
                part = replace(part, plan=replace(part.plan, group_plan=plan))
            parts.append(part)
        self.parts = tuple(parts)

    def of_copy(self, module: nn.Module) -> TwoD:
        """Return the 2D parallelism of a copy of the model, over the same ranks."""
        parts = [
            RunningGroup(
                part.paths, part.plan, part.shard, part.axis, _sync_like(module, part.paths, part.axis, part.average)
            )
            for part in self.parts
        ]  # fmt: skip
        return TwoD(self.world, parts, self.settings)

    def mesh(self, part: int = 0) -> DeviceMesh:
        """Return the ranks of a part as a mesh with the axes ("replicate", "shard").

        Raises:
            ConfigError: the ranks are threads.
        """
        shard, axis, world = self.parts[part].shard, self.parts[part].axis, self.world
        if not (
            isinstance(world, ProcessGroupComms)
            and isinstance(shard, ProcessGroupComms)
            and isinstance(axis, ProcessGroupComms)
        ):
            raise ConfigError(
                "device_mesh: ranks are threads, which have no DeviceMesh; run them as processes, or read plan.grid."
            )
        everyone = dist.get_process_group_ranks(world.process_group)
        ranks = [[everyone[rank] for rank in group] for group in self.parts[part].plan.grid.sharding_groups]
        return DeviceMesh.from_group(
            [axis.process_group, shard.process_group],
            world.device.type,
            mesh=torch.tensor(ranks, dtype=torch.int, device="cpu"),
            mesh_dim_names=("replicate", "shard"),
        )


class _SyncBeforeStateDict:
    """Hook that averages replicas before every `state_dict` of a module."""

    def __init__(self, two_d: TwoD) -> None:
        self.two_d = two_d

    def __call__(self, *_: object) -> None:
        self.two_d.sync_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> _SyncBeforeStateDict:
        return self  # `sync_before_state_dict` replaces it on a copied model


def unwrapped(model: nn.Module) -> tuple[nn.Module, TwoD | None]:
    """Return the model inside of a `DistributedModelParallel`, or the model itself; and its 2D parallelism, if any."""
    two_d = vars(model).get("_two_d")
    inner = cast(nn.Module, model.module) if hasattr(model, "_dmp_wrapped_module") else model
    return inner, two_d if isinstance(two_d, TwoD) else None


def _sync_like(module: nn.Module, paths: Sequence[str], axis: Group, like: ReplicaSync | None) -> ReplicaSync | None:
    if like is None:
        return None
    return ReplicaSync(axis, [module.get_submodule(path) for path in paths], like.hook, like.ranks)
