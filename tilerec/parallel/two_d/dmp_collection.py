"""`DMPCollection`: TorchRec's `DistributedModelParallel` with tables sharded within groups of ranks.

DMPCollection(model)  =  shard_2d(model)  +  dense parameters on the device, in DistributedDataParallel over all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.group import Group
from tilerec.comms.traffic import Traffic
from tilerec.parallel.data_parallel import DataParallelWrapper
from tilerec.parallel.dense_part import DenseOptions
from tilerec.parallel.env import Ranks, env_of
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.two_d.collection_config import (
    DMPCollectionConfig,
    ShardingStrategy,
    check_configs,
    check_world,
    configs_of_submodules,
    warn_without_effect,
)
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan
from tilerec.parallel.two_d.settings import AverageHook, GroupConfig, ReplicaSettings, Sync
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.parallel.two_d.traced_sync import sync_handle, sync_traced
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.spec.topology import Topology


@final
class DMPCollection(DistributedModelParallel):
    """A model in 2D parallelism: tables sharded over groups of ranks, with a copy of all tables in every group.

    Only the placement of tables differs from `DistributedModelParallel`; names, state, device and dense part are the
    same.

    Args:
        module: the model, real or built on meta; changed in place.
        device: the model's device; an integer is the index of a GPU.
        plan: the plan of one sharding group: of `sharding_group_size` ranks, numbered from 0. Any form that `shard`
            takes, or another model's `.plan`; it is never changed. None: the planner makes one for the machines of one
            group.
        world_size: the number of ranks of `global_pg`.
        sharding_group_size: number of ranks that together hold every table once; divides `world_size`.
        global_pg: all ranks: a process group, or another form of `DistributedModelParallel`'s `env`; None: the default
            process group.
        node_group_size: number of consecutive members of the sharding group that table_row_wise and grid_shard treat
            as one host. None: the hosts of the group's ranks.
        sharders, init_data_parallel, init_parameters, data_parallel_wrapper: see `DistributedModelParallel`.
        use_inter_host_allreduce: members of a sharding group are neighbours, and replicas are apart. By default the
            `W / sharding_group_size` replicas are neighbours, on one host if they fit.
        custom_all_reduce: function that averages a list of tensors over the replica group, in place; it replaces the
            all-reduce.
        submodule_configs: settings of modules that are sharded over groups of another size.
        sharding_strategy, rs_awaitable_hook_module, use_sharded_relay: accepted with a warning; no effect.
        sync: "exact": replicas exchange the gradients of touched rows before every update. Training then equals that
            of `DistributedModelParallel` and of the unsharded model. "average": each sharding group updates with the
            mean of its own gradients, and `sync()` averages weights and optimizer state.
        sync_interval: with "average": the number of updates after which the next forward pass with gradients begins
            with a `sync()`; None: only your calls of `sync()` average.
        exact: produce the same bits under every plan, with more bytes on the wire.
        moment_scale: with "average": factor of a gradient's contribution to the moment of row-wise Adagrad; None: one
            over the number of replicas (docs/two-d.md).
        refuse_together: with "average": if one rank refuses a batch (`InputError`), the ranks of all groups refuse it.
            This takes one all-reduce of eight bytes per collection and call, and all groups must call the model equally
            often, in evaluations, too. False: only the ranks of its own group refuse it.
        topology: the topology of the world, with the ranks of each host, and memory sizes for the planner. None: from
            the launcher.

    Raises:
        ConfigError: as `DistributedModelParallel`; a group size does not divide the world size; a plan has another
            number of ranks; ranks have different settings (all ranks raise); the model lacks the module of a config.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | int | None,
        plan: AnyPlan | ReplicatedPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: Ranks | None = None,
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
        who = "DMPCollection"
        dense = DenseOptions.of(init_data_parallel, init_parameters, data_parallel_wrapper)
        settings = ReplicaSettings(sync, sync_interval, exact, moment_scale, custom_all_reduce, refuse_together)

        def shard_onto(group: Group, tables_device: torch.device | str | int) -> None:
            def checked() -> tuple[list[GroupConfig], dict[str, object]]:
                check_world(world_size, group.size, topology)
                own = check_configs(submodule_configs)
                strategies = [sharding_strategy, *(config.sharding_strategy for config in own)]
                warn_without_effect(settings, strategies, rs_awaitable_hook_module, use_sharded_relay)
                whole = GroupConfig(plan, sharding_group_size, node_group_size, use_inter_host_allreduce)
                return [whole, *configs_of_submodules(module, own)], dense.described()

            self._two_d = shard_2d(module, checked, group, settings, topology, tables_device, sharders, who)

        self._build(module, env_of(who, "global_pg", global_pg), device, dense, shard_onto)
        self._sync_handle = sync_handle(self._two_d)
        self._two_d.sync_before_state_dict(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model; with gradients and after `sync_interval` updates, begin with a `sync()`.

        That sync overlaps with the forward pass until the first lookup.
        """
        if torch.is_grad_enabled() and self._two_d.settings.interval is not None:
            if torch.compiler.is_compiling():
                sync_traced(self._sync_handle)
            else:
                self._two_d.sync_if_due(wait=False)
        return super().forward(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------ replicas

    def sync(self, include_optimizer_state: bool = True, *, wait: bool = True) -> None:
        """Average the rows touched since the last sync, over the replicas. Collective; call it between two steps.

        With `sync="exact"` replicas are always equal, and this does nothing.

        Args:
            include_optimizer_state: False: average weights only; a later sync averages the state of these rows.
            wait: False: return early; the average ends before the tables are next looked up, updated or saved. Until
                then no code may write rows, but dense optimizers may step and batches may be read and routed.
        """
        self._two_d.sync(include_optimizer_state, wait=wait)

    @property
    def sync_interval(self) -> int | None:
        """Updates between two averages that the forward begins; None: only calls of `sync()` average."""
        return self._two_d.settings.interval

    @property
    def unsynced_steps(self) -> int:
        """Updates since replicas were last equal; 0 with `sync="exact"`. Call `sync()` before an evaluation."""
        return self._two_d.unsynced_steps

    def set_all_reduce_hook(self, reduce_hook: AverageHook | None) -> None:
        """Average with this function from now on; see `custom_all_reduce`."""
        self._two_d.set_hook(reduce_hook)

    def ensure_reduce_scatter_complete(self) -> None:
        """Complete a `sync(wait=False)`; this is TorchRec's name for it."""
        self._two_d.settle()

    @property
    def plan(self) -> ReplicatedPlan:  # type: ignore[override]
        """The plan; printable. A file that `plan.save` writes may be passed as `plan=` again."""
        first, *others = [part.plan for part in self._two_d.parts]
        return ReplicatedPlan(first.group_plan, first.grid, first.topology, first.hosts_from, first.kept, tuple(others))

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks as a mesh with the axes ("replicate", "shard")."""
        return self._two_d.mesh()

    @property
    def fused_optimizer(self) -> ShardedFusedOptimizer:
        """The attached optimizers as one `torch.optim.Optimizer`; its `state_dict()` syncs first (collective)."""
        face = super().fused_optimizer
        face.register_state_dict_pre_hook(lambda _: self._two_d.sync_all())
        return face

    def traffic(self) -> Traffic:
        """Return the bytes sent for the tables, to sharding group and replicas, by ranks of the world."""
        return self._group.traffic

    # ------------------------------------------------------------------------------------------------ state and copies

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load state as `DistributedModelParallel` does, from any layout into any other. Collective."""
        self._two_d.settle()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> DMPCollection:
        self._two_d.settle()
        super()._apply(fn, recurse)
        return self

    def copy(self, device: torch.device | str) -> DMPCollection:
        """Return a copy on a device, over the same ranks. Collective if the dense part is wrapped."""
        self._two_d.settle()
        twin = super().copy(device)
        assert isinstance(twin, DMPCollection)
        twin._two_d = self._two_d.of_copy(twin.module)
        twin._two_d.sync_before_state_dict(twin.module)
        return twin
