"""`RandomRecDataset` has TorchRec's arguments and draws; expected numbers are those of TorchRec 1.8 and torch 2.13."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tilerec.compat.datasets.random_dataset import RandomRecDataset
from tilerec.errors import ConfigError


def test_a_seed_gives_the_batches_that_it_gives_in_torchrec() -> None:
    data = RandomRecDataset(["a", "b"], 3, hash_size=100, ids_per_feature=2, num_dense=2, manual_seed=5)
    batch = next(iter(data))
    assert batch.sparse_features.values().tolist() == [85, 6, 70, 92, 33, 88, 11, 12, 18, 88, 23, 0]
    assert batch.sparse_features.lengths().tolist() == [2] * 6
    assert batch.labels.tolist() == [0, 0, 1]
    wanted = torch.tensor([[-0.9010, 0.2736], [-0.8234, 1.5981], [0.0951, 0.4758]])
    torch.testing.assert_close(batch.dense_features, wanted, rtol=0, atol=1e-4)
    assert (batch.sparse_features.lengths().dtype, batch.labels.dtype) == (torch.int32, torch.int64)


def test_an_iteration_has_num_batches_and_starts_again() -> None:
    data = RandomRecDataset(["a"], 2, num_batches=3, num_generated_batches=2, manual_seed=0, min_ids_per_feature=1)
    first, again = list(data), list(data)
    assert len(data) == len(first) == 3
    assert first[0] is first[2] is again[0]
    endless = RandomRecDataset(["a"], 2, num_generated_batches=0)
    assert len(list(islice(endless, 5))) == 5
    with pytest.raises(TypeError, match="no length"):
        len(endless)


def test_without_a_seed_the_default_generator_decides() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(next(iter(RandomRecDataset(["a"], 4, num_dense=1))).dense_features)
    assert torch.equal(*draws)


def test_numbers_per_key_are_checked() -> None:
    with pytest.raises(ConfigError, match="got both hash_size and hash_sizes"):
        RandomRecDataset(["a"], 1, hash_size=1, hash_sizes=[1])
    with pytest.raises(ConfigError, match="ids_per_features: got 2 numbers; expected 1"):
        RandomRecDataset(["a"], 1, ids_per_features=[1, 2])
