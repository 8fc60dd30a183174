"""A run on a GPU: batches are brought, and sorted for their updates, beside the steps before them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.cuda.sizes import size
from tests.cuda.test_sharded_ahead import noted
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.synthetic import SyntheticClicks
from tilerec.errors import InputError
from tilerec.models.dlrm import DLRM
from tilerec.parallel.full_state import full_state_dict
from tilerec.pipelines.batch_in_flight import BatchInFlight, Origin
from tilerec.pipelines.device_copy import DeviceCopy
from tilerec.pipelines.routes_ahead import RoutesAhead
from tilerec.pipelines.train_pipelines import PrefetchTrainPipelineSparseDist, TrainPipelineBase
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.storage.table_rows import NonFiniteGradientError
from tilerec.testing.ranks import Ranks
from tilerec.train.config import ParallelConfig, RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.world import World

STEPS = 3
RUN = RunConfig(
    name="small",
    data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=48, held_out_rows=16),
    model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
    train=TrainConfig(batch_size=16, eval_batch_size=16, device="cuda", max_steps=STEPS),
    parallel=ParallelConfig(sharding="row_wise"),
)


Run = tuple[list[Tensor], list[bool]]


def run(ahead: bool) -> Run:
    sorts, real = noted(), RoutesAhead.prefetch
    if not ahead:
        RoutesAhead.prefetch = lambda *_: None  # type: ignore[method-assign]
    try:
        model = train(RUN).model
    finally:
        RoutesAhead.prefetch = real  # type: ignore[method-assign]
    return [value.cpu() for value in model.state_dict().values()], sorts


def run_on_ranks(ahead: bool) -> Run:
    """The tables' part of a run."""
    sorts, device, world = noted(), torch.device("cuda", 0), World(ProcessGroupComms())
    dataset = RUN.data.open()
    torch.manual_seed(0)
    model = world.build(RUN, dataset, device)

    def forward(batch: Batch) -> tuple[Tensor, None]:
        return model(batch.dense_features, batch.sparse_features).square().sum(), None

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    make = PrefetchTrainPipelineSparseDist if ahead else TrainPipelineBase
    pipeline = make(model, optimizer, device, custom_model_fwd=forward, even=False)
    shares = itertools.islice(dataset.train_shares(RUN.train.batch_size), STEPS)
    assert len(list(pipeline.outputs(share.batch for share in shares))) == STEPS
    return [value.cpu() for value in full_state_dict(model).values()], sorts


def assert_same(plain: Run, ahead: Run) -> None:
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ahead[0], strict=True))
    assert plain[1] == [False] * STEPS
    assert ahead[1] == [False] + [True] * (STEPS - 1)  # the first step learns


@pytest.mark.filterwarnings("ignore:.*parallel.*has no effect")
def test_batches_are_sorted_ahead_and_change_no_bit() -> None:
    assert_same(run(False), run(True))


def test_the_host_goes_at_most_three_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.cuda.Event] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waited.append(event))
    ids = KeyedJaggedTensor.from_lengths_sync(["one"], torch.tensor([1]), torch.tensor([1]))
    copy = DeviceCopy(torch.device("cuda"))
    for step in range(6):
        batch = BatchInFlight(Origin(0, step), Batch(torch.ones(1, 1), ids, torch.ones(1)))
        copy(batch, "test")
        assert batch.batch.labels.is_cuda
        copy.arrive(batch)
        assert len(waited) == max(0, step - 2)


def test_batches_of_ranks_are_routed_and_sorted_ahead() -> None:
    with Ranks(2, backend="gloo", timeout_s=size(60, 600)) as ranks:
        for plain, ahead in zip(ranks.run(run_on_ranks, False), ranks.run(run_on_ranks, True), strict=True):
            assert_same(plain, ahead)


@pytest.mark.filterwarnings("ignore:.*parallel.*has no effect", "ignore:invalid value:RuntimeWarning")
def test_a_bad_id_in_the_last_batch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op comes behind that would tell."""
    real = SyntheticClicks.held_out

    def held_out(self: SyntheticClicks, batch_size: int) -> Iterator[Batch]:
        *_, last = real(self, batch_size)
        last.sparse_features.values()[-1] = 1000
        yield last

    monkeypatch.setattr(SyntheticClicks, "held_out", held_out)
    with pytest.raises(InputError, match="id 1000 of feature 'feature_1'"):
        train(RUN)


@pytest.mark.filterwarnings("ignore:.*parallel.*has no effect", "ignore:invalid value:RuntimeWarning")
def test_a_gradient_that_is_not_finite_in_the_last_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = DLRM.forward, itertools.count(1)

    def forward(self: DLRM, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        logits = real(self, dense, sparse)
        if self.training and next(steps) == STEPS:
            logits.register_hook(lambda grad: grad * float("inf"))
        return logits

    monkeypatch.setattr(DLRM, "forward", forward)
    with pytest.raises(NonFiniteGradientError, match=r"row \d+ is not finite"):
        train(RUN)
