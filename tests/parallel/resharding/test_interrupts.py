"""Ctrl-C ends a step where ranks exchange messages anyway, and is never lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tilerec.parallel.resharding.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _python_handles_sigint() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_is_raised_by_the_next_check_and_not_before() -> None:
    seen = []

    def work() -> None:
        with Interrupts() as interrupts:
            press()
            seen.append("goes on")
            interrupts.check()
            seen.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["goes on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_check_it_is_raised_at_the_end_and_only_once() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        press()
    with Interrupts() as interrupts:
        interrupts.check()


def test_the_second_is_raised_at_once() -> None:
    seen = []

    def work() -> None:
        with Interrupts():
            press()
            press()
            seen.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_not_hidden_by_it() -> None:
    def work() -> None:
        with Interrupts():
            press()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_a_handler_of_the_program_stays_and_other_threads_change_nothing() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with Interrupts():
            press()
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    done: list[bool] = []

    def elsewhere() -> None:
        with Interrupts():
            done.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [True]
