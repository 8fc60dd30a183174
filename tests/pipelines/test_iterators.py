"""Iterators: several at a time, more than one epoch, ends, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelines.pipeline_models import batch_of, dense_optimizer, model_of, pipelined, weights_of
from tilerec.errors import ConfigError, InputError
from tilerec.pipelines import (
    EvalPipelineSparseDist,
    Origin,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

CPU = torch.device("cpu")
ALL = [
    TrainPipelineBase, TrainPipelineSparseDistLite, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist,
    EvalPipelineSparseDist,
]  # fmt: skip


class Echo(torch.nn.Module):
    """Returns the batch's first number; one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        return self.weight * batch["x"].sum(), batch["x"][0].item()


def _batches(name: int, count: int) -> Iterator[dict[str, torch.Tensor]]:
    return ({"x": torch.full((2,), 100.0 * name + k)} for k in range(count))


def _pipeline(make: Any) -> Any:
    model = Echo()
    return make(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)


@pytest.mark.parametrize("make", ALL)
@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_any_switching_order_gives_the_batches_of_plain_iterators(
    make: Any, order: list[int], counts: list[int]
) -> None:
    pipeline = _pipeline(make)
    iterators = [_batches(n, count) for n, count in enumerate(counts)]
    plain = [_batches(n, count) for n, count in enumerate(counts)]
    numbers: dict[int, int] = {}
    taken = [0] * 3
    for n in [*order, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]:
        expected = next(plain[n], None)
        if expected is None:
            with pytest.raises(StopIteration):
                pipeline.progress(iterators[n])
            continue
        assert pipeline.progress(iterators[n]) == expected["x"][0].item()
        origin = pipeline.last_origin
        assert numbers.setdefault(n, origin.iterator) == origin.iterator
        assert origin.batch == taken[n]
        taken[n] += 1
    assert taken == counts
    assert len(set(numbers.values())) == len(numbers)


