"""Sharded lookups in compiled programs: opaque ops that run the eager stages.

    begin      route and lookup; when it returns, rows are in flight to their homes   -> ticket
    finish     combine: waits for the rows                                            -> output
    backward   sends gradients to the owners of the rows, as in eager mode

A tracer sees ops whose outputs have known shapes, and none of the collectives, checks and host numbers inside. Ops take
tensors and numbers: `collection` holds the handle of a module, and a ticket the number of a lookup in flight. A lookup
lives as long as its ticket.

`begin` and `backward` are collective. They are registered as ordered effects: compilers keep all of them, in the order
of the program, so all ranks make the same calls in the same order. `finish` only waits for messages that have been
sent. A compiler may move it to the first use of the rows, behind work that does not need them.

Legend: B samples, C columns of the output, N ids.
"""

from __future__ import annotations

import ast
import functools
import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY
from tilerec.sharding.combine_autograd import CombinedLookup, Output, combined, combined_lookup
from tilerec.sharding.exchange import Exchange, LookedUpBatch
from tilerec.sharding.late_calls import run_late
from tilerec.sharding.table import COLLECTIONS_OF
from tilerec.sharding.tile_leaves import TileLeaves, dense_leaves
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, from_leaves, text_leaves_of
from tilerec.torch_private import (
    BelowAutograd,
    autograd_visible,
    change_inductor_graphs,
    constant_in_programs,
    keep_order,
)

_OPS = torch.ops.tilerec


class TracedModule(nn.Module):
    """Sharded module that a compiled program calls by its handle (abstract)."""

    handle: Tensor
    """Number of this object, and a leaf of its lookups: it requires a gradient, so that every rank has a backward.

    It is one tensor for both, as each tensor that a program takes has 8 guards."""
    traced_settings: int
    """Compiled programs guard this number. It changes with the settings that they take for constants."""

    def renew_handle(self, tables: Iterable[nn.Module] = ()) -> None:
        """Give this object a handle of its own. A copy of the object needs another one.

        Args:
            tables: its tables, if it is a collection.
        """
        for table in tables:
            COLLECTIONS_OF.setdefault(table, weakref.WeakSet()).add(self)
        self.handle = torch.tensor(float(next(_HANDLES)), dtype=HANDLE_DTYPE, device="cpu", requires_grad=True)
        self.__dict__.setdefault("traced_settings", 0)  # a class attribute would be guarded in every base class
        _MODULES[int(self.handle)] = self

    @abstractmethod
    def begin_traced(self, features: KeyedJaggedTensor, *options: bool) -> Begun:
        """Route and look up a batch. Collective."""


class Combination(NamedTuple):
    """The parts of an eager combine.

    tail: local and differentiable work, from the flat output to the module's.
    current: returns False after a reshard.
    """

    module: TracedModule
    looked: LookedUpBatch
    output: Output
    leaves: TileLeaves
    exchange: Exchange
    current: Callable[[], bool]
    tail: Callable[[Tensor], Tensor]


class Begun(NamedTuple):
    """A looked-up batch whose rows are in flight."""

    combination: Combination
    weights: Tensor | None  # the batch's sample weights
    remapped: KeyedJaggedTensor | None = None  # of managed collision: the batch of row numbers


@dataclass
class _Flight:
    """A lookup in flight."""

    begun: Begun | None  # before `finish`, which frees the rows
    trains: bool
    leaves: TileLeaves
    weights: Tensor | None  # the batch's sample weights
    routed_weights: Tensor | None  # those of the ids that were looked up
    remapped: KeyedJaggedTensor | None = None  # of managed collision: the batch of row numbers
    lookup: CombinedLookup | None = None  # after `finish`, if the tables or the weights train
    flat: Tensor | None = None  # with `edge`: the input of the tail
    edge: GradientEdge | None = None  # the output of the tail; None: a view of the flat output


