"""Managed collision on a GPU: the host's map and rows, nothing waits, and a captured step counts on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules import test_managed_on_device as cases
from tilerec.comms.group import Group
from tilerec.modules import managed_embedding
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.modules.row_reset import reset_rows
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage.prefetched_results import StreamEvent
from tilerec.testing.virtual import run_virtual_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, BATCH, STEPS = 64, 32, 5


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    """From the second step on: kernels are compiled, and layouts sent, in the first."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def users(device: str, policy: str = "LRU_EVICTION") -> ManagedCollisionEmbeddingBagCollection:
    torch.manual_seed(3)
    configs = [EmbeddingBagConfig(ROWS, 8, "t", feature_names=["a", "b"])]
    ids = HashZchManagedCollisionModule(ROWS, device, 4, eviction_policy_name=policy)
    made = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs), ManagedCollisionCollection({"t": ids}, configs), True
    ).to(device)
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1, capturable=True), made.parameters())
    return made


def batch(step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50 + 40 * step, (2 * BATCH,), generator=generator) * 10**15 - 7
    lengths = torch.tensor([2, 0, 1, 1]).repeat(BATCH // 2)
    return KeyedJaggedTensor(["a", "b"], ids, lengths=lengths, length_per_key=[BATCH, BATCH])


def train(module: Any, features: KeyedJaggedTensor) -> list[Tensor]:
    pooled, remapped = module(features)
    pooled.values().square().sum().backward()
    return [pooled.values().detach(), remapped.values()]


def same(module: Any, host: Any) -> None:
    state = host.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.cpu(), state[name], rtol=0, atol=1e-5 if "weight" in name else 0)
    assert module.stats() == host.stats()


@pytest.mark.filterwarnings("ignore:Table 't':UserWarning")
@pytest.mark.parametrize("kind", cases.MODULES)
def test_a_gpu_makes_the_map_and_the_rows_of_the_host(kind: str) -> None:
    host, module = (cases.users(kind, RowWiseAdagrad(lr=0.1)) for _ in range(2))
    module.cuda()
    for step in range(cases.STEPS):
        cases.TIME[0] = step // 2
        outs = []
        for own, device in ((host, "cpu"), (module, "cuda")):
            out, remapped = own(cases.batch(step).to(device))
            assert remapped is not None
            out.values().square().sum().backward()
            outs.append((out.values().detach().cpu(), remapped.values().cpu(), remapped.lengths().cpu()))
        torch.testing.assert_close(outs[0][0], outs[1][0], rtol=0, atol=1e-5)
        assert torch.equal(outs[0][1], outs[1][1])
        assert torch.equal(outs[0][2], outs[1][2])
    same(module, host)
    assert module.inspect("a", 10**15 - 5) == host.inspect("a", 10**15 - 5)
    cases.TIME[0] = 0


@pytest.mark.usefixtures("waiting_is_an_error")
@pytest.mark.parametrize("policy", ["LRU_EVICTION", "LFU_EVICTION"])
def test_training_and_evaluating_do_not_wait(policy: str) -> None:
    module, host = users("cuda", policy), users("cpu", policy)
    batches = [batch(step).to("cuda") for step in range(STEPS)]
    torch.cuda.synchronize()
    for step, features in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        train(module, features)
    module.eval()(batches[0])
    module(batches[1])
    torch.cuda.set_sync_debug_mode("default")
    for step in range(STEPS):
        train(host, batch(step))
    host.eval()(batch(0))
    host(batch(1))
    same(module, host)
    assert host.stats()["t"].total.evictions > 10


def test_a_captured_step_is_the_next_one_at_every_replay() -> None:
    module, host, place = users("cuda"), users("cpu"), batch(0).to("cuda")
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        train(module, place)
    torch.cuda.current_stream().wait_stream(warm)
    train(host, batch(0))
    place.values().copy_(batch(1).values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled, rows = train(module, place)
    # A GPU runs nothing while it captures; the simulated one does.
    captured = module.managed_collision_collection.modules_by_table["t"].step
    for step in range(1, STEPS):
        if step >= captured:
            place.values().copy_(batch(step).values())
            graph.replay()
        wanted = train(host, batch(step))
        torch.testing.assert_close(pooled.cpu(), wanted[0], rtol=0, atol=1e-5)
        assert torch.equal(rows.cpu(), wanted[1])
    same(module, host)
    assert module.managed_collision_collection.modules_by_table["t"].step == STEPS
    assert host.stats()["t"].total.evictions > 10


def test_ids_and_steps_move_between_devices() -> None:
    module, host = users("cuda"), users("cpu")
    for step in range(2):
        train(module, batch(step).to("cuda"))
        train(host, batch(step))
    module.cpu()
    for own in (module, host):
        train(own, batch(2))
    same(module, host)
    module.cuda()
    train(module, batch(3).to("cuda"))
    train(host, batch(3))
    same(module, host)


@pytest.mark.parametrize("attached", [True, False])
def test_rows_that_were_reset_in_between_are_not_those_that_weights_gradients_are_of(attached: bool) -> None:
    table = EmbeddingBagConfig(16, 4, "t", feature_names=["f"])
    module = EmbeddingBagCollection([table], device=torch.device("cuda"), is_weighted=True)
    if attached:
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    with torch.no_grad():
        module.embedding_bags["t"].weight.fill_(7.0)
    weights = torch.ones(3, device="cuda", requires_grad=True)
    ids, lengths = torch.arange(1, 4, device="cuda"), torch.tensor([2, 1], device="cuda")
    out = module(KeyedJaggedTensor(["f"], ids, weights=weights, lengths=lengths)).values().sum()
    reset_rows(module.embedding_bags["t"], torch.tensor([2, -1], device="cuda"))
    out.backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [28.0] * 3


def test_rows_are_reset_behind_the_stream_that_mapped_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their numbers are no other batch's while they are."""
    waited: list[Tensor | None] = []
    reset: list[Tensor] = []
    monkeypatch.setattr(StreamEvent, "wait", lambda _, tensors: waited.extend(tensors))

    def noted(table: Any, rows_N: Tensor) -> None:
        assert any(tensor is rows_N for tensor in waited)
        reset.append(rows_N)

    monkeypatch.setattr(managed_embedding, "reset_rows", noted)

    def run(group: Group) -> None:
        module: Any = users("cuda")
        side = torch.cuda.Stream()
        shard(module, {"t": row_wise()}, mesh=group, device="cuda")
        with torch.cuda.stream(side):
            routed = module.route(batch(0).to(torch.device("cuda")))
        with torch.no_grad():
            module(routed)

    run_virtual_ranks(1, run)
    assert reset
