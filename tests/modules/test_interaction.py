from __future__ import annotations

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.crossnet import LowRankCrossNet
from tilerec.modules.interaction import (
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    dot_interaction,
    pair_count,
)

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(0, 2, 4), (1, 1, 1), (3, 5, 3), (2, 3, 257)]  # samples, sparse features, dim


def features(batch: int, sparse: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, dim, dtype=torch.float64), torch.randn(batch, sparse, dim, dtype=torch.float64)


@pytest.mark.parametrize(("batch", "sparse", "dim"), SHAPES)
def test_dots_of_all_pairs_follow_the_dense_vector(batch: int, sparse: int, dim: int) -> None:
    dense, embedded = features(batch, sparse, dim)
    out = InteractionArch(sparse)(dense, embedded)
    vectors = [dense, *embedded.unbind(1)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(sparse + 1) for j in range(i + 1, sparse + 1)]
    torch.testing.assert_close(out, torch.cat([dense, torch.stack(pairs, 1)], 1))
    assert out.shape[1] == dim + pair_count(sparse + 1)


def test_the_docstring_example_holds() -> None:
    vectors = torch.tensor([[[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]])
    assert dot_interaction(vectors[:, 0], vectors[:, 1:]).tolist() == [[1.0, 0.0, 2.0, 4.0, 23.0]]


@pytest.mark.parametrize("sparse", [0, 1, 4])
def test_first_and_second_derivatives_of_the_dots_check(sparse: int) -> None:
    inputs = tuple(t.requires_grad_() for t in features(2, sparse, 3))
    assert torch.autograd.gradcheck(dot_interaction, inputs)
    assert torch.autograd.gradgradcheck(dot_interaction, inputs)


def test_a_prediction_may_come_before_the_first_training_step() -> None:
    inputs = tuple(t.requires_grad_() for t in features(2, 10, 3))  # no other test has as many: pairs are made once
    with torch.inference_mode():
        expected = dot_interaction(*[t.detach() for t in inputs])
    assert torch.equal(dot_interaction(*inputs), expected)
    assert torch.autograd.gradgradcheck(dot_interaction, inputs)


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_gradient_of_the_dots_equals_that_of_plain_torch(contiguous: bool) -> None:
    base = torch.randn(3, 7, 5) if contiguous else torch.randn(3, 5, 7).transpose(1, 2)
    left, right = base.clone().requires_grad_(), base.clone().requires_grad_()
    rows, columns = torch.triu_indices(7, 7, 1)
    plain = torch.cat([right[:, 0], torch.bmm(right, right.transpose(1, 2))[:, rows, columns]], dim=1)
    ours = dot_interaction(left[:, 0], left[:, 1:])
    torch.testing.assert_close(ours, plain)
    weights = torch.randn_like(plain)
    (ours * weights).sum().backward()
    (plain * weights).sum().backward()
    torch.testing.assert_close(left.grad, right.grad)


def test_a_step_saves_each_vector_once() -> None:
    saved: list[int] = []
    dense, embedded = (t.requires_grad_() for t in features(3, 2, 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        dot_interaction(dense, embedded)
    assert saved == [dense.numel() + embedded.numel()]


def test_each_input_has_the_gradient_of_its_own_dtype() -> None:
    dense, embedded = (t.to(dtype).requires_grad_() for t, dtype in zip(features(3, 2, 4), DTYPES, strict=True))
    out = dot_interaction(dense, embedded)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert dense.grad is not None
    assert embedded.grad is not None
    assert (dense.grad.dtype, embedded.grad.dtype) == DTYPES


# torch 2.13's tracer makes an instance of every autograd.Function it meets, which torch itself deprecates
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_dots_compile_in_one_graph_with_gradients() -> None:
    arch = InteractionArch(3)
    compiled = torch.compile(arch, fullgraph=True, backend="aot_eager")
    dense, embedded = (t.requires_grad_() for t in features(4, 3, 5))
    wanted = torch.autograd.grad(arch(dense, embedded).square().sum(), (dense, embedded))
    got = torch.autograd.grad(compiled(dense, embedded).square().sum(), (dense, embedded))
    torch.testing.assert_close(got, wanted)


def test_dots_work_under_autocast_and_in_half_precision() -> None:
    dense, embedded = (t.to(torch.bfloat16) for t in features(4, 3, 8))
    assert InteractionArch(3)(dense, embedded).dtype == torch.bfloat16
    inputs = [t.float().requires_grad_() for t in (dense, embedded)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = InteractionArch(3)(*inputs)
    out.float().sum().backward()
    assert inputs[1].grad is not None
    assert inputs[1].grad.dtype == torch.float32


@pytest.mark.parametrize(("batch", "sparse", "dim"), SHAPES)
def test_the_cross_network_sees_all_features_side_by_side(batch: int, sparse: int, dim: int) -> None:
    dense, embedded = features(batch, sparse, dim)
    crossnet = LowRankCrossNet((sparse + 1) * dim, 2, 2, dtype=torch.float64)
    out = InteractionDCNArch(sparse, crossnet)(dense, embedded)
    assert torch.equal(out, crossnet(torch.cat([dense, embedded.reshape(batch, sparse * dim)], 1)))


@pytest.mark.parametrize(("batch", "sparse", "dim"), SHAPES)
def test_projected_vectors_of_both_branches_meet(batch: int, sparse: int, dim: int) -> None:
    dense, embedded = features(batch, sparse, dim)
    width = (sparse + 1) * dim
    left, right = nn.Linear(width, 2 * dim).double(), nn.Linear(width, 3 * dim).double()
    out = InteractionProjectionArch(sparse, left, right)(dense, embedded)
    assert out.shape == (batch, dim + 6)
    for sample in range(batch):
        x = torch.cat([dense[sample], embedded[sample].flatten()])
        rows, columns = left(x).reshape(2, dim), right(x).reshape(dim, 3)
        wanted = [(rows[i] * columns[:, j]).sum() for i in range(2) for j in range(3)]
        torch.testing.assert_close(out[sample], torch.cat([dense[sample], torch.stack(wanted)]))


def test_without_sparse_features_the_dense_vector_is_returned() -> None:
    dense, embedded = torch.randn(2, 4), torch.zeros(2, 0, 4)
    for arch in (
        InteractionArch(0),
        InteractionDCNArch(0, nn.Linear(4, 4)),
        InteractionProjectionArch(0, nn.Linear(4, 4), nn.Linear(4, 4)),
    ):
        assert torch.equal(arch(dense, embedded), dense)


def test_an_interaction_of_dots_has_no_state() -> None:
    assert not InteractionArch(3).state_dict()
    assert not list(InteractionArch(3).buffers())


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="num_sparse_features: got -1"):
        InteractionArch(-1)
    archs = [
        InteractionArch(2),
        InteractionDCNArch(2, nn.Identity()),
        InteractionProjectionArch(2, nn.Identity(), nn.Identity()),
    ]
    for arch in archs:
        name = type(arch).__name__
        with pytest.raises(
            InputError, match=rf"{name}: got dense features .*\[2, 4\].*\[2, 3, 4\]; expected .*\[B, 2, D\]"
        ):
            arch(torch.zeros(2, 4), torch.zeros(2, 3, 4))
        with pytest.raises(InputError, match=name):
            arch(torch.zeros(2, 5), torch.zeros(2, 2, 4))
        with pytest.raises(InputError, match=name):
            arch(torch.zeros(4), torch.zeros(2, 2, 4))
    with pytest.raises(
        InputError, match="interaction_branch2 returned 7 features; expected a multiple of the embedding"
    ):
        InteractionProjectionArch(2, nn.Linear(12, 8), nn.Linear(12, 7))(torch.zeros(2, 4), torch.zeros(2, 2, 4))


def test_memory_of_large_interactions_is_used_again_only_once_it_is_free() -> None:
    arch = InteractionDCNArch(3, nn.Identity())
    dense, embedded = torch.randn(2048, 160, requires_grad=True), torch.randn(2048, 3, 160, requires_grad=True)
    kept = arch(dense, embedded)
    expected = torch.cat([dense[:, None], embedded], 1).flatten(1)
    arch(dense + 1, embedded).sum().backward()
    assert torch.equal(kept, expected)
    for given in (dense, embedded):
        assert given.grad is not None
        assert torch.equal(given.grad, torch.ones_like(given))
