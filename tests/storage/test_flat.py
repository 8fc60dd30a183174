"""Leaves side by side in one storage, values and identities kept."""

import torch
from torch import nn

from tilerec.storage.flat import ALIGNMENT, lay_flat


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
    assert all(
        leaf.is_leaf and (leaf.data_ptr() - s) % ALIGNMENT == 0
        for leaf, s in zip(leaves, storage, strict=True)
    )
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
