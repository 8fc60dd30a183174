"""Batches that modules refuse: tensors on several devices, ids outside of every bag, samples without a bag."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise, table_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.virtual import run_virtual_ranks

IDS = torch.tensor([1, 2, 3, 4])


def pooled(weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])], is_weighted=weighted)


def one_by_one() -> EmbeddingCollection:
    return EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["f"])])


def refused(make: Callable[[], nn.Module], features: KeyedJaggedTensor, message: str) -> None:
    """Unsharded, and sharded on every rank."""
    with pytest.raises(InputError, match=message):
        make()(features)

    def run(group: Group, plan: object) -> None:
        with pytest.raises(InputError, match=message):
            shard(make(), plan, group)(features)  # type: ignore[arg-type]

    run_virtual_ranks(2, run, row_wise())
    run_virtual_ranks(1, run, table_wise(0))


@pytest.mark.parametrize("part", ["lengths", "offsets", "weights"])
def test_a_batch_with_one_tensor_on_meta_is_refused(part: str) -> None:
    ones, offsets = torch.ones(4, dtype=torch.int64), torch.arange(5)
    features = {
        "lengths": KeyedJaggedTensor(["f"], IDS, lengths=ones.to("meta")),
        "offsets": KeyedJaggedTensor(["f"], IDS, offsets=offsets.to("meta")),
        "weights": KeyedJaggedTensor(["f"], IDS, torch.ones(4, device="meta"), ones),
    }[part]
    refused(lambda: pooled(part == "weights"), features, f"got {part} on meta; expected cpu")


@pytest.mark.parametrize("make", [pooled, one_by_one])
def test_lengths_that_cover_fewer_values_are_refused(make: Callable[[], nn.Module]) -> None:
    features = KeyedJaggedTensor(["f"], IDS, lengths=torch.tensor([1, 1]))
    refused(make, features, r"(got lengths that sum to 2; expected 4,|the lengths sum to 2, but there are 4) ")


@pytest.mark.parametrize("make", [pooled, one_by_one])
def test_offsets_that_begin_behind_the_first_value_are_refused(make: Callable[[], nn.Module]) -> None:
    refused(
        make,
        KeyedJaggedTensor(["f"], IDS, offsets=torch.tensor([1, 2, 4])),
        r"(got 1 as the first offset|the first offset is 1); expected 0",
    )


def test_values_without_any_bag_are_refused() -> None:
    features = KeyedJaggedTensor(["f"], IDS, lengths=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(InputError, match="the lengths sum to 0, but there are 4 values"):
        pooled()(features)


@pytest.mark.parametrize("change", ["none", "permute", "permute back", "split", "variable"])
def test_values_of_features_that_no_table_reads_are_in_bags_of_theirs(change: str) -> None:
    lengths = torch.tensor([1, 1, 0, 2, 1, 0])
    features = KeyedJaggedTensor(["e", "f", "g"], torch.arange(5), lengths=lengths)
    want = pooled()
    rows = want.embedding_bags["t"].weight
    if change == "permute":
        features = features.permute([2, 1])
    elif change == "permute back":
        features = features.permute([2, 0, 1])
    elif change == "split":
        features = features.split([1, 2])[1]
    elif change == "variable":
        features = KeyedJaggedTensor(
            ["e", "f", "g"], torch.arange(5), lengths=lengths[:5], stride_per_key_per_rank=[[2], [2], [1]],
            inverse_indices=(["f"], torch.tensor([[0, 1]])),
        )  # fmt: skip
    expected = torch.stack([torch.zeros(4), rows[2] + rows[3]])
    torch.testing.assert_close(want(features).values(), expected)


def test_a_permutation_leaves_no_value_out_that_lies_in_no_bag() -> None:
    features = KeyedJaggedTensor(["e", "f"], IDS, lengths=torch.tensor([1, 1]))
    with pytest.raises(InputError, match=r"got lengths that sum to 2; expected 4, the number of values"):
        features.permute([1])


@pytest.mark.parametrize("bag", [-1, 7])
def test_a_sample_that_uses_no_bag_of_its_feature_is_refused(bag: int) -> None:
    features = KeyedJaggedTensor(
        ["f"], IDS[:2], lengths=torch.tensor([2]), stride_per_key_per_rank=[[1]],
        inverse_indices=(["f"], torch.tensor([[0, bag]])),
    )  # fmt: skip
    refused(pooled, features, rf"Feature 'f': inverse_indices of sample 1 is bag {bag}; expected one of \[0, 1\)")


def test_complex_weights_are_refused() -> None:
    with pytest.raises(InputError, match=r"got weights of torch\.complex64; expected real numbers"):
        KeyedJaggedTensor(["f"], IDS, torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.int64))