HANDLE_DTYPE = torch.float32  # exact up to 16 million; torch guards values of float64
_HANDLES, _TICKETS = itertools.count(1), itertools.count(1)
_MODULES: weakref.WeakValueDictionary[int, TracedModule] = weakref.WeakValueDictionary()
_FLIGHTS: dict[int, tuple[_Flight, weakref.ref[Tensor]]] = {}


def traced_module(handle: Tensor) -> TracedModule:
    """Return the module of a handle."""
    return _MODULES[int(handle)]


# ------------------------------------------------------------------------------------------------ traced code


@constant_in_programs
def traced_constants(handle: Tensor, _settings: int) -> tuple[tuple[tuple[str, str], ...], torch.dtype, bool]:
    """Return `dense_leaves` of a collection, its output's dtype, and whether it takes sample weights.

    Guards of these values would read several objects per table in each call.
    """
    collection: Any = traced_module(handle)
    return dense_leaves(collection._tables), collection._traced_dtype, getattr(collection, "_is_weighted", False)


def is_traceable(features: object) -> TypeGuard[KeyedJaggedTensor]:
    """Return True in a compiled program that can have the lookup of these features in its graph."""
    return (
        torch.compiler.is_compiling() and not torch.compiler.is_exporting() and isinstance(features, KeyedJaggedTensor)
    )


def _arguments(module: TracedModule, features: KeyedJaggedTensor) -> tuple[Any, ...]:
    leaves, context = text_leaves_of(features)
    weights = features.weights_or_none()
    trains = torch.is_grad_enabled()
    return (
        module.handle.detach(), [leaf.detach() for leaf in leaves], context, trains,
        trains and weights is not None and weights.requires_grad,
    )  # fmt: skip


def begin(module: TracedModule, features: KeyedJaggedTensor) -> Tensor:
    """Begin a lookup, and return its ticket. Collective."""
    ticket: Tensor = torch.ops.tilerec.begin_sharded_lookup(*_arguments(module, features))
    return ticket


def begin_managed(
    module: TracedModule, features: KeyedJaggedTensor, mutate: bool, drops: bool
) -> tuple[Tensor, KeyedJaggedTensor]:
    """Begin a lookup with managed collision, and return its ticket and the batch of row numbers. Collective."""
    ticket: Tensor = _OPS.begin_managed_lookup(*_arguments(module, features), mutate)
    values, lengths, weights = _OPS.remapped_batch(ticket, drops, features.values(), features.lengths())
    known = features.weights_or_none()
    if known is not None and drops:
        known = weights
    strides = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
    remapped = KeyedJaggedTensor(
        features.keys(), values, known, lengths, stride_per_key_per_rank=strides,
        inverse_indices=features.inverse_indices_or_none(),
    )  # fmt: skip
    return ticket, remapped


