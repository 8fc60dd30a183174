"""`DMPCollection`: `DistributedModelParallel` with tables sharded inside groups of ranks, under TorchRec's name.

DMPCollection(model)  =  shard_2d(model)  +  dense parameters on the device, in DistributedDataParallel over all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.agree import heard_by_all
from tilerec.comms.group import Group
from tilerec.comms.traffic import Traffic
from tilerec.compat.sharders import ModuleSharder
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.data_parallel import DataParallelWrapper
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.model_parallel import DistributedModelParallel, _default_env, dense_settings
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.two_d.replica_sync import AverageHook
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.parallel.two_d.two_d import GroupConfig, ReplicaSettings, Sync, TwoD, shard_2d
from tilerec.sharding.fused import ShardedFusedOptimizer
from tilerec.spec.plan import to_enum
from tilerec.spec.topology import Topology
from tilerec.spec.without_effect import warn_without_effect
from tilerec.torch_private import state_dict_pre_hooks


class ShardingStrategy(Enum):
    """TorchRec's ways to keep replicas in memory; all of them are one here."""

    DEFAULT = "default"
    PER_MODULE = "per_module"
    FULLY_SHARDED = "fully_sharded"


@dataclass(frozen=True)
class DMPCollectionConfig:
    """How some modules of a model are sharded, where it is otherwise than for the rest.

    Args:
        module: their class (or the path of one): every collection in them, or that is one of them, is meant.
        plan: of one sharding group, with the paths of the whole model; None: one is made.
        sharding_group_size, node_group_size, use_inter_host_allreduce, sharding_strategy: as of `DMPCollection`.
    """

    module: type[nn.Module] | str
    plan: AnyPlan | ReplicatedPlan | None
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False
    sharding_strategy: ShardingStrategy | str = ShardingStrategy.DEFAULT


_WITHOUT_EFFECT = {
    "sharding_strategy": "every replica keeps its rows in memory: larger sharding groups take less of it",
    "rs_awaitable_hook_module": "no weights are scattered after the forward pass, so there is nothing to wait for",
    "use_sharded_relay": "replicas talk over a process group of their own, in one all-reduce",
    "custom_all_reduce": "sync='exact' exchanges gradients; it averages nothing",
    "sync_interval": "sync='exact' keeps replicas equal at every step; there is nothing to average",
    "refuse_together": "sync='exact' routes over all ranks, and they refuse a batch together",
    "moment_scale": "sync='exact' updates with the gradients of all ranks; their moment is the unsharded model's",
}


