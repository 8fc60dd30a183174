"""Towers of a SASRec have the model's last states and its items' rows, for any lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.test_sasrec import DIM, LONGEST, _features, _model
from tilerec.errors import ConfigError
from tilerec.models.sasrec import SASRec
from tilerec.models.sasrec_tower import SASRecTower
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def history(sequences: list[list[int]]) -> KeyedJaggedTensor:
    flat = torch.tensor([item for one in sequences for item in one], dtype=torch.int64)
    return KeyedJaggedTensor(["history"], flat, lengths=torch.tensor([len(one) for one in sequences]))


def last_states(model: SASRec, sequences: list[list[int]]) -> Tensor:
    ends = torch.tensor([len(one) for one in sequences]).cumsum(0) - 1
    return model(torch.zeros(len(sequences), 0), _features(sequences)).states[ends]


@pytest.mark.parametrize("heads", [1, 2])
def test_the_query_side_has_the_state_after_the_newest_item(heads: int) -> None:
    model = _model(heads, dropout=0.3).eval()
    tower = SASRecTower(model, "query").eval()
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]]
    torch.testing.assert_close(tower(history(sequences)), last_states(model, sequences), rtol=1e-5, atol=1e-6)
    assert set(tower.state_dict()) <= set(model.state_dict())


def test_samples_without_items_get_zeros_and_the_newest_items_of_long_ones_count() -> None:
    model = _model().eval()
    tower = SASRecTower(model, "query").eval()
    long = [1, 2, 3, 4, 5, 6, 7, 8]
    found = tower(history([[], long, [3], []]))
    assert not found[[0, 3]].any()
    torch.testing.assert_close(found[[1, 2]], last_states(model, [long[-LONGEST:], [3]]), rtol=1e-5, atol=1e-6)
    assert tower(history([])).shape == (0, DIM)
    assert not tower(history([[], []])).any()


def test_the_candidate_side_has_the_rows_of_items() -> None:
    model = _model().eval()
    tower = SASRecTower(model, "candidate").eval()
    items = KeyedJaggedTensor(["item"], torch.tensor([3, 0, 11]), lengths=torch.tensor([1, 0, 2]))
    rows = model.embedding_collection.embeddings["items"].weight
    assert torch.equal(tower(items), torch.stack([rows[3], torch.zeros(DIM), rows[11]]))
    assert list(tower.state_dict()) == ["embedding_collection.embeddings.items.weight"]


def test_another_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="got side='left'; expected 'query' or 'candidate'"):
        SASRecTower(_model(), "left")
