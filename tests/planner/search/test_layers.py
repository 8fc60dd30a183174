"""Layers: as many pieces on every rank, memory minded, and hardly less level than one by one."""

from __future__ import annotations

import numpy as np
import pytest

from tilerec.planner.search import pack as packing
from tilerec.planner.search.bins import Bins
from tilerec.planner.search.instance import Instance, evaluate, fits
from tilerec.planner.search.pack import PackingOrder, pack
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.slopes import Slopes, split_for_layers
from tilerec.planner.search.work import Work


def crumbs(ranks: int, tables: int, cap: int) -> Instance:
    """Many tables of about one size, some in two pieces, on hosts of four ranks; the last stage is their link."""
    rng = np.random.default_rng(3)
    cost = rng.integers(50, 100, (tables, 1, 3)).astype(np.int64)
    return Instance(
        [f"t{i:04d}" for i in range(tables)],
        np.ones((tables, 1), np.int64),
        (1 + (np.arange(tables) % 5 == 0)).astype(np.int64)[:, None],
        cost,
        np.zeros_like(cost),
        rng.integers(1, 20, (tables, 1, 1)).astype(np.int64),
        np.full((ranks, 1), cap),
        np.arange(ranks) // 4,
        shared=np.array([False, False, True]),
    )


@pytest.mark.parametrize("rule", [PackingOrder.TIME, PackingOrder.BOTH])
def test_layers_come_out_almost_as_level_as_pieces_one_by_one(
    monkeypatch: pytest.MonkeyPatch, rule: PackingOrder
) -> None:
    instance = crumbs(32, 900, 450)
    relaxed, option = Relaxed(instance), np.zeros(900, np.int64)
    slow = pack(relaxed, option, rule, Work(10**10))
    monkeypatch.setattr(packing, "LAYERS_FROM_BINS", 8)
    assert len(split_for_layers(np.arange(900), instance.pieces[:, 0], 32)[1]) > 300
    quick = pack(relaxed, option, rule, Work(10**10))
    assert slow is not None
    assert quick is not None
    assert slow.places != quick.places
    assert fits(instance, quick.memory)
    one, other = (evaluate(instance, option, p.places) for p in (slow, quick))
    assert other.memory.tolist() == quick.memory.tolist()
    assert other.cost <= one.cost * 1.02
    for places, pieces in zip(quick.places, instance.pieces[:, 0].tolist(), strict=True):
        assert len(set(places)) == pieces


def test_a_table_of_several_pieces_is_never_laid_and_no_table_is_lost() -> None:
    pieces = np.array([1, 2] * 60, np.int64)
    first, laid, last = split_for_layers(np.arange(120)[::-1].copy(), pieces, 4)
    assert np.concatenate([first, laid, last]).tolist() != []
    assert sorted(np.concatenate([first, laid, last]).tolist()) == list(range(120))
    assert (pieces[laid] == 1).all()
    assert len(laid) > 0
    assert split_for_layers(np.arange(5), np.ones(5, np.int64), 4)[1].tolist() == []


def test_a_layer_that_finds_too_few_ranks_with_room_says_so() -> None:
    def laid(room: list[int]) -> list[int] | None:
        time, free = np.zeros((2, 1)), np.array(room)[:, None]
        bins = Bins(
            time, np.ones((2, 1)), free, np.zeros(2, np.int64), None, np.array([2]), np.zeros(1, np.bool_), None
        )  # fmt: skip
        state = Slopes(bins, np.ones(1), np.ones(1), with_memory=False)
        found = state.add_layers(np.full((4, 1), 5), np.full((4, 1), 10), np.ones((4, 1)))
        return None if found is None else [*found.tolist(), *(time for (time,) in state.time), *free[:, 0].tolist()]

    assert laid([20, 20]) == [0, 1, 0, 1, 10.0, 10.0, 0, 0]
    assert laid([35, 15]) == [0, 1, 0, 0, 15.0, 5.0, 5, 5]
    assert laid([25, 15]) is None
