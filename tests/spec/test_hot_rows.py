"""`HotRows`: distinct ids in order, as text and back; and the head that they give a tiling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.spec import hot_rows
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.tile import Rectangle, Tile, Tiling, rectangles


def test_ids_are_ascending_equal_in_any_order_and_read_back_from_their_text() -> None:
    made = HotRows(torch.tensor([7, 2, 5]))
    assert made.ids.tolist() == [2, 5, 7]
    assert made == HotRows(np.array([5, 7, 2]))
    assert hash(made) == hash(HotRows(np.array([5, 7, 2])))
    assert made != HotRows(np.array([5, 7]))
    assert HotRows.from_json(JsonValue.of(made.to_json(), "plan")) == made
    assert len(HotRows()) == 0
    assert HotRows() == HotRows([])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 2, 1], "the hot id 1 twice"),
        ([-1, 2], "the hot id -1; expected row numbers from 0"),
        (np.array([1, 2], dtype=np.uint64), "ids of type uint64"),
        (torch.tensor([1.0, 2.0]), "ids of type float32"),
        (torch.tensor([[1], [2]]), r"shape \[2, 1\]"),
        (np.arange(9), "9 hot ids; expected at most 8"),
        ([[1], [2, 3]], "ids that make no array"),
        (torch.tensor([1], device="meta"), "ids that make no array"),
    ],
)
def test_ids_that_are_none_are_refused(ids: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rows, "MOST_HOT_ROWS", 8)
    with pytest.raises(ConfigError, match=f"HotRows: got .*{words}"):
        HotRows(ids)


@pytest.mark.parametrize("text", [[1, 1], [[1]], ["a"], 3])
def test_text_that_is_no_list_of_distinct_ids_names_its_place(text: Any) -> None:
    data = {"sharding_type": "row_wise", "hot": text}
    with pytest.raises(ConfigError, match=r"Table 't' in the plan: hot: "):
        ParameterSharding.from_json("t", data)


def test_a_head_is_a_tile_below_the_rows_on_every_rank() -> None:
    bare = Tiling.of("t", 10, 4, [(0, 6, 0, 2, 0), (6, 10, 0, 2, 1), (0, 10, 2, 4, 1)])
    tiling = bare.with_hot("t", HotRows(np.array([1, 9])), 3)
    assert tiling.rows == 10
    assert tiling.bare == bare
    assert tiling != bare
    assert tiling.tiles() == bare.tiles()
    assert tiling.tiles_of(2) == ()
    assert tiling.tiles_of(1) == (Rectangle(6, 10, 0, 2), Rectangle(0, 10, 2, 4))
    assert Tile(10, 12, 0, 4, (0, 1, 2)) in rectangles(tiling)
    assert set(rectangles(tiling)) - set(rectangles(bare)) == {Tile(10, 12, 0, 4, (0, 1, 2))}
    assert tiling.with_hot("t", None, 3) == bare
    assert tiling.with_hot("t", HotRows(), 3) == bare


def test_a_tiling_with_all_rows_on_every_rank_needs_no_head() -> None:
    for world, owners in ((1, (0,)), (2, (0, 1))):
        bare = Tiling.of("t", 10, 4, [(0, 10, 0, 4, owners)])
        assert bare.with_hot("t", HotRows(np.array([1])), world) is bare
