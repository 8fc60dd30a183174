"""Cycles of waits: only those through the rank that asks count, and the shortest is found."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tilerec.comms.deadlock import LOST_RANK, Call, DeadlockDetector, cycle_through


@pytest.mark.parametrize(
    ("waits", "cycle"),
    [
        ({}, []),
        ({0: [1]}, []),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [1], 1: [2], 2: [0]}, [0, 1, 2]),
        ({0: [1, 2], 1: [3], 2: [0], 3: [0]}, [0, 2]),
        ({0: [1], 1: [2], 2: [1]}, []),  # of others: they find it
    ],
)
def test_the_shortest_cycle_through_a_rank(waits: dict[int, list[int]], cycle: list[int]) -> None:
    assert cycle_through(0, lambda rank: waits.get(rank, [])) == cycle


def watches(size: int) -> list[DeadlockDetector]:
    store = dist.HashStore()
    return [DeadlockDetector(store, rank, size) for rank in range(size)]


def looks(watch: DeadlockDetector, call: Call) -> str:
    """As a rank that waits: the first look writes, the second reads."""
    watch.look(call)
    return watch.look(call)


def test_a_rank_that_waits_for_a_late_one_finds_nothing() -> None:
    """Rank 2 is late; ranks 0 and 1 wait in two calls, of which rank 1 has made both."""
    first, second, _ = watches(3)
    one = first.begin("a", "rows", (0, 1, 2))
    second.begin("a", "rows", (0, 1, 2))
    other = second.begin("b", "route", (1, 2))
    assert looks(first, one) == ""
    assert looks(second, other) == ""
    assert looks(first, one) == ""


def test_a_record_of_an_earlier_wait_is_no_cycle() -> None:
    """Rank 1 waited for rank 0, which has come since."""
    first, second = watches(2)
    early = second.begin("a", "rows", (0, 1))
    looks(second, early)
    first.begin("a", "rows", (0, 1))
    later = first.begin("b", "route", (0, 1))
    assert looks(first, later) == ""


def test_parts_of_the_ranks_form_a_cycle_by_their_numbers_in_the_whole() -> None:
    """2 x 2 ranks: two wait along one axis and two along the other."""
    all_ranks = watches(4)
    ways = {0: ("rows 0", (0, 1)), 1: ("columns 1", (1, 3)), 3: ("rows 1", (2, 3)), 2: ("columns 0", (0, 2))}
    calls = {rank: all_ranks[rank].begin(f"call {rank}", *way) for rank, way in ways.items()}
    for rank, call in calls.items():
        all_ranks[rank].look(call)
    assert all_ranks[0].look(calls[0]) == (
        "rank 0 waits in call 0, which rank 1 has not called; rank 1 waits in call 1, which rank 3 has not called; "
        "rank 3 waits in call 3, which rank 2 has not called; rank 2 waits in call 2, which rank 0 has not called. "
        "Every rank makes the same calls in the same order."
    )


def test_the_message_of_a_launcher_is_found_under_every_prefix() -> None:
    whole = dist.HashStore()
    detector = DeadlockDetector(dist.PrefixStore("group", dist.PrefixStore("start", whole)), 0, 2)
    assert detector.last_words(look=True) is None
    whole.set(LOST_RANK, "rank 1 was killed")
    assert detector.last_words(look=False) is None
    assert detector.last_words(look=True) == "rank 1 was killed"
