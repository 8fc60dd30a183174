"""Ids by table and distinct ids of a batch: equal to counts of the batches, for every kind of collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.pipelines import StageTimes
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.train.lookup_counts import LookupCounts, Sample, counts_on_device, distinct_counts, feature_ends

BAGS = {"a": [[1, 2], [2]], "b": [[2], []], "c": [[7, 7, 7], [8]]}


def _batch(bags: dict[str, list[list[int]]], **options: Any) -> KeyedJaggedTensor:
    ids = torch.tensor([id_ for lists in bags.values() for bag in lists for id_ in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for lists in bags.values() for bag in lists], dtype=torch.int64)
    return KeyedJaggedTensor(list(bags), ids, lengths=lengths, **options)


def _bags(*tables: tuple[str, Sequence[str]]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(20, 4, name, feature_names=list(keys)) for name, keys in tables])


class _TwoCollections(nn.Module):
    """Pooled and unpooled tables; two collections have a table of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = _bags(("t", ["a", "b"]), ("u", ["c"]))
        self.unpooled = EmbeddingCollection([EmbeddingConfig(20, 4, "t", feature_names=["c"])])

    def forward(self, features: KeyedJaggedTensor) -> None:
        self.pooled(features)
        self.unpooled(features)


def test_tables_count_the_ids_of_their_features_in_every_batch() -> None:
    model, times = _TwoCollections(), StageTimes()
    counts = LookupCounts(model, times)
    assert counts.ids() == {"t": 0, "u": 0}
    model(_batch(BAGS))
    model(_batch({"c": [[1]], "b": [[5]], "a": [[]]}))  # other order, other size
    # t: 3 + 1 of a and b, 4 of c in the other collection; then 0 + 1 and 1
    assert counts.ids() == {"t": 10, "u": 5}
    assert counts.ids_looked_up_here() == 15
    assert set(times.take()) == {"lookup"}


def test_a_sample_has_the_distinct_ids_of_the_latest_batch_once() -> None:
    model = _TwoCollections()
    counts = LookupCounts(model, StageTimes())
    model(_batch({"a": [[9]], "b": [[9]], "c": [[9]]}))
    model(_batch(BAGS))
    # The table t of the pooled collection has 1 and 2 among four ids, that of the other one 7 and 8 among four.
    assert counts.samples() == {"t": Sample(8, 4), "u": Sample(4, 2)}
    assert counts.samples() == {"t": Sample(0, 0), "u": Sample(0, 0)}


def test_forwards_of_a_pause_do_not_count() -> None:
    model, times = _TwoCollections(), StageTimes()
    counts = LookupCounts(model, times)
    counts.pause()
    model(_batch(BAGS))
    assert counts.ids() == {"t": 0, "u": 0}
    assert counts.samples()["u"] == Sample(0, 0)
    assert times.take() == {}
    counts.pause(False)
    model(_batch(BAGS))
    assert counts.ids()["u"] == 4


def test_the_model_has_no_hook_afterwards() -> None:
    model = _TwoCollections()
    counts = LookupCounts(model, StageTimes())
    counts.close()
    model(_batch(BAGS))
    assert counts.ids() == {"t": 0, "u": 0}
    assert all(not part._forward_pre_hooks and not part._forward_hooks for part in model.modules())


def test_managed_tables_count_ids_and_not_their_rows() -> None:
    config = EmbeddingBagConfig(64, 4, "t", feature_names=["a"])
    maps = ManagedCollisionCollection({"t": HashZchManagedCollisionModule(64, total_num_buckets=4)}, [config])
    model = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([config]), maps)
    counts = LookupCounts(model, StageTimes())
    model(_batch({"a": [[10**15, 3], [10**15]]}))
    assert counts.ids() == {"t": 3}
    assert counts.samples() == {"t": Sample(3, 2)}


@pytest.mark.parametrize(
    "features",
    [
        _batch(BAGS),
        _batch({"a": [[], []], "b": [[], []]}),
        _batch(BAGS, stride_per_key_per_rank=[[2], [2], [2]]),
        KeyedJaggedTensor(["a", "b"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)),
    ],
)
def test_ends_of_features_are_those_of_their_lengths(features: KeyedJaggedTensor) -> None:
    """The form in which a GPU adds them up."""
    assert feature_ends(features).diff().tolist() == features.length_per_key()


def test_ends_on_a_device_add_up_to_the_ids_of_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _TwoCollections()
    counts = LookupCounts(model, StageTimes())
    with monkeypatch.context() as patch:  # as on a GPU: lengths are not on the host, and are not fetched
        patch.setattr(KeyedJaggedTensor, "length_per_key_or_none", lambda _: None)
        patch.setattr(KeyedJaggedTensor, "device", lambda _: torch.device("cuda"))
        for collection in counts._collections:
            collection._add(_batch(BAGS))
            collection._add(_batch(BAGS))
    assert counts.ids() == {"t": 16, "u": 8}


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([3, 1, 3, -1, 2**62]),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([5], dtype=torch.int32),
        torch.randint(0, 50, (1000,)),
    ],
)
def test_distinct_ids_are_those_of_a_set(ids: Tensor) -> None:
    want = [Sample(ids.numel(), len(set(ids.tolist())))]
    assert distinct_counts([ids]) == want
    assert counts_on_device([ids]) == want
