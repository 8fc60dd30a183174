"""Transfers bring every cell of every new tile once, and both sides of a pair cut the same messages."""

from __future__ import annotations

import itertools

import hypothesis
import torch
from hypothesis import strategies as st

from tests.parity.harness import TILINGS, WORLDS
from tilerec.parallel.resharding.move_schedule import order_of
from tilerec.parallel.resharding.transfers import (
    ALIGNMENT,
    Transfer,
    cut,
    message_bytes,
    messages,
    row_transfers,
    starts,
    transfers,
)
from tilerec.spec.tile import Rectangle, Tiling
from tilerec.spec.topology import Topology

KINDS = st.sampled_from(sorted(TILINGS))


@hypothesis.given(
    old=KINDS,
    new=KINDS,
    world=st.sampled_from(sorted(WORLDS)),
    rows=st.integers(1, 20),
    dim=st.integers(1, 20),
)
def test_every_cell_of_every_new_tile_comes_once_from_a_rank_that_has_it(
    old: str, new: str, world: str, rows: int, dim: int
) -> None:
    hosts = WORLDS[world]
    topology = Topology(sum(map(len, hosts)), "cpu", hosts=hosts)
    before, after = TILINGS[old](rows, dim, hosts, 0), TILINGS[new](rows, dim, hosts, 1)
    cells, by_rows = transfers(before, after, topology), row_transfers(before, after, topology)
    for rank in range(topology.world_size):
        for leaf, tile in enumerate(after.tiles_of(rank)):
            covered = torch.zeros(rows, dim, dtype=torch.int64)
            for t in cells:
                if (t.target, t.target_leaf) == (rank, leaf):
                    r = t.rectangle
                    covered[r.r0 : r.r1, r.c0 : r.c1] += 1
                    source = before.tiles_of(t.source)[t.source_leaf]
                    assert source.r0 <= r.r0 < r.r1 <= source.r1
                    assert source.c0 <= r.c0 < r.c1 <= source.c1
            want = torch.zeros_like(covered)
            want[tile.r0 : tile.r1, tile.c0 : tile.c1] = 1
            assert torch.equal(covered, want)
            numbers = torch.zeros(rows, dtype=torch.int64)
            for t in by_rows:
                if (t.target, t.target_leaf) == (rank, leaf):
                    numbers[t.rectangle.r0 : t.rectangle.r1] += 1
                    source = before.tiles_of(t.source)[t.source_leaf]
                    assert source.r0 <= t.rectangle.r0 < t.rectangle.r1 <= source.r1
            assert torch.equal(numbers, want[:, tile.c0])


@hypothesis.given(old=KINDS, world=st.sampled_from(sorted(WORLDS)))
def test_what_is_where_it_is_wanted_stays_there(old: str, world: str) -> None:
    hosts = WORLDS[world]
    topology = Topology(sum(map(len, hosts)), "cpu", hosts=hosts)
    tiling = TILINGS[old](11, 6, hosts, 0)
    assert all(t.stays for t in transfers(tiling, tiling, topology))


def test_a_cell_with_copies_comes_from_the_receivers_host() -> None:
    topology = Topology(4, "cpu", hosts=((0, 1), (2, 3)))
    copies = Tiling.of("t", 4, 2, [(0, 4, 0, 2, (0, 2))])
    everywhere = Tiling.of("t", 4, 2, [(0, 4, 0, 2, (0, 1, 2, 3))])
    found = {t.target: t.source for t in transfers(copies, everywhere, topology)}
    assert found == {0: 0, 1: 0, 2: 2, 3: 2}


@hypothesis.given(
    rows=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    row_bytes=st.integers(1, 100),
    most=st.integers(1, 500),
)
def test_messages_hold_every_row_in_order_and_keep_their_size(rows: list[int], row_bytes: int, most: int) -> None:
    moves = [Transfer(0, 0, 1, 0, Rectangle(0, count, 0, 1)) for count in rows]
    slices = [s for i, move in enumerate(moves) for s in cut(move, i, 0, row_bytes, most)]
    made = list(messages(iter(slices), most))
    assert [s for message in made for s in message] == slices
    for i, count in enumerate(rows):
        own = [(s.r0, s.r1) for s in slices if s.table == i]
        assert own[0][0] == 0
        assert own[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
    for message in made:
        assert message_bytes(message) <= max(most, row_bytes)
        at = starts(message)
        assert all(begin % ALIGNMENT == 0 for begin in at)
        assert all(begin + s.bytes <= end for begin, s, end in zip(at, message, at[1:], strict=False))


def test_tables_move_in_the_order_that_needs_the_least_memory() -> None:
    """Rank 0 gives two tables of 2 for one of 4: the large one goes when one of the small ones has made room."""
    order = order_of([[2, 0], [2, 0], [0, 4]], [[0, 2], [0, 2], [4, 0]], None)
    assert order.extra == 2
    assert [batch[0] for batch in order.batches][:2] in ([0, 2], [1, 2])


@hypothesis.given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 6), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(0, 80)),
)
def test_batches_keep_to_the_extra_memory_and_hold_every_table_once(
    tables: list[tuple[int, ...]], most: int | None
) -> None:
    before, after = [list(t[:3]) for t in tables], [list(t[3:]) for t in tables]
    order = order_of(before, after, most)
    assert sorted(t for batch in order.batches for t in batch) == list(range(len(tables)))
    limit = max(order.extra, most or 0)
    held = [sum(t[r] for t in before) for r in range(3)]
    room = [max(held[r], sum(t[r] for t in after)) for r in range(3)]
    for batch in order.batches:
        for r in range(3):
            assert held[r] + sum(after[t][r] for t in batch) - room[r] <= limit
            held[r] += sum(after[t][r] - before[t][r] for t in batch)
