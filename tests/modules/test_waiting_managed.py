"""Collections with managed collision never wait for the device that ids and tables are on; see `test_waiting.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.modules.no_waiting import DEVICE, NoWaiting
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import HashZchEvictionConfig, LFU_EvictionPolicy
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.id_map import IdMap
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

pytestmark = pytest.mark.usefixtures("no_lists_to_the_device")


@pytest.fixture(autouse=True)
def _ids_on_meta_are_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no numbers and so is refused otherwise."""
    monkeypatch.setattr(IdMap, "refuse_meta", lambda self: None)


def batch(weighted: bool) -> KeyedJaggedTensor:
    def on_device(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=DEVICE)

    weights = on_device(9, torch.float32) if weighted else None
    return KeyedJaggedTensor(
        ["x", "z", "y_readonly"], on_device(9), weights, lengths=on_device(6), length_per_key=[4, 2, 3]
    )


def modules() -> dict[str, ManagedCollisionModule]:
    ends = HashZchEvictionConfig(["x", "y_readonly"], per_feature_ttl=[3, 4])
    return {
        "a": HashZchManagedCollisionModule(
            16, DEVICE, 2, eviction_policy_name="PER_FEATURE_TTL_EVICTION", eviction_config=ends
        ),
        "b": MCHManagedCollisionModule(24, DEVICE, LFU_EvictionPolicy(), 5, buckets=2, admission_threshold=2),
    }


def train(module: nn.Module, features: KeyedJaggedTensor, attached: bool) -> None:
    if attached:
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(module.parameters())[:1])
        apply_optimizer_in_backward(Adam(lr=0.1, row_step=True), list(module.parameters())[1:])
    with NoWaiting():
        for _ in range(2):
            out, _ = module(features)
            values = [jagged.values() for jagged in out.values()] if isinstance(out, dict) else [out.values()]
            torch.stack([value.sum() for value in values]).sum().backward()
        module.eval()(features)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_collections_do_not_wait(weighted: bool, attached: bool) -> None:
    tables = [
        EmbeddingBagConfig(16, 4, "a", feature_names=["x", "y_readonly"]),
        EmbeddingBagConfig(24, 8, "b", feature_names=["z"], data_type="BF16"),
    ]
    ids = ManagedCollisionCollection(modules(), tables)
    tables_ = EmbeddingBagCollection(tables, weighted, DEVICE)
    train(ManagedCollisionEmbeddingBagCollection(tables_, ids, True), batch(weighted), attached)


def test_sequence_collections_do_not_wait() -> None:
    tables = [
        EmbeddingConfig(16, 4, "a", feature_names=["x", "y_readonly"]),
        EmbeddingConfig(24, 8, "b", feature_names=["z"]),
    ]
    ids = ManagedCollisionCollection(modules(), tables)
    module = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables, DEVICE), ids, True)
    train(module, batch(False), True)


def test_one_that_drops_ids_waits_to_hear_how_many() -> None:
    tables = [EmbeddingBagConfig(16, 4, "a", feature_names=["x"])]
    ids = HashZchManagedCollisionModule(16, DEVICE, 2, disable_fallback=True)
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables, False, DEVICE), ManagedCollisionCollection({"a": ids}, tables)
    )
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        train(module, batch(False), False)
