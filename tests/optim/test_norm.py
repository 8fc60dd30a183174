"""clip_grad_norm_ equals torch's where nothing is sharded (tests/parallel/test_unattached.py: where tables are)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilerec.optim.norm import clip_grad_norm_, grads_of, total_norm


def params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.ones(shape)) for shape in ((3,), (2, 257), (1, 1), (0, 4), (2,))]
    for p in made[:-1]:  # the last has no gradient
        p.grad = torch.randn(p.shape, generator=generator)
    return made


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, "inf", float("inf")])
def test_it_equals_torchs(p: Any, max_norm: float) -> None:
    ours, theirs = params(), params()
    got = clip_grad_norm_(iter(ours), max_norm, p)
    want = torch.nn.utils.clip_grad_norm_([q for q in theirs if q.numel()], max_norm, float(p))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_it_equals_torchs_where_gradients_are_tiny_and_no_norm_is_named() -> None:
    """torch adds 1e-6 to the norm that it divides by, and takes the Euclidean one."""
    ours, theirs = params(), params()
    for one in (*ours, *theirs):
        if one.grad is not None:
            one.grad *= 1e-6
    got = clip_grad_norm_(ours, 1e-6)
    want = torch.nn.utils.clip_grad_norm_([q for q in theirs if q.numel()], 1e-6)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = [q.grad for q in theirs if q.grad is not None and q.numel()]
    want = torch.cat([g.reshape(-1) for g in grads]).norm()
    torch.testing.assert_close(total_norm(theirs), want, rtol=1e-5, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_one_parameter_and_none_are_taken() -> None:
    (p, *_) = params()
    assert p.grad is not None
    want = p.grad.norm()
    torch.testing.assert_close(clip_grad_norm_(p, 1e3), want)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


def test_a_norm_that_is_not_finite_is_an_error_if_asked_for() -> None:
    own = params()
    own[0].grad = torch.full((3,), float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(own, 1.0, error_if_nonfinite=True)


def test_a_parameter_given_twice_counts_and_is_scaled_once() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert float(clip_grad_norm_([p, p], 1.0)) == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))


def test_entries_of_a_sparse_gradient_that_meet_are_added_first() -> None:
    p = nn.Parameter(torch.ones(5, 1))
    p.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor([[1.0], [2.0], [4.0]]), (5, 1), check_invariants=True
    )
    assert float(clip_grad_norm_([p], 1.0)) == 5.0
    torch.testing.assert_close(grads_of([p])[0], torch.tensor([[0.6], [0.8]]))
