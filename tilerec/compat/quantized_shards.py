"""TorchRec's `shard_quant_model`: a quantized model on several devices of one process. See `quantized/sharded.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.quantized.embedding import QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.quantized.quantize import replace_modules
from tilerec.quantized.sharded import ShardedQuantEmbeddingBagCollection, ShardedQuantEmbeddingCollection
from tilerec.sharding.strategies import complete
from tilerec.spec.byte_text import byte_text
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.parameter_sharding import ParameterSharding
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tilerec.spec.sharding_type import ShardingType, to_enum
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.torch_private import buffers, parameters

_Collection = QuantEmbeddingBagCollection | QuantEmbeddingCollection
_KINDS = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
_WITHOUT_EFFECT = {
    "sharding_device": "each tile is cut where the table is, and copied to its device",
    "sharders": "every collection has one sharded form",
}


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "cpu",
    sharders: Sequence[Any] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Spread the tables of a quantized model over the devices of this process, in place.

    One process serves the model: ids go to all devices that have tables, and rows come back to the first. With
    `compute_device="cpu"` all tables stay in host memory, and nothing is gained: it shows that a plan works. Without a
    plan, tables are placed by size, the largest first, on the device with the fewest bytes.

    Args:
        model: with quantized collections. Its dense part is moved to the first device.
        world_size: number of devices.
        compute_device: "cuda" (devices 0 to world_size - 1) or "cpu".
        sharding_device, sharders: no effect; values other than the defaults warn.
        device_memory_size: most bytes of tables on a GPU.
        constraints: by table name, objects with `sharding_types`; the first of table_wise, row_wise and column_wise
            among them is taken.
        ddr_cap: most bytes of tables in host memory.
        sharding_plan: instead of planning. Tables of an `EmbeddingCollection` must be table-wise.

    Returns:
        The model and its plan.

    Raises:
        ConfigError: there is no quantized collection or no such device, a device has too little memory, or a table
            cannot be cut as its plan demands. Nothing has changed then.
    """
    given = {"sharding_device": None if sharding_device == "cpu" else sharding_device, "sharders": sharders}
    warn_ignored_settings("shard_quant_model", given, _WITHOUT_EFFECT, 1)
    devices = _devices(compute_device, world_size)
    found = {path: module for path, module in model.named_modules() if isinstance(module, _Collection)}
    if not found:
        raise ConfigError(
            f"shard_quant_model: got a {type(model).__name__} without quantized collections; expected some. Call "
            "quantize_inference_model first."
        )
    topology = Topology(world_size, "cpu")
    wanted = sharding_plan.plan if sharding_plan is not None else _by_size(found, world_size, constraints or {})
    made = {}
    for path, module in found.items():
        if path not in wanted or set(wanted[path]) != {config.name for config in _configs(module)}:
            raise ConfigError(
                f"shard_quant_model: got a plan without the tables of module '{path}'; expected one for each of them. "
                "Leave sharding_plan out, or plan this model."
            )
        made[path] = {
            config.name: complete(
                wanted[path][config.name], config.name, config.num_embeddings, config.embedding_dim, topology
            )
            for config in _configs(module)
        }
    plan = ShardingPlan({path: EmbeddingModuleShardingPlan(tables) for path, tables in made.items()}, world_size)
    tilings = {path: {name: _tiling(own) for name, own in tables.items()} for path, tables in made.items()}
    _check_memory(found, tilings, devices, ddr_cap if compute_device == "cpu" else device_memory_size)
    sharded = {id(module): _sharded(module, tilings[path], devices) for path, module in found.items()}
    replaced = replace_modules(model, sharded)
    _move_others(replaced, sharded.values(), devices[0])
    return replaced, plan


def _devices(kind: str, count: int) -> list[torch.device]:
    there = torch.cuda.device_count() if kind == "cuda" else count
    if kind not in ("cuda", "cpu") or not 1 <= count <= there:
        raise ConfigError(
            f"shard_quant_model: got compute_device={kind!r} and world_size={count}; expected 'cuda' with at most "
            f"{torch.cuda.device_count()} devices, or 'cpu'. Use the devices of this machine."
        )
    return [torch.device(kind, i) if kind == "cuda" else torch.device("cpu") for i in range(count)]


