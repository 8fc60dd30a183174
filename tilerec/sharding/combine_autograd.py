"""Autograd of a sharded lookup: combine in the forward; send gradients to the owners in the backward.

    out = Combine(leaves, sample weights; looked)      one autograd node, whose backward is a collective

Legend: B samples, C columns of the output, D columns of a slot, N ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilerec.ops.gradient.definition import submit
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.lookup.saved_rows import kept_for_retained_graph
from tilerec.sharding.dense_gradients import dense_grads
from tilerec.sharding.exchange import Exchange, LookedUpBatch
from tilerec.sharding.row_exchange import BagLocation, PooledRows, RowExchange
from tilerec.sharding.tile_leaves import TileLeaves
from tilerec.sharding.update import TileRows
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.torch_private import graph_task_id, will_execute


@dataclass(frozen=True)
class Output:
    """Layout of a batch's output: flat, slot after slot, or `[B, C]` with slots side by side."""

    places: list[BagLocation]
    shape: tuple[int, ...]
    bag_sizes: list[Tensor | None]  # per slot: number of ids in each bag, float [bags]; None: no mean
    dims: list[int]  # per slot
    bags: list[int]  # per slot

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def of_gradient(self, grad: Tensor) -> tuple[Output, Tensor]:
        """Return the layout of a gradient of the output, and the gradient as a flat tensor.

        Rows [B, C] of a wider matrix, as the backward of a concatenation makes them, are read where they are. The flat
        tensor then has the columns between them, too.
        """
        if grad.dim() == 1 or grad.is_contiguous() or grad.stride(1) != 1 or grad.stride(0) < grad.shape[1]:
            return self, grad.contiguous().view(-1)
        (rows, columns), stride = grad.shape, grad.stride(0)
        places = [BagLocation(place.base, stride) for place in self.places]
        return replace(self, places=places), grad.as_strided(((rows - 1) * stride + columns,), (1,))

    def block(self, flat: Tensor, slot: int) -> Tensor:
        """Return the view of a slot's `[bags, dim]` in a flat output."""
        place = self.places[slot]
        return flat.as_strided(
            (self.bags[slot], self.dims[slot]), (place.stride, 1), flat.storage_offset() + place.base
        )

    def divide_(self, flat: Tensor) -> Tensor:
        """Divide the bags of mean slots by their sizes, in place."""
        for slot, sizes in enumerate(self.bag_sizes):
            if sizes is not None:
                self.block(flat, slot).div_(sizes[:, None])
        return flat

    @staticmethod
    def _all_finite(grad: Tensor, dtypes: set[torch.dtype]) -> bool:
        """Return True if all elements are finite in all `dtypes`. May return False for finite gradients, too."""
        if dtypes == {torch.float32}:
            return bool(torch.isfinite(grad.sum()))  # takes half the time of `aminmax`
        least, most = torch.aminmax(grad)
        limit = min(torch.finfo(dtype).max for dtype in dtypes)
        return bool((least >= -limit) & (most <= limit))

    def spread_non_finite(self, grad: Tensor, slots: Sequence[tuple[int, torch.dtype]]) -> Tensor:
        """Make a bag's gradient non-finite in all columns of a slot if it is non-finite in one of them.

        An unsharded table skips such a row. Without this, the owners of its other columns would update it. `[1, inf]`
        becomes `[nan, nan]`.

        Args:
            slots: each with the dtype in which its gradients are sent; a value that overflows there counts as
                non-finite.
        """
        if not slots:
            return grad
        if grad.device.type == "cpu" and grad.numel() and self._all_finite(grad, {dtype for _, dtype in slots}):
            return grad
        grad = grad.clone()
        for slot, dtype in slots:
            block = self.block(grad, slot)
            block += (block.to(dtype) * 0).sum(dim=1, keepdim=True)
        return grad


def pooled_output(dims: Sequence[int], bags: Sequence[int], uniform: bool, bag_sizes: list[Tensor | None]) -> Output:
    """Return the output layout: `[B, C]` for uniform batches, flat for others."""
    places, at, total = [], 0, sum(dims)
    for dim, count in zip(dims, bags, strict=True):
        places.append(BagLocation(at, total if uniform else dim))
        at += dim if uniform else dim * count
    return Output(places, (bags[0], total) if uniform and bags else (at,), bag_sizes, list(dims), list(bags))