class Epochs:
    """An iterator that begins again after its end, as those of persistent workers."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.at == self.count:
            self.at = 0
            raise StopIteration
        self.at += 1
        return {"x": torch.full((1,), float(self.at))}


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_same_iterator_object_gives_a_second_epoch(make: Any, count: int) -> None:
    pipeline, epochs = _pipeline(make), Epochs(count)
    for number in range(3):
        assert pipelined(pipeline, epochs) == [k + 1.0 for k in range(count)]
        assert pipeline.last_origin == Origin(number, count - 1)


@pytest.mark.parametrize("make", ALL)
def test_a_batch_that_is_none_is_named_after_the_batches_before_it(make: Any) -> None:
    pipeline = _pipeline(make)
    batches = iter([*_batches(0, 2), None, *_batches(1, 1)])
    assert [pipeline.progress(batches), pipeline.progress(batches)] == [0.0, 1.0]
    with pytest.raises(InputError, match="batch 2 of iterator 0 is None; expected a batch"):
        pipeline.progress(batches)
    assert pipelined(pipeline, _batches(2, 2)) == [200.0, 201.0]


@pytest.mark.parametrize("make", ALL)
def test_an_error_of_the_iterator_comes_after_the_batches_before_it(make: Any) -> None:
    def failing() -> Iterator[dict[str, torch.Tensor]]:
        yield from _batches(0, 3)
        raise OSError("disk")

    pipeline, batches = _pipeline(make), failing()
    assert [pipeline.progress(batches) for _ in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(OSError, match="disk"):
        pipeline.progress(batches)
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    assert pipelined(pipeline, _batches(1, 2)) == [100.0, 101.0]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("name", ["forward", "backward", "update"])
def test_after_an_error_in_a_stage_the_next_batch_and_the_next_epoch_work(make: Any, name: str) -> None:
    model = Echo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = []

    def fail(*_: Any) -> None:
        if broken:
            broken.clear()
            raise ArithmeticError(name)

    if name == "forward":
        model.register_forward_hook(fail)
    elif make is EvalPipelineSparseDist:
        return
    elif name == "backward":
        model.weight.register_hook(fail)
    else:
        optimizer.register_step_pre_hook(fail)
    pipeline, batches = make(model, optimizer, CPU), _batches(0, 4)
    assert pipeline.progress(batches) == 0.0
    broken.append(True)
    with pytest.raises(ArithmeticError, match=name):
        pipeline.progress(batches)
    assert pipelined(pipeline, batches) == [2.0, 3.0]
    assert pipelined(pipeline, _batches(1, 2)) == [100.0, 101.0]


def test_iterators_that_are_dropped_free_their_batches() -> None:
    pipeline, batches = _pipeline(TrainPipelineSparseDist), _batches(0, 9)
    pipeline.progress(batches)
    first = weakref.ref(batches)
    del batches
    gc.collect()
    assert first() is None
    assert not pipeline._pipeline._passes.in_flight()


@pytest.mark.parametrize(
    ("make", "most"), [(TrainPipelineBase, 2), (TrainPipelineSparseDistLite, 2), (TrainPipelineSparseDist, 3)]
)
def test_batches_alive_are_counted(make: Any, most: int) -> None:
    """Storages of batches: never more than those in flight, from the reading to the update."""
    alive: set[int] = set()
    counts = []

    def reading() -> Iterator[Any]:
        for k in range(8):
            batch = batch_of(k)
            for tensor in (batch.dense, batch.labels, batch.features.values()):
                alive.add(key := len(counts) * 10 + len(alive) + 1000 * k)
                weakref.finalize(tensor.untyped_storage(), alive.discard, key)
            counts.append(len({one // 1000 for one in alive}))
            yield batch
            del batch, tensor

    model = model_of()
    pipeline = make(model, dense_optimizer(model), CPU)
    assert len(pipelined(pipeline, reading())) == 8
    assert max(counts) == most


def test_batches_that_are_written_to_while_they_wait_are_refused() -> None:
    x = torch.zeros(2)
    pipeline = _pipeline(TrainPipelineSparseDist)
    batches = ({"x": x.fill_(k)} for k in range(5))  # one buffer for all batches
    with pytest.raises(InputError, match=r"batch 0 of iterator 0 was written to after it was read"):
        pipeline.progress(batches)


def test_lists_are_no_iterators() -> None:
    with pytest.raises(ConfigError, match=r"progress: got a list; expected an iterator\. Pass iter"):
        _pipeline(TrainPipelineBase).progress([1, 2])


def test_detach_attach_and_reset_keep_or_drop_batches() -> None:
    pipeline, batches = _pipeline(TrainPipelineSparseDist), _batches(0, 5)
    pipeline.progress(batches)
    model = pipeline.detach()
    assert isinstance(model, Echo)
    assert "forward" not in vars(model)
    assert pipeline.progress(batches) == 1.0  # attached again, batches 1 and 2 were in flight
    pipeline.reset()
    assert pipeline.progress(batches) == 4.0  # batches 2 and 3 were dropped


def test_settings_without_effect_warn_and_name_the_reason() -> None:
    model = Echo()
    with pytest.warns(UserWarning, match=r"TrainPipelineSparseDist: .*execute_all_batches \(every batch"):
        TrainPipelineSparseDist(model, None, CPU, execute_all_batches=False)
    with pytest.warns(UserWarning, match="EvalPipelineSparseDist: .*apply_jit"):
        EvalPipelineSparseDist(model, None, CPU, apply_jit=True)


@pytest.mark.parametrize("make", ALL)
def test_custom_model_fwd_replaces_the_call_of_the_model(make: Any) -> None:
    model = Echo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = make(model, optimizer, CPU, custom_model_fwd=lambda batch: (model.weight * 2, "own"))
    assert pipelined(pipeline, _batches(0, 2)) == ["own", "own"]


def test_a_model_that_returns_no_pair_is_named() -> None:
    model = torch.nn.Identity()
    pipeline = EvalPipelineSparseDist(model, None, CPU)
    with pytest.raises(InputError, match=r"returned a dict; expected \(losses, output\)"):
        pipeline.progress(_batches(0, 1))


def test_a_model_in_eval_mode_is_not_trained() -> None:
    model = model_of().eval()
    before = weights_of(model)
    pipelined(TrainPipelineSparseDist(model, dense_optimizer(model), CPU), map(batch_of, range(3)))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(model).items())
