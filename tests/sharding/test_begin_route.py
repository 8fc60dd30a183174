"""Routes in two parts: the sizes of later batches travel while earlier batches wait for theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.sharding.header import header_sizes_of
from tilerec.testing import random_batch, run_virtual_ranks


def _outputs(group: Group) -> None:
    module = sharded(group, rows(12, group.size))
    batches = [random_batch(["a"], 12, 3, seed=10 * k + group.rank) for k in range(3)]
    expected = [module(batch).values() for batch in batches]
    begun = [module.begin_route(batch) for batch in batches]  # all headers are in flight
    for one, wanted in zip(begun, expected, strict=True):
        assert torch.equal(module(one.finish()).values(), wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_that_were_begun_together_have_the_same_bits(ranks: int) -> None:
    run_virtual_ranks(ranks, _outputs)


def _error(group: Group, refused: bool) -> tuple[str, str]:
    module = sharded(group, rows(12, group.size))
    good = batch_of([[1], [2, 11]])
    if group.rank:
        bad: Any = module.begin_route(good)
    elif refused:
        bad = module.begin_refused(ValueError("not readable"))
    else:
        bad = module.begin_route(batch_of([[1], [99]]))
    after = module.begin_route(good)  # nothing raises before `finish`
    with pytest.raises((InputError, ValueError)) as raised:
        bad.finish()
    assert module(after.finish()).values().shape == (2, 4)
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("refused", [False, True])
def test_a_wrong_batch_raises_on_all_ranks_in_finish_and_the_next_one_is_fine(refused: bool) -> None:
    own, other = run_virtual_ranks(2, _error, refused)
    assert own[0] == ("ValueError" if refused else "InputError")
    assert "Rank 0 refused its batch" in other[1]


def _notes(group: Group) -> tuple[list[int], ...]:
    module = sharded(group, rows(12, group.size))
    before = module.begin_route(batch_of([[1], [2, 11]]))
    header_sizes_of(module.exchange.route_group).carry_notes()
    first = module.begin_route(batch_of([[1], [2, 11]]), 10 + group.rank)
    second = module.begin_route(batch_of([[99 * (group.rank == 1)]]), -group.rank)
    early = second.headers.notes()
    assert module(before.finish()).values().shape == (2, 4)
    assert module(first.finish()).values().shape == (2, 4)
    with pytest.raises(InputError):
        second.finish()
    return first.headers.notes(), second.headers.notes(), early


def test_a_route_carries_a_note_to_all_ranks_also_if_a_rank_refuses_its_batch() -> None:
    assert run_virtual_ranks(3, _notes) == [([10, 11, 12], [0, -1, -2], [0, -1, -2])] * 3
