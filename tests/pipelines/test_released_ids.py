"""`free_features_storage_early`: ids are released once they are sorted; bits and the caller's batches stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from tests.pipelines.test_models import Branching, Built, Twice, TwoPlaces
from tests.pipelines.test_models import Pair as NestedBatch
from tests.pipelines.test_tables import Managed
from tests.sharding.managed_models import local_batch, sizes_of
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel import reshard
from tilerec.parallel.compiled_model import compile_model
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from tilerec.pipelines.released_ids import ReleasedIds, without_ids
from tilerec.planner import row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.testing import random_batch, run_ranks, run_virtual_ranks

CPU = torch.device("cpu")
ROUTING = [TrainPipelineSparseDistLite, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]
KINDS = ["table_wise", "column_wise", "row_wise", "table_column_wise", "data_parallel", "grid_shard"]


def _early(make: Any, model: nn.Module, **options: Any) -> Any:
    return make(model, dense_optimizer(model), CPU, free_features_storage_early=True, **options)


def _compare(
    group: Group, kind: str, make: Callable[[], Any], batch: Callable[[int], Any], even: bool = True
) -> None:  # fmt: skip
    batches = [batch(100 * group.rank + k) for k in range(7)]
    model = model_of(group, kind, make)
    expected = plain_loop(model, dense_optimizer(model), iter(batches * 2))
    wanted = weights_of(model)
    for pipelines in ROUTING:
        model = model_of(group, kind, make)
        pipeline = _early(pipelines, model, even=even)
        found = [*pipelined(pipeline, iter(batches)), *pipelined(pipeline, iter(batches))]  # the same batches again
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), pipelines
        assert_same(weights_of(model), wanted)
    model.eval()
    with torch.no_grad():
        expected = [model(batch)[1] for batch in batches]
    pipeline = EvalPipelineSparseDist(model, None, CPU, free_features_storage_early=True, even=even)
    found = pipelined(pipeline, iter(batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tiling_has_the_bits_of_the_plain_loop_and_reads_the_callers_batches_again(ranks: int, kind: str) -> None:
    run_virtual_ranks(ranks, _compare, kind, Clicks, lambda seed: batch_of(seed, 1 + seed % 3))


def _nested(seed: int) -> NestedBatch:
    a, b = batch_of(seed), batch_of(500 + seed)
    return NestedBatch({"ids": (a.features, b.features)}, [a.dense, a.labels])


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (Twice, batch_of),
        (Built, batch_of),
        (Branching, lambda seed: batch_of(seed, 1 + seed % 100 % 3)),
        (TwoPlaces, _nested),
    ],
)
def test_forwards_of_any_shape(make: Any, batch: Any) -> None:
    run_virtual_ranks(2, _compare, "row_wise", make, batch)


class Pooled(nn.Module):
    """Tables whose features have weights, a mean, or numbers of bags of their own; the batch is the features."""

    def __init__(self, *, weighted: bool, pooling: PoolingType) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(23, 8, f"t{key}", feature_names=[key], pooling=pooling) for key in "ab"]
        self.tables = EmbeddingBagCollection(configs, is_weighted=weighted)
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        logits = self.over(self.tables(features).values())
        return logits.square().mean(), logits.detach()


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(("weighted", "pooling"), [(True, PoolingType.SUM), (False, PoolingType.MEAN)])
def test_weights_means_and_variable_batches(*, weighted: bool, pooling: PoolingType, variable: bool) -> None:
    def batch(seed: int) -> KeyedJaggedTensor:
        return random_batch(["a", "b"], 23, 4, weighted=weighted, variable=variable, seed=seed)

    make = partial(Pooled, weighted=weighted, pooling=pooling)
    run_virtual_ranks(2, _compare, "row_wise", make, batch, not variable)


class Sequences(nn.Module):
    """Rows of single ids, with the ids in the output if `ids` is set."""

    def __init__(self, *, ids: bool) -> None:
        super().__init__()
        configs = [EmbeddingConfig(23, 8, f"t{key}", feature_names=[key]) for key in "ab"]
        self.tables = EmbeddingCollection(configs, need_indices=ids)
        self.ids = ids

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found = self.tables(features)
        rows = torch.cat([found[key].values() for key in "ab"])
        ids = torch.cat([found[key].weights() for key in "ab"]) if self.ids else torch.empty(0)
        return rows.square().sum(), torch.cat((rows.detach().flatten(), ids))


def _compare_sequences(group: Group, ids: bool) -> None:
    batches = [random_batch(["a", "b"], 23, 4, seed=100 * group.rank + k) for k in range(7)]
    results = []
    for make in (None, *ROUTING):
        model = Sequences(ids=ids)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        apply_optimizer_in_backward(RowWiseAdagrad, list(model.parameters()), {"lr": 0.1})
        shard(model, plan=row_wise(), mesh=group)
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        if make is None:
            found = plain_loop(model, other, iter(batches))
        else:
            found = pipelined(make(model, other, CPU, free_features_storage_early=True), iter(batches))
        results.append((found, full_state_dict(model)))
    (expected, state), *rest = results
    for found, own in rest:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(torch.equal(own[name], value) for name, value in state.items())


@pytest.mark.parametrize("ids", [False, True])
def test_sequences_with_and_without_their_ids_in_the_output(*, ids: bool) -> None:
    run_virtual_ranks(2, _compare_sequences, ids)


def _managed(group: Group) -> None:
    batches = [local_batch(step % 4, group, sizes_of(2)) for step in range(8)]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    results = []
    for early in (False, True):
        model = Managed("lru and lfu, shared rows")
        shard(model, plan=row_wise(), mesh=group)
        pipeline = TrainPipelineSparseDist(model, other, CPU, free_features_storage_early=early)
        results.append((pipelined(pipeline, iter(batches)), full_state_dict(model)))
    (expected, wanted), (found, state) = results
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


def test_managed_ids_are_kept() -> None:
    run_virtual_ranks(2, _managed)


def _compiled() -> None:
    group = ProcessGroupComms()
    batches = [batch_of(100 * group.rank + k, 3 + k % 2) for k in range(6)]
    model = model_of(group)
    expected = plain_loop(model, dense_optimizer(model), iter(batches))
    model = model_of(group)
    compiled = compile_model(model, backend="aot_eager")
    pipeline = TrainPipelineSparseDist(compiled, dense_optimizer(model), CPU, free_features_storage_early=True)
    found = pipelined(pipeline, iter(batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert pipeline.report()[0].ahead == 5


def test_compiled_models_keep_their_ids() -> None:
    run_ranks(2, _compiled)


class Reading(Clicks):
    """Reads the ids besides its tables."""

    def forward(self, batch: Any) -> Any:
        loss, output = super().forward(batch)
        return loss + 0.0 * batch.features.values().sum(), output


def _read(group: Group) -> None:
    model = model_of(group, make=Reading)
    pipeline, batches = _early(TrainPipelineSparseDist, model), map(batch_of, range(6))
    pipeline.progress(batches)  # nothing is routed ahead yet
    refusal = r"aten\.sum.* reads ids that were released .* Leave free_features_storage_early out"
    with pytest.raises(InputError, match=refusal):
        pipeline.progress(batches)


def test_a_model_that_reads_released_ids_is_refused() -> None:
    run_virtual_ranks(2, _read)


def _write(group: Group) -> None:
    model = model_of(group)
    pipeline = _early(TrainPipelineSparseDist, model)
    batches = [batch_of(k) for k in range(6)]
    iterator = iter(batches)
    pipeline.progress(iterator)
    batches[2].dense.add_(1)
    pipeline.progress(iterator)
    with pytest.raises(InputError, match="batch 2 of iterator 0 was written to after it was read"):
        pipeline.progress(iterator)


def test_writes_to_the_other_tensors_of_a_waiting_batch_are_detected() -> None:
    run_virtual_ranks(2, _write)


def _reshard(group: Group) -> None:
    model = model_of(group)
    pipeline, batches = _early(TrainPipelineSparseDist, model), map(batch_of, range(8))
    pipeline.progress(batches)
    pipeline.progress(batches)
    reshard(model, {"tables": dict.fromkeys("tu", ParameterSharding("table_wise", ranks=[0]))})
    for _ in range(2):  # two batches were in flight
        with pytest.raises(InputError, match="not resharded while batches are in flight"):
            pipeline.progress(batches)
    assert len(pipelined(pipeline, batches)) == 4


def test_batches_in_flight_are_refused_after_a_reshard_and_later_ones_train() -> None:
    run_virtual_ranks(2, _reshard)


def test_released_ids_have_no_memory_and_views_without_memory() -> None:
    features = random_batch(["a", "b"], 23, 4)
    released = without_ids(features)
    ids = released.values()
    assert isinstance(ids, ReleasedIds)
    assert (ids.shape, ids.dtype, ids.device) == (features.values().shape, torch.int64, CPU)
    assert released.length_per_key() == features.length_per_key()
    assert isinstance(released["b"].values(), ReleasedIds)
    assert released["b"].values().shape == features["b"].values().shape
    assert ids.new_empty(3).shape == (3,)
    for read in (lambda: ids + 1, lambda: ids.max(), lambda: ids.add_(1), lambda: torch.cat((torch.ones(1), ids))):
        with pytest.raises(InputError, match="reads ids that were released"):
            read()
