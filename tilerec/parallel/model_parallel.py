"""`DistributedModelParallel`: a model with sharded tables and a replicated dense part, under TorchRec's name.

DistributedModelParallel(model)  =  shard(model)  +  dense parameters on the device, in DistributedDataParallel
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.comms.agree import digest, heard_by_all, on_all_ranks
from tilerec.comms.group import Group
from tilerec.comms.traffic import Traffic
from tilerec.compat.sharders import ModuleSharder
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table, Tables
from tilerec.parallel.broadcast_init import send_from_rank_0
from tilerec.parallel.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from tilerec.parallel.device import device_of
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.shard import shard_tables
from tilerec.parallel.traffic import traffic
from tilerec.sharding.fused import ShardedFusedOptimizer
from tilerec.spec.plan import ShardingPlan
from tilerec.storage.table_rows import rows_of


class DistributedModelParallel(nn.Module):
    """A sharded model, called as the model itself.

    The model is changed in place: its tables become this rank's tiles (see `tilerec.parallel.shard`), it moves to the
    device, and its dense parameters go into torch's `DistributedDataParallel`. Names of parameters and state stay those
    of the model: no prefix of either wrapper. torch's `get_state_dict` wants the model itself: pass it `.module`.

    Args:
        module: the model, real or built on meta.
        env: the ranks; None is the default process group.
        device: where the model lives; a number is a GPU's. None is the CPU (the current GPU where the process group
            cannot serve CPU tensors).
        plan: see `shard`; None has one made.
        sharders: a list with optimizers and wire formats for kinds of collections, one for each kind at most. A kind
            without one is sharded all the same. Optimizers go to tables that have none attached and that the plan does
            not call `dense`; formats to tables whose plan names none. One that changes nothing is warned about.
        init_data_parallel: whether to wrap the dense part now; otherwise call `init_data_parallel()` before training.
        init_parameters: whether to make dense parameters that are on meta: memory on the device, and their modules'
            `reset_parameters`.
        data_parallel_wrapper: another one than `DefaultDataParallelWrapper()`.
        model_tracker_configs: has no effect here.

    Raises:
        ConfigError: as `shard`; `sharders` that are no list of sharders of different kinds; a `device` that this
            machine lacks; modules on meta that have no `reset_parameters`; ranks that are to treat the dense part
            differently (all of them raise, naming ranks and values).

    Warns of a model without tables, which becomes a `DistributedDataParallel` one.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | int | None = None,
        plan: AnyPlan | None = None,
        sharders: Sequence[ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
    ) -> None:
        super().__init__()
        if model_tracker_configs is not None:
            warnings.warn("DistributedModelParallel: model_tracker_configs has no effect.", stacklevel=2)

        def cut(group: Group, home: torch.device | str | int) -> None:
            who = "DistributedModelParallel"
            with heard_by_all(group, "the model to shard"):
                also = dense_settings(init_data_parallel, init_parameters, data_parallel_wrapper)
            shard_tables(module, plan, group, None, home, False, sharders, who, also)

        self._build(module, env, device, init_data_parallel, init_parameters, data_parallel_wrapper, cut)

    def _build(
        self,
        module: nn.Module,
        env: ShardingEnv | None,
        device: torch.device | str | int | None,
        init_data_parallel: bool,
        init_parameters: bool,
        wrapper: DataParallelWrapper | None,
        cut: Callable[[Group, torch.device | str | int], None],
    ) -> None:
        """Everything but the tables, which `cut` shards over a group, on a device that it refuses on every rank."""
        self.register_load_state_dict_pre_hook(_with_wrappers)
        who = type(self).__name__
        self._env = env if env is not None else _default_env(who)
        group = self._env.group()
        device = group.device if device is None else device
        self._wrapper = wrapper or DefaultDataParallelWrapper()
        self._wrapped_once = False
        _warn_of_no_tables(module, who)
        cut(group, device)
        self.device = device_of(device, who)
        self._group = group
        self._dmp_wrapped_module: nn.Module = module
        with on_all_ranks(group, "the sharded model", "its dense part"):
            if init_parameters:
                _make_dense(module, self.device)
            module.to(self.device)
        if init_data_parallel:
            self.init_data_parallel()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self._dmp_wrapped_module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The model, without wrappers."""
        inner = self._dmp_wrapped_module
        return inner.module if isinstance(inner, DistributedDataParallel) else inner

    @property
    def plan(self) -> ShardingPlan:
        """Which rank holds what; printable."""
        return plan_of(self.module)

    @property
    def fused_optimizer(self) -> ShardedFusedOptimizer:
        """The `torch.optim.Optimizer` face of the attached optimizers (empty if none is attached)."""
        return ShardedFusedOptimizer(self.module)

    def traffic(self) -> Traffic:
        """What this rank has sent for the tables; see `tilerec.parallel.traffic`."""
        return traffic(self.module)

    def init_data_parallel(self) -> None:
        """Wrap the dense part, once; all ranks call it. From here on ranks start with rank 0's dense parameters."""
        if not self._wrapped_once:
            self._wrapped_once = True
            self._wrapper.wrap(self, self._env, self.device)

    def _apply(self, fn: Any, recurse: bool = True) -> DistributedModelParallel:
        """As a module's; dense parameters that change type or device are wrapped anew. All ranks call it then."""
        before = [(t.dtype, t.device) for t in _dense(self.module)]
        super()._apply(fn, recurse)
        if before != [(t.dtype, t.device) for t in _dense(self.module)]:
            wrapped, self._dmp_wrapped_module = self._dmp_wrapped_module, self.module
            if wrapped is not self.module:
                del wrapped  # its hooks on the parameters go with it, before others come
                self._wrapper.wrap(self, self._env, self.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values for every module that has `reset_parameters`, the same on all ranks. All ranks call it."""
        for part in self.module.modules():
            if not isinstance(part, (Table, Tables)) and callable(getattr(part, "reset_parameters", None)):
                part.reset_parameters()  # type: ignore[operator]
        for dense in _dense(self.module):
            send_from_rank_0(self._group, dense)

    def copy(self, device: torch.device | str) -> DistributedModelParallel:
        """A copy on a device, over the same ranks. All ranks call it if the dense part is wrapped."""
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        twin.register_load_state_dict_pre_hook(_with_wrappers)
        twin._env, twin._group, twin._wrapper = self._env, self._group, self._wrapper
        twin.device = torch.device(device)
        twin._wrapped_once = False
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
        """The model's: dense parameters, and this rank's tiles under the names of their tables."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def bare_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `named_parameters`, where the names never had a prefix to strip."""
        return self.named_parameters(prefix, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """Tables whose `.grad` will be sparse (`set_sparse_grad`), appended to `destination`."""
        names = [] if destination is None else destination
        for name, parameter in self.named_parameters(prefix):
            rows = rows_of(parameter)
            if rows is not None and rows.takes_gradients and rows.spec is None:
                names.append(name)
        return names

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The model's, on every rank with every key; tables in their logical shapes."""
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
        """Load the model's state; tables whole, as DTensors, or in other tilings. All ranks call it.

        Args:
            prefix: of the keys; a bool in this place is `strict`, as in `nn.Module.load_state_dict`.
        """
        start = prefix if isinstance(prefix, str) else ""
        strict = prefix if isinstance(prefix, bool) else strict
        own = {key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)}
        return self.module.load_state_dict(own, strict=strict, assign=assign)


def dense_settings(
    init_data_parallel: bool, init_parameters: bool, wrapper: DataParallelWrapper | None
) -> dict[str, object]:
    """What is said of the dense part, which must be the same on all ranks: else some would wait for others.

    Raises what the wrapper's `options()` raises; `ConfigError` if it names values that ranks cannot compare.
    """
    wrapper = wrapper or DefaultDataParallelWrapper()
    said: dict[str, object] = {
        "init_data_parallel": bool(init_data_parallel),
        "init_parameters": bool(init_parameters),
        "data_parallel_wrapper": type(wrapper).__qualname__,
        "wrapper_options": wrapper.options(),
    }
    digest("the dense part", said)
    return said


def _with_wrappers(dmp: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A module around this one loads it child by child: give the keys the wrappers' names then."""
    assert isinstance(dmp, DistributedModelParallel)
    inner = "_dmp_wrapped_module." + ("" if dmp._dmp_wrapped_module is dmp.module else "module.")
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{inner}{key[len(prefix) :]}"] = state_dict.pop(key)


def _default_env(who: str) -> ShardingEnv:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{who}: torch.distributed has no process group yet; call "
            "torch.distributed.init_process_group() first, or pass env=ShardingEnv.from_local(1, 0) for one rank."
        )
    world = dist.group.WORLD
    assert world is not None
    return ShardingEnv.from_process_group(world)


def _warn_of_no_tables(module: nn.Module, who: str) -> None:
    if any(isinstance(part, TableCollection) for part in module.modules()):
        return
    plain = [
        path for path, part in module.named_modules() if isinstance(part, (nn.EmbeddingBag, nn.Embedding))
    ]
    warnings.warn(
        f"{who}: {type(module).__name__} has no EmbeddingBagCollection or EmbeddingCollection, so "
        "nothing is sharded and every rank holds all of it, as under DistributedDataParallel."
        + (f" {plain[:8]} are torch's own embeddings: put their tables into a collection." if plain else ""),
        stacklevel=4,
    )


def _dense(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers that belong to no table."""
    tables = {id(p) for part in module.modules() if isinstance(part, Table) for p in part.parameters()}
    return [t for t in [*module.parameters(), *module.buffers()] if id(t) not in tables]


def _make_dense(module: nn.Module, device: torch.device) -> None:
    """Memory and initial values for dense modules on meta."""
    for path, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if isinstance(part, Table) or not any(t.is_meta for t in own):
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"DistributedModelParallel: module '{path}' ({type(part).__name__}) is on meta and has no "
                "reset_parameters, so nothing says its initial values; give it one, build it on a real device, or pass "
                "init_parameters=False and fill it yourself."
            )
        part.to_empty(device=device, recurse=False)
        reset()
