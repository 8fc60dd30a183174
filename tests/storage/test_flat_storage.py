"""Leaves side by side in one storage, values and identities kept."""

import pytest
import torch
from torch import nn

from tilerec.storage import flat_storage as flat
from tilerec.storage.flat_storage import ALIGNMENT, flat_memory, lay_flat


def test_leaves_keep_identity_and_values_and_share_one_storage_per_type() -> None:
    leaves = [
        nn.Parameter(torch.randn(5, 3)),
        nn.Parameter(torch.randn(2, 7).half()),
        nn.Parameter(torch.randn(4, 4)),
    ]
    before = [leaf.detach().clone() for leaf in leaves]
    optimizer = torch.optim.SGD(leaves, lr=1.0)
    lay_flat(leaves)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))
    storage = [leaf.untyped_storage().data_ptr() for leaf in leaves]
    assert storage[0] == storage[2] != storage[1]
    assert all(leaf.is_leaf and (leaf.data_ptr() - s) % ALIGNMENT == 0 for leaf, s in zip(leaves, storage, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], leaves, strict=True))


def test_laying_flat_again_moves_nothing() -> None:
    leaves = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4, 4))]
    lay_flat(leaves)
    places = [leaf.data_ptr() for leaf in leaves]
    lay_flat(leaves)
    assert places == [leaf.data_ptr() for leaf in leaves]


def test_meta_leaves_stay_and_one_leaf_fills_its_storage() -> None:
    meta, single = nn.Parameter(torch.empty(3, 3, device="meta")), nn.Parameter(torch.ones(3, 3))
    lay_flat([meta, single])
    assert meta.is_meta
    assert torch.equal(single, torch.ones(3, 3))


def test_new_memory_is_adjacent_and_its_gaps_are_zero() -> None:
    places = flat_memory([(5, 3), (2, 7), (1, 32)], torch.float32, None)
    assert [tuple(place.shape) for place in places] == [(5, 3), (2, 7), (1, 32)]
    starts = [(place.data_ptr() - places[0].data_ptr()) // 4 for place in places]
    assert starts == [0, 32, 64]
    whole = torch.empty(0).set_(places[0].untyped_storage())
    assert whole.numel() == 96
    assert not whole[15:32].any()
    assert not whole[46:64].any()
    leaves = [nn.Parameter(place.zero_()) for place in places]
    before = [leaf.data_ptr() for leaf in leaves]
    lay_flat(leaves)
    assert [leaf.data_ptr() for leaf in leaves] == before


def test_memory_on_meta_is_none_and_of_no_leaf_empty() -> None:
    assert all(place.is_meta for place in flat_memory([(1 << 40, 3)], torch.float16, "meta"))
    assert flat_memory([], torch.float32, None) == []


def test_huge_pages_are_asked_for_large_memory_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(flat, "advise_huge_pages", lambda memory: asked.append(memory.nbytes))
    flat_memory([(1 << 10, 1 << 9), (1 << 10, 1 << 9)], torch.float32, "cpu")
    flat_memory([(1 << 10, 1 << 9)], torch.float32, "cpu")
    flat_memory([(1 << 20, 1 << 9)], torch.float32, "meta")
    assert asked == [4 << 20]
