"""Troubles of managed collision that TorchRec's users report; docs/torchrec-users.md says what they are."""

from __future__ import annotations

from typing import Any

import torch

from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingCollection
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingConfig
from tilerec.testing.virtual import run_virtual_ranks


def sequence(group: Group, features: list[str]) -> Any:
    configs = [EmbeddingConfig(96, 4, "t", feature_names=features)]
    ids = ManagedCollisionCollection({"t": HashZchManagedCollisionModule(96, "cpu", 6)}, configs)
    module = ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), ids, return_remapped_features=True)
    shard(module, row_wise(), group)
    return module


def test_2838_one_table_gives_its_remapped_features() -> None:
    def fn(group: Group) -> None:
        module = sequence(group, ["a"])
        batch = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([7, -7, 7 + group.rank]), torch.tensor([2, 1]))
        out, remapped = module(batch)
        weight = full_state_dict(module)["_embedding_module.embeddings.t.weight"]
        assert torch.equal(out["a"].values(), weight[remapped["a"].values()])
        assert remapped.keys() == ["a"]

    run_virtual_ranks(2, fn)


def test_pr_4525_ids_that_features_repeat_stay_with_their_features() -> None:
    def fn(group: Group) -> None:
        module = sequence(group, ["a", "b", "c"])
        ids = {"a": [5, 5, 9], "b": [9], "c": [], "d": [1]}
        batch = KeyedJaggedTensor.from_lengths_sync(
            list(ids), torch.tensor([id_ for own in ids.values() for id_ in own]), torch.tensor([3, 1, 0, 1])
        )
        _, remapped = module(batch)
        row = {id_: module.inspect("a", id_).row for id_ in (5, 9)}
        assert remapped["a"].values().tolist() == [row[5], row[5], row[9]]
        assert remapped["b"].values().tolist() == [row[9]]
        assert remapped["c"].values().tolist() == []
        assert remapped["d"].values().tolist() == [1]  # of no table

    run_virtual_ranks(3, fn)