@dataclass(frozen=True)
class Gradients:
    """Destinations of the gradients of a rank's leaves.

    Lists per table are the same on every rank, so that all ranks take the same branches.
    """

    exchange: Exchange
    current: Callable[[], bool]  # returns False after a reshard
    leaves: list[nn.Parameter]
    bare: list[nn.Parameter]  # empty leaves, of the tables of which this rank holds no rows
    tables: list[int]  # of each leaf, then of each bare one
    sinks: list[int]  # handle per leaf; -1: a dense `.grad`, or none
    trained: list[bool]  # per table
    attached: list[bool]  # per table: trained, and updated in the backward pass
    # Slots whose rows are split over owners by columns, where each owner skips non-finite rows; with the wire dtype.
    guarded: list[tuple[int, torch.dtype]]
    rows: list[TileRows]  # of the leaves

    @staticmethod
    def of(own: TileLeaves, exchange: Exchange, current: Callable[[], bool]) -> Gradients:
        """Return the destinations under the present settings of the tables."""
        bare = [t for t, table in enumerate(own.tables) if not table.tiles]
        held = [t for t, table in enumerate(own.tables) for _ in table.tiles]
        attached = own.attached()
        guarded = [
            (s, dtype) for s, t, dtype in exchange.column_cut if attached[t] and is_elementwise(own.tables[t].rows.spec)
        ]
        return Gradients(
            exchange, current, own.held(), [own.first[t] for t in bare], held + bare, own.sinks(), own.trained(),
            attached, guarded, own.rows(),
        )  # fmt: skip

    def bare_tables(self) -> list[tuple[nn.Parameter, int]]:
        """Return the bare leaves, each with its table."""
        return list(zip(self.bare, self.tables[len(self.leaves) :], strict=True))

    def dense(self, record: GradientRecord, leaf_of: Sequence[int]) -> dict[int, Tensor]:
        """Return the gradients of the leaves that have no optimizer attached, by leaf.

        Args:
            leaf_of: per feature of the record, the leaf that it read.
        """
        wanted = [i for i, leaf in enumerate(self.leaves) if self.sinks[i] == -1 and leaf.requires_grad]
        if not wanted:
            return {}
        owners, exchange = [rows.peers.replicas for rows in self.rows], self.exchange
        return dense_grads(
            exchange.group, self.leaves, owners, leaf_of, wanted, record, exact=exchange.exact, teams=exchange.teams
        )  # fmt: skip


def is_elementwise(spec: OptimizerSpec | None) -> bool:
    """Return True if a rule is element-wise: owners of a row's columns then exchange no sums."""
    return spec is not None and not spec.phases


