"""torch.amp.GradScaler over attached tables and dense layers: the recipe of docs/optimizers.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage import loss_scale

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2, 2]), torch.tensor([1, 2]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
        self.over = nn.Linear(3, 1)
        apply_optimizer_in_backward(SGD(lr=0.1, non_finite="skip"), self.tables.parameters())

    def forward(self, factor: float = 1.0) -> Tensor:
        return (self.over(self.tables(BATCH).values()) * factor).sum()


def test_scaled_training_equals_plain_and_goes_on_after_an_overflow() -> None:
    scaled, plain = Model(), Model()
    plain.load_state_dict(scaled.state_dict())
    optimizers = [torch.optim.SGD(model.over.parameters(), lr=0.1) for model in (scaled, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    groups = scaled.tables.fused_optimizer.param_groups
    plain.tables.fused_optimizer.param_groups[0]["grad_scale"] = 1.0  # the scaler is the other model's
    table = scaled.tables.embedding_bags["t"]
    scales = []
    for step in range(6):
        overflow = step == 3
        before = {name: value.clone() for name, value in scaled.state_dict().items()}
        for optimizer in optimizers:
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
        for group in groups:
            group["grad_scale"] = scaler.get_scale()
        scaler.scale(scaled(float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if overflow:  # nothing moved, the two rows of the batch are counted
            assert all(torch.equal(value, before[name]) for name, value in scaled.state_dict().items())
            assert table.rows.skipped_rows == 2
            continue
        plain().backward()
        optimizers[1].step()
        for got, want in zip(scaled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want)
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0]
    assert table.rows.skipped_rows == 2
    assert table.weight.grad is None


def test_a_scale_that_was_not_written_is_refused_and_no_row_moves() -> None:
    model = Model()
    before = model.tables.embedding_bags["t"].weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match=r"Table 't': got grad_scale=1.0, but a GradScaler .* by 65536.0"):
        scaler.scale(model()).backward()
    assert torch.equal(model.tables.embedding_bags["t"].weight, before)
    for group in model.tables.fused_optimizer.param_groups:
        group["grad_scale"] = scaler.get_scale()
    scaler.scale(model()).backward()
    assert not torch.equal(model.tables.embedding_bags["t"].weight, before)


@pytest.mark.parametrize("idle", ["disabled", "unused", "gone"])
def test_a_scaler_that_scales_nothing_is_no_obstacle(idle: str) -> None:
    model = Model()
    scaler = torch.amp.GradScaler("cpu", enabled=idle != "disabled")
    loss = model()
    if idle != "unused":
        scaler.scale(model().detach())
    if idle == "gone":
        del scaler
    loss.backward()  # raises nothing


@pytest.mark.parametrize("when", ["made before", "made after"])
def test_a_scaler_that_is_first_used_after_some_updates_is_refused_too(when: str) -> None:
    model = Model()
    scaler = torch.amp.GradScaler("cpu") if when == "made before" else None
    for _ in range(2):
        model().backward()
    before = model.tables.embedding_bags["t"].weight.detach().clone()
    scaler = scaler or torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match=r"but a GradScaler multiplies losses by 65536\.0"):
        scaler.scale(model()).backward()
    assert torch.equal(model.tables.embedding_bags["t"].weight, before)


def test_a_process_is_searched_for_scalers_only_when_one_came_or_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, searches, living = Model(), [], loss_scale._living
    monkeypatch.setattr(loss_scale, "_living", lambda classes: searches.append(1) or living(classes))
    model().backward()
    searches.clear()
    for _ in range(3):
        model().backward()
    assert not searches
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        model().backward()
    assert len(searches) == 1
    del scaler
