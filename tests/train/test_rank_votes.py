"""Votes of ranks reach all of them at the same step."""

from __future__ import annotations

import pytest

from tilerec.comms.group import Group
from tilerec.testing import run_virtual_ranks
from tilerec.train.rank_votes import RankVotes

STEPS = 80


def answers(group: Group, interval_s: float, voter: int, first: int) -> list[tuple[bool, ...]]:
    """Vote for the second question on one rank from a step on; return all answers."""
    votes = RankVotes(group, 2, interval_s)
    return [votes.at(step, (False, group.rank == voter and step >= first)) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("voter", [0, 2])
def test_all_ranks_learn_of_a_vote_at_the_same_step(voter: int) -> None:
    every = run_virtual_ranks(3, answers, 0.0, voter, 7)
    assert every[0] == every[1] == every[2]
    # With a post per step, the answer comes at the step after the vote.
    assert every[0].index((False, True)) == 7
    assert not any(stop for stop, _ in every[0])


def test_posts_are_rare_if_steps_are_short() -> None:
    every = run_virtual_ranks(2, answers, 1e9, 1, 1)
    assert every[0] == every[1]
    # The second post is the first to know the time of a step; the next is 64 steps later.
    assert [step for step, (_, vote) in enumerate(every[0], 1) if vote] == [2, 3, 67]


def last(group: Group, voter: int) -> list[tuple[bool, ...]]:
    votes = RankVotes(group, 1, 0.0)
    votes.at(1, (False,))
    return [votes.decide((group.rank == voter,)), votes.decide((False,))]


def test_the_last_decision_needs_no_further_step() -> None:
    assert run_virtual_ranks(2, last, 1) == [[(True,), (False,)]] * 2


def test_one_process_decides_alone() -> None:
    votes = RankVotes(None, 2)
    assert votes.at(1, (True, False)) == (True, False)
    assert votes.decide((False, True)) == (False, True)
