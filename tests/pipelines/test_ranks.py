"""Ranks with different numbers of batches, accumulation, and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipelines.pipeline_models import (
    ClickBatch,
    Clicks,
    assert_same,
    batch_of,
    dense_optimizer,
    model_of,
    pipelined,
    plain_loop,
    weights_of,
)
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import CommsError, InputError
from tilerec.parallel import DistributedModelParallel, DMPCollection, even_batches
from tilerec.pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from tilerec.planner import row_wise
from tilerec.testing import concat_batches, run_ranks, run_virtual_ranks

CPU = torch.device("cpu")
TRAINING = [
    TrainPipelineBase, TrainPipelineSparseDistLite, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist
]  # fmt: skip


def _joined(batches: list[ClickBatch]) -> ClickBatch:
    return ClickBatch(
        concat_batches([batch.features for batch in batches]),
        torch.cat([batch.dense for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
    )


# Uneven ranks -------------------------------------------------------------------------------------------------


def _uneven(group: Group, make: Any, counts: tuple[int, ...]) -> list[bool]:
    model = model_of(group)
    pipeline = make(model, dense_optimizer(model), CPU)
    for epoch in range(2):
        batches = (batch_of(10 * group.rank + k) for k in range(counts[group.rank]))
        fillers = []
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
            fillers.append(pipeline.last_origin.filler)
            assert pipeline.last_origin.iterator == epoch
    return fillers


@pytest.mark.parametrize("make", [*TRAINING, EvalPipelineSparseDist])
@pytest.mark.parametrize("counts", [(5, 2), (0, 3), (1, 0), (0, 0), (4, 4)])
def test_ranks_with_different_numbers_of_batches_finish_together(make: Any, counts: tuple[int, int]) -> None:
    found = run_virtual_ranks(2, _uneven, make, counts)
    for rank, count in enumerate(counts):
        assert found[rank] == [k >= count for k in range(max(counts))]


def _tables(group: Group, use_pipeline: bool) -> dict[str, torch.Tensor]:
    model = model_of(group)
    for parameter in model.over.parameters():  # without DistributedDataParallel only tables are shared
        parameter.requires_grad_(False)
    batches = [batch_of(10 * group.rank + k) for k in range((4, 2)[group.rank])]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if use_pipeline:
        pipelined(TrainPipelineSparseDist(model, optimizer, CPU), iter(batches))
    else:
        for turn in even_batches(batches, group, batch_of(0, 0), lambda batch: len(batch.labels)):
            loss, _ = model(turn.batch)
            (loss if turn.scale == 1 else loss * turn.scale).backward()
    return weights_of(model)


def test_empty_batches_weigh_as_in_even_batches() -> None:
    for one, other in zip(run_virtual_ranks(2, _tables, True), run_virtual_ranks(2, _tables, False), strict=True):
        assert_same(one, other)


def _failing(group: Group, make: Any, at: int, error: type[Exception]) -> None:
    model = model_of(group)
    pipeline = make(model, dense_optimizer(model), CPU)

    def batches() -> Any:
        for k in range(5):
            bad = group.rank == 1 and k == at
            if bad and error is OSError:
                raise OSError("disk")
            yield None if bad else batch_of(k)

    iterator = batches()
    for _ in range(at):
        pipeline.progress(iterator)
    expected, words = (error, "disk|is None") if group.rank else (CommsError, "rank 1 could not read its next batch")
    with pytest.raises(expected, match=words):
        pipeline.progress(iterator)


@pytest.mark.parametrize("make", [*TRAINING, EvalPipelineSparseDist])
@pytest.mark.parametrize(("at", "error"), [(0, OSError), (0, InputError), (3, OSError)])
def test_a_rank_that_cannot_read_ends_the_pass_on_all_ranks_at_the_same_batch(
    make: Any, at: int, error: type[Exception]
) -> None:
    run_virtual_ranks(2, _failing, make, at, error)


def _all_waited(make: Any) -> tuple[int, list[str]]:
    handles: list[Any] = []
    begin = ProcessGroupComms._all_to_all

    def recorded(self: ProcessGroupComms, *args: Any) -> Any:
        handles.append(begin(self, *args))
        return handles[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupComms, "_all_to_all", recorded)
        group = ProcessGroupComms()
        model = model_of(group)
        pipelined(make(model, dense_optimizer(model), CPU), (batch_of(k) for k in range(2 + group.rank)))
    return len(handles), [handle.title for handle in handles if handle.works]


@pytest.mark.parametrize("make", TRAINING)
def test_no_message_is_in_flight_after_a_pass(make: Any) -> None:
    """A process that exits while gloo receives a message may be aborted."""
    for messages, in_flight in run_ranks(2, _all_waited, make):
        assert messages > 10
        assert in_flight == []


def _counted(group: Group, make: Any, count: int) -> int:
    model = model_of(group)
    pipeline = make(model, dense_optimizer(model), CPU)
    for _ in range(2):
        batches = (batch_of(10 * group.rank + k) for k in range(count + group.rank))
        assert len(pipelined(pipeline, batches)) == count + 1
    return group.traffic["samples"].calls


@pytest.mark.parametrize("make", [*TRAINING, EvalPipelineSparseDist])
def test_routes_carry_the_numbers_of_samples_of_all_but_the_first_batches(make: Any) -> None:
    few, many = (run_virtual_ranks(2, _counted, make, count) for count in (4, 9))
    assert few == many
    assert max(few) <= 3


class _SometimesTables(Clicks):
    """Forwards whose batch has an even number of samples do not read the tables."""

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if len(batch.labels) % 2 or not len(batch.labels):
            return super().forward(batch)
        logits = self.over(torch.cat((batch.dense, batch.dense.new_zeros(len(batch.dense), 32)), dim=1)).squeeze(-1)
        return ((logits - batch.labels) ** 2).mean(), logits.detach()


def _without_routes(group: Group, make: Any, sharded: bool) -> int:
    model = model_of(group if sharded else None, make=_SometimesTables if sharded else Clicks)
    pipeline = make(model, dense_optimizer(model), CPU, group=group)
    sizes = [2, 3, 4, 3, 2, 2, 3]
    return len(
        pipelined(pipeline, (batch_of(k, size) for k, size in enumerate(sizes[: 7 - group.rank * (not sharded)])))
    )


@pytest.mark.parametrize("make", [*TRAINING, EvalPipelineSparseDist])
@pytest.mark.parametrize("sharded", [True, False])
def test_ranks_finish_together_without_a_route_in_every_step(make: Any, sharded: bool) -> None:
    assert run_virtual_ranks(2, _without_routes, make, sharded) == [7, 7]


def _empty_first_pass(group: Group, make: Any) -> list[int]:
    model = model_of(group)
    pipeline = make(model, dense_optimizer(model), CPU)
    counts = [0, 0, 3 * group.rank, 2]
    return [len(pipelined(pipeline, iter([batch_of(k) for k in range(count)]))) for count in counts]


@pytest.mark.parametrize("make", TRAINING)
def test_after_passes_without_batches_uneven_ranks_finish_together(make: Any) -> None:
    assert run_virtual_ranks(2, _empty_first_pass, make) == [[0, 0, 3, 2]] * 2


# Accumulation -------------------------------------------------------------------------------------------------


def _accumulate(group: Group | None, make: Any, count: int, k: int) -> None:
    rank = 0 if group is None else group.rank
    batches = [batch_of(50 * rank + n, 2 + n % 3) for n in range(count)]
    joined = [_joined(batches[start : start + k]) for start in range(0, count, k)]
    model = model_of(group)
    plain_loop(model, dense_optimizer(model), iter(joined))
    wanted = weights_of(model)
    model = model_of(group)
    pipeline = make(model, dense_optimizer(model), CPU, accumulate=k)
    assert len(pipelined(pipeline, iter(batches))) == count
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", TRAINING)
@pytest.mark.parametrize(("count", "k"), [(6, 3), (7, 3), (2, 4)])
def test_accumulated_batches_equal_one_batch_of_all_their_samples(make: Any, count: int, k: int) -> None:
    _accumulate(None, make, count, k)
    run_virtual_ranks(2, _accumulate, make, count, k)


# Wrappers and replicas ----------------------------------------------------------------------------------------


def _wrapped(k: int) -> None:
    group = ProcessGroupComms()

    def trained(batches: list[ClickBatch], use_pipeline: bool, accumulate: int) -> dict[str, torch.Tensor]:
        model = DistributedModelParallel(model_of(), device=CPU, plan={"tables": row_wise()})
        optimizer = dense_optimizer(model)
        if use_pipeline:
            pipelined(TrainPipelineSparseDist(model, optimizer, CPU, accumulate=accumulate), iter(batches))
        else:
            plain_loop(model, optimizer, iter(batches))
        return weights_of(model)

    batches = [batch_of(50 * group.rank + n) for n in range(6)]
    assert_same(trained(batches, True, 1), trained(batches, False, 1))
    wanted = trained([_joined(batches[:k]), _joined(batches[k:])], False, 1)
    for name, weight in trained(batches, True, k).items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)


def test_distributed_model_parallel_trains_and_accumulates() -> None:
    run_ranks(2, _wrapped, 3)


def _replicas() -> None:
    def made(interval: int | None) -> tuple[Any, Any]:
        model = DMPCollection(model_of(), CPU, {"tables": row_wise()}, 2, 1, sync="average", sync_interval=interval)
        return model, dense_optimizer(model)

    rank = ProcessGroupComms().rank
    batches = [batch_of(50 * rank + n) for n in range(5)]
    model, optimizer = made(None)
    for batch in batches:
        plain_loop(model, optimizer, iter([batch]))
        model.sync()
    wanted = weights_of(model)
    for make in TRAINING:
        model, optimizer = made(None)
        pipelined(make(model, optimizer, CPU), iter(batches))
        assert_same(weights_of(model), wanted)
        assert model.unsynced_steps == 0
    model, optimizer = made(2)
    pipelined(TrainPipelineSparseDist(model, optimizer, CPU), iter(batches))
    assert model.unsynced_steps == 1  # its own interval counts


def test_every_pipeline_averages_replicas() -> None:
    run_ranks(2, _replicas)
