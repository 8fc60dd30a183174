"""Pipelines under TorchRec's names. Each is a list of stages.

TrainPipelineBase                 the copy of batch i + 1 overlaps with step i
TrainPipelineSparseDistLite       the route of batch i + 1 as well
TrainPipelineSparseDist           the routes of batches i + 1 and i + 2 as well
PrefetchTrainPipelineSparseDist   batch i + 1 is prefetched as well: rows of cached tables, order of the update
EvalPipelineSparseDist            as TrainPipelineSparseDist, without gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.pipelines.batch_in_flight import BatchInFlight, Origin
from tilerec.pipelines.device_copy import DeviceCopy
from tilerec.pipelines.even_ranks import EvenRanks
from tilerec.pipelines.passes import Pass
from tilerec.pipelines.pipeline import Pipeline, Stage, group_of
from tilerec.pipelines.routes_ahead import RouteReport, RoutesAhead
from tilerec.pipelines.stage_times import StageTimes
from tilerec.pipelines.trace import Trace
from tilerec.pipelines.train_step import ModelForward, TrainStep
from tilerec.spec.ignored_settings import warn_ignored_settings

_WITHOUT_EFFECT = {
    "execute_all_batches": "every batch is executed; stop calling progress() to leave the rest",
    "apply_jit": "no part of the model is scripted; use torch.compile",
    "context_type": "batches in flight have no contexts that you can replace",
    "pipeline_postproc": "a model is not traced; features that it builds itself are routed in its forward",
    "enqueue_batch_after_forward": "all stages run in one fixed order",
    "enable_inplace_copy_batch": "copies to the device are new tensors",
    "clear_data_dist_inputs": "a batch is released after its forward; free_features_storage_early frees ids earlier",
}
_ROUTES = {"finish_route", "route", "prefetch"}


class TrainPipelineContext:
    """TorchRec's context of a batch in flight; accepted as `context_type=`, and never created."""


