"""The face of attached tables: their own state and numbers, cached or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.fused import FusedOptimizer
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam
from tilerec.spec.table import EmbeddingBagConfig

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2]), torch.tensor([1, 1]))


def face_of(cached: bool) -> tuple[Any, FusedOptimizer, Any]:
    """A table, the face of its optimizer, and its state there, after one step."""
    module: Any = EmbeddingBagCollection([EmbeddingBagConfig(40, 3, "t")])
    apply_optimizer_in_backward(Adam(lr=0.1), module.parameters())
    if cached:
        cache_tables(module, 1.0)
    face = FusedOptimizer(module)
    module(BATCH).values().sum().backward()
    return module.embedding_bags["t"], face, face.state[face.params["embedding_bags.t.weight"]]


def test_state_is_the_tables_own_and_of_a_cached_table_as_new() -> None:
    table, _, state = face_of(cached=False)
    assert state["exp_avg"] is table.rows.state["exp_avg"]
    _, _, cached = face_of(cached=True)
    assert sorted(cached) == sorted(state)
    assert len(cached) == len(state) == 3
    for name, value in state.items():
        assert torch.equal(cached[name], value)
    assert int((cached["exp_avg"] != 0).sum()) == 6, "two rows of three columns"


def test_state_of_a_cached_table_is_written_in_place_and_not_taken_away() -> None:
    table, _, state = face_of(cached=True)
    with pytest.raises(
        ConfigError, match=r"Table 't': got a deletion of state 'exp_avg'; .* the attached optimizer uses it"
    ):
        del state["exp_avg"]
    state["exp_avg"] = torch.full((40, 3), 2.0)
    assert table.rows.state["exp_avg"].eq(2.0).all()


def test_a_group_has_the_tables_beside_its_numbers() -> None:
    table, face, _ = face_of(cached=False)
    (group,) = face.param_groups
    assert group["params"] == [table.weight]
    assert len(group) == len(list(group)) == 1 + len(table.rows.group)
    group["lr"] = 0.5
    assert table.rows.group["lr"] == 0.5
    assert face.defaults["lr"] == 0.1
    with pytest.raises(ConfigError, match="Attach an optimizer with apply_optimizer_in_backward"):
        face.add_param_group({"params": []})
