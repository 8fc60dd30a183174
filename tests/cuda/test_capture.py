"""Whole training steps in CUDA graphs: replays go on as eager steps do, bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.cuda.sizes import SIMULATED, size
from tests.optim.capturable_specs import SPECS
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec
from tilerec.spec.table import EmbeddingBagConfig

GPU = torch.device("cuda", 0)
BATCH, LENGTH = size(512, 3), size(10, 2)
STEPS = 5


class Model(nn.Module):
    """Two tables of bfloat16 (rounded at random) and one of float32, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(11, 8, "a", feature_names=["x"], dtype=torch.bfloat16),
            EmbeddingBagConfig(7, 16, "b", feature_names=["y", "x"], dtype=torch.bfloat16),
            EmbeddingBagConfig(9, 4, "c", feature_names=["y"]),
        ]
        self.tables = EmbeddingBagCollection(tables, device=GPU)
        self.over = nn.Linear(44, 1, device=GPU)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(features).values().float()).square().mean()


def batches() -> list[KeyedJaggedTensor]:
    """Alike in everything but ids."""
    made = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 7, (2 * BATCH * LENGTH,), generator=generator)
        lengths = torch.full((2 * BATCH,), LENGTH)
        made.append(KeyedJaggedTensor(["x", "y"], ids, lengths=lengths).to(GPU))
    return made


def attached(spec: OptimizerSpec, lr: Any, capturable: bool) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    settings = {key: value for key, value in spec.to_json().items() if key not in ("optimizer", "lr", "capturable")}
    apply_optimizer_in_backward(type(spec), model.tables.parameters(), {"lr": lr, "capturable": capturable, **settings})
    return model, torch.optim.SGD(model.over.parameters(), lr=0.05, foreach=False)


def left(model: Model) -> list[Tensor]:
    states = model.tables.fused_optimizer.state_dict()["state"].values()
    slots = [value for own in states for _, value in sorted(own.items())]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *slots)]


def captured(model: Model, dense: torch.optim.Optimizer, features: KeyedJaggedTensor) -> torch.cuda.CUDAGraph:
    """A graph of a whole step that reads this batch. The step before the capture compiles, and changes nothing."""
    before = [tensor.clone() for tensor in _all_state(model)]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        _step(model, dense, features)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _step(model, dense, features)
    with torch.no_grad():
        for tensor, old in zip(_all_state(model), before, strict=True):
            tensor.copy_(old)
    return graph


def _all_state(model: Model) -> list[Tensor]:
    rows = [table.rows for table in model.tables.embedding_bags.values()]
    return [
        *(p.detach() for p in model.parameters()),
        *(value for own in rows for value in own.state.values()),
    ]


def _step(model: Model, dense: torch.optim.Optimizer, features: KeyedJaggedTensor) -> None:
    dense.zero_grad(set_to_none=False)
    model(features).backward()
    dense.step()


def run(
    spec: OptimizerSpec,
    lr: Any,
    capturable: bool,
    replayed: bool,
    schedule: Callable[[Any], Any] | None = None,
) -> Sequence[Tensor]:
    model, dense = attached(spec, lr, capturable)
    for p in model.over.parameters():
        p.grad = torch.zeros_like(p)
    face = model.tables.fused_optimizer
    scheduler = None if schedule is None else schedule(face)
    seen = batches()
    static = batches()[0]
    graph = captured(model, dense, static) if replayed else None
    for features in seen:
        if graph is None:
            _step(model, dense, features)
        else:
            static.values().copy_(features.values())
            graph.replay()
        face.step()
        if scheduler is not None:
            scheduler.step()
    return left(model)


@pytest.mark.parametrize("name", [*SPECS] if not SIMULATED else ["adam", "partial_rowwise_lamb"])
def test_replays_of_a_step_have_the_bits_of_eager_steps(name: str) -> None:
    """By numbers without a graph, by tensors without one, by tensors with one."""
    eager = run(SPECS[name], 0.1, False, False)
    for replayed in (False, True):
        other = run(SPECS[name], 0.1, True, replayed)
        for a, b in zip(eager, other, strict=True):
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    counts = [int(t) for t in eager if t.dtype == torch.int64]
    assert counts == [STEPS] * 3


@pytest.mark.parametrize("tensor", [True, False])
def test_replays_follow_a_schedule(tensor: bool) -> None:
    """A number that is written and a tensor that is filled reach the graph alike."""

    def schedule(face: Any) -> Any:
        return ExponentialLR(face, 0.5)

    spec = Adam(lr=0.1)
    eager = run(spec, 0.1, False, False, schedule)
    lr = torch.tensor(0.1, dtype=torch.float64, device=GPU) if tensor else 0.1
    for a, b in zip(eager, run(spec, lr, True, True, schedule), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("spec", [SGD(lr=0.1), Adam(lr=0.1)], ids=["sgd", "adam"])
def test_a_capture_without_capturable_says_what_to_pass(spec: OptimizerSpec) -> None:
    model, dense = attached(spec, 0.1, False)
    features = batches()[0]
    _step(model, dense, features)
    before = left(model)
    words = r"Attach the optimizer with \{'capturable': True\}"
    with pytest.raises(ConfigError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(features).backward()
    torch.cuda.synchronize()
    for a, b in zip(before, left(model), strict=True):
        assert torch.equal(a, b)


def test_an_update_by_tensors_does_not_wait() -> None:
    model, dense = attached(Adam(lr=0.1), 0.1, True)
    features = batches()[0]
    _step(model, dense, features)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                _step(model, dense, features)
                model.tables.fused_optimizer.param_groups[0]["lr"] *= 0.5
    finally:
        torch.cuda.set_sync_debug_mode("default")
    table = model.tables.embedding_bags["a"].rows
    assert table.state["step"].device == GPU
    assert table.updates == 4


def test_counts_and_rates_move_with_the_tables() -> None:
    model, dense = attached(Adam(lr=0.1), 0.1, True)
    _step(model, dense, batches()[0])
    table = model.tables.embedding_bags["a"].rows
    model.tables.to("cpu")
    assert table.state["step"].device.type == "cpu"
    assert table.updates == 1
    model.tables.to(GPU)
    assert table.state["step"].device == GPU
    _step(model, dense, batches()[1])
    assert table.updates == 2


def test_rows_that_replays_skip_are_all_counted() -> None:
    """However many replays there are from look to look."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["f"])], device=GPU)
    apply_optimizer_in_backward(SGD(lr=0.1, non_finite="skip", capturable=True), module.parameters())
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 2]), lengths=torch.tensor([1, 2])).to(GPU)
    factor = torch.full((2, 1), float("inf"), device=GPU)
    rows = module.embedding_bags["t"].rows

    def step() -> None:
        (module(batch).values() * factor).sum().backward()

    step()
    assert rows.skipped_rows == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert rows.skipped_rows == 2
    for bad in (2, 0, 1, 2, 0):
        factor.fill_(1.0)
        factor[:bad] = float("inf")
        graph.replay()
    assert rows.skipped_rows == 2 + 5
    assert rows.skipped_rows == 2 + 5
    graph.replay()
    step()
    assert rows.skipped_rows == 2 + 5
    factor.fill_(float("nan"))
    graph.replay()
    step()
    assert rows.skipped_rows == 2 + 5 + 2 + 2