def _configs(module: _Collection) -> Sequence[Any]:
    if isinstance(module, QuantEmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs()


def _by_size(
    found: Mapping[str, _Collection], count: int, constraints: Mapping[str, Any]
) -> dict[str, dict[str, ParameterSharding]]:
    """Return shardings by module and table: whole tables balanced by bytes, others as their constraints say."""
    loads = [0] * count
    out: dict[str, dict[str, ParameterSharding]] = {path: {} for path in found}
    sizes = [
        (config.num_embeddings * module.row_types()[config.name].row_bytes(config.embedding_dim), path, config.name)
        for path, module in found.items()
        for config in _configs(module)
    ]
    for size, path, name in sorted(sizes, key=lambda entry: -entry[0]):
        kind = _kind(name, getattr(constraints.get(name), "sharding_types", None))
        if kind is ShardingType.TABLE_WISE:
            device = loads.index(min(loads))
            loads[device] += size
            out[path][name] = ParameterSharding(kind, ranks=[device])
        else:
            loads = [load + size // count for load in loads]
            out[path][name] = ParameterSharding(kind)
    return out


def _kind(name: str, allowed: Sequence[ShardingType | str] | None) -> ShardingType:
    if not allowed:
        return ShardingType.TABLE_WISE
    kinds = [to_enum(ShardingType, value, f"Table '{name}': sharding_types") for value in allowed]
    for kind in _KINDS:
        if kind in kinds:
            return kind
    raise ConfigError(
        f"Table '{name}': got sharding_types {[kind.value for kind in kinds]}; expected one of "
        f"{[kind.value for kind in _KINDS]} among them. Add one."
    )


def _tiling(sharding: ParameterSharding) -> Tiling:
    assert sharding.tiling is not None
    return sharding.tiling


def _check_memory(
    found: Mapping[str, _Collection], tilings: Mapping[str, Mapping[str, Tiling]], devices: Sequence[torch.device],
    most: int | None,
) -> None:  # fmt: skip
    if most is None:
        return
    used = [0] * len(devices)
    for path, module in found.items():
        for name, tiling in tilings[path].items():
            own = module.row_types()[name]
            for block in tiling.blocks:
                for i, owners in enumerate(block.owners):
                    rows = block.cuts[i + 1] - block.cuts[i]
                    used[owners[0]] += rows * own.row_bytes(block.c1 - block.c0)
    if devices[0].type == "cpu":
        used = [sum(used)]
    for device, size in enumerate(used):
        if size > most:
            raise ConfigError(
                f"shard_quant_model: got {byte_text(most)} per device; expected at least {byte_text(size)}, the tables "
                f"of device {device}. Use more devices, or smaller row types."
            )


def _sharded(module: _Collection, tilings: Mapping[str, Tiling], devices: Sequence[torch.device]) -> nn.Module:
    if isinstance(module, QuantEmbeddingBagCollection):
        return ShardedQuantEmbeddingBagCollection(module, tilings, devices).train(module.training)
    for name, tiling in tilings.items():
        if len(tiling.blocks) > 1 or len(tiling.blocks[0].owners) > 1:
            raise ConfigError(
                f"Table '{name}': got a sharding that cuts a table of an EmbeddingCollection; expected table_wise. "
                "Constrain its sharding_types."
            )
    devices_of = {name: tiling.blocks[0].owners[0][0] for name, tiling in tilings.items()}
    return ShardedQuantEmbeddingCollection(module, devices_of, devices).train(module.training)


def _move_others(model: nn.Module, sharded: Any, device: torch.device) -> None:
    """Move all parameters and buffers outside of sharded collections."""
    inside = {id(child) for module in sharded for child in module.modules()}
    for child in model.modules():
        if id(child) in inside:
            continue
        for parameter in parameters(child).values():
            if parameter is not None:
                parameter.data = parameter.data.to(device)
        for name, buffer in buffers(child).items():
            if buffer is not None:
                buffers(child)[name] = buffer.to(device)
