"""Reading ahead: bounded, in order, with the errors of the thread in their place."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tilerec.data.read_ahead import ReadAhead


def test_items_arrive_in_order() -> None:
    with ReadAhead(iter(range(1000)), lambda item: 1, 10) as ahead:
        assert list(ahead) == list(range(1000))


def test_the_thread_waits_at_the_number_of_bytes() -> None:
    made: list[int] = []
    full = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 3:
                full.set()
            yield number

    with ReadAhead(items(), lambda item: 4, 12) as ahead:
        assert full.wait(10)
        # Three items of 4 bytes wait, and the fourth is in the thread's hands.
        assert made == [0, 1, 2, 3]
        assert sum(1 for _ in ahead) == 100


def test_an_error_of_the_thread_follows_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("bad row")

    seen = []
    with ReadAhead(items(), lambda item: 1, 1) as ahead:
        found = iter(ahead)
        seen += [next(found), next(found)]
        with pytest.raises(ValueError, match="bad row"):
            next(found)
    assert seen == [1, 2]


def test_closing_early_ends_the_thread_and_the_iterator() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    before = threading.active_count()
    with ReadAhead(items(), lambda item: 1, 5) as ahead:
        assert next(iter(ahead)) == 0
    assert closed.is_set()
    assert threading.active_count() == before
