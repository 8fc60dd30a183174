"""Blocks of an arena, read through a second map of the same process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tilerec.comms import shared_memory
from tilerec.comms.shared_memory import Arena, PeerArena

READER = 1


@pytest.fixture
def arena() -> Iterator[Arena]:
    return Arena(3)


def peer_of(arena: Arena) -> PeerArena:
    found = PeerArena.open(os.getpid(), arena.fd, arena.token, READER)
    assert found is not None
    return found


def filled(arena: Arena, size: int, value: int) -> Tensor:
    return arena.take(size).fill_(value)


def test_a_part_is_read_where_its_sender_wrote_it(arena: Arena) -> None:
    peer, mine = peer_of(arena), filled(arena, 10_000, 3)
    mine[4_000:] = 7
    place = arena.send(mine[4_000:], READER)
    part = peer.read(place, 6_000)
    assert part.tolist() == [7] * 6_000
    mine[5_000] = 9  # the same memory
    assert part[1_000] == 9


def test_a_block_is_reused_only_after_its_sender_and_its_readers_have_released_it(arena: Arena) -> None:
    peer, mine = peer_of(arena), filled(arena, 5_000, 1)
    first = mine.data_ptr()
    place = arena.send(mine, READER)
    assert filled(arena, 5_000, 2).data_ptr() != first  # leased and marked
    del mine
    assert filled(arena, 5_000, 2).data_ptr() != first  # marked: the message is on its way
    part = peer.read(place, 5_000)
    view = part.view(torch.int32)[10:]
    del part
    assert filled(arena, 5_000, 2).data_ptr() != first
    assert view.tolist() == [0x01010101] * (1_250 - 10)
    del view
    assert filled(arena, 5_000, 2).data_ptr() == first


def test_a_block_that_was_sent_holds_no_further_message(arena: Arena) -> None:
    mine = arena.take(100)
    assert arena.holds(mine)
    assert arena.holds(mine[50:])
    assert not arena.holds(torch.zeros(100))
    arena.send(mine, READER)
    assert not arena.holds(mine)


def test_a_forked_child_neither_reuses_nor_releases_blocks(arena: Arena) -> None:
    peer, mine = peer_of(arena), filled(arena, 5_000, 1)
    first, part = mine.data_ptr(), peer.read(arena.send(mine, READER), 5_000)
    child = os.fork()
    if child == 0:
        del mine, part
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    del mine
    assert filled(arena, 5_000, 2).data_ptr() != first
    assert part[0] == 1


def test_other_memory_is_not_taken_for_an_arena(arena: Arena) -> None:
    assert PeerArena.open(os.getpid(), arena.fd, bytes(16), READER) is None
    assert PeerArena.open(os.getpid(), 10**6, arena.token, READER) is None
    assert PeerArena.open(2**22 + 1, arena.fd, arena.token, READER) is None
    with open(__file__, "rb") as file:  # too short
        assert PeerArena.open(os.getpid(), file.fileno(), arena.token, READER) is None


def test_pages_of_idle_blocks_return_to_the_system(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_IDLE_BYTES", 1 << 20)

    def used() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    kept = filled(arena, 1 << 20, 5)
    for size in (1 << 20, 2 << 20):
        filled(arena, size, 1)
    most = used()
    assert most >= 3 << 20
    filled(arena, 64, 1)  # a block of a new size
    assert used() <= most - (2 << 20)
    assert kept.sum() == 5 << 20
    assert filled(arena, 2 << 20, 4).sum() == 8 << 20


def test_more_messages_than_an_arena_holds_are_an_error_with_a_next_move(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "ARENA_BYTES", 1 << 20)
    with pytest.raises(MemoryError, match=r"expected at most 1048576\. Send smaller batches, or set"):
        arena.take(1 << 20)
