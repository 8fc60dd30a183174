"""The exit of a process waits for the messages that gloo holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tilerec.comms import exit_wait
from tilerec.comms.group import Handle
from tilerec.comms.process import _IN_FLIGHT, ProcessGroupComms
from tilerec.testing.ranks import run_ranks


def _post(group: ProcessGroupComms) -> Handle:
    return group.all_to_all("ids", torch.zeros(2), torch.ones(2), [1, 1], [1, 1])


def _store() -> dist.Store:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _late_peer() -> list[bool]:
    """Rank 1 sends only after rank 0 has waited in vain. The handles are not waited for."""
    group, store = ProcessGroupComms(), _store()
    if group.rank == 1:
        store.wait(["posted"])
    kept = _post(group)
    _post(group)  # its handle is dropped
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 0:
            patch.setattr(exit_wait, "_MOST_SECONDS", 0.01)
            found.append(_IN_FLIGHT.wait())
            store.set("posted", "")
        patch.setattr(exit_wait, "_MOST_SECONDS", 60.0)
        found.append(_IN_FLIGHT.wait())
    assert kept.is_done()
    return found


def test_exit_waits_for_messages_in_flight_but_not_for_ever() -> None:
    assert run_ranks(2, _late_peer) == [[False, True], [True]]


def _waited() -> bool:
    group = ProcessGroupComms()
    total = torch.ones(3, requires_grad=True)
    handles = [_post(group), group.all_reduce_("sums", total)]
    received = [handle.wait().tolist() for handle in handles]
    assert received == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_wait, "_MOST_SECONDS", 60.0)
        return _IN_FLIGHT.wait()


def test_nothing_is_left_of_messages_that_were_waited_for() -> None:
    assert run_ranks(2, _waited) == [True, True]