@dataclass
class CombinedLookup:
    """A lookup from its combine to its backward. Eager and compiled programs share it."""

    combiner: RowExchange
    looked: PooledRows | None  # without rows; None once a backward has applied gradients
    output: Output
    gradients: Gradients
    weights: tuple[int, torch.dtype] | None  # number and dtype of this rank's sample weights

    def backward(
        self, given: Tensor, reached: Sequence[bool], *, sample_weights: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Send gradients to the owners of the rows, and submit those of the rows that this rank holds. Collective.

        Args:
            given: gradient of the output, in its shape or flat.
            reached: per table, whether the running backward pass includes it.
            sample_weights: whether this rank needs gradients of its sample weights.

        Returns:
            Gradients of the sample weights, and of the leaves: those with rows, then bare ones.
        """
        gradients, combiner = self.gradients, self.combiner
        if self.looked is None:
            raise RuntimeError(
                "A sharded lookup's backward ran a second time (retain_graph=True), but the first one already applied "
                "the gradients of its tables (an attached optimizer updates, a sparse .grad adds up): look the "
                "features up again, or give the tables dense gradients and step them with your own optimizer."
            )
        routed, reader = self.looked.routed, self.looked.reader
        routed.check()
        if not gradients.current():
            raise RuntimeError(
                "A sharded lookup's backward came after its tables were resharded, so its rows may be on other ranks: "
                "reshard between two steps, after the backward."
            )
        output, grad = self.output.of_gradient(given)
        if any(sizes is not None for sizes in output.bag_sizes):
            grad = output.divide_(grad.clone())
        grad = output.spread_non_finite(grad, gradients.guarded)
        if routed.weights_need_grad and reader is None:
            raise RuntimeError(
                "A sharded lookup's backward ran a second time, and the rows that the gradients of its sample weights "
                "need were freed after the first: pass retain_graph=True to the first one."
            )
        as_read = None if reader is None else reader.rows()  # raises, if at all, before anything is sent
        # Gradients of sample weights need the gradients of all rows.
        live = [True] * len(gradients.trained) if routed.weights_need_grad else gradients.trained
        looked = combiner.thawed(self.looked, live)
        rows = combiner.send_back(looked, grad.contiguous(), output.places)
        sample_grad = None
        if routed.weights_need_grad:  # true if any rank needs them: a collective
            assert self.weights is not None, "all ranks have weights"
            count, dtype = self.weights
            sample_grad = combiner.sample_weight_grads(routed, rows, gradients.rows, gradients.leaves, count, as_read)
            sample_grad = sample_grad.to(dtype) if sample_weights else None
        sinks = [sink if reached[t] else -1 for sink, t in zip(gradients.sinks, gradients.tables, strict=False)]
        record = combiner.record(looked.routed, rows, sinks, routed.present)
        submit(record)
        dense = gradients.dense(record, combiner.leaf_order)
        if any(a and r for a, r in zip(gradients.attached, reached, strict=True)):
            self.looked = None
        else:
            self.looked = replace(self.looked, reader=kept_for_retained_graph(reader))
        bare = [_no_rows(leaf, gradients.attached[t]) for leaf, t in gradients.bare_tables()]
        return sample_grad, [*(dense.get(i) for i in range(len(gradients.leaves))), *bare]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        lookup, rows, _anchor, _sample_weights, *_leaves = args
        ctx.lookup = lookup
        return combined(rows, lookup.output, lookup.combiner).view(lookup.output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        lookup: CombinedLookup = ctx.lookup
        reached = _reached(ctx, lookup.gradients)
        sample_grad, leaves = lookup.backward(grad, reached, sample_weights=ctx.needs_input_grad[3])
        return None, None, None, sample_grad, *leaves


def _no_rows(leaf: Tensor, attached: bool) -> Tensor | None:
    """Return the gradient of an empty leaf: empty, or None where leaves with rows get none."""
    return torch.zeros_like(leaf) if leaf.requires_grad and not attached else None


def _reached(ctx: Any, gradients: Gradients) -> list[bool]:
    """Return per table whether the running backward pass includes it.

    `loss.backward()` reaches every leaf; `torch.autograd.grad` and `backward(inputs=…)` reach some. A table that is not
    an input of the pass must not be updated.
    """
    reached = [True] * len(gradients.trained)
    if graph_task_id() == -1:
        return reached
    included = [False] * len(reached)
    nodes = ctx.next_functions[len(ctx.next_functions) - len(gradients.tables) :]  # leaves are the last inputs
    for t, (node, _) in zip(gradients.tables, nodes, strict=True):
        if not gradients.attached[t] or node is None:
            continue
        try:
            included[t] |= will_execute(node)
        except RuntimeError as error:  # torch raises it if the pass returns this leaf's gradient to its caller
            raise RuntimeError(
                "torch.autograd.grad was called for the gradient of a sharded table that applies it at the end of the "
                "backward pass (it has an attached optimizer, or a sparse .grad by set_sparse_grad); call "
                "loss.backward(), or call torch.autograd.grad before either is set."
            ) from error
    return [a or not attached for a, attached in zip(included, gradients.attached, strict=True)]


def combined(rows: PooledRows, output: Output, combiner: RowExchange) -> Tensor:
    """Wait for the rows of a lookup, and return its flat output."""
    return output.divide_(combiner.combine(rows, output.places, output.size))


def combined_lookup(
    looked: LookedUpBatch, output: Output, own: TileLeaves, exchange: Exchange, current: Callable[[], bool]
) -> CombinedLookup | None:
    """Return the record for a lookup's backward; None if nothing trains.

    Args:
        current: returns False after a reshard.
    """
    batch = looked.batch
    if not torch.is_grad_enabled() or not (any(own.trained()) or batch.routed.weights_need_grad):
        return None
    weights = batch.sample_weights if batch.stages.router.weighted else None
    return CombinedLookup(
        batch.stages.combiner, looked.looked.without_rows(), output, Gradients.of(own, exchange, current),
        None if weights is None else (weights.shape[0], weights.dtype),
    )  # fmt: skip


def combine(
    looked: LookedUpBatch, output: Output, own: TileLeaves, exchange: Exchange, current: Callable[[], bool]
) -> Tensor:
    """Return the output of a lookup.

    If a table trains, it is differentiable on every rank, even on one that holds no rows.

    Args:
        current: returns False after a reshard.
    """
    batch = looked.batch
    lookup = combined_lookup(looked, output, own, exchange, current)
    if lookup is None:
        with torch.no_grad():
            return combined(looked.looked, output, batch.stages.combiner).view(output.shape)
    sample_weights = batch.sample_weights if batch.stages.router.weighted else None
    gradients = lookup.gradients
    return _Combine.apply(lookup, looked.looked, exchange.anchor, sample_weights, *gradients.leaves, *gradients.bare)
