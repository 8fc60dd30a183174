"""`run_virtual_ranks`: closures on threads, and whose failure is told."""

from __future__ import annotations

import threading

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.errors import CommsError, InputError
from tilerec.testing.ranks import RankError
from tilerec.testing.virtual import run_virtual_ranks


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_results_come_in_the_order_of_the_ranks(world_size: int) -> None:
    found = run_virtual_ranks(world_size, lambda group, more: (group.rank, group.size, more), "x")
    assert found == [(rank, world_size, "x") for rank in range(world_size)]


def test_threads_of_torch_are_one_per_rank_and_put_back() -> None:
    before = torch.get_num_threads()
    assert run_virtual_ranks(3, lambda group: torch.get_num_threads()) == [1] * 3
    assert torch.get_num_threads() == before

    def fail(group: Group) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run_virtual_ranks(3, fail)
    assert torch.get_num_threads() == before


def test_the_failure_that_came_first_is_told_and_not_what_it_caused() -> None:
    def act(group: Group) -> None:
        if group.rank == 2:
            raise InputError("feature 'x' is missing") from KeyError("x")
        group.barrier()

    with pytest.raises(InputError, match=r"^feature 'x' is missing$") as caught:
        run_virtual_ranks(3, act)
    story = caught.value.__cause__
    assert isinstance(story, RankError)
    assert str(story).startswith("Rank 2 of 3: InputError: feature 'x' is missing")
    assert "rank 0: CommsError: all_to_all 'barrier' on rank 0: rank 2 failed with InputError" in str(story)
    assert isinstance(story.__cause__, KeyError)


def test_a_disagreement_is_an_error_of_its_own_where_no_rank_failed() -> None:
    with pytest.raises(CommsError, match="differs") as caught:
        run_virtual_ranks(2, lambda group: group.all_reduce_(f"x{group.rank}", torch.zeros(1)).wait())
    assert isinstance(caught.value.__cause__, RankError)


def test_a_rank_that_exits_is_a_failure() -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            raise SystemExit(3)
        group.barrier()

    with pytest.raises(SystemExit):
        run_virtual_ranks(2, act)


def test_a_rank_that_hangs_is_told_with_its_stack_and_its_later_calls_raise() -> None:
    done, told = threading.Event(), threading.Event()
    heard: list[str] = []

    def sit_here(group: Group) -> None:
        done.wait(20.0)
        try:
            group.barrier()
        except CommsError as error:
            heard.append(str(error))
        told.set()

    def act(group: Group) -> None:
        if group.rank == 1:
            sit_here(group)

    with pytest.raises(RankError, match=r"Ranks \[1\] of 2 were not done after 0.2 s") as caught:
        run_virtual_ranks(2, act, timeout_s=0.2)
    assert "sit_here" in str(caught.value)
    done.set()
    assert told.wait(20.0)
    assert "rank 1 failed with RankError" in heard[0]


def test_ranks_share_what_a_closure_holds_and_not_their_traffic() -> None:
    seen: dict[int, int] = {}

    def act(group: Group) -> int:
        seen[group.rank] = group.rank
        if group.size > 1:
            group.all_reduce_("x", torch.zeros(4)).wait()
        return group.traffic.total()

    assert run_virtual_ranks(2, act) == [16, 16]
    assert seen == {0: 0, 1: 1}


def test_a_backward_meets_other_ranks() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, group: Group) -> torch.Tensor:
            ctx.group = group  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return ctx.group.all_reduce_("grad", grad.clone()).wait(), None  # type: ignore[attr-defined]

    def act(group: Group) -> float:
        x = torch.ones((), requires_grad=True)
        (Sum.apply(x, group) * (group.rank + 1)).backward()
        assert x.grad is not None
        return float(x.grad)

    assert run_virtual_ranks(4, act) == [10.0] * 4
