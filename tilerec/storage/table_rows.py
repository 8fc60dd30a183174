"""The rows of one table in device memory, with the state of the optimizer attached to them.

Nouns
  leaf      the `nn.Parameter` that holds the rows (or a tile's part of them)
  place     first row and column of the leaf in the whole table, and the table's random key; with these, random bits
            do not depend on the plan
  cache     lines of device memory that hold rows and their slots while batches use them (`row_cache.py`)
  group     the optimizer numbers shared by the tables that were attached together (`shared_param_group.py`)
  observer  is called before rows are written and after it: saves copy or mark the rows (`row_observer.py`)
  count     number of updates of a table: a tensor in its state. It is on the host; if the optimizer is `capturable`, it
            is on the device of the update, which increments it, as replays of a captured update do

`TableRows` is a sink (`ops/gradient`). With an attached optimizer it takes the row gradients at the end of a
backward pass and updates rows and slots in place. Tables own their rows, and rows own their leaf. The leaf stores only
its sink's number: it pickles like any parameter, there is no back reference, and memory is freed with the last table.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, TilerecError
from tilerec.ops.backends import gpu_kernels_serve
from tilerec.ops.gradient.definition import _SINKS, GradientSink, sum_rows
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.readback import on_arrival, poll, wait_all
from tilerec.ops.runtime.upload import capturing
from tilerec.ops.update.counts import advance, read_counts
from tilerec.spec.optimizer import OptimizerSpec, Slot
from tilerec.storage.located_batch import FeatureBatch, located
from tilerec.storage.loss_scale import check_scale
from tilerec.storage.prefetched_orders import PrefetchedOrders
from tilerec.storage.row_cache import RowCache
from tilerec.storage.row_file import RowField, file_of, in_records
from tilerec.storage.row_observer import RowObserver
from tilerec.storage.shared_param_group import SharedParamGroup

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class TilePosition:
    """The table's Philox key (two 32-bit words) and the leaf's first global row and column."""

    key: tuple[int, int]
    row_offset: int = 0
    column_offset: int = 0


class NonFiniteGradientError(TilerecError):
    """A row's summed gradient was infinite or NaN; that row was not updated, all others were."""