def finish(
    ticket: Tensor, anchor: Tensor, weights: Tensor | None, dense: list[Tensor], size: Sequence[int],
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """Return the output of a lookup.

    Args:
        anchor: the handle of the collection.
        weights: sample weights of the batch.
        dense: `dense_leaves` of the tables.
        size, dtype, device: of the output.
    """
    out: Tensor = torch.ops.tilerec.finish_sharded_lookup(ticket, anchor, weights, dense, size, dtype, device)
    return out


# ------------------------------------------------------------------------------------------------ begin


def _fake_ticket(*_: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@LIBRARY.op(
    "begin_sharded_lookup(Tensor collection, Tensor[] features, str context, bool trains, bool weights) -> Tensor",
    _fake_ticket,
)
def _begin(collection: Tensor, features: list[Tensor], context: str, trains: bool, weights: bool) -> Tensor:
    return _begun(collection, features, context, trains, weights)[0]


def _begun(
    collection: Tensor, features: Sequence[Tensor], context: str, trains: bool, weights: bool, *options: bool
) -> tuple[Tensor, _Flight]:
    leaves, known = list(features), _context(context)
    with autograd_visible(), torch.set_grad_enabled(trains):
        if weights:
            at = known[1].index("weights")
            leaves[at] = leaves[at].detach().requires_grad_()
        begun = traced_module(collection).begin_traced(from_leaves(leaves, known), *options)
    found = begun.combination
    flight = _Flight(begun, trains, found.leaves, begun.weights, found.looked.batch.sample_weights)
    number = next(_TICKETS)
    ticket = torch.tensor([number])
    _FLIGHTS[number] = flight, weakref.ref(ticket, lambda _: _FLIGHTS.pop(number, None))
    return ticket, flight


@functools.lru_cache(maxsize=256)
def _context(text: str) -> Any:
    return ast.literal_eval(text)


@LIBRARY.op(
    "begin_managed_lookup(Tensor collection, Tensor[] features, str context, bool trains, bool weights, bool mutate) "
    "-> Tensor",
    _fake_ticket,
)
def _begin_managed(
    collection: Tensor, features: list[Tensor], context: str, trains: bool, weights: bool, mutate: bool
) -> Tensor:
    ticket, flight = _begun(collection, features, context, trains, weights, mutate)
    assert flight.begun is not None
    flight.remapped = flight.begun.remapped
    return ticket


def _fake_remapped(ticket: Tensor, drops: bool, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size() if drops else values.shape[0]
    return (
        values.new_empty(count, dtype=torch.int64), torch.empty_like(lengths),
        values.new_empty(count, dtype=torch.float32),
    )  # fmt: skip


# An op of its own: inductor has no ordered effects with results of unknown size.
@LIBRARY.op(
    "remapped_batch(Tensor ticket, bool drops, Tensor values, Tensor lengths) -> (Tensor, Tensor, Tensor)",
    _fake_remapped,
)
def _remapped(ticket: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, lengths and sample weights of the batch of row numbers."""
    remapped = _FLIGHTS[int(ticket)][0].remapped
    assert remapped is not None, "managed collision maps ids"
    own = remapped.weights_or_none()
    values = remapped.values()
    shown = values.new_empty(values.shape[0], dtype=torch.float32) if own is None else own.detach().clone()
    return values.clone(), remapped.lengths().clone(), shown


# ------------------------------------------------------------------------------------------------ finish


_in_order: list[bool] = []


def _fake_finish(*args: Any) -> Tensor:
    if not _in_order and change_inductor_graphs(_OPS.finish_sharded_lookup.default, run_late):
        _in_order.append(True)
    return torch.empty(args[4], dtype=args[5], device=args[6])


@LIBRARY.op(
    "finish_sharded_lookup(Tensor ticket, Tensor anchor, Tensor? weights, Tensor[] dense, SymInt[] size, "
    "ScalarType dtype, Device device) -> Tensor",
    _fake_finish,
)
def _finish(
    ticket: Tensor, anchor: Tensor, weights: Tensor | None, dense: Sequence[Tensor], size: Sequence[int],
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    flight = _FLIGHTS[int(ticket)][0]
    begun, flight.begun = flight.begun, None
    assert begun is not None, "a lookup is finished once"
    module, looked, output, leaves, exchange, current, tail = begun.combination
    combiner = looked.batch.stages.combiner
    with autograd_visible(), torch.set_grad_enabled(flight.trains):
        flight.lookup = combined_lookup(looked, output, leaves, exchange, current)
        with torch.no_grad():
            flat = combined(looked.looked, output, combiner)
        out = tail(flat.requires_grad_(flight.lookup is not None))
        if out.dtype != dtype or len(dense) != len(leaves.dense_places()):
            module.traced_settings += 1
            raise ConfigError(
                f"{exchange.name}: got tables with other data types or optimizers than when the model was compiled; "
                "expected the same. The next call compiles it again: repeat the step, on all ranks."
            )
        if out.requires_grad and (out.dtype != flat.dtype or out.data_ptr() != flat.data_ptr()):
            flight.flat, flight.edge = flat, get_gradient_edge(out)
        return out.detach()


class _Finish(torch.autograd.Function):
    """Inputs: non-tensors in one tuple, then the op's tensors."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], ticket: Tensor, anchor: Tensor, weights: Tensor | None, *dense: Tensor
    ) -> Tensor:
        with BelowAutograd():
            out: Tensor = _OPS.finish_sharded_lookup.default(ticket, anchor, weights, dense, *call)
        ctx.save_for_backward(ticket, *dense)
        ctx.weights = (0, torch.float32) if weights is None else (weights.shape[0], weights.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ticket, *dense = ctx.saved_tensors
        needs = ctx.needs_input_grad[3]
        anchor, weights, *grads = _OPS.sharded_lookup_backward.default(ticket, grad, needs, *ctx.weights, dense)
        return None, None, anchor, weights if needs else None, *grads


def _finish_autograd(
    ticket: Tensor, anchor: Tensor, weights: Tensor | None, dense: Sequence[Tensor], *call: Any
) -> Tensor:
    if torch.is_grad_enabled():
        return cast(Tensor, _Finish.apply(call, ticket, anchor, weights, *dense))
    with BelowAutograd():
        return cast(Tensor, _OPS.finish_sharded_lookup.default(ticket, anchor, weights, dense, *call))


LIBRARY.impl("finish_sharded_lookup", _finish_autograd, "Autograd")


# ------------------------------------------------------------------------------------------------ backward


def _fake_backward(
    ticket: Tensor, grad: Tensor, needs: bool, count: int, dtype: torch.dtype, dense: Sequence[Tensor]
) -> list[Tensor]:
    return [
        torch.empty((), dtype=HANDLE_DTYPE, device="cpu"),
        grad.new_empty(count if needs else 0, dtype=dtype),
        *map(torch.empty_like, dense),
    ]


@LIBRARY.op(
    "sharded_lookup_backward(Tensor ticket, Tensor grad, bool needs, SymInt count, ScalarType dtype, Tensor[] dense) "
    "-> Tensor[]",
    _fake_backward,
)
def _backward(
    ticket: Tensor, grad: Tensor, needs: bool, count: int, dtype: torch.dtype, dense: Sequence[Tensor]
) -> list[Tensor]:
    """Return gradients of the anchor (zero), of the sample weights (none unless `needs`) and of the dense leaves."""
    flight = _FLIGHTS[int(ticket)][0]
    lookup = flight.lookup
    flat_grad, weight_grad = grad.reshape(-1), None
    grads: list[Tensor | None] = [None] * len(dense)
    with autograd_visible():
        if flight.edge is not None:
            flat_grad, weight_grad = _tail_grads(flight.edge, [flight.flat, flight.weights if needs else None], grad)
        if lookup is not None:
            reached = [True] * len(lookup.gradients.trained)  # a compiled graph computes all gradients or none
            with torch.no_grad():
                own, leaves = lookup.backward(flat_grad, reached, sample_weights=needs)
            grads = [leaves[i] for i in flight.leaves.dense_places()]
            routed = flight.routed_weights
            dropped = routed is not flight.weights  # managed collision has dropped ids
            if own is not None and routed is not None and dropped:
                (own,) = _tail_grads(get_gradient_edge(routed), [flight.weights], own)
            weight_grad = own if weight_grad is None else weight_grad
    if weight_grad is None:
        weight_grad = grad.new_zeros(count if needs else 0, dtype=dtype)
    given = [torch.zeros_like(leaf) if own is None else own for leaf, own in zip(dense, grads, strict=True)]
    return [torch.zeros((), dtype=HANDLE_DTYPE, device="cpu"), weight_grad, *given]


def _tail_grads(edge: GradientEdge, inputs: Sequence[Tensor | None], grad: Tensor) -> list[Any]:
    """Return the gradients of the inputs, where they are tensors that require one and are used."""
    wanted = [own for own in inputs if own is not None and own.requires_grad]
    found = iter(torch.autograd.grad([edge], wanted, [grad], allow_unused=True) if wanted else ())
    return [next(found) if own is not None and own.requires_grad else None for own in inputs]


for _op in (_OPS.begin_sharded_lookup, _OPS.begin_managed_lookup, _OPS.sharded_lookup_backward):
    keep_order(_op.default)