@final
class DMPCollection(DistributedModelParallel):
    """A model in 2D parallelism: tables sharded over groups of ranks, a copy of everything in every group.

    As `DistributedModelParallel` but for where tables lie: names, state, the device and the dense part are the same.

    Args:
        module: the model, real or built on meta; changed in place.
        device: where it lives; a number is a GPU's.
        plan: of one sharding group: of `sharding_group_size` ranks, numbered from 0. Any form that `shard` takes, or
            another model's `.plan`; None has one made for the machines of one group. It is never changed.
        world_size: of `global_pg`.
        sharding_group_size: ranks that together hold every table once; divides `world_size`.
        global_pg: all ranks; None is the default process group.
        node_group_size: what table_row_wise and grid_shard take for hosts: runs of so many members of the sharding
            group. None: the hosts that its ranks are on.
        sharders, init_data_parallel, init_parameters, data_parallel_wrapper: as of `DistributedModelParallel`.
        use_inter_host_allreduce: sharding groups are runs of neighbours, and replicas are apart. By default replicas
            are neighbours: `W / sharding_group_size` of them, on one host where they fit.
        custom_all_reduce: averages a list of tensors over the replica group, in place, in place of an all-reduce.
        submodule_configs: modules that are sharded over groups of another size.
        sharding_strategy, rs_awaitable_hook_module, use_sharded_relay: without effect here, with a warning.
        sync: "exact": replicas exchange the gradients of touched rows before every update, and training equals that
            of `DistributedModelParallel` and of the unsharded model. "average": each sharding group updates by its own
            gradients (their mean over the group), and `sync()` averages weights and optimizer state.
        sync_interval: of "average": after so many updates the next forward pass with gradients begins with a `sync()`;
            None: only when it is called.
        exact: the same bits under every plan, at the price of bytes on the wire.
        moment_scale: of "average": what a row-wise Adagrad gradient adds to its moment; None: one over the number of
            replicas (docs/two-d.md).
        refuse_together: of "average": a batch that one rank refuses (`InputError`) is refused by the ranks of all
            groups, for one all-reduce of eight bytes per collection and call. All groups then call the model equally
            often, in evaluations, too. False: by its own group's.
        topology: of the world: which ranks share a host, and memory for the planner. None: as the launcher says.

    Raises:
        ConfigError: as `DistributedModelParallel`; a group size that does not divide the world; a plan of another
            number of ranks; ranks with different settings (all of them raise); a config whose module is not there.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | int | None,
        plan: AnyPlan | ReplicatedPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | str = ShardingStrategy.DEFAULT,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: AverageHook | None = None,
        submodule_configs: Sequence[DMPCollectionConfig] | None = None,
        rs_awaitable_hook_module: str | None = None,
        use_sharded_relay: bool = False,
        *,
        sync: Sync = "exact",
        sync_interval: int | None = None,
        exact: bool = False,
        moment_scale: float | None = None,
        refuse_together: bool = False,
        topology: Topology | None = None,
    ) -> None:
        nn.Module.__init__(self)
        env = (
            _default_env("DMPCollection") if global_pg is None else ShardingEnv.from_process_group(global_pg)
        )

        def cut(group: Group, home: torch.device | str | int) -> None:
            with heard_by_all(group, "the model to shard in 2D"):
                if world_size != group.size:
                    raise ConfigError(
                        f"DMPCollection: world_size is {world_size!r} and global_pg has {group.size} ranks; pass the "
                        "number of ranks in it."
                    )
                if topology is not None and not isinstance(topology, Topology):
                    raise ConfigError(f"DMPCollection: topology is {topology!r:.80}; wanted a Topology.")
                _check_configs(submodule_configs)
                averages = sync != "exact"
                warn_without_effect(
                    "DMPCollection",
                    {
                        "sharding_strategy": _kept_whole(sharding_strategy, submodule_configs),
                        "rs_awaitable_hook_module": rs_awaitable_hook_module,
                        "use_sharded_relay": use_sharded_relay,
                        "custom_all_reduce": None if averages else custom_all_reduce,
                        "sync_interval": None if averages else sync_interval,
                        "moment_scale": None if averages else moment_scale,
                        "refuse_together": None if averages else refuse_together,
                    },
                    _WITHOUT_EFFECT,
                    4,
                )
                configs = [
                    GroupConfig(plan, sharding_group_size, node_group_size, use_inter_host_allreduce),
                    *_of_submodules(module, submodule_configs or ()),
                ]
                also = dense_settings(init_data_parallel, init_parameters, data_parallel_wrapper)
            settings = ReplicaSettings(
                sync, sync_interval, exact, moment_scale, custom_all_reduce, refuse_together
            )
            self._two_d = shard_2d(
                module, configs, group, settings, topology, home, sharders, "DMPCollection", also
            )

        self._build(module, env, device, init_data_parallel, init_parameters, data_parallel_wrapper, cut)
        _equal_before_saved(self.module, self._two_d)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's. Where gradients are taken and `sync_interval` updates have come, it begins with `sync()`, which
        goes on until the first lookup."""
        if torch.is_grad_enabled():
            self._two_d.sync_if_due(wait=False)
        return super().forward(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------ replicas

    def sync(self, include_optimizer_state: bool = True, *, wait: bool = True) -> None:
        """Make replicas equal: average what was touched since the last time. All ranks call it, between two steps.

        With `sync="exact"` they always are: it does nothing.

        Args:
            include_optimizer_state: else weights only; the state of these rows comes along the next time.
            wait: else it ends before the tables are next looked up, updated or saved. Nobody may write rows
                meanwhile, but dense optimizers may step and batches may be read and routed.
        """
        self._two_d.sync(include_optimizer_state, wait=wait)

    @property
    def unsynced_steps(self) -> int:
        """Updates since replicas were last equal; 0 with `sync="exact"`. Make it 0 before evaluating."""
        return self._two_d.unsynced_steps

    def set_all_reduce_hook(self, reduce_hook: AverageHook | None) -> None:
        """Average by this function from now on; see `custom_all_reduce`."""
        self._two_d.set_hook(reduce_hook)

    def ensure_reduce_scatter_complete(self) -> None:
        """TorchRec's name for waiting until the rows are there: ends what `sync(wait=False)` began."""
        self._two_d.settle()

    @property
    def plan(self) -> ReplicatedPlan:  # type: ignore[override]
        """Which rank holds what; printable. `plan.save` writes what may be passed as `plan=` again."""
        first, *others = [part.plan for part in self._two_d.parts]
        return ReplicatedPlan(
            first.group_plan, first.grid, first.topology, first.hosts_from, first.kept, tuple(others)
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, with the axes ("replicate", "shard")."""
        return self._two_d.mesh()

    @property
    def fused_optimizer(self) -> ShardedFusedOptimizer:
        """As `DistributedModelParallel`'s. Its `state_dict()` makes replicas equal first, so all ranks call it."""
        face = super().fused_optimizer
        face.register_state_dict_pre_hook(lambda _: self._two_d.sync_all())
        return face

    def traffic(self) -> Traffic:
        """What this rank has sent for the tables, to its sharding group and to its replicas, by ranks of the world."""
        return self._group.traffic

    # ------------------------------------------------------------------------------------------------ the model's own

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `DistributedModelParallel`'s: what was saved in any layout loads into any other. All ranks call it."""
        self._two_d.settle()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> DMPCollection:
        self._two_d.settle()
        super()._apply(fn, recurse)
        return self

    def copy(self, device: torch.device | str) -> DMPCollection:
        """A copy on a device, over the same ranks. All ranks call it if the dense part is wrapped."""
        self._two_d.settle()
        twin = super().copy(device)
        assert isinstance(twin, DMPCollection)
        twin._two_d = self._two_d.of_copy(twin.module)
        _equal_before_saved(twin.module, twin._two_d)
        return twin


class _EqualFirst:
    """Makes replicas that are apart equal before a module's `state_dict`, whoever asks for it."""

    def __init__(self, two_d: TwoD) -> None:
        self.two_d = two_d

    def __call__(self, *_: object) -> None:
        self.two_d.sync_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> _EqualFirst:
        return self  # a copied model gets its own


def _equal_before_saved(module: nn.Module, two_d: TwoD) -> None:
    hooks = state_dict_pre_hooks(module)
    for key in [key for key, hook in hooks.items() if isinstance(hook, _EqualFirst)]:
        del hooks[key]
    module.register_state_dict_pre_hook(_EqualFirst(two_d))


def _check_configs(configs: Sequence[DMPCollectionConfig] | None) -> None:
    if configs is None:
        return
    if not isinstance(configs, Sequence):
        raise ConfigError(
            f"DMPCollection: submodule_configs is a {type(configs).__name__}; wanted a list of DMPCollectionConfigs."
        )
    for config in configs:
        if not isinstance(config, DMPCollectionConfig):
            raise ConfigError(
                f"DMPCollection: submodule_configs holds a {type(config).__name__}; wanted DMPCollectionConfigs."
            )


def _kept_whole(
    strategy: ShardingStrategy | str, configs: Sequence[DMPCollectionConfig] | None
) -> str | None:
    """A strategy that would keep less than the rows of a sharding group in memory."""
    asked = [strategy, *(config.sharding_strategy for config in configs or ())]
    read = [to_enum(ShardingStrategy, one, "DMPCollection: sharding_strategy") for one in asked]
    return "fully_sharded" if ShardingStrategy.FULLY_SHARDED in read else None


def _of_submodules(module: nn.Module, configs: Sequence[DMPCollectionConfig]) -> list[GroupConfig]:
    """The configs with the paths of their collections.

    Raises:
        ConfigError: one is of a module that is not there, or of nothing that an earlier one has left.
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
                f"DMPCollection: a config is of the {name}, "
                + ("whose collections other configs have already" if roots else "which the model lacks")
                + f"; its collections are {collections[:8]}."
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
