"""`Traffic`: what is counted, for whom, and how it reads."""

from __future__ import annotations

import pytest

from tilerec.comms.traffic import Sent, Traffic
from tilerec.errors import ConfigError


def test_the_worked_example_counts_as_it_says() -> None:
    traffic = Traffic(0, 2)
    for _ in range(2):
        traffic.record("ids", [3, 4], 4)
    assert traffic.table() == [Sent("ids", calls=2, bytes=(0, 32))]
    assert traffic["ids"].total == traffic.total() == 32


def test_what_a_rank_sends_itself_is_not_counted() -> None:
    traffic = Traffic(1, 3)
    traffic.record("a", [1, 100, 2], 8)
    traffic.record_to("b", {0: 5, 1: 100})
    assert traffic["a"].bytes == (8, 0, 16)
    assert traffic["b"].bytes == (5, 0, 0)
    alone = Traffic(0, 1)
    alone.record("a", [7], 4)
    alone.record_ring("b", 7, 4)
    assert [line.total for line in alone] == [0, 0]
    assert [line.calls for line in alone] == [1, 1]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [0, 1, 2, 5, 7, 1000])
def test_a_ring_sends_each_element_as_often_as_a_sum_needs(size: int, elements: int) -> None:
    ranks = [Traffic(rank, size) for rank in range(size)]
    for traffic in ranks:
        traffic.record_ring("sum", elements, 4)
    chunks = [elements // size + (chunk < elements % size) for chunk in range(size)]
    for rank, traffic in enumerate(ranks):
        after = (rank + 1) % size
        sent = 2 * elements - chunks[after] - chunks[(rank + 2) % size]
        assert traffic["sum"].bytes == tuple(4 * sent if peer == after else 0 for peer in range(size))
    assert sum(traffic.total() for traffic in ranks) == 2 * (size - 1) * elements * 4


def test_a_part_counts_under_the_numbers_of_the_whole() -> None:
    whole = Traffic(3, 5)
    part = whole.part((1, 3, 4))
    assert (part.rank, part.size) == (1, 3)
    part.record("a", [10, 20, 30], 1)
    part.record_to("a", {0: 1})
    part.record_ring("ring", 3, 1)
    pair = part.part((1, 2))
    pair.record("a", [20, 5], 2)
    assert whole["a"] == part["a"] == Sent("a", 3, (0, 11, 0, 0, 40))
    assert whole["ring"].bytes == (0, 0, 0, 0, 4)
    same = whole.part((0, 1, 2, 3, 4))
    same.record("b", [1, 1, 1, 1, 1], 1)
    assert whole["b"].bytes == (1, 1, 1, 0, 1)


def test_bytes_between_hosts_are_those_that_leave_ones_own() -> None:
    traffic = Traffic(2, 4)
    traffic.record("ids", [1, 2, 4, 8], 1)
    traffic.record("rows", [0, 0, 0, 5], 1)
    assert traffic.between(((0, 1), (2, 3))) == {"ids": 3, "rows": 0}
    assert traffic.between(((0, 2), (3, 1))) == {"ids": 10, "rows": 5}
    assert traffic.between(((0, 1, 2, 3),)) == {"ids": 0, "rows": 0}
    part = traffic.part((2, 3))
    part.record("rows", [9, 9], 1)
    assert part.between(((0, 1), (2,), (3,))) == {"ids": 11, "rows": 14}


@pytest.mark.parametrize("hosts", [((0, 1),), ((0, 1, 2, 3), (2,)), ((0, 1), (2, 3, 4)), ()], ids=str)
def test_hosts_that_do_not_hold_every_rank_once_are_refused(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match=r"do not hold each of the ranks 0 to 3 once"):
        Traffic(2, 4).between(hosts)


def test_lines_come_in_the_order_of_their_first_call_until_a_reset() -> None:
    traffic = Traffic(0, 2)
    view = traffic.part((0, 1))
    traffic.record("b", [0, 1], 1)
    traffic.record("a", [0, 1], 1)
    traffic.record("b", [0, 1], 1)
    assert [line.name for line in traffic] == ["b", "a"]
    assert traffic["never"] == Sent("never", 0, (0, 0))
    assert [line.name for line in traffic] == ["b", "a"], "asking adds no line"
    view.reset()
    assert traffic.table() == []
    assert traffic.total() == 0
    traffic.record("a", [0, 3], 1)
    assert view.table() == [Sent("a", 1, (0, 3))]


def test_a_table_taken_earlier_does_not_change() -> None:
    traffic = Traffic(0, 2)
    traffic.record("a", [0, 1], 1)
    table = traffic.table()
    traffic.record("a", [0, 1], 1)
    assert table == [Sent("a", 1, (0, 1))]


def test_it_prints_as_a_table() -> None:
    traffic = Traffic(1, 2)
    assert str(traffic).splitlines()[0] == "rank 1 of 2"
    traffic.record("gradients", [1_000_000, 0], 4)
    assert str(traffic).splitlines() == [
        "rank 1 of 2",
        "name         calls       bytes sent",
        "gradients        1        4,000,000",
    ]
