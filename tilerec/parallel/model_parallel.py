"""`DistributedModelParallel`: TorchRec's wrapper, a model with sharded tables and a replicated dense part.

DistributedModelParallel(model)  =  shard(model)  +  dense parameters on the device, in DistributedDataParallel
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import TypeVar

from tilerec.comms.group import Group
from tilerec.comms.traffic import Traffic
from tilerec.parallel.data_parallel import DataParallelWrapper, handle_of, prepare
from tilerec.parallel.dense_part import DenseOptions, dense_tensors, move_dense, reset_dense
from tilerec.parallel.device import device_of
from tilerec.parallel.env import Ranks, ShardingEnv, env_of
from tilerec.parallel.model_tables import warn_of_no_tables
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.shard import shard_tables
from tilerec.parallel.traffic import traffic
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.spec.plan import ShardingPlan
from tilerec.storage.table_rows import rows_of

Output = TypeVar("Output", default=Any)
"""What a model returns: Any for a module whose calls have no type of their own."""


class DistributedModelParallel(nn.Module, Generic[Output]):
    """A sharded model with the same call signature as the model itself.

    The constructor changes the model in place. It replaces tables by this rank's tiles (see `tilerec.parallel.shard`),
    moves the model to the device, and wraps dense parameters in torch's `DistributedDataParallel`. Names of parameters
    and state stay those of the model, without the prefix of either wrapper. For torch's `get_state_dict`, pass
    `.module`: it needs the model itself.

    Args:
        module: the model, an `nn.Module`, real or built on meta.
        env: the ranks: a `ShardingEnv`, a `DeviceMesh` of one axis, a process group or a `Group`; None: the default
            process group.
        device: the model's device; an integer is the index of a GPU. None: the CPU, or the current GPU if the process
            group does not support CPU tensors.
        plan: see `shard`; None: the planner makes one.
        sharders: optimizers and wire formats, as a list of at most one sharder per kind of collection. A kind without
            a sharder is sharded, too. Optimizers apply to tables without an attached one, unless the plan has the table
            as `dense`. Formats apply to tables whose plan names none. A sharder without effect causes a warning.
        init_data_parallel: whether to wrap the dense part now; otherwise call `init_data_parallel()` before training.
        init_parameters: whether to allocate dense parameters that are on meta and call their modules'
            `reset_parameters`.
        data_parallel_wrapper: wrapper of the dense part; None: `DefaultDataParallelWrapper()`.
        model_tracker_configs: accepted with a warning; has no effect.

    Raises:
        ConfigError: as `shard`; `sharders` is not a list of sharders of different kinds; this machine lacks `device`; a
            module on meta has no `reset_parameters`; ranks have different settings for the dense part (all ranks raise,
            and the error names ranks and values).

    Warns if the model has no tables; it is then a `DistributedDataParallel` model.
    """

    def __init__(
        self,
        module: Callable[..., Output],
        env: Ranks | None = None,
        device: torch.device | str | int | None = None,
        plan: AnyPlan | None = None,
        sharders: Sequence[ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
    ) -> None:
        super().__init__()
        model = cast(nn.Module, module)
        if model_tracker_configs is not None:
            warnings.warn("DistributedModelParallel: model_tracker_configs has no effect.", stacklevel=2)
        who = "DistributedModelParallel"
        dense = DenseOptions.of(init_data_parallel, init_parameters, data_parallel_wrapper)

        def shard_onto(group: Group, tables_device: torch.device | str | int) -> None:
            shard_tables(model, plan, group, None, tables_device, False, sharders, who, dense.described)

        self._build(model, env_of(who, "env", env), device, dense, shard_onto)

    def _build(
        self,
        module: nn.Module,
        env: ShardingEnv,
        device: torch.device | str | int | None,
        dense: DenseOptions,
        shard_onto: Callable[[Group, torch.device | str | int], None],
    ) -> None:
        """Build the wrapper.

        Args:
            shard_onto: shards the tables over a group; raises on every rank if one of them lacks the device.
        """
        self.register_load_state_dict_pre_hook(_with_wrappers)
        who = type(self).__name__
        self._env, self._wrapper, self._wrapped_once = env, dense.wrapper, False
        group = env.group()
        device = group.device if device is None else device
        warn_of_no_tables(module, who)
        shard_onto(group, device)
        self.device = device_of(device, who)
        self._group = group
        self._dmp_wrapped_module: nn.Module = module
        self._ddp_handle: Tensor | None = None  # for compiled programs
        move_dense(module, self.device, group, dense.init_parameters)
        if dense.init_data_parallel:
            self.init_data_parallel()

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Output: ...  # the model's own arguments and result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        if torch.compiler.is_compiling() and self._ddp_handle is not None:
            prepare(self._ddp_handle)
            return self.module(*args, **kwargs)
        return self._dmp_wrapped_module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The model without wrappers."""
        inner = self._dmp_wrapped_module
        return inner.module if isinstance(inner, DistributedDataParallel) else inner

    @property
    def group(self) -> Group:
        """All ranks that train the model together."""
        return self._group

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan of the model; printable."""
        return plan_of(self.module)

    @property
    def fused_optimizer(self) -> ShardedFusedOptimizer:
        """The attached optimizers as one `torch.optim.Optimizer`, without parameter groups if none is attached."""
        return ShardedFusedOptimizer(self.module)

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent for the tables; see `tilerec.parallel.traffic`."""
        return traffic(self.module)

    def init_data_parallel(self) -> None:
        """Wrap the dense part, and set its parameters to rank 0's. Collective; later calls do nothing."""
        if not self._wrapped_once:
            self._wrapped_once = True
            self._wrap()

    def _wrap(self) -> None:
        self._wrapper.wrap(self, self._env, self.device)
        wrapped = self._dmp_wrapped_module
        self._ddp_handle = handle_of(wrapped) if isinstance(wrapped, DistributedDataParallel) else None

    def _apply(self, fn: Any, recurse: bool = True) -> DistributedModelParallel:
        """Apply `fn`; wrap the dense part again if its dtype or device changes, which is a collective."""
        before = [(t.dtype, t.device) for t in dense_tensors(self.module)]
        super()._apply(fn, recurse)
        if before != [(t.dtype, t.device) for t in dense_tensors(self.module)]:
            wrapped, self._dmp_wrapped_module = self._dmp_wrapped_module, self.module
            if wrapped is not self.module:
                del wrapped  # removes its hooks from the parameters before the new wrapper adds others
                self._wrap()
        return self

    def reset_parameters(self) -> None:
        """Reset every dense module that has `reset_parameters`, to the same values on all ranks. Collective."""
        reset_dense(self.module, self._group)

    def copy(self, device: torch.device | str) -> DistributedModelParallel:
        """Return a copy on a device, over the same ranks. Collective if the dense part is wrapped."""
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        twin.register_load_state_dict_pre_hook(_with_wrappers)
        twin._env, twin._group, twin._wrapper = self._env, self._group, self._wrapper
        twin.device = torch.device(device)
        twin._wrapped_once, twin._ddp_handle = False, None
        module = copy.deepcopy(self.module)
        for parameter in module.parameters():
            vars(parameter).pop("_ddp_ignored", None)
        twin._dmp_wrapped_module = module.to(twin.device)
        twin.training = self.training
        if self._wrapped_once:
            twin.init_data_parallel()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModelParallel:
        return memo.setdefault(id(self), self.copy(self.device))

    # ------------------------------------------------------------------------------ names and state of the model itself

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's dense parameters, and this rank's tiles under the names of their tables."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def bare_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same as `named_parameters`, whose names have no wrapper prefix."""
        return self.named_parameters(prefix, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's buffers without wrapper prefixes."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Append the names of tables whose `.grad` will be sparse (`set_sparse_grad`) to `destination`; return it."""
        names = [] if destination is None else destination
        for name, parameter in self.named_parameters(prefix):
            rows = rows_of(parameter)
            if rows is not None and rows.takes_gradients and rows.spec is None:
                names.append(name)
        return names

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's state dict, with all keys on every rank and tables in their logical shapes."""
        options: dict[str, Any] = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
        options.update(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        return self.module.state_dict(**options)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        prefix: str | bool = "",
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load the model's state, with tables whole, as DTensors, or in other tilings. Collective.

        Args:
            prefix: prefix of the keys; a bool in this position is `strict`, as in `nn.Module.load_state_dict`.
        """
        start = prefix if isinstance(prefix, str) else ""
        strict = prefix if isinstance(prefix, bool) else strict
        own = {key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)}
        return self.module.load_state_dict(own, strict=strict, assign=assign)


def _with_wrappers(dmp: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the wrappers' prefixes to the keys: a parent module loads this module child by child."""
    assert isinstance(dmp, DistributedModelParallel)
    inner = "_dmp_wrapped_module." + ("" if dmp._dmp_wrapped_module is dmp.module else "module.")
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{inner}{key[len(prefix) :]}"] = state_dict.pop(key)
