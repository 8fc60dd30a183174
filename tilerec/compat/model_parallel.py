"""TorchRec's `DistributedModelParallel`, and functions about wrapped models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.compat.sharders import ModuleSharder, _Methods
from tilerec.parallel import model_parallel as native
from tilerec.parallel.env import env_of
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.shard import shard
from tilerec.planner import helpers
from tilerec.planner.helpers import Cut
from tilerec.spec.plan import EmbeddingModuleShardingPlan


class DistributedModelParallel(native.DistributedModelParallel):
    """`tilerec.DistributedModelParallel`, with sharders of a program's own modules. See there for the arguments.

    A plan may also contain modules that tilerec does not shard; they are data-parallel.
    """

    def __init__(
        self, module: nn.Module, env: Any = None, device: Any = None, plan: Any = None, sharders: Any = None,
        init_data_parallel: bool = True, init_parameters: bool = True, data_parallel_wrapper: Any = None,
        model_tracker_configs: Any = None,
    ) -> None:  # fmt: skip
        given = list(sharders or ())
        own = [sharder for sharder in given if isinstance(sharder, ModuleSharder)]
        for sharder in given:
            if isinstance(sharder, _Methods) and type(sharder).shard is not _Methods.shard:
                warnings.warn(
                    f"DistributedModelParallel: {type(sharder).__name__}.shard has no effect: tilerec shards "
                    f"{sharder.module_type.__name__}s itself.",  # type: ignore[attr-defined]
                    stacklevel=2,
                )
        if own:
            module = _shard_own(module, own, env_of("DistributedModelParallel", "env", env), device)
        rest = None if sharders is None else [sharder for sharder in given if sharder not in own]
        super().__init__(
            module, env, device, plan, rest, init_data_parallel, init_parameters, data_parallel_wrapper,
            model_tracker_configs,
        )  # fmt: skip


def _shard_own(module: nn.Module, sharders: Sequence[ModuleSharder[Any]], env: Any, device: Any) -> nn.Module:
    """Replace the modules of a program's own types by the results of their sharders; return the model."""
    by_type = {sharder.module_type: sharder for sharder in sharders}

    def replaced(child: nn.Module, path: str) -> nn.Module:
        sharder = by_type.get(type(child))
        if sharder is not None:
            return sharder.shard(child, {}, env, device, path)
        for name, below in list(child.named_children()):
            new = replaced(below, f"{path}.{name}" if path else name)
            if new is not below:
                setattr(child, name, new)
        return child

    return replaced(module, "")


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the model without `DistributedModelParallel` and `DistributedDataParallel`."""
    while isinstance(module, (native.DistributedModelParallel, DistributedDataParallel)):
        module = module.module
    return module


def get_module(module: nn.Module) -> nn.Module:
    """Return the model without `DistributedModelParallel`; torch's wrapper stays."""
    return module._dmp_wrapped_module if isinstance(module, native.DistributedModelParallel) else module


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Return the paths of the uppermost modules that contain no sharded tables."""
    sharded = set(plan_of(get_unwrapped_module(model)).plan)

    def below(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            own = f"{path}.{name}" if path else name
            inside = [s for s in sharded if s == own or s.startswith(f"{own}.")]
            if not inside:
                yield own
            elif own not in sharded:
                yield from below(child, own)

    return list(below(get_unwrapped_module(model), ""))


def shard_modules(
    module: nn.Module, env: Any = None, device: Any = None, plan: Any = None, sharders: Any = None,
    init_params: bool = False,
) -> nn.Module:  # fmt: skip
    """Shard every collection of a model in place; see `tilerec.shard`.

    Args:
        init_params: whether to allocate dense parameters that are on meta, and call their `reset_parameters`.
    """
    out = shard(module, plan, env, device, sharders)
    if init_params:
        init_parameters(out, torch.device("cpu") if device is None else device)
    return out


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocate parameters and buffers that are on meta, and call `reset_parameters` of their modules."""
    for child in module.modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            child.to_empty(device=device, recurse=False)
            reset = getattr(child, "reset_parameters", None)
            if reset is not None:
                reset()


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """Return a copy of a module, with the parameters and buffers of one device on another."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(to_device) if tensor.device == torch.device(current_device) else tensor

    return copy.deepcopy(module)._apply(move)


def construct_module_sharding_plan(
    module: nn.Module, per_param_sharding: Mapping[str, Cut], sharder: Any = None, local_size: int | None = None,
    world_size: int | None = None, device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:  # fmt: skip
    """Return the plan of a collection; see `tilerec.planner.construct_module_sharding_plan`.

    A table whose sharding names no kernel keeps its own optimizer, or gets that of the sharder with which the model
    is sharded.
    """
    plan = helpers.construct_module_sharding_plan(
        module, per_param_sharding, sharder, local_size, world_size, device_type
    )
    for name, cut in per_param_sharding.items():
        if cut.compute_kernel is None:
            plan[name] = replace(plan[name], compute_kernel=None)
    return plan