class TrainPipeline:
    """Common part of the pipelines.

    Args:
        model: `model(batch)` returns (losses, output); it is never changed.
        optimizer: of all parameters without an attached optimizer.
        device: where batches are copied to.
        forward: called with the batch in place of the model.
        accumulate: number of batches that count as one: gradients, tables and optimizer are updated once for all of
            them, as for one batch with all their samples. Their activations stay in memory until then.
        even: ranks with different numbers of batches finish together. False: they must have equally many.
        group: the ranks that train together; None: those of the model's wrapper or of its sharded collections.
        empty: a batch without samples, for ranks that have run out; None: derived from a batch.
        sync_interval: see `TrainStep`.
        free_features_storage_early: release the ids of features once a route ahead of their step has sorted them. The
            model gets features without ids, and an operator that reads these raises an `InputError`: one of the
            model's own, of an unsharded collection, or of a sharded one whose first call comes while the batch is in
            flight. The caller's batch keeps its ids. Batches in flight cannot be routed again after a reshard. Compiled
            models keep their ids.

    Attributes:
        last_origin: origin of the output that the last `progress` returned; None before the first.
    """

    _depth = 3
    _route_ahead = True
    _prefetch = False
    _train = True

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device | str, forward: ModelForward | None, *,
        accumulate: int = 1, even: bool = True, group: Group | None = None, empty: Any = None,
        sync_interval: int | None = 1, free_features_storage_early: bool = False,
    ) -> None:  # fmt: skip
        who, self._releases_ids = type(self).__name__, free_features_storage_early
        self._model, self._attached = model, True
        self._copy = DeviceCopy(torch.device(device))
        self._step = TrainStep(model, optimizer if self._train else None, forward, accumulate, sync_interval, who)
        self._group = group_of(model) if group is None else group
        several = even and self._group is not None and self._group.size > 1
        self._even = EvenRanks(self._group, empty, who) if several and self._group is not None else None
        self._routes = self._routes_of(model)
        self._pipeline = Pipeline(*self._stages(), self._depth, self._even, who)

    def _routes_of(self, model: nn.Module) -> RoutesAhead:
        group = None if self._even is None else self._group
        return RoutesAhead(
            model, type(self).__name__, prefetches=self._prefetch, group=group, releases_ids=self._releases_ids
        )

    def _stages(self) -> tuple[list[Stage], list[Stage]]:
        """Return the stages of one step before the next batch is read, and those after it."""
        copy = Stage("copy", self._copy_batch, self._depth - 1)
        route = Stage("route", self._begin_route, self._depth - 1)
        finish = Stage("finish_route", self._finish_route, max(self._depth - 2, 1))
        forward, prefetch = Stage("forward", self._forward), Stage("prefetch", self._prefetch_batch, 1)
        update = [Stage("backward", self._step.backward), Stage("update", self._step.update)] if self._train else []
        if not self._route_ahead:
            return [], [copy, forward, *update]
        if self._depth == 2:  # the sizes of batch i + 1 travel during the forward
            return [], [copy, route, forward, finish, *update]
        return [finish, forward, *([prefetch] if self._prefetch else [])], [copy, route, *update]

    # -- stages ------------------------------------------------------------------------------------------------

    def _copy_batch(self, batch: BatchInFlight, _: Pass) -> None:
        if not batch.origin.batch:
            self._routes.find_collections()
        self._copy(batch, type(self).__name__)

    def _has_turn(self, batch: BatchInFlight) -> bool:
        """Return False for a batch after the end of all ranks, whose route would change maps of ids.

        Ranks learn late that all have ended. Routes of tables alone are harmless then, so only maps wait for it.
        """
        return self._even is None or not self._routes.maps_ids or not self._even.is_end(batch)

    def _begin_route(self, batch: BatchInFlight, current: Pass) -> None:
        for earlier in current.batches:
            if earlier is not batch:  # its messages are freed before this batch is sorted
                self._routes.receive(earlier)
        if self._has_turn(batch):
            with self._copy.ahead(batch):
                self._routes.begin(batch)
        if self._even is not None:
            self._even.send(batch)

    def _finish_route(self, batch: BatchInFlight, _: Pass) -> None:
        if self._has_turn(batch):
            with self._copy.ahead(batch):
                self._routes.finish(batch)
        if self._even is not None:
            self._even.send(batch)

    def _prefetch_batch(self, batch: BatchInFlight, current: Pass) -> None:
        self._finish_route(batch, current)  # of routes that were learned in the forward before this stage
        with self._copy.ahead(batch):
            self._routes.prefetch(batch)

    def _forward(self, batch: BatchInFlight, current: Pass) -> None:
        self._copy.arrive(batch)
        if not self._route_ahead:
            following = current.batches[0] if current.batches else None
            with self._routes.carry(following):
                self._step.forward(batch, current)
            batch.release()
            if following is not None and self._even is not None:
                self._even.send(following)
            return
        if self._depth == 2:  # the first batch of a pass follows no other whose step would finish its route
            self._finish_route(batch, current)
            if batch.error is not None:
                raise batch.error
        learned = self._routes.learned
        with self._routes.serve(batch):
            self._step.forward(batch, current)
        batch.release()
        if self._routes.learned > learned:
            self._pipeline.run_again(_ROUTES)

    # -- for users ---------------------------------------------------------------------------------------------

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch of an iterator, and return the model's output for it. Collective.

        Several iterators may take turns: each has its own batches in flight.

        Raises:
            StopIteration: once, when the iterator has ended, on all ranks at the same call. If the same object is
                passed again, a new pass over it begins.
            InputError: a batch is None or wrong, or was written to while it waited.
        """
        if not self._attached:
            self.attach()
        if self._train:
            return self._pipeline.progress(dataloader_iter)
        with torch.no_grad():
            return self._pipeline.progress(dataloader_iter)

    def outputs(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the output of every batch: `progress` until the end. Collective."""
        iterator = iter(batches)
        while True:
            try:
                output = self.progress(iterator)
            except StopIteration:
                return
            yield output

    @property
    def last_origin(self) -> Origin | None:
        """Origin of the output that the last `progress` returned; None before the first."""
        return self._pipeline.last_origin

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order of one step."""
        return self._pipeline.stages

    @property
    def stage(self) -> str:
        """Name of the stage that runs, or has run last; "" before the first. Another thread may read it."""
        return self._pipeline.stage

    def report(self) -> list[RouteReport]:
        """Return, for each sharded collection, how many of its forwards found their features routed ahead."""
        return self._routes.report()

    @property
    def times(self) -> StageTimes:
        """Time of "read" and of each stage: `times.take()` returns the seconds since its last call."""
        return self._pipeline.times

    @property
    def trace(self) -> Trace | None:
        """The trace of the stages; None unless `start_trace` was called."""
        return self._pipeline.trace

    def start_trace(self) -> Trace:
        """Record the time of every stage from now on, and return the trace."""
        self._pipeline.trace = Trace(0 if self._group is None else self._group.rank)
        return self._pipeline.trace

    def write_trace(self, path: str | Path) -> None:
        """Write the stages of all ranks to one file for Perfetto. Collective if the model has several ranks.

        Raises:
            InputError: `start_trace` was not called.
            FileError: the file cannot be written.
        """
        if self.trace is None:
            raise InputError(
                f"{type(self).__name__}.write_trace: got no recorded stages; expected a call of start_trace before the "
                "steps to record. Call it on all ranks."
            )
        self.trace.write(path, self._group)

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Use `model` from now on, or the same model again. Nothing in the model changes.

        Args:
            sparse_dist: accepted for TorchRec's signature; no effect.
        """
        self._attached = True
        if model is not None and model is not self._model:
            self._model = self._step.model = model
            self._routes = self._routes_of(model)
            self._pipeline.reset()

    def detach(self) -> nn.Module:
        """Return the model. It was never changed, and batches in flight stay; `progress` attaches again."""
        self._attached = False
        return self._model

    def reset(self) -> None:
        """Drop all batches in flight, of all iterators. All ranks call it."""
        self._pipeline.reset()


