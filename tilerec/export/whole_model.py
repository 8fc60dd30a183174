"""`whole_model`: a copy of a model for export, with every table whole and without gradients' destinations.

    sharded table             its rows, gathered on rank 0 in chunks
    cached table              its rows in host memory, written back first
    ids of managed collision  the buckets of all ranks
    everything else           shared with the model, if it is on the CPU: no second copy of a weight

The copy has the classes, names and outputs of the unsharded model. The model itself does not change.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tilerec.modules.table import Table
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.sharding.buckets_view import BucketsView
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tilerec.sharding.managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
)
from tilerec.sharding.rank_0_rows import all_rows_on_rank_0, contiguous_rows
from tilerec.sharding.table import ShardedTable
from tilerec.torch_private import state_dict_pre_hooks, state_hooks, uncompiled

_UNSHARDED: dict[type[nn.Module], type[nn.Module]] = {
    ShardedEmbeddingBagCollection: EmbeddingBagCollection,
    ShardedEmbeddingCollection: EmbeddingCollection,
    ShardedManagedCollisionCollection: ManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection: ManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection: ManagedCollisionEmbeddingCollection,
}
_NOT_COPIED = ("exchange", "_resets")
"""Attributes of sharded modules that hold ranks, streams or batches."""

_OF_RANKS = (*_NOT_COPIED, "routed_ahead", "_routed")
"""Attributes of sharded modules that the unsharded ones lack."""

_DROPPED = object()


def model_group(model: nn.Module) -> Group | None:
    """Return the ranks of a sharded model, in 2D parallelism those of all groups; None for an unsharded one."""
    if isinstance(model, DistributedModelParallel):
        return model.group
    return next((part.ranks for part in model.modules() if isinstance(part, ShardedTable)), None)


@torch.no_grad()
def whole_model(model: nn.Module) -> nn.Module | None:
    """Return the unsharded model in evaluation mode, on rank 0; None on other ranks. Collective for a sharded model.

    Raises:
        ConfigError: a table has no memory.
    """
    model = uncompiled(model)
    group = model_group(model)
    if isinstance(model, (DistributedModelParallel, DistributedDataParallel)):
        model = model.module
    for before in state_dict_pre_hooks(model).values():
        before(model, "", False)
    memo: dict[int, Any] = {}
    _share_tensors(model, memo)
    weights: dict[int, nn.Parameter] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for path, part in model.named_modules():
        # Hooks of state dicts may hold process groups, which cannot be copied.
        memo.update({id(hooks): type(hooks)() for hooks in state_hooks(part)})
        if isinstance(part, Table):
            _add_table(part, memo, weights)
        elif isinstance(part, ManagedCollisionModule) and isinstance(part._view, BucketsView):
            view = part._view
            view.group.begin("export")
            state = part.id_map.state_tensors().items()
            parts[path] = {name: view.logical(own, per_bucket).full() for name, (own, per_bucket) in state}
        elif type(part) in _UNSHARDED:
            memo.update({id(vars(part).get(name)): _DROPPED for name in _NOT_COPIED if name in vars(part)})
    if group is not None and group.rank != 0:
        return None
    twin = copy.deepcopy(model, memo)
    for path, part in twin.named_modules():
        if type(part) in _UNSHARDED:
            part.__class__ = _UNSHARDED[type(part)]
            for name in _OF_RANKS:
                vars(part).pop(name, None)
        if path in parts:
            assert isinstance(part, ManagedCollisionModule)
            part.become(part._buckets.cut(0, part._buckets.count), parts[path])
    return twin.eval().requires_grad_(False)


def _share_tensors(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let the copy use the tensors of the model outside of tables, as parameters of its own."""
    for part in model.modules():
        if isinstance(part, Table):
            continue
        for parameter in part.parameters(recurse=False):
            memo[id(parameter)] = nn.Parameter(_plain(parameter), requires_grad=False)
        for buffer in part.buffers(recurse=False):
            memo[id(buffer)] = _plain(buffer)


def _plain(tensor: Tensor) -> Tensor:
    """Return the values as contiguous memory of the CPU: the tensor's own, if it is such."""
    return tensor.detach().cpu().contiguous()


def _add_table(table: Table, memo: dict[int, Any], weights: dict[int, nn.Parameter]) -> None:
    """Let the copy have a plain table with all rows.

    Args:
        weights: whole rows by the identity of a table's leaf, so that tied tables share them; is extended.
    """
    table.settle()
    key = id(table.rows.leaf)
    if key not in weights:
        found = _gathered(table) if isinstance(table, ShardedTable) else table.rows.leaf.detach()
        if found is None:
            return
        if found.is_meta:
            raise ConfigError(
                f"Table '{table.config.name}': got no memory (it is on meta); expected its rows. Load the model before "
                "the export."
            )
        weights[key] = nn.Parameter(_plain(contiguous_rows(found)), requires_grad=False)
    config, whole = table.config, weights[key]
    shape = config.num_embeddings, config.embedding_dim
    plain = Table(config, torch.empty(shape, dtype=whole.dtype, device="meta"), table.seed)
    plain.weight = whole
    plain.tied = True  # keeps the collection from moving the rows into a storage of its own
    memo[id(table)] = plain


def _gathered(table: ShardedTable) -> Tensor | None:
    """Return all rows of a table on rank 0, in a file if they are in files. Collective."""
    whole, cache = table.weight_of(), table.cache
    whole.group.begin("export")
    return all_rows_on_rank_0(whole, None if cache is None else cache.folder, table.config.name)
