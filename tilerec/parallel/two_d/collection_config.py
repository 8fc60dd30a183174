"""Settings of `DMPCollection`: TorchRec's arguments, and their meaning as `GroupConfig`s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.plan import to_enum
from tilerec.spec.topology import Topology


class ShardingStrategy(Enum):
    """TorchRec's ways to store replicas; tilerec treats all of them alike."""

    DEFAULT = "default"
    PER_MODULE = "per_module"
    FULLY_SHARDED = "fully_sharded"


@dataclass(frozen=True)
class DMPCollectionConfig:
    """Sharding settings of some modules that differ from the rest of the model.

    Args:
        module: a class or a path; the settings apply to every collection that is such a module or is inside one.
        plan: the plan of one sharding group, with the paths of the whole model; None: the planner makes one.
        sharding_group_size, node_group_size, use_inter_host_allreduce, sharding_strategy: see `DMPCollection`.
    """

    module: type[nn.Module] | str
    plan: AnyPlan | ReplicatedPlan | None
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False
    sharding_strategy: ShardingStrategy | str = ShardingStrategy.DEFAULT


_WITHOUT_EFFECT = {
    "sharding_strategy": "every replica keeps its rows in memory; larger sharding groups need less memory per rank",
    "rs_awaitable_hook_module": "no weights are scattered after the forward pass, so there is nothing to wait for",
    "use_sharded_relay": "replicas have their own process group and use one all-reduce",
    "custom_all_reduce": "sync='exact' exchanges gradients and does not average",
    "sync_interval": "sync='exact' keeps replicas equal at every step; there is nothing to average",
    "refuse_together": "sync='exact' routes over all ranks, which always refuse a batch together",
    "moment_scale": "sync='exact' updates with the gradients of all ranks, so the moment is the unsharded model's",
}


def warn_without_effect(
    settings: ReplicaSettings,
    strategies: Sequence[ShardingStrategy | str],
    rs_awaitable_hook_module: str | None,
    use_sharded_relay: bool,
) -> None:
    """Warn of arguments of `DMPCollection` without effect; see there.

    Args:
        strategies: those of the model and of its modules.
    """
    averages = settings.sync != "exact"
    parsed = [to_enum(ShardingStrategy, one, "DMPCollection: sharding_strategy") for one in strategies]
    # Only fully sharded replicas would use another amount of memory.
    fully_sharded = "fully_sharded" if ShardingStrategy.FULLY_SHARDED in parsed else None
    warn_ignored_settings(
        "DMPCollection",
        {
            "sharding_strategy": fully_sharded,
            "rs_awaitable_hook_module": rs_awaitable_hook_module,
            "use_sharded_relay": use_sharded_relay,
            "custom_all_reduce": None if averages else settings.hook,
            "sync_interval": None if averages else settings.interval,
            "moment_scale": None if averages else settings.moment_scale,
            "refuse_together": None if averages else settings.refuse_together,
        },
        _WITHOUT_EFFECT,
        5,
    )


def check_world(world_size: object, size: int, topology: object) -> None:
    """Raise a `ConfigError` if the world size is not the number of ranks, or the topology no `Topology`."""
    if world_size != size:
        raise ConfigError(
            f"DMPCollection: world_size: got {world_size!r}; expected {size}, the number of ranks of global_pg."
        )
    if topology is not None and not isinstance(topology, Topology):
        raise ConfigError(f"DMPCollection: topology: got {topology!r:.80}; expected a Topology.")


def check_configs(configs: Sequence[DMPCollectionConfig] | None) -> Sequence[DMPCollectionConfig]:
    """Return the configs; raise a `ConfigError` if they are no list of configs."""
    if configs is None:
        return ()
    if not isinstance(configs, Sequence):
        raise ConfigError(
            f"DMPCollection: submodule_configs: got a {type(configs).__name__}; expected a list of "
            "DMPCollectionConfigs."
        )
    for config in configs:
        if not isinstance(config, DMPCollectionConfig):
            raise ConfigError(
                f"DMPCollection: submodule_configs: got a {type(config).__name__} in it; expected DMPCollectionConfigs."
            )
    return configs


def configs_of_submodules(module: nn.Module, configs: Sequence[DMPCollectionConfig]) -> list[GroupConfig]:
    """Return the configs with the paths of their collections.

    Raises:
        ConfigError: the model lacks the module of a config, or earlier configs have all of its collections.
    """
    collections = [path for path, part in module.named_modules() if isinstance(part, TableCollection)]
    taken: set[str] = set()
    made = []
    for config in configs:
        if isinstance(config.module, str):
            roots = [path for path, _ in module.named_modules() if path == config.module]
            name = f"module '{config.module}'"
        else:
            roots = [path for path, part in module.named_modules() if isinstance(part, config.module)]
            name = f"module of class {config.module.__name__}"
        mine = [
            path
            for path in collections
            if path not in taken and any(root in ("", path) or path.startswith(f"{root}.") for root in roots)
        ]
        if not mine:
            raise ConfigError(
                f"DMPCollection: submodule_configs: got {name}, "
                + ("whose collections other configs have already" if roots else "which the model lacks")
                + f"; the model's collections are {collections[:8]}."
            )
        taken.update(mine)
        made.append(
            GroupConfig(
                config.plan,
                config.sharding_group_size,
                config.node_group_size,
                config.use_inter_host_allreduce,
                tuple(mine),
            )
        )
    return made
