"""EmbeddingCollection: rows in the order of the ids, mixed dims, shared tables."""

from __future__ import annotations

import pytest
import torch

from tilerec.errors import InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingConfig


def collection(**options) -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            EmbeddingConfig(9, 4, "a", feature_names=["x", "y"]),
            EmbeddingConfig(8, 1, "b", feature_names=["y"]),
            EmbeddingConfig(7, 4, "c", torch.bfloat16, feature_names=["z"]),
        ],
        **options,
    )


def batch(keys: tuple[str, ...] = ("z", "other", "y", "x"), size: int = 3) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (len(keys) * size,))
    return KeyedJaggedTensor.from_lengths_sync(list(keys), torch.randint(0, 7, (int(lengths.sum()),)), lengths)


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("keys", [("x", "y", "z"), ("z", "other", "y", "x")])
@pytest.mark.parametrize("need_indices", [False, True])
def test_every_id_gives_its_row(size: int, keys: tuple[str, ...], need_indices: bool) -> None:
    ec = collection(need_indices=need_indices)
    kjt = batch(keys, size)
    out = ec(kjt)
    assert list(out) == ["x", "y@a", "y@b", "z"]
    for name, table in (("x", "a"), ("y@a", "a"), ("y@b", "b"), ("z", "c")):
        feature = kjt[name[0]]
        assert torch.equal(out[name].values(), ec.embeddings[table].weight[feature.values()].float())
        assert torch.equal(out[name].lengths(), feature.lengths())
        assert torch.equal(out[name].offsets(), feature.offsets())
        if need_indices:
            assert torch.equal(out[name].weights(), feature.values())
        else:
            assert out[name].weights_or_none() is None
    assert ec.embedding_names_by_table() == [["x", "y@a"], ["y@b"], ["z"]]
    assert ec.embedding_dim() == -1


@pytest.mark.parametrize("attached", [False, True])
def test_gradients_of_shared_tables_add_up(attached: bool) -> None:
    ec = collection()
    kjt = batch()
    want = {n: t.weight.detach().clone().float().requires_grad_() for n, t in ec.embeddings.items()}
    if attached:
        apply_optimizer_in_backward(torch.optim.SGD, ec.parameters(), {"lr": 1.0})
    out = ec(kjt)
    loss = sum((out[n].values() ** 2).sum() * k for k, n in enumerate(out, start=1))
    loss.backward()
    plain = sum(
        (want[t][kjt[n[0]].values()] ** 2).sum() * k
        for k, (n, t) in enumerate((("x", "a"), ("y@a", "a"), ("y@b", "b"), ("z", "c")), start=1)
    )
    plain.backward()
    for name, leaf in want.items():
        weight = ec.embeddings[name].weight
        grad = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        if attached:
            assert weight.grad is None
            tolerance = 2e-2 if weight.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(weight.detach().float(), leaf.detach() - grad, rtol=tolerance, atol=tolerance)
        else:
            torch.testing.assert_close(weight.grad.float(), grad, rtol=1e-2, atol=1e-5)


def test_bad_ids_and_missing_features_are_named() -> None:
    ec = collection()
    kjt = KeyedJaggedTensor.from_lengths_sync(["x", "y", "z"], torch.tensor([1, 8, 2]), torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match="Table 'b': got id 8 of feature 'y'"):
        ec(kjt)
    with pytest.raises(InputError, match=r"feature 'z' of table 'c' is not in the batch"):
        ec(batch(("x", "y")))
    with pytest.warns(UserWarning, match=r"1 ids of this batch"):
        out = collection(on_bad_id="clamp")(kjt)
    assert out["y@b"].values().shape == (1, 1)
