"""Pools of gloo ranks: results, reuse, variables, and every way in which a rank can fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import CommsError
from tilerec.testing.ranks import RankError, Ranks, run_ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


class Unpicklable(Exception):
    """Its constructor wants more than its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def _echo(*args: Any) -> tuple[int, tuple[Any, ...]]:
    return dist.get_rank(), args


def _process() -> int:
    return os.getpid()


def _variables() -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OWN")
    return {name: os.environ.get(name) for name in names}


def _sum(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values


def _threads() -> int:
    return torch.get_num_threads()


def _set_up() -> None:
    os.environ["OWN"] = f"set up before the group: {not dist.is_initialized()}"


def _set_up_badly() -> None:
    raise ArithmeticError("0 sets up nothing")


def _fail_on(rank: int, how: str) -> str:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ArithmeticError("0 divides nothing")
        if how == "raise, unpicklable":
            raise Unpicklable(1, 2)
        if how == "exit":
            os._exit(7)
        if how == "sys.exit":
            raise SystemExit(7)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "lambda":
            return lambda: 0  # type: ignore[return-value]
        assert how == "hang"
        signal.pause()
    return "fine"


def _fail_and_meet(rank: int, how: str) -> str:
    """As above, but the others wait for that rank."""
    _fail_on(rank, how)
    ProcessGroupComms().barrier()
    return "met"


def _open_groups() -> int:
    dist.new_group([0, 1])
    dist.new_group([0])
    return len(dist.distributed_c10d._world.pg_map)


def test_results_come_in_the_order_of_the_ranks(two: Ranks) -> None:
    assert two.run(_echo, 1, "x", [None]) == [(rank, (1, "x", [None])) for rank in range(2)]
    totals = two.run(_sum, torch.arange(3))
    assert [total.tolist() for total in totals] == [[0, 2, 4]] * 2


def test_processes_are_reused_and_a_cases_groups_are_closed(two: Ranks) -> None:
    before = two.run(_process)
    assert len({*before, os.getpid()}) == 3
    assert two.run(_open_groups) == two.run(_open_groups)
    assert two.run(_process) == before


def test_ranks_are_numbered_on_their_hosts_as_torchrun_does() -> None:
    with Ranks(4, hosts=2, setup=_set_up, threads=3) as ranks:
        for rank, variables in enumerate(ranks.run(_variables)):
            assert variables == {
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(rank // 2),
                "GROUP_WORLD_SIZE": "2",
                "OWN": "set up before the group: True",
            }
        assert ranks.run(_threads) == [3] * 4


def test_one_case_needs_no_pool() -> None:
    assert run_ranks(1, _echo, 5) == [(0, (5,))]
    outcomes = run_ranks(2, _fail_on, 1, "raise", return_exceptions=True)
    assert outcomes[0] == "fine"
    assert isinstance(outcomes[1], ArithmeticError)


def test_an_exception_keeps_its_type_and_tells_its_rank_and_traceback(two: Ranks) -> None:
    with pytest.raises(ArithmeticError, match=r"^0 divides nothing$") as caught:
        two.run(_fail_and_meet, 1, "raise")
    story = caught.value.__cause__
    assert isinstance(story, RankError)
    assert str(story).startswith("Rank 1 of 2: ArithmeticError: 0 divides nothing")
    assert "in _fail_on" in str(story)
    # What it caused on the other is told after it.
    assert "rank 0: CommsError: all_to_all 'barrier' on rank 0 of 2: " in str(story)


def test_an_exception_that_cannot_be_pickled_is_told(two: Ranks) -> None:
    with pytest.raises(RankError, match="Rank 0 of 2: Unpicklable: 1 and 2") as caught:
        two.run(_fail_on, 0, "raise, unpicklable")
    assert "in _fail_on" in str(caught.value)


def test_a_result_that_cannot_be_pickled_is_refused(two: Ranks) -> None:
    with pytest.raises(TypeError, match="rank 1 returned a function that cannot be pickled"):
        two.run(_fail_on, 1, "lambda")


@pytest.mark.parametrize(
    ("how", "words"),
    [("exit", "exit code 7"), ("signal", "killed by signal SIGKILL")],
)
def test_a_rank_that_dies_is_told_with_how(how: str, words: str, two: Ranks) -> None:
    with pytest.raises(RankError, match=rf"Rank 1 of 2: died in _fail_and_meet\(\), {words}") as caught:
        two.run(_fail_and_meet, 1, how)
    assert "rank 0: CommsError: " in str(caught.value)
    outcomes = two.run(_fail_and_meet, 1, how, return_exceptions=True)
    assert isinstance(outcomes[0], CommsError)
    assert isinstance(outcomes[1], RankError)


def test_an_exit_in_a_case_is_an_exception_and_no_success(two: Ranks) -> None:
    outcomes = two.run(_fail_on, 0, "sys.exit", return_exceptions=True)
    assert isinstance(outcomes[0], SystemExit)
    assert outcomes[1] == "fine"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="stacks are asked for by a signal")
def test_a_rank_that_hangs_is_killed_and_shows_where_it_was() -> None:
    with Ranks(2, timeout_s=1.5, setup=_set_up) as ranks:
        pids = ranks.run(_process)
        with pytest.raises(RankError, match=r"Rank 1 of 2: still in _fail_on\(\) after 1.5 s; it was killed") as caught:
            ranks.run(_fail_on, 1, "hang")
        assert "_fail_on" in str(caught.value).split("it was killed", 1)[1]
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        # And the pool goes on with new processes.
        assert set(ranks.run(_process)).isdisjoint(pids)


def test_a_rank_that_died_between_two_runs_is_missed(two: Ranks) -> None:
    pids = two.run(_process)
    os.kill(pids[1], signal.SIGKILL)
    two._processes[1].join()
    with pytest.raises(RankError, match=r"Rank 1 of 2: died in _process\(\), killed by signal SIGKILL"):
        two.run(_process)
    assert len(two.run(_process)) == 2


def test_a_set_up_that_fails_is_the_error() -> None:
    with Ranks(2, setup=_set_up_badly) as ranks, pytest.raises(ArithmeticError, match="0 sets up nothing"):
        ranks.run(_echo)


def test_a_closed_pool_leaves_no_process_and_no_file() -> None:
    ranks = Ranks(2)
    pids = ranks.run(_process)
    assert ranks._folder is not None
    folder = Path(ranks._folder.name)
    assert folder.exists()
    ranks.close()
    ranks.close()
    assert not folder.exists()
    assert not {child.pid for child in multiprocessing.active_children()} & set(pids)
    assert ranks.run(_echo) == [(0, ()), (1, ())]
    ranks.close()


def test_functions_that_another_process_cannot_find_are_refused(two: Ranks) -> None:
    def inside() -> None: ...

    for function in (inside, lambda: 0, two.run):
        with pytest.raises(ValueError, match="pass a function defined at the top of a module"):
            two.run(function)
    assert two.run(_echo) == [(0, ()), (1, ())]


@pytest.mark.parametrize(("world_size", "hosts"), [(0, 1), (2, 0), (3, 2), (2, 4)])
def test_ranks_and_hosts_must_fit(world_size: int, hosts: int) -> None:
    with pytest.raises(ValueError, match=f"Ranks: got {world_size} ranks on {hosts} hosts; expected"):
        Ranks(world_size, hosts)
