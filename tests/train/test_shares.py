"""Shares of a batch: each sample once, the same on any number of ranks, from any position."""

from __future__ import annotations

import functools

import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset
from tilerec.data.share import bounds, cut, shares
from tilerec.errors import InputError
from tilerec.recipes.data import SyntheticData
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.testing import random_batch


@pytest.mark.parametrize(("total", "world_size"), [(0, 2), (1, 2), (5, 2), (7, 3), (2, 5), (64, 4)])
def test_shares_cover_a_batch_once_and_differ_by_one_sample_at_most(total: int, world_size: int) -> None:
    cuts = [bounds(total, rank, world_size) for rank in range(world_size)]
    assert [sample for first, last in cuts for sample in range(first, last)] == list(range(total))
    sizes = [last - first for first, last in cuts]
    assert max(sizes) - min(sizes) <= 1


def test_a_source_that_draws_shares_alone_draws_those_of_the_whole_batches() -> None:
    dataset = SyntheticData(num_rows=(30, 20), max_lengths=(3, 1), min_lengths=(0, 1), train_rows=2500).open()
    for rank in range(3):
        drawn = list(dataset.train_shares(700, 1, rank=rank, world_size=3))
        kept = list(shares(dataset.train(700, 1), rank, 3))
        assert [(s.first, s.total, s.end) for s in drawn] == [(s.first, s.total, s.end) for s in kept]
        for own, other in zip(drawn, kept, strict=True):
            assert torch.equal(own.batch.dense_features, other.batch.dense_features)
            assert torch.equal(own.batch.labels, other.batch.labels)
            ours, theirs = own.batch.sparse_features, other.batch.sparse_features
            assert torch.equal(ours.values(), theirs.values())
            assert torch.equal(ours.lengths(), theirs.lengths())
            assert ours.stride() == theirs.stride() == own.batch.batch_size


@pytest.mark.parametrize("start", [0, 700, 2100, 2500])
def test_a_pass_continues_at_the_end_of_any_share_on_any_number_of_ranks(start: int) -> None:
    dataset = SyntheticData(num_rows=(30,), train_rows=2500).open()
    complete = list(dataset.train_shares(700, 1, rank=0, world_size=1))
    wanted = [share for share in complete if share.end > start]
    for source in (dataset.train_shares, functools.partial(Dataset.train_shares, dataset)):
        parts = [list(source(700, 1, rank=rank, world_size=3, start=start)) for rank in range(3)]
        for i, whole in enumerate(wanted):
            assert [part[i].end for part in parts] == [whole.end] * 3
            labels = torch.cat([part[i].batch.labels for part in parts])
            assert torch.equal(labels, whole.batch.labels)
        assert {len(part) for part in parts} == {len(wanted)}


KEYS = ["a", "b", "c"]


def _batch_of(features: KeyedJaggedTensor, size: int) -> Batch:
    return Batch(torch.arange(2.0 * size).view(size, 2), features, torch.arange(float(size)))


@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 0), (5, 5), (1, 4), (2, 3)])
def test_a_cut_keeps_the_bags_and_weights_of_its_samples(first: int, last: int) -> None:
    features = random_batch(KEYS, 9, 5, weighted=True, seed=3)
    own = cut(_batch_of(features, 5), first, last)
    assert own.batch_size == own.sparse_features.stride() == last - first
    assert own.labels.tolist() == list(map(float, range(first, last)))
    assert own.dense_features.shape == (last - first, 2)
    for key in KEYS:
        whole, part = features[key], own.sparse_features[key]
        begin, end = whole.offsets()[first], whole.offsets()[last]
        assert torch.equal(part.values(), whole.values()[begin:end])
        assert torch.equal(part.weights(), whole.weights()[begin:end])
        assert torch.equal(part.lengths(), whole.lengths()[first:last])


def test_a_batch_of_several_batch_sizes_cannot_be_cut() -> None:
    features = random_batch(["a", "b"], 9, 5, variable=True)
    with pytest.raises(InputError, match="cannot be divided among ranks"):
        cut(_batch_of(features, 5), 0, 2)
