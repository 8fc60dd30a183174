"""Lookups of cached tables: the forward reads cache lines, the backward records gradients by row number.

The gradient record has the batch's own ids, so its consumers (sums over ranks, marks of touched rows) are independent
of caches. The update looks up the rows' cache lines again.

Legend: T tables, F features, N ids, B samples, D columns of a table, C = sum of D over features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilerec.errors import ConfigError
from tilerec.ops.gradient.definition import bag_starts, pooled_blocks, register_saved_rows, submit_record
from tilerec.ops.lookup.definition import _reach, raise_bad_id
from tilerec.ops.lookup.saved_rows import SavedRows, kept_for_retained_graph
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.ops.runtime.upload import upload
from tilerec.ops.update.calls import Features, Gradients
from tilerec.storage.cached import lock_caches, prefetch_all
from tilerec.storage.line_batch import LineBatch, per_table, place, wanted
from tilerec.storage.table_rows import TableRows

_NO_SINKS = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class CachedBatch:
    """Arguments of a lookup op whose tables are partly or all cached.

    `offsets` None: every id is its own bag. `segments`: (begin, end) of each feature's ids.
    """

    rows: list[TableRows]
    ids: Tensor
    offsets: Tensor | None
    sample_weights: Tensor | None
    tables: tuple[int, ...]
    keys: tuple[int, ...]
    means: tuple[int, ...]
    batches: list[int]
    segments: list[tuple[int, int]]
    dtype: torch.dtype
    names: str

    @property
    def bags(self) -> list[int]:
        """Number of bags per feature."""
        if self.offsets is None:
            return [end - begin for begin, end in self.segments]
        return bag_starts(self.keys, self.batches)[1]

    @property
    def starts(self) -> list[int]:
        """First bag of each feature; without offsets, its first id."""
        if self.offsets is None:
            return [begin for begin, _ in self.segments]
        return bag_starts(self.keys, self.batches)[0]

    def only(self, features: Sequence[int]) -> CachedBatch:
        """Return the batch restricted to these features."""
        names = self.names.split(",")
        return replace(
            self,
            tables=tuple([self.tables[f] for f in features]),
            keys=tuple([self.keys[f] for f in features]),
            means=tuple([self.means[f] for f in features]),
            segments=[self.segments[f] for f in features],
            names=",".join([names[f] for f in features]),
        )

    def refuse(self, feature: int, position: int, id_: int) -> None:
        """Raise the error for a bad id."""
        raise_bad_id(self.names, feature, position, id_, self.rows[self.tables[feature]].leaf.shape[0])

    def place(self) -> LineBatch:
        """Load the batch's rows into the caches and return their cache lines."""
        for t in dict.fromkeys(self.tables):
            self.rows[t].arrive()
        return place(
            self.rows, self.tables, self.ids, self.offsets, self.sample_weights, self.starts, self.bags, self.refuse,
            self.segments, self.names,
        )  # fmt: skip

    def prefetch(self) -> None:
        """Load the batch's rows into the caches ahead of its lookup."""
        for t in dict.fromkeys(self.tables):
            self.rows[t].arrive()
        wants = wanted(self.rows, self.tables, self.segments, self.refuse, self.names)
        prefetch_all([want for _, _, want in wants], self.ids)

    def looked_up(self, updates: bool) -> None:
        """Notify the caches that the batch has been looked up; `updates`: its update will follow."""
        for t, _, segments in per_table(self.rows, self.tables, self.segments):
            cache = self.rows[t].cache
            assert cache is not None
            cache.looked_up(self.ids, segments, updates=updates)


