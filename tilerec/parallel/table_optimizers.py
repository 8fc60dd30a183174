"""Optimizers, compute kernels, caches and wire formats of tables, resolved from model, sharders and plan.

Optimizer that updates a table in the backward pass:

attached     the attached optimizer; sharders do not replace it
`dense`      none: gradients go to `.grad`, for the user's own optimizer; sharding the model detaches an attached
             optimizer, with a warning
`fused_uvm…` as `fused`, with rows in host memory: behind a cache, or (`fused_uvm`, on a GPU) on the device only while
             a batch is in flight
`key_value`  as `fused`, with rows in files, behind a cache
otherwise    the optimizer of the collection's sharder, if it has one
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.model_tables import Name, table_word
from tilerec.planner.sharder import sharder_of
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.spec.cache import CacheParams
from tilerec.spec.key_value import KeyValueParams
from tilerec.spec.plan import (
    CACHING_KERNELS,
    HOST_KERNELS,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    Wire,
)
from tilerec.storage.row_cache import RowCache

DENSE, FUSED = EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED
UVM, CACHED = EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING
FILES = EmbeddingComputeKernel.KEY_VALUE

SharderOptimizers = list[tuple[ModuleSharder, list[nn.Parameter]]]
"""Each sharder with the tables that receive its optimizer."""


def sharder_optimizers(
    plan: ShardingPlan,
    collections: Mapping[str, TableCollection],
    ties: Sequence[Mapping[Name, Table]],
    sharders: Sequence[ModuleSharder],
) -> SharderOptimizers:
    """Return the tables without an optimizer that receive one from a sharder, by sharder; change nothing.

    Args:
        ties: the distinct tables, each under all its names.

    Raises:
        ConfigError: the plan contradicts itself about one table, e.g. places it in different memories; two sharders
            have different optimizers for one table.
    """
    members: dict[int, list[nn.Parameter]] = {}
    for names in ties:
        kernels = {name: plan.plan[name[0]][name[1]].kernel for name in names}
        dense_by_name = {name: kernel is DENSE for name, kernel in kernels.items() if kernel is not None}
        if len(set(dense_by_name.values())) > 1:
            raise ConfigError(
                f"shard: one table has the names {_listed(names)}: got compute_kernel 'dense' for one of them and "
                "another kernel for the other. Use the same compute_kernel for all of them."
            )
        placements = {_storage_in(plan.plan[path][name]) for path, name in names}
        if len(placements) > 1 and any(kernel in HOST_KERNELS for kernel, _, _ in placements):
            raise ConfigError(
                f"shard: one table has the names {_listed(names)}: the plan has it in files, in host memory, or behind "
                "a cache, under one of them and not under the other. Use the same compute_kernel, cache_params and "
                "key_value_params for all."
            )
        dense, table = any(dense_by_name.values()), next(iter(names.values()))
        if table.rows.spec is not None:
            continue
        candidates: dict[int, ModuleSharder] = {}
        for path, _ in names:
            sharder = sharder_of(collections[path], sharders)
            if sharder is not None and sharder.optimizer is not None:
                candidates[id(sharder)] = sharder
        if dense or not candidates or not table.weight.requires_grad:
            continue
        first, *others = candidates.values()
        for other in others:
            if other.optimizer != first.optimizer:
                raise ConfigError(
                    f"shard: one table has the names {_listed(names)}: got {first.optimizer} from "
                    f"{type(first).__name__} and {other.optimizer} from {type(other).__name__}; expected one. Give "
                    "both sharders the same fused_params, or use apply_optimizer_in_backward."
                )
            members.setdefault(id(other), [])  # same optimizer as the first sharder's
        members.setdefault(id(first), []).append(table.weight)
    return [(sharder, members[id(sharder)]) for sharder in sharders if id(sharder) in members]


def dense_tables(plan: ShardingPlan, ties: Sequence[Mapping[Name, Table]]) -> list[Mapping[Name, Table]]:
    """Return the tables, under their names, that are `dense` in the plan and have an attached optimizer."""
    return [
        names
        for names in ties
        if next(iter(names.values())).rows.spec is not None
        and any(plan.plan[path][name].kernel is DENSE for path, name in names)
    ]


def detach_dense(plan: ShardingPlan, ties: Sequence[Mapping[Name, Table]]) -> None:
    """Detach the optimizers of tables that are `dense` in the plan, with one warning that lists them."""
    found = dense_tables(plan, ties)
    if not found:
        return
    listed = _listed([name for names in found for name in names])
    warnings.warn(
        f"shard: the plan has compute_kernel 'dense' for table {listed}, so its attached optimizer is detached: "
        "gradients go to .grad, for your own optimizer (in_backward_optimizer_filter(model.named_parameters()) yields "
        "these parameters once the model is sharded). To update the table in the backward pass, leave compute_kernel "
        "out or use 'fused'.",
        stacklevel=6,
    )
    for names in found:
        next(iter(names.values())).rows.detach()


def check_not_dense(plan: ShardingPlan, ties: Sequence[Mapping[Name, Table]]) -> None:
    """Raise a `ConfigError` if a plan for resharding has a table with an attached optimizer as `dense`."""
    for names in dense_tables(plan, ties):
        kind = type(next(iter(names.values())).rows.spec).__name__
        raise ConfigError(
            f"reshard: the plan has compute_kernel 'dense' for table {_listed(names)}, but {kind} is attached to it "
            "and updates it in the backward pass; leave compute_kernel out of the plan, or use 'fused'."
        )


def give_sharder_optimizers(
    plan: ShardingPlan,
    collections: Mapping[str, TableCollection],
    ties: Sequence[Mapping[Name, Table]],
    sharders: Sequence[ModuleSharder],
) -> None:
    """Detach the optimizers of `dense` tables, and attach those of the sharders; see `sharder_optimizers`.

    Tables of one sharder share their hyper-parameters.
    """
    detach_dense(plan, ties)
    gifts = sharder_optimizers(plan, collections, ties, sharders)
    for sharder, params in gifts:
        assert sharder.optimizer is not None
        if params:
            apply_optimizer_in_backward(sharder.optimizer, params)
    warn_of_unused_sharders(gifts, plan, collections, sharders)


def with_kernels(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], sharders: Sequence[ModuleSharder] = ()
) -> ShardingPlan:
    """Return the plan with the kernel and the cache of every table.

    A missing kernel follows from the table's present storage and optimizer. A missing cache is the table's present one,
    else the sharder's, else `CacheParams()`. A missing folder of files is the present one.

    Warns of tables that the plan updates in the backward pass and that have no attached optimizer.

    Raises:
        ConfigError: a trained table without an optimizer would be in host memory or in files, with a dense gradient of
            the whole table; a table in files has no folder.
    """
    unattached: list[Name] = []

    def cache_of(path: str, sharding: ParameterSharding, present: RowCache | None) -> CacheParams:
        if sharding.cache is not None:
            return sharding.cache
        if present is not None and present.params is not None:
            return present.params
        sharder = sharder_of(collections[path], sharders)
        return (None if sharder is None else sharder.cache) or CacheParams()

    def filled(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        table = collections[path]._tables[name]
        rows, cache = table.rows, table.cache
        if sharding.kernel is None:
            present = _storage_of(cache)
            kernel = (DENSE if rows.spec is None else FUSED) if present is None else present[0]
            sharding = replace(sharding, compute_kernel=kernel)
        if sharding.kernel in HOST_KERNELS and rows.spec is None and rows.leaf.requires_grad:
            raise ConfigError(
                f"shard: table {_listed([(path, name)])} is planned for host memory or files (compute_kernel "
                f"'{sharding.kernel.value}') and has no optimizer, so its gradient would be a dense .grad of the whole "
                "table. Attach one with apply_optimizer_in_backward, pass fused_params, or freeze the table."
            )
        if sharding.kernel is FILES:
            files = sharding.files
            if files is None and cache is not None and cache.folder is not None:
                files = KeyValueParams(cache.folder)
            if files is None:
                raise ConfigError(
                    f"shard: table {_listed([(path, name)])}: got compute_kernel 'key_value' without key_value_params; "
                    "expected the folder of its files. Pass KeyValueParams(ssd_storage_directory)."
                )
            sharding = replace(sharding, key_value_params=files)
        if sharding.kernel in CACHING_KERNELS:
            return replace(sharding, cache_params=cache_of(path, sharding, cache))
        if sharding.kernel is not DENSE and table.rows.spec is None and table.weight.requires_grad:
            unattached.append((path, name))
        return sharding

    whole = _mapped(plan, filled)
    if unattached:
        path, name = unattached[0]
        kernel = plan.plan[path][name].kernel
        assert kernel is not None
        warnings.warn(
            f"shard: the plan has compute_kernel '{kernel.value}' for table {_listed(unattached)}, but no optimizer is "
            "attached and no sharder has one: gradients go to .grad. Attach one with apply_optimizer_in_backward, "
            "give a sharder fused_params, or use 'dense'.",
            stacklevel=5,
        )
    return whole


def keep_cached_tables(plan: ShardingPlan, collections: Mapping[str, TableCollection]) -> ShardingPlan:
    """Return a planner's plan without kernels for tables that have a cache, so that they keep it."""

    def kept(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        cached = collections[path]._tables[name].cache is not None
        return replace(sharding, compute_kernel=None, cache_params=None, key_value_params=None) if cached else sharding

    return _mapped(plan, kept)


def with_present_storage(plan: ShardingPlan, collections: Mapping[str, TableCollection]) -> ShardingPlan:
    """Return the plan of sharded tables with their present caches, which may have changed since sharding."""

    def stored(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        table = collections[path]._tables[name]
        present = _storage_of(table.cache)
        if present is None:
            if sharding.kernel not in CACHING_KERNELS:
                return sharding
            present = (DENSE if table.rows.spec is None else FUSED, None, None)
        return sharding if present[0] is UVM else _stored_as(sharding, present)

    return _mapped(plan, stored)


def with_storage_of(plan: ShardingPlan, present: ShardingPlan) -> ShardingPlan:
    """Return the plan with the kernels and caches of `present`."""

    def stored(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        return _stored_as(sharding, _storage_in(present.plan[path][name]))

    return _mapped(plan, stored)


def caches_of(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], device: torch.device | None
) -> dict[Name, RowCache]:
    """Return the caches of tables in host memory and in files, by table; each tile of a table gets one.

    Args:
        plan: a plan with kernels and caches of all tables.
        device: device of the batches; None: the device of each table.
    """
    caches: dict[Name, RowCache] = {}
    for path, name, sharding in plan.tables():
        table = collections[path]._tables[name]
        leaf, present = table.rows.leaf, table.cache
        where = device if device is not None or leaf.is_meta else leaf.device
        if where is None and present is not None:
            where = present.device
        where = None if where is None or where.type == "cpu" else where
        if sharding.kernel in CACHING_KERNELS:
            folder = None if sharding.files is None else sharding.files.ssd_storage_directory
            caches[path, name] = RowCache(name, sharding.cache, where, folder)
        elif sharding.kernel is UVM and where is not None:
            caches[path, name] = RowCache(name, None, where)
    return caches


def check_storage(plan: ShardingPlan, collections: Mapping[str, TableCollection]) -> None:
    """Check that the plan keeps the storage of every table; resharding moves rows between ranks only.

    Raises:
        ConfigError: a table is cached in the model and not in the plan, or the reverse, or with another cache.
    """
    for path, name, sharding in plan.tables():
        cache = collections[path]._tables[name].cache
        present = _storage_of(cache)
        if sharding.kernel is UVM or _storage_in(sharding) == present:
            continue
        if present is not None or sharding.kernel in CACHING_KERNELS:
            kernel = "" if sharding.kernel is None else sharding.kernel.value
            got, expected = (own or "no cache" for own in (sharding.cache, present and present[1]))
            folder = "" if cache is None or cache.folder is None else f", files in {cache.folder}"
            raise ConfigError(
                f"reshard: table {_listed([(path, name)])}: got '{kernel}' ({got}); expected {expected}{folder}. Leave "
                "compute_kernel and cache_params out of the plan."
            )


_Storage = tuple[EmbeddingComputeKernel | None, CacheParams | None, KeyValueParams | None]


def _storage_of(cache: RowCache | None) -> _Storage | None:
    """Return the kernel, cache and files of a table with this cache, None without one."""
    if cache is None:
        return None
    if cache.folder is not None:
        return FILES, cache.params, KeyValueParams(cache.folder)
    return (UVM if cache.params is None else CACHED), cache.params, None


def _storage_in(sharding: ParameterSharding) -> _Storage:
    return sharding.kernel, sharding.cache, sharding.files


def _stored_as(sharding: ParameterSharding, storage: _Storage) -> ParameterSharding:
    if _storage_in(sharding) == storage:
        return sharding
    kernel, cache, files = storage
    return replace(sharding, compute_kernel=kernel, cache_params=cache, key_value_params=files)


def with_wire_formats(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], sharders: Sequence[ModuleSharder]
) -> ShardingPlan:
    """Return the plan with the wire format of every table: the plan's, else the sharder's, else fp32."""

    def filled(path: str, name: str, sharding: ParameterSharding) -> ParameterSharding:
        if sharding.wire is not None:
            return sharding
        sharder = sharder_of(collections[path], sharders)
        given = None if sharder is None else sharder.wire
        return replace(sharding, wire=given or Wire())

    return _mapped(plan, filled)


def _mapped(plan: ShardingPlan, change: Callable[[str, str, ParameterSharding], ParameterSharding]) -> ShardingPlan:
    parts = {
        path: EmbeddingModuleShardingPlan({name: change(path, name, s) for name, s in part.items()})
        for path, part in plan.plan.items()
    }
    return replace(plan, plan=parts)


def warn_of_unused_sharders(
    gifts: SharderOptimizers,
    given: ShardingPlan,
    collections: Mapping[str, TableCollection],
    sharders: Sequence[ModuleSharder],
) -> None:
    """Warn of settings of sharders that have no effect.

    Args:
        given: the plan before the sharders' formats are filled in.
    """
    giving = {id(sharder) for sharder, _ in gifts}
    for sharder in sharders:
        kind = sharder.module_type.__name__
        own = [path for path, part in collections.items() if sharder_of(part, sharders) is sharder]
        planned = [sharding for path in own for sharding in given.plan[path].values()]
        cache, wire = sharder.cache, None if sharder.wire == Wire() else sharder.wire
        settings = {
            "fused_params": sharder.optimizer,
            "qcomm_codecs_registry": wire,
            "fused_params about the cache": cache,
        }
        used = [word for word, value in settings.items() if value is not None]
        found: list[str] = []
        if used and not own:
            kinds = sorted({type(part).__name__ for part in collections.values()})
            found = [f"{' and '.join(used)} have no effect: the model has no {kind}; it has {kinds}."]
        elif own:
            if sharder.optimizer is not None and id(sharder) not in giving:
                found.append(
                    f"fused_params have no effect: every table of a {kind} has an optimizer attached, is frozen, or is "
                    "'dense' in the plan."
                )
            if cache is not None and not any(s.kernel in CACHING_KERNELS and s.cache is None for s in planned):
                found.append(
                    f"fused_params about the cache have no effect: the plan has no table of a {kind} as "
                    "'fused_uvm_caching' or 'key_value' without cache_params."
                )
            # A planner with this sharder has written its format into the plan.
            if wire is not None and all(s.wire not in (None, wire) for s in planned):
                found.append(f"qcomm_codecs_registry has no effect: the plan has others for every table of a {kind}.")
        for text in found:
            warnings.warn(f"{type(sharder).__name__}: its {text}", stacklevel=6)


def _listed(names: Sequence[Name] | Mapping[Name, Table], most: int = 8) -> str:
    texts = [table_word(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