class TableRows(GradientSink):
    """Rows of one leaf, their optimizer state, and the sink of their gradients.

    Args:
        name: the table's name, for messages.
        place: see `TilePosition`.
    """

    leaf: nn.Parameter
    """The parameter that holds the rows; set by `bind`."""

    def __init__(self, name: str, place: TilePosition) -> None:
        super().__init__()
        self.name = name
        self.place = place
        self.spec: OptimizerSpec | None = None
        self.group: SharedParamGroup | None = None
        self.state: dict[str, Tensor] = {}  # slots by name, and the table's update count
        self.skipped_rows = 0
        self.takes_gradients = False  # True: gradients are taken at the end of the backward; no dense `.grad`
        self._counter = "step"  # name of the update count in `state`
        self._warned = False
        self.named_idle = False  # a warning has named an optimizer whose steps do not change these rows
        self.names: Tensor | None = None  # int64, numbers of the rows in the table; None: consecutive, from `place`
        self.cache: RowCache | None = None  # None: rows are read and updated in the leaf
        self.cache_beside: RowCache | None = None  # of copies of hot rows: one like those of their table's tiles
        self.holders: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the tables that share these rows
        self.orders = PrefetchedOrders()  # row orders of later batches, for the group whose first table this is
        self.observers: list[RowObserver] = []  # called for each write of rows and slots

    def bind(self, leaf: nn.Parameter) -> None:
        """Tie these rows to the leaf, and move the slots to its device and precision."""
        if self.cache is not None and getattr(self, "leaf", None) is not leaf:
            self.cache.drop()
        file = file_of(leaf)
        folder = file.folder if file is not None else self.cache.folder if self.cache is not None else None
        slots = () if self.spec is None else self.spec.slots
        state = [self.state[slot.name].to(_slot_dtype(leaf)) for slot in slots]
        if folder is not None and leaf.numel() and not leaf.is_meta:
            self._check_not_shared(leaf)
            own = leaf.data  # of copies and of loaded rows, in memory so far
            made, *state = in_records([own, *state], [slot.init for slot in slots], folder, self.name)
            if made is not own:
                leaf.data = made
        else:
            state = [_beside(leaf, slot, tensor) for slot, tensor in zip(slots, state, strict=True)]
        self.state.update({slot.name: tensor for slot, tensor in zip(slots, state, strict=True)})
        self.leaf = leaf
        if self.names is not None:
            self.names = self.names.to("cpu" if leaf.is_meta else leaf.device)
        cast(Any, leaf)._tilerec_sink = self.handle
        if self.group is not None:
            on_device = self.group.get("capturable", False) and not leaf.is_meta
            self.count_on(leaf.device if on_device else _HOST)
            if on_device and not isinstance(self.group["lr"], Tensor):
                self.group.rate(leaf.device)  # makes the copy of the rate before a capture can begin

    def _check_not_shared(self, leaf: Tensor) -> None:
        if leaf.device.type == "cpu" and leaf.numel() and leaf.is_shared():
            raise ConfigError(
                f"Table '{self.name}': its rows are in files, which processes cannot share; expected no "
                "share_memory(). Call uncache_tables first, or shard the model over the processes."
            )

    def attach(self, spec: OptimizerSpec, group: SharedParamGroup) -> None:
        """Update these rows by `spec` at the end of every backward pass, with fresh state."""
        leaf = self.leaf
        if self.cache is not None:
            self.cache.drop()
        self.spec, self.group, self.takes_gradients = spec, group, True
        self.state = {
            slot.name: torch.empty(slot.shape(*leaf.shape), dtype=_slot_dtype(leaf), device="meta")
            for slot in spec.slots
        }  # `bind` makes them
        self.training_changed()
        self._counter = "updates" if "step" in self.state else "step"
        self.state[self._counter] = torch.zeros((), dtype=torch.int64, device="cpu")
        self.bind(leaf)

    def detach(self) -> None:
        """Remove the optimizer and its state: gradients become a dense `.grad` again."""
        self.settle()
        if self.cache is not None:
            self.cache.drop()
        self.spec, self.group, self.state, self.takes_gradients = None, None, {}, False
        self.training_changed()

    def training_changed(self) -> None:
        """Call `training_changed` of the tables that have it; called after `takes_gradients` may have changed."""
        for holder in self.holders:
            changed: Callable[[], None] | None = getattr(holder, "training_changed", None)
            if changed is not None:
                changed()

    @property
    def divisor(self) -> float:
        """Divisor of gradients: the number of ranks over which they are summed."""
        return 1.0

    def rule(self) -> OptimizerSpec:
        """Return the current optimizer spec of attached rows."""
        assert self.group is not None, "rows are attached"
        return self.group.spec()

    def settle(self) -> None:
        """Finish a pending replica sync and write cached rows back, before other code reads or writes rows or slots."""
        self.arrive()
        if self.cache is not None:
            super().about_to_write()  # the caller may write the rows of a cached table
            self.cache.settle()

    def about_to_write(self, rows_N: Tensor | None = None) -> None:
        """Announce that rows or slots are about to be written.

        Args:
            rows_N: their numbers in the leaf, int32 or int64; repeats are allowed. None: any rows.
        """
        super().about_to_write()
        for observer in self.observers:
            observer.before_write(self, rows_N)

    def wrote(self) -> None:
        """Announce that the writes of the rows that `about_to_write` named have ended."""
        for observer in self.observers:
            observer.after_write(self)

    def leave(self, rows_M: Tensor) -> None:
        """Run `settle` for some rows (int64, rows of this leaf) that the caller will write."""
        self.arrive()
        self.about_to_write(rows_M)
        if self.cache is not None:
            self.cache.leave(rows_M)

    def arrive(self) -> None:
        """Finish a pending replica sync of these rows, before a batch reads or updates them."""

    @property
    def trained(self) -> bool:
        """True if a backward pass updates these rows."""
        return self.takes_gradients and self.leaf.requires_grad

    def fields(self, dim: int) -> list[RowField]:
        """Return the fields of a record of this table's rows: of `dim` columns of a row, and of its slots."""
        state = [] if self.spec is None else [slot.shape(1, dim)[1:] for slot in self.spec.slots]
        return [RowField((dim,), self.leaf.dtype), *(RowField(shape, _slot_dtype(self.leaf)) for shape in state)]

    def host(self) -> list[Tensor]:
        """Return the leaf's rows and their slots, not those in cache lines."""
        return [self.leaf.detach(), *self.slots]

    def count_on(self, device: torch.device) -> Tensor:
        """Move the update count to this device and return it."""
        count = self.state[self._counter]
        if count.device != device:
            count = self.state[self._counter] = count.to(device)
        return count

    def rate(self, device: torch.device) -> Tensor:
        """Return the current learning rate of attached rows, 0-d on the device; their optimizer is `capturable`."""
        assert self.group is not None, "rows are attached"
        return self.group.rate(device)

    @property
    def updates(self) -> int:
        """Number of updates since the optimizer was attached. On a GPU, reading this may wait for the device."""
        return int(self.state[self._counter]) if self.spec is not None else 0

    @property
    def slots(self) -> list[Tensor]:
        """The optimizer's slots, in the order of its spec."""
        return [self.state[slot.name] for slot in self.spec.slots] if self.spec is not None else []

    def batch_key(self) -> Hashable:
        return self.handle if self.group is None else (self.group.alike(), self.divisor)

    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        if self.group is None:
            self._add_sparse_grad(record)
            return
        spec = self.rule()
        tables = cast("Sequence[TableRows]", sinks)
        position = {table.handle: t for t, table in enumerate(tables)}
        of_feature = [position[handle] for handle in record.sinks]
        batch = FeatureBatch(
            tables, [table.leaf for table in tables], record.ids, record.offsets, record.sample_weights, of_feature,
            record.starts, record.bags,
        )  # fmt: skip
        for t, table in enumerate(tables):
            table.about_to_write(batch.ids_of(t) if table.observers else None)
            if table.group is not None:
                table.group.watch.updated(table.handle, table.name)
        hyper = spec.hyper()
        hyper[1] *= self.divisor
        places = [table.place for table in tables]
        with located(batch, writes=True) as rows:
            steps, counts, lr = counting(tables, spec, record.ids.device)
            result = torch.ops.tilerec.update_rows_.default(
                rows.weights, rows.slots(spec), record.grad, rows.ids, rows.offsets, rows.sample_weights, of_feature,
                rows.starts, record.bags, record.grad_starts, record.grad_strides, record.means, spec.rule, hyper,
                steps, [word for own in places for word in own.key],
                [own.row_offset if table.names is None else 0 for own, table in zip(places, tables, strict=True)],
                [own.column_offset for own in places], rows.row_names, counts, lr,
                self.orders.take([table.handle for table in tables], record),
            )  # fmt: skip
            # An op that raises has updated nothing.
            count_updates(tables, spec)
            rows.updated()
        # On a GPU the result arrives later. An error of an earlier update does not undo this one.
        on_arrival(result, _SkippedRowsReport(spec, tuple([weakref.ref(table) for table in tables])))
        poll(result.device)

    def order(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        """Sort a batch's occurrences ahead of its `take`, where that saves time: on a GPU."""
        tables = cast("Sequence[TableRows]", sinks)
        if self.group is not None and _sorted_there(tables, record.ids.device):
            self.orders.make([table.leaf for table in tables], [table.handle for table in tables], record)

    def order_sums(self, tables: Sequence[TableRows], record: GradientRecord) -> None:
        """Run `order` for tables whose row gradients are summed and not applied; `self` is the first of them."""
        if _sorted_there(tables, record.ids.device):
            # One column each: keys of sums are in the order of the tables, whatever the widths.
            narrow = [t.leaf.detach().as_strided((t.leaf.shape[0], 1), (0, 1)) for t in tables]
            self.orders.make(narrow, [table.handle for table in tables], record)

    @property
    def skipped_rows(self) -> int:
        """Number of row updates skipped because a gradient was not finite. On a GPU, reading this waits."""
        leaf = getattr(self, "leaf", None)
        if leaf is not None:
            wait_all(leaf.device if self.cache is None else self.cache.device or leaf.device)
        return cast(int, self.__dict__["skipped_rows"])

    @skipped_rows.setter
    def skipped_rows(self, count: int) -> None:
        self.__dict__["skipped_rows"] = count

    def report_skipped(self, spec: OptimizerSpec, skipped: int, row: int) -> None:
        """Count `skipped` rows that were not updated because their gradient was not finite; raise if `spec` demands it.

        `row` is the first of these rows.
        """
        self.__dict__["skipped_rows"] += skipped
        if spec.non_finite != "skip":
            raise NonFiniteGradientError(
                f"Table '{self.name}': the summed gradient of row {row} is not finite (one of {skipped} such rows). "
                "These rows kept their values, all others were updated. Lower the learning rate or the loss scale, or "
                "attach the optimizer with non_finite='skip', which counts such rows and continues."
            )

    def _warn_dense_grad(self, spec: OptimizerSpec) -> None:
        self._warned = True
        warnings.warn(
            f"Table '{self.name}': its weight has a .grad, which the attached {type(spec).__name__} does not read: "
            "it uses gradients of lookups only. If the loss uses the weight itself (a penalty on it), put that into "
            "the optimizer (weight_decay=...) or step .grad yourself. If .grad is from before the optimizer was "
            "attached, set it to None.",
            stacklevel=2,
        )

    def _add_sparse_grad(self, record: GradientRecord) -> None:
        leaf = self.leaf
        rows_U, grads_UD = sum_rows(record, leaf.shape[0])
        grad = torch.sparse_coo_tensor(
            rows_U[None],
            (grads_UD / self.divisor).to(leaf.dtype),
            leaf.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad

    # Copies and pickles have the settings and the state: the table binds its copy again.
    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a view would contain whole records.
        slots = {name: t if file_of(t) is None else t.clone() for name, t in self.state.items()}
        return {**self.settings(), "state": slots}

    def settings(self) -> dict[str, Any]:
        """Return the attributes without those that tie rows to this process. Cached rows are written back."""
        if self.cache is not None:
            self.settle()
        own = ("handle", "leaf", "holders", "readers", "earlier", "orders", "observers")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(state)
        self.holders = weakref.WeakSet()
        self.orders = PrefetchedOrders()
        self.observers = []
        if self.cache is not None:  # two copies may be made from one state
            self.cache = copy.copy(self.cache)
        if self.cache_beside is not None:
            self.cache_beside = copy.copy(self.cache_beside)


@dataclass(frozen=True)
class _SkippedRowsReport:
    """Callback for the result of an update of these tables: reports the rows that it skipped."""

    spec: OptimizerSpec
    tables: tuple[weakref.ref[TableRows], ...]

    def __call__(self, numbers: list[int]) -> None:
        skipped, t, row = numbers
        table = self.tables[t]() if skipped else None
        if table is not None:
            table.report_skipped(self.spec, skipped, row)


def _sorted_there(tables: Sequence[TableRows], device: torch.device) -> bool:
    """Return True if a backend sorts these tables' occurrences: on a GPU, except the reference backend."""
    return gpu_kernels_serve(device) and all(
        t.cache is None and t.leaf.device == device and t.leaf.dtype != torch.float64 for t in tables
    )


def rows_of(parameter: Tensor) -> TableRows | None:
    """Return the rows whose leaf is `parameter`, or None for a parameter of no table."""
    # The number of a parameter that was copied or loaded from a file belongs to other rows, or to none.
    sink = _SINKS.get(getattr(parameter, "_tilerec_sink", -1))
    return sink if isinstance(sink, TableRows) and getattr(sink, "leaf", None) is parameter else None


def counting(
    tables: Sequence[TableRows], spec: OptimizerSpec, device: torch.device
) -> tuple[list[int], list[Tensor] | None, Tensor | None]:
    """Return `steps`, `counts` and `lr` for an update of these tables: numbers, or tensors on its device.

    Raises:
        ConfigError: the update is being captured and its optimizer is not `capturable`, so every replay would repeat
            these numbers; or a `GradScaler` scales losses and `grad_scale` was never written.
    """
    unknown = {id(table.group): table for table in tables if table.group and not table.group.scale_known}
    for table in unknown.values():
        assert table.group is not None
        check_scale(table.name, table.group)
    if spec.capturable:
        if capturing():
            for table in tables:
                assert table.group is not None
                table.group.freeze()
        return [], [table.count_on(device) for table in tables], tables[0].rate(device)
    if capturing():
        others = f" (and {len(tables) - 1} more)" if len(tables) > 1 else ""
        raise ConfigError(
            f"Table '{tables[0].name}'{others}: its update by {type(spec).__name__} is captured in a CUDA graph, but "
            "its update count and learning rate are host numbers, which every replay would repeat. Attach the "
            "optimizer with {'capturable': True}, which keeps both on the device."
        )
    return [count + 1 for count in read_counts([table.state[table._counter] for table in tables])], None, None


def count_updates(tables: Sequence[TableRows], spec: OptimizerSpec) -> None:
    """Count the updates, unless the op has, and increment the version counters of rows and slots."""
    if not spec.capturable:
        advance([table.state[table._counter] for table in tables])
    written: list[Tensor] = [table.leaf for table in tables]
    for slot in spec.slots:
        written += [table.state[slot.name] for table in tables]
    # Ops write through raw pointers; the version counters let autograd detect stale saved tensors.
    torch.autograd.graph.increment_version(written)
    for table in tables:
        table.wrote()
        if not table._warned and table.leaf.grad is not None:
            table._warn_dense_grad(spec)


def _slot_dtype(leaf: Tensor) -> torch.dtype:
    return torch.float64 if leaf.dtype == torch.float64 else torch.float32


def _beside(leaf: Tensor, slot: Slot, tensor: Tensor) -> Tensor:
    """Return a slot's tensor on the leaf's device, shared by processes as the leaf is."""
    if tensor.is_meta and not leaf.is_meta:
        tensor = torch.full(tensor.shape, slot.init, dtype=tensor.dtype, device=leaf.device)
    tensor = tensor.to(leaf.device)
    if leaf.device.type == "cpu" and leaf.is_shared():
        tensor.share_memory_()
    return tensor
