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
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.storage.table_rows import NonFiniteGradientError
from tilerec.testing.ranks import Ranks
from tilerec.train.config import ParallelConfig, RunConfig, TrainConfig
from tilerec.train.device_prefetcher import DevicePrefetcher
from tilerec.train.loop import train
from tilerec.train.world import World

STEPS = 2
RUN = RunConfig(
    name="small",
    data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=32, held_out_rows=16),
    model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
    train=TrainConfig(batch_size=16, eval_batch_size=16, device="cuda", max_steps=STEPS),
    parallel=ParallelConfig(sharding="row_wise"),
)


Run = tuple[list[Tensor], list[bool]]


def as_it_is(self: DevicePrefetcher, batch: Batch) -> Batch:
    return batch.to("cuda")


def run(ahead: bool) -> Run:
    sorts, real = noted(), DevicePrefetcher.__call__
    if not ahead:
        DevicePrefetcher.__call__ = as_it_is  # type: ignore[method-assign]
    try:
        model = train(RUN).model
    finally:
        DevicePrefetcher.__call__ = real  # type: ignore[method-assign]
    return [value.cpu() for value in model.state_dict().values()], sorts


def run_on_ranks(ahead: bool) -> Run:
    """The tables' part of a run."""
    sorts, device, world = noted(), torch.device("cuda", 0), World(ProcessGroupComms())
    dataset = RUN.data.open()
    torch.manual_seed(0)
    model = world.build(RUN, dataset, device)
    bring = DevicePrefetcher(model, device)
    for share in itertools.islice(dataset.train_shares(RUN.train.batch_size), STEPS):
        batch = bring(share.batch) if ahead else share.batch.to(device)
        assert isinstance(batch.sparse_features, KeyedJaggedTensor) != ahead
        model(batch.dense_features, batch.sparse_features).square().sum().backward()
    return [value.cpu() for value in full_state_dict(model).values()], sorts


def assert_same(plain: Run, ahead: Run) -> None:
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ahead[0], strict=True))
    assert plain[1] == [False] * STEPS
    assert ahead[1] == [True] * STEPS


@pytest.mark.filterwarnings("ignore:.*parallel.*has no effect")
def test_batches_are_sorted_ahead_and_change_no_bit() -> None:
    assert_same(run(False), run(True))


def test_the_host_goes_at_most_three_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.cuda.Event] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waited.append(event))
    ids = KeyedJaggedTensor.from_lengths_sync(["one"], torch.tensor([1]), torch.tensor([1]))
    bring = DevicePrefetcher(torch.nn.Identity(), torch.device("cuda"))
    for step in range(6):
        bring(Batch(torch.ones(1, 1), ids, torch.ones(1)))
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
