"""Requests and a follower's writes exclude each other, and no request waits for more than one write."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilerec.delta import RequestLock, request_lock
from tilerec.ops.backends import RowWrite


@pytest.fixture(params=["native", "plain"])
def lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RequestLock:
    if request.param == "plain":
        monkeypatch.setattr(request_lock, "row_gate", lambda: None)
    return RequestLock()


def test_a_write_waits_for_the_request_that_runs(lock: RequestLock) -> None:
    seen, began = list[str](), threading.Event()

    def follow() -> None:
        began.set()
        with lock.writing():
            seen.append("written")

    with ThreadPoolExecutor(1) as thread:
        with lock:
            done = thread.submit(follow)
            assert began.wait(60)
            seen.append("read")
        done.result()
    assert seen == ["read", "written"]


def test_a_request_waits_for_one_write_only(lock: RequestLock) -> None:
    if lock.gate is None:
        pytest.skip("threading.Lock has no order")
    seen, waits = list[str](), threading.Event()

    def read() -> None:
        waits.set()
        with lock:
            seen.append("read")

    with ThreadPoolExecutor(1) as thread:
        with lock.writing():
            done = thread.submit(read)
            assert waits.wait(60)
            while not lock.gate.waiting:
                pass
            seen.append("first write")
        with lock.writing():
            seen.append("second write")
        done.result()
    assert seen == ["first write", "read", "second write"]


def test_requests_run_beside_each_other() -> None:
    lock = RequestLock()
    if lock.gate is None:
        pytest.skip("needs the native library")
    with lock, ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: [lock.__enter__(), lock.__exit__()]).result(60)


def test_a_write_that_fails_lets_requests_in_again(lock: RequestLock) -> None:
    with pytest.raises(OSError, match="a disk that is gone"), lock.writing():
        raise OSError(5, "a disk that is gone")
    with lock:
        pass
    with lock.writing():
        pass


def test_no_request_of_several_threads_reads_between_two_halves_of_a_write(lock: RequestLock) -> None:
    row, done = [0, 0], threading.Event()

    def read() -> list[tuple[int, int]]:
        found = []
        while not done.is_set():
            with lock:
                found.append((row[0], row[1]))
        return found

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        for _ in range(30):
            with lock.writing():
                row[0] += 1
                row[1] += 1
        done.set()
        found = [pair for reader in readers for pair in reader.result()]
    assert row == [30, 30]
    assert all(first == second for first, second in found)


@pytest.mark.parametrize("listed", [False, True], ids=["all rows", "listed rows"])
def test_a_request_sees_each_row_as_a_whole(listed: bool) -> None:
    lock, done = RequestLock(), threading.Event()
    place = torch.zeros(64, 4096, dtype=torch.int64)

    def read() -> int:
        count = 0
        while not done.is_set():
            with lock:
                assert torch.equal(*torch.aminmax(place, dim=1))
            count += 1
        return count

    with ThreadPoolExecutor(1) as thread:
        reader = thread.submit(read)
        for number in range(1, 30):
            write = RowWrite(place, torch.arange(63, -1, -1) if listed else None, torch.full_like(place, number))
            native = write.native
            if native is None or lock.gate is None:
                pytest.skip("needs the native library")
            write.run_between_requests(native, lock.gate, 3)
            assert bool((place == number).all())
        done.set()
        assert reader.result()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_follower_leaves_the_core_of_requests_and_gets_its_cores_back() -> None:
    lock = RequestLock()
    if lock.gate is None:
        pytest.skip("needs the native library")
    cores = os.sched_getaffinity(0)
    own = min(cores)
    place = torch.zeros(64, 16)
    try:
        os.sched_setaffinity(0, {own})
        with lock:
            pass
        os.sched_setaffinity(0, cores)
        with lock.gate.other_core():
            assert os.sched_getaffinity(0) == cores - {own}
        assert os.sched_getaffinity(0) == cores
        write = RowWrite(place, None, torch.ones(64, 16))
        assert write.native is not None
        os.sched_setaffinity(0, {own})
        with lock.gate.other_core():  # there is no other one
            write.run_between_requests(write.native, lock.gate, 3, 1000)
            assert os.sched_getaffinity(0) == {own}
        os.sched_setaffinity(0, cores)
        write.run_between_requests(write.native, lock.gate, 3, 1000)
        assert os.sched_getaffinity(0) == cores
    finally:
        os.sched_setaffinity(0, cores)
    assert bool((place == 1).all())
