from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tilerec.errors import InputError
from tilerec.modules.deepfm import DeepFM, FactorizationMachine


def embeddings(batch: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(batch, *shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_pairs_of_elements_are_summed_by_default(batch: int) -> None:
    inputs = embeddings(batch, (4,), (3, 2), (1,))
    out = FactorizationMachine()(inputs)
    for sample in range(batch):
        elements = [float(v) for e in inputs for v in e[sample].flatten()]
        wanted = sum(a * b for a, b in itertools.combinations(elements, 2))
        assert float(out[sample, 0]) == pytest.approx(wanted)
    assert out.shape == (batch, 1)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("dim", [1, 3, 257])
def test_pairs_of_embeddings_are_summed_as_in_equation_2_of_deepfm(batch: int, dim: int) -> None:
    inputs = embeddings(batch, (dim,), (3, dim), (dim,))
    out = FactorizationMachine(per_embedding=True)(inputs)
    vectors = (
        torch.cat([e.reshape(batch, e.numel() // max(batch, 1) // dim, dim) for e in inputs], 1) if batch else None
    )
    for sample in range(batch):
        assert vectors is not None
        pairs = itertools.combinations(vectors[sample], 2)
        assert float(out[sample, 0]) == pytest.approx(sum(float(a @ b) for a, b in pairs))
    assert out.shape == (batch, 1)


def test_the_docstring_example_holds() -> None:
    inputs = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])]
    assert FactorizationMachine()(inputs).tolist() == [[35.0]]
    assert FactorizationMachine(per_embedding=True)(inputs).tolist() == [[11.0]]


def test_the_deep_half_sees_all_embeddings_side_by_side() -> None:
    inputs = embeddings(3, (4,), (3, 2))
    deep = DeepFM(nn.Linear(10, 5).double())
    wanted = deep.dense_module(torch.cat([inputs[0], inputs[1].reshape(3, 6)], 1))
    assert torch.equal(deep(inputs), wanted)
    assert list(deep.state_dict()) == ["dense_module.weight", "dense_module.bias"]


@pytest.mark.parametrize("per_embedding", [False, True])
def test_a_gradient_check_passes(per_embedding: bool) -> None:
    machine = FactorizationMachine(per_embedding=per_embedding)
    inputs = tuple(e.requires_grad_() for e in embeddings(2, (3,), (2, 3)))
    assert torch.autograd.gradcheck(lambda *e: machine(list(e)), inputs)


@pytest.mark.parametrize("module", [FactorizationMachine(), DeepFM(nn.Identity())], ids=["fm", "deep"])
def test_inputs_that_do_not_fit_are_named(module: nn.Module) -> None:
    with pytest.raises(InputError, match="list of embeddings is empty"):
        module([])
    with pytest.raises(InputError, match="with one batch size B"):
        module([torch.zeros(2, 4), torch.zeros(3, 4)])
    with pytest.raises(InputError, match=r"expected \[B, D\] or \[B, N, D\]"):
        module([torch.zeros(4)])


def test_embeddings_of_several_dims_have_no_pairs() -> None:
    with pytest.raises(InputError, match=r"dims \[4, 3\]; expected one dim"):
        FactorizationMachine(per_embedding=True)([torch.zeros(2, 4), torch.zeros(2, 3)])