class _CachedLookup(torch.autograd.Function):
    """Pooled lookup, or one row per id if the batch has no offsets. The leaves are the last arguments."""

    @staticmethod
    def forward(ctx: Any, batch: CachedBatch, sinks: Tensor, *args: Any) -> Tensor:
        sample_weights, leaves = args[0], args[1:]
        with lock_caches([rows.cache for rows in batch.rows]):
            out, ticket = _looked_up(batch, sinks.numel() > 0)
        ctx.save_for_backward(batch.ids, batch.offsets, sample_weights)
        ctx.batch, ctx.sinks, ctx.ticket, ctx.leaves = batch, sinks, ticket, leaves
        ctx.reader = None
        if sample_weights is not None and ctx.needs_input_grad[2]:
            ctx.reader = _reader(batch, any(ctx.needs_input_grad[3:]) and sinks.numel() > 0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        batch: CachedBatch = ctx.batch
        ids, offsets, sample_weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        used = set(batch.tables)
        wanted = [want and t in used for t, want in enumerate(ctx.needs_input_grad[3:])]
        updates = any(wanted) and ctx.sinks.numel() > 0
        sample_grad = None
        if sample_weights is not None and ctx.needs_input_grad[2]:
            sample_grad = _sample_weight_grad(batch, grad, updates, ctx.reader).to(sample_weights.dtype)
        if updates:
            reach = _reach(ctx, grad, ctx.sinks, wanted)
            if any(reach.captured):
                raise RuntimeError(
                    f"Table '{batch.rows[reach.captured.index(True)].name}': torch.autograd.grad cannot return the "
                    "gradient of a cached table, which is applied at the end of the backward pass. Call "
                    "loss.backward()."
                )
            if reach.submits:
                dims = [leaf.shape[1] for leaf in ctx.leaves]
                own = [dims[t] for t in batch.tables]
                uniform = offsets is not None and len(batch.batches) == 1
                places, strides = pooled_blocks(own, batch.bags, uniform)
                taken = None if sample_weights is None else sample_weights.detach()
                features = Features(batch.tables, batch.starts, batch.bags, places, strides, batch.means)
                submit_record(reach.sinks, ctx.ticket, dims, Gradients(grad, ids, offsets, taken, features))
        ctx.reader = kept_for_retained_graph(ctx.reader)
        return (None, None, sample_grad, *[None] * len(ctx.leaves))


def _looked_up(batch: CachedBatch, updates: bool) -> tuple[Tensor, Tensor]:
    """Return the lookup op's output and ticket. `updates`: the batch's update will follow."""
    placed = batch.place()
    features = list(range(len(batch.tables)))
    if placed.offsets is None:
        starts = upload([*placed.starts, placed.ids.numel()], placed.ids.device)
        out, ticket = torch.ops.tilerec.sequence_lookup(
            placed.weights, _NO_SINKS, placed.ids, starts, batch.tables, batch.dtype, batch.names
        )
    else:
        uniform = len(batch.batches) == 1
        out, ticket = torch.ops.tilerec.pooled_lookup(
            placed.weights, _NO_SINKS, placed.ids, placed.offsets, placed.sample_weights, batch.tables, features,
            batch.means, batch.batches if uniform else batch.bags, batch.dtype, batch.names,
        )  # fmt: skip
        out = out if uniform else out.reshape(-1)  # with one feature, the op returned the uniform layout
    batch.looked_up(updates)
    return out, ticket


def _reader(batch: CachedBatch, updates: bool) -> SavedRows:
    """Return the rows that the gradient of the batch's weights will read. `updates`: the batch's update will follow."""

    def copy(features: Sequence[int]) -> list[Tensor]:
        # Copy only these features' rows: another table's cache may already be settled for a write that comes later.
        own = batch.only(features)
        with lock_caches([rows.cache for rows in batch.rows]):
            copies = own.place().copies(own.tables, range(len(features)))
            own.looked_up(updates)
        return copies

    reader = SavedRows(batch.tables, {}, str, copy)
    register_saved_rows({t: batch.rows[t].handle for t in batch.tables}, reader)
    return reader


def _sample_weight_grad(batch: CachedBatch, grad: Tensor, updates: bool, reader: SavedRows) -> Tensor:
    """Return gradients of the batch's weights. `updates`: the batch's update will follow."""
    features = list(range(len(batch.tables)))
    with lock_caches([rows.cache for rows in batch.rows]):
        rows = reader.rows()
        placed = batch.place()
        assert placed.offsets is not None
        tables: Sequence[int] = batch.tables
        if rows is not None:
            placed, tables = placed.of_copies(rows), features
        uniform = len(batch.batches) == 1
        own = torch.ops.tilerec.sample_weight_grad(
            placed.weights, placed.ids, placed.offsets, grad, tables, features, batch.means,
            batch.batches if uniform else batch.bags,
        )  # fmt: skip
        batch.looked_up(updates)
    return placed.back(own, batch.ids.numel())


def check_trained(rows: Sequence[TableRows], tables: Sequence[int]) -> None:
    """Check that every trained cached table has an attached optimizer.

    Raises:
        ConfigError: a table has none. Its dense `.grad` would have the size of the whole table, which a cache avoids.
    """
    for t in dict.fromkeys(tables):
        if rows[t].leaf.requires_grad and rows[t].spec is None:
            raise ConfigError(
                f"Table '{rows[t].name}': it is cached and has no attached optimizer, so its gradient would be a "
                "dense .grad of the whole table. Attach one with apply_optimizer_in_backward, freeze the table "
                "(requires_grad_(False)), or look it up under torch.no_grad()."
            )


@graph_break
def eager_forward(module: nn.Module, features: Any) -> Any:
    """Run a module's forward outside of a compiled program, which has a graph break around it.

    Raises:
        ConfigError: under `torch.export`, whose programs have no graph breaks.
    """
    if torch.compiler.is_exporting():
        raise ConfigError(
            f"{type(module).__name__}: torch.export cannot trace lookups of cached tables. Export a copy without "
            "caches: uncache_tables(copy.deepcopy(module))."
        )
    return type(module).forward(module, features)


def cached_lookup(batch: CachedBatch, sinks: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Return the output of `pooled_lookup` or `sequence_lookup`, for tables that are partly or all cached.

    Args:
        sinks: as the ops take them; empty if nothing is trained.
        leaves: of all tables.
    """
    if torch.is_grad_enabled():
        check_trained(batch.rows, batch.tables)
    out: Tensor = _CachedLookup.apply(batch, sinks, batch.sample_weights, *leaves)
    return out


def key_segments(sizes: Sequence[int], keys: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of the ids of each key. Example: sizes (2, 0, 3), keys (2, 0) -> (2, 5), (0, 2)."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [(ends[k], ends[k + 1]) for k in keys]
