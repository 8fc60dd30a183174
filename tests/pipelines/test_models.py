"""Forwards of any shape: branches, repeated calls, features built by the model, other batch classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.pipelines.pipeline_models import (
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
from tilerec.errors import InputError
from tilerec.pipelines import TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite
from tilerec.sharding.exchange import RoutedFeatures
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.testing import run_virtual_ranks

CPU = torch.device("cpu")


class Branching(Clicks):
    """Calls its tables in some steps only: the branch depends on a tensor."""

    def forward(self, batch: Any) -> Any:
        if batch.labels.shape[0] % 2:  # the same on all ranks
            return super().forward(batch)
        logits = self.over(torch.cat((batch.dense, batch.dense.new_ones(len(batch.labels), 32)), 1)).squeeze(-1)
        if logits.sum() > 1e9:
            raise AssertionError
        return (logits - batch.labels).square().mean(), logits.detach()


class Twice(Clicks):
    """Calls its tables twice on the same features."""

    def forward(self, batch: Any) -> Any:
        loss, output = super().forward(batch)
        again, _ = super().forward(batch)
        return loss + again, output


class Built(Clicks):
    """Builds its features itself."""

    def forward(self, batch: Any) -> Any:
        batch = type(batch)(batch.features.permute([2, 0, 1]), batch.dense, batch.labels)
        return super().forward(batch)


class Writing(Clicks):
    """Writes to its features before it looks them up."""

    def forward(self, batch: Any) -> Any:
        batch.features.values().add_(0)
        return super().forward(batch)


def _compare(group: Group, make: Any, pipelines: Any) -> tuple[int, int, int]:
    batches = [batch_of(100 * group.rank + k, 1 + k % 3) for k in range(9)]
    model = model_of(group, make=make)
    expected = plain_loop(model, dense_optimizer(model), iter(batches))
    wanted = weights_of(model)
    model = model_of(group, make=make)
    pipeline = pipelines(model, dense_optimizer(model), CPU)
    found = pipelined(pipeline, iter(batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same(weights_of(model), wanted)
    (report,) = pipeline.report()
    return report.ahead, report.in_forward, report.built


@pytest.mark.parametrize("pipelines", [TrainPipelineSparseDistLite, TrainPipelineSparseDist])
@pytest.mark.parametrize(("make", "counts"), [(Branching, (5, 1, 0)), (Twice, (16, 2, 0)), (Built, (0, 9, 9))])
def test_forwards_of_any_shape_have_the_bits_of_the_plain_loop(
    make: Any, counts: tuple[int, ...], pipelines: Any
) -> None:
    assert set(run_virtual_ranks(2, _compare, make, pipelines)) == {counts}


def _write(group: Group) -> None:
    model = model_of(group, make=Writing)
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
    batches = map(batch_of, range(4))
    pipeline.progress(batches)  # nothing is routed ahead yet
    with pytest.raises(InputError, match=r"features at \.features were written to after they were routed"):
        pipeline.progress(batches)


def test_features_that_a_forward_writes_to_are_refused() -> None:
    run_virtual_ranks(2, _write)


class Pair(NamedTuple):
    """A batch as a named tuple."""

    first: dict[str, Any]
    rest: list[Tensor]


class TwoPlaces(Clicks):
    """Reads two places of a nested batch."""

    def forward(self, batch: Any) -> Any:
        pooled = sum(self.tables(features).values() for features in batch.first["ids"])
        logits = self.over(torch.cat((batch.rest[0], pooled), dim=1)).squeeze(-1)
        return (logits - batch.rest[1]).square().mean(), logits.detach()


def _nested(group: Group) -> tuple[str, ...]:
    def batches() -> list[Pair]:
        made = [(batch_of(20 * group.rank + k), batch_of(500 + k)) for k in range(6)]
        return [Pair({"ids": (a.features, b.features)}, [a.dense, a.labels]) for a, b in made]

    model = model_of(group, make=TwoPlaces)
    plain_loop(model, dense_optimizer(model), iter(batches()))
    wanted = weights_of(model)
    model = model_of(group, make=TwoPlaces)
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
    pipelined(pipeline, iter(batches()))
    assert_same(weights_of(model), wanted)
    (report,) = pipeline.report()
    assert (report.ahead, report.in_forward) == (10, 2)
    return report.paths


def test_features_are_found_at_their_places_in_nested_batches() -> None:
    expected = ("[0]['ids'][0]", "[0]['ids'][1]")
    assert run_virtual_ranks(2, _nested) == [expected, expected]


def _bad_ids(group: Group, make: Any) -> str:
    model = model_of(group)
    pipeline = make(model, dense_optimizer(model), CPU)
    batches = [batch_of(k) for k in range(6)]
    if group.rank:
        bad = batches[3].features
        values = bad.values().clone()
        values[0] = 99
        batches[3].features = KeyedJaggedTensor(bad.keys(), values, lengths=bad.lengths())
    iterator = iter(batches)
    for _ in range(3):
        pipeline.progress(iterator)
    with pytest.raises(InputError) as raised:
        pipeline.progress(iterator)
    assert len(pipelined(pipeline, iterator)) == 2
    assert len(pipelined(pipeline, iter(batches[:3]))) == 3
    return str(raised.value)


@pytest.mark.parametrize("make", [TrainPipelineBase, TrainPipelineSparseDistLite, TrainPipelineSparseDist])
def test_bad_ids_of_one_rank_raise_on_all_ranks_at_their_batch_and_training_goes_on(make: Any) -> None:
    own, other = run_virtual_ranks(2, _bad_ids, make)
    assert "99" in other
    assert "Rank 1 refused its batch" in own


def test_a_message_that_fails_raises_at_the_turn_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch_of(k) for k in range(6)]

    def receive(routed: RoutedFeatures) -> None:
        if routed.features is batches[2].features:
            raise InputError("the message is lost")

    def fn(group: Group) -> int:
        model = model_of(group)
        pipeline, iterator = TrainPipelineSparseDist(model, dense_optimizer(model), CPU), iter(batches)
        pipeline.progress(iterator)
        pipeline.progress(iterator)
        with pytest.raises(InputError, match="the message is lost"):
            pipeline.progress(iterator)
        return len(pipelined(pipeline, iterator))

    monkeypatch.setattr(RoutedFeatures, "receive", receive)
    assert run_virtual_ranks(1, fn) == [3]