@final
class TrainPipelineBase(TrainPipeline):
    """Pipeline that copies batch i + 1 to the device while step i runs. Two batches are in flight.

    Args: see `TrainPipeline`; `custom_model_fwd` is its `forward`. `enable_inplace_copy_batch` has no effect.
    """

    _depth = 2
    _route_ahead = False

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device | str,
        custom_model_fwd: ModelForward | None = None, enable_inplace_copy_batch: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        _warn("TrainPipelineBase", enable_inplace_copy_batch=enable_inplace_copy_batch)
        super().__init__(model, optimizer, device, custom_model_fwd, **options)


@final
class TrainPipelineSparseDistLite(TrainPipeline):
    """Pipeline that routes batch i + 1 while step i computes. Two batches are in flight.

    The sizes of batch i + 1 travel during the forward of batch i, its ids during the backward.

    Args: see `TrainPipelineSparseDist`.
    """

    _depth = 2

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device | str, apply_jit: bool = False,
        context_type: type[Any] | None = TrainPipelineContext, pipeline_postproc: bool = False,
        custom_model_fwd: ModelForward | None = None, enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False, clear_data_dist_inputs: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        _warn(
            "TrainPipelineSparseDistLite",
            apply_jit=apply_jit,
            context_type=context_type not in (TrainPipelineContext, None),
            pipeline_postproc=pipeline_postproc,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        super().__init__(
            model, optimizer, device, custom_model_fwd, free_features_storage_early=free_features_storage_early,
            **options,
        )  # fmt: skip


class TrainPipelineSparseDist(TrainPipeline):
    """Pipeline that routes batches i + 1 and i + 2 while step i computes. Three batches are in flight.

    At the start of step i the ids of batch i + 1 leave this rank, and travel during the forward and the backward. After
    the forward batch i is released, batch i + 2 is read, and its sizes leave this rank.

    Args: see `TrainPipeline`. `custom_model_fwd` is its `forward`, `dmp_collection_sync_interval_batches` its
        `sync_interval`. The other arguments of TorchRec have no effect; values other than the defaults cause a warning.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device | str, execute_all_batches: bool = True,
        apply_jit: bool = False, context_type: type[Any] | None = TrainPipelineContext, pipeline_postproc: bool = False,
        custom_model_fwd: ModelForward | None = None, dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False, enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False, clear_data_dist_inputs: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        _warn(
            type(self).__name__,
            execute_all_batches=not execute_all_batches,
            apply_jit=apply_jit,
            context_type=context_type not in (TrainPipelineContext, None),
            pipeline_postproc=pipeline_postproc,
            enqueue_batch_after_forward=enqueue_batch_after_forward,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        super().__init__(
            model, optimizer, device, custom_model_fwd, sync_interval=dmp_collection_sync_interval_batches,
            free_features_storage_early=free_features_storage_early, **options,
        )  # fmt: skip


@final
class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` that also prefetches batch i + 1, after the forward of batch i.

    Rows of cached tables are loaded into their caches. On a GPU the rows are sorted for the update.
    """

    _prefetch = True


@final
class EvalPipelineSparseDist(TrainPipeline):
    """Pipeline that evaluates: forwards without gradients, routed ahead as in `TrainPipelineSparseDist`.

    Args: see `TrainPipeline`. The optimizer is not used and may be None. Call `model.eval()` first.
    """

    _train = False

    def __init__(
        self, model: nn.Module, optimizer: Any, device: torch.device | str, apply_jit: bool = False,
        pipeline_postproc: bool = False, custom_model_fwd: ModelForward | None = None, **options: Any,
    ) -> None:  # fmt: skip
        _warn("EvalPipelineSparseDist", apply_jit=apply_jit, pipeline_postproc=pipeline_postproc)
        super().__init__(model, None, device, custom_model_fwd, **options)


def _warn(who: str, **given: object) -> None:
    warn_ignored_settings(who, given, _WITHOUT_EFFECT, 3)
