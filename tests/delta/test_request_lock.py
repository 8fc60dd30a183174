"""Writes of a follower are done in their order between requests, by whichever side has the lock."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tilerec.delta import RequestLock


def await_writes(lock: RequestLock) -> None:
    """Return once a follower in another thread has posted writes."""
    while not lock._writes:
        pass


def test_without_requests_the_follower_writes_in_order() -> None:
    seen: list[tuple[int, int]] = []
    RequestLock().write([lambda number=number: seen.append((number, threading.get_ident())) for number in range(5)])
    assert seen == [(number, threading.get_ident()) for number in range(5)]


def test_no_writes_wait_for_no_request() -> None:
    lock = RequestLock()
    with lock:
        lock.write([])


def test_a_request_that_ends_does_one_write_and_the_follower_the_rest() -> None:
    lock, seen = RequestLock(), list[int]()
    with ThreadPoolExecutor(1) as thread:
        follower = thread.submit(threading.get_ident).result()
        with lock:
            done = thread.submit(lock.write, [lambda: seen.append(threading.get_ident())] * 3)
            await_writes(lock)
            assert not seen  # nothing is written while a request reads
        assert seen[0] == threading.get_ident()
        done.result()
    assert seen[1:] == [follower] * 2


def test_a_request_waits_for_one_write_only() -> None:
    lock, seen, began = RequestLock(), list[int](), threading.Event()

    def first() -> None:
        began.set()
        while not lock._entry.locked():  # until the request waits
            pass
        seen.append(0)

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lock.write, [first, *(lambda number=number: seen.append(number) for number in (1, 2, 3))])
        assert began.wait(60)
        with lock:
            assert seen == [0]
        done.result()
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("by", ["follower", "request"])
def test_an_error_of_a_write_is_the_followers_and_ends_its_writes(by: str) -> None:
    lock, seen = RequestLock(), list[int]()

    def fails() -> None:
        raise OSError(5, "a disk that is gone")

    with ThreadPoolExecutor(1) as thread:
        if by == "request":
            with lock:
                done = thread.submit(lock.write, [fails, lambda: seen.append(1)])
                await_writes(lock)
        else:
            done = thread.submit(lock.write, [fails, lambda: seen.append(1)])
        with pytest.raises(OSError, match="a disk that is gone"):
            done.result()
    assert not seen
    lock.write([lambda: seen.append(2)])
    with lock:
        assert seen == [2]


def test_no_request_of_several_threads_reads_between_two_halves_of_a_write() -> None:
    lock, row, done = RequestLock(), [0, 0], threading.Event()

    def write() -> None:
        row[0] += 1
        row[1] += 1

    def read() -> list[tuple[int, int]]:
        found = []
        while not done.is_set():
            with lock:
                found.append((row[0], row[1]))
        return found

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        for _ in range(20):
            lock.write([write] * 50)
        done.set()
        found = [pair for reader in readers for pair in reader.result()]
    assert row == [1000, 1000]
    assert all(first == second for first, second in found)
