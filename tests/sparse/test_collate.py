"""`default_collate` and `DataLoader` over keyed jagged tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from tilerec.errors import InputError
from tilerec.sparse import JaggedTensor, KeyedJaggedTensor, collate_features, jt_is_equal, kjt_is_equal


def _sample(a: list[int], b: list[int], weighted: bool = False) -> KeyedJaggedTensor:
    ids = torch.tensor([*a, *b])
    return KeyedJaggedTensor(
        ["a", "b"], ids, ids.float() / 2 if weighted else None, lengths=torch.tensor([len(a), len(b)])
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_become_one_batch_in_their_order(weighted: bool) -> None:
    samples = [_sample([1, 2], [], weighted), _sample([], [3], weighted), _sample([4], [5, 6], weighted)]
    ids = torch.tensor([1, 2, 4, 3, 5, 6])
    expected = KeyedJaggedTensor(
        ["a", "b"], ids, ids.float() / 2 if weighted else None, lengths=torch.tensor([2, 0, 1, 0, 1, 2])
    )
    assert kjt_is_equal(default_collate(samples), expected)
    # Batches of batches: the second tensor has two samples.
    assert kjt_is_equal(collate_features([samples[0], collate_features(samples[1:])]), expected)


def test_a_data_loader_takes_records_with_features() -> None:
    records = [{"features": _sample([i], [i, i]), "label": torch.tensor(float(i))} for i in range(5)]
    sizes = [(batch["features"].stride(), batch["label"].numel()) for batch in DataLoader(records, batch_size=2)]
    assert sizes == [(2, 2), (2, 2), (1, 1)]


def test_bags_are_joined() -> None:
    one = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
    other = JaggedTensor(torch.tensor([3]), lengths=torch.tensor([1]))
    joined = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
    assert jt_is_equal(default_collate([one, other]), joined)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])), r"item 1: got keys \['a'\]"),
        (_sample([1], [2], weighted=True), "item 1: got weights; expected them in all items"),
        (
            KeyedJaggedTensor(
                ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]), stride_per_key_per_rank=[[1], [2]]
            ),
            "item 1: got a batch size that varies by key",
        ),
    ],
    ids=["keys", "weights", "variable"],
)
def test_items_that_differ_are_refused(other: KeyedJaggedTensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        default_collate([_sample([1], [2]), other])
