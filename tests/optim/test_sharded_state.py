"""Tables in tiles as optimizers meet them: what lies beside the leaves, put together and taken apart."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import CommsError, ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.optim.norm import clip_grad_norm_
from tilerec.optim.sharded_state import (
    accepts_any_state_shape,
    combine_parts,
    empty_tile_leaves,
    gradient_layout,
    is_secondary_leaf,
    split_loaded_state,
    stepped_by_optimizer,
    tables_by_name,
    tiled_table_of,
    write_parts,
)
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sharding.table import ShardedTable
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

ROWS, DIM, WORLD = 7, 6, 3
CUTS: dict[str, list[tuple[Any, ...]]] = {
    "everywhere": [(0, 7, 0, 6, (0, 1, 2))],
    "two": [(0, 7, 0, 2, 0), (0, 7, 2, 4, 1), (0, 7, 4, 6, 0)],
    "rows": [(0, 6, 0, 6, 0), (6, 7, 0, 6, 2)],
    "some": [(0, 3, 0, 6, (0, 1)), (3, 7, 0, 6, (1, 2))],
}
BASE = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in CUTS])


def sharded(group: Group) -> Any:
    own = copy.deepcopy(BASE)
    tilings = {name: Tiling.of(name, ROWS, DIM, tiles) for name, tiles in CUTS.items()}
    shard_collection(own, tilings, group, group.split("route"), Topology(group.size, "cpu"))
    return own


def table(own: Any, name: str) -> ShardedTable:
    return cast(ShardedTable, own.embedding_bags[name])


def test_a_table_has_the_name_of_its_first_leaf_and_the_others_are_further() -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        named = dict(own.named_parameters())
        tables = tables_by_name(named)
        assert list(tables) == [f"embedding_bags.{name}.weight" for name in CUTS]
        further = [name for name, p in named.items() if is_secondary_leaf(p)]
        twice = {0: ["two"], 1: ["some"], 2: []}[group.rank]
        assert further == [f"embedding_bags.{name}.weight.1" for name in twice]
        empty = [name for name, p in named.items() if any(p is leaf for leaf in empty_tile_leaves(named.values()))]
        missing = {0: [], 1: ["rows"], 2: ["two"]}[group.rank]
        assert empty == [f"embedding_bags.{name}.weight" for name in missing]
        if group.rank == 0:
            for lost in ("embedding_bags.two.weight", "embedding_bags.two.weight.1"):
                with pytest.raises(ConfigError, match="got only some of the 2 tiles"):
                    tables_by_name({name: p for name, p in named.items() if name != lost})

    run_virtual_ranks(WORLD, run)


def test_parameters_of_whole_tables_and_of_no_table_are_none() -> None:
    for p in (next(BASE.parameters()), torch.nn.Parameter(torch.ones(2))):
        assert tiled_table_of(p) is None
        assert not is_secondary_leaf(p)
    assert tables_by_name(dict(BASE.named_parameters())) == {}
    assert empty_tile_leaves([torch.nn.Parameter(torch.ones(0, 2))]) == []


def test_the_shape_is_the_tables_and_what_has_none_is_refused() -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        for name in CUTS:
            leaves = table(own, name).leaves()

            def shape(fn: Any, name: str = name, leaves: list[Any] = leaves) -> tuple[int, ...]:
                return table(own, name).shape_of([fn(leaf) for leaf in leaves], f"state of '{name}'")

            assert shape(torch.zeros_like) == (7, 6)
            assert shape(lambda leaf: torch.tensor(0.0)) == ()
            if name == "two":
                with pytest.raises(ConfigError, match="'two' is cut by columns"):
                    shape(lambda leaf: torch.zeros(len(leaf)))
            else:
                assert shape(lambda leaf: torch.zeros(len(leaf))) == (7,)
                assert shape(lambda leaf: torch.zeros(len(leaf), 1)) == (7, 1)
            if name != "everywhere":
                with pytest.raises(ConfigError, match=rf"state of '{name}' has shape \(3, 3\) beside a tile"):
                    shape(lambda leaf: torch.zeros(3, 3))

    run_virtual_ranks(WORLD, run)


@pytest.mark.parametrize("whole", [torch.arange(42.0).view(7, 6), torch.arange(7.0), torch.arange(7.0)[:, None]])
def test_a_whole_value_is_cut_into_the_parts(whole: Tensor) -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        for name in CUTS:
            if name == "two" and whole.shape != (7, 6):
                continue
            one = table(own, name)
            parts = [
                torch.full(leaf.shape if whole.shape == (7, 6) else (len(leaf), *whole.shape[1:]), -1.0)
                for leaf in one.leaves()
            ]
            write_parts(one, parts, whole)
            for tile, part in zip(one.tiles, parts, strict=False):
                rows = whole[tile.r0 : tile.r1]
                assert torch.equal(part, rows[:, tile.c0 : tile.c1] if whole.shape == (7, 6) else rows)

    run_virtual_ranks(WORLD, run)


def test_numbers_go_beside_every_leaf_an_empty_one_too() -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        for name in CUTS:
            parts = [torch.tensor(0.0) for _ in table(own, name).leaves()]
            for value in (2, 3.0, torch.tensor(4.0)):
                write_parts(table(own, name), parts, value)
                assert [float(part) for part in parts] == [float(value)] * len(parts)

    run_virtual_ranks(WORLD, run)


def test_parts_of_two_kinds_are_refused_and_numbers_are_shown_as_they_are() -> None:
    def run(group: Group) -> None:
        one = table(sharded(group), "two")
        assert combine_parts(one, [{"a": {"b": 3}}] * 2, "state") == {"a": {"b": 3}}
        for parts in ([torch.zeros(7, 2), None], [{"a": 1}, None]):
            with pytest.raises(ConfigError, match=r"state.*for one tile .* and a NoneType for another"):
                combine_parts(one, parts, "state")

    run_virtual_ranks(WORLD, run)


def test_every_cell_counts_on_one_rank() -> None:
    def run(group: Group) -> list[int]:
        own = sharded(group)
        return [
            sum(leaf.numel() for i, leaf in enumerate(table(own, name).leaves()) if table(own, name).counts(i))
            for name in CUTS
        ]

    counted = run_virtual_ranks(WORLD, run)
    assert [sum(cells) for cells in zip(*counted, strict=True)] == [ROWS * DIM] * len(CUTS)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, float("inf")])
def test_all_ranks_have_the_same_norm_to_the_bit_also_without_a_gradient_of_their_own(p: float) -> None:
    whole = {name: torch.arange(42.0).view(7, 6).sub(20 + i) for i, name in enumerate(CUTS)}
    whole["rows"][:] = 0
    dense = torch.tensor([3.0, -50.0])

    def run(group: Group) -> tuple[float, float]:
        own = sharded(group)
        for name in ("two", "some", "everywhere"):
            for tile, leaf in zip(table(own, name).tiles, table(own, name).leaves(), strict=False):
                leaf.grad = whole[name][tile.r0 : tile.r1, tile.c0 : tile.c1].clone()
        over = torch.nn.Parameter(torch.zeros(2))
        over.grad = dense.clone()
        total = clip_grad_norm_([over, *own.parameters()], 1.0, p)
        return float(total), float(over.grad[1])

    got = run_virtual_ranks(WORLD, run)
    want = torch.linalg.vector_norm(torch.cat([*(w.view(-1) for w in whole.values()), dense]).double(), p)
    assert len(set(got)) == 1
    assert got[0][0] == pytest.approx(float(want), rel=1e-6)
    assert got[0][1] == pytest.approx(-50.0 / (float(want) + 1e-6), rel=1e-6)


def test_a_norm_of_no_order_is_refused_on_every_rank() -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        with pytest.raises(ConfigError, match="got norm_type=0"):
            clip_grad_norm_(own.parameters(), 1.0, 0)

    run_virtual_ranks(WORLD, run)


def test_leaves_of_which_a_rank_holds_nothing_step_along() -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        named = dict(own.named_parameters())
        optimizer = KeyedOptimizerWrapper(named, lambda p: torch.optim.Adam(p))

        def closure() -> float:
            optimizer.zero_grad()
            for p in named.values():
                p.grad = torch.ones_like(p) if p.numel() else None
            return 1.5

        closure()
        optimizer.step()
        assert optimizer.step(closure) == 1.5
        assert {float(optimizer.state[p]["step"]) for p in named.values()} == {2.0}
        assert all(p.grad is None for p in named.values() if not p.numel())

    run_virtual_ranks(WORLD, run)


def test_a_rank_that_names_no_table_is_told_of_to_the_others() -> None:
    def run(group: Group) -> None:
        own = sharded(group)
        over = torch.nn.Parameter(torch.ones(2))
        over.grad = torch.ones(2)
        if group.rank == 0:
            table(own, "two").leaves()[0].grad = torch.ones(7, 2)
        clip_grad_norm_([p for p in (over, *own.parameters()) if p.grad is not None], 1.0)

    with pytest.raises(CommsError, match=r"pass model\.parameters\(\), unfiltered, on every rank"):
        run_virtual_ranks(WORLD, run, timeout_s=10.0)


def state_of(value: Tensor) -> dict[str, Any]:
    return {
        "step": torch.tensor(3.0),
        "n": 5,
        "own": {"rows": value[:, 0].double()},
        "cells": value,
        "none": None,
    }


def test_state_is_adopted_beside_leaves_that_have_none() -> None:
    whole = torch.arange(42.0).view(7, 6)

    def run(group: Group) -> None:
        own = sharded(group)
        for name in ("everywhere", "rows", "some"):
            one, plan = table(own, name), list[Any]()
            parts = split_loaded_state(one, state_of(whole), "state", plan)
            for write in plan:
                write()
            assert len(parts) == len(one.leaves())
            assert all((part["n"], part["none"], float(part["step"])) == (5, None, 3.0) for part in parts)
            for tile, part in zip(one.tiles, parts, strict=False):
                assert torch.equal(part["cells"], whole[tile.r0 : tile.r1])
                assert torch.equal(part["own"]["rows"], whole[tile.r0 : tile.r1, 0].double())
        with pytest.raises(ConfigError, match="'rows' is a number per row, and table 'two' is cut by columns"):
            split_loaded_state(table(own, "two"), state_of(whole), "state", [])
        with pytest.raises(ConfigError, match=r"'cells'.*shape \(6, 6\)"):
            split_loaded_state(table(own, "rows"), {"cells": torch.zeros(6, 6)}, "state", [])
        assert [accepts_any_state_shape(table(own, name)) for name in CUTS] == [True, False, False, False]

    run_virtual_ranks(WORLD, run)


def test_a_column_of_numbers_per_row_is_adopted_as_one() -> None:
    whole = torch.arange(42.0).view(7, 6)

    def run(group: Group) -> None:
        one, plan = table(sharded(group), "rows"), list[Any]()
        parts = split_loaded_state(one, {"own": whole[:, :1]}, "state", plan)
        for write in plan:
            write()
        for tile, part in zip(one.tiles, parts, strict=False):
            assert torch.equal(part["own"], whole[tile.r0 : tile.r1, :1])

    run_virtual_ranks(WORLD, run)


class OneLeaf:
    """A table that lies whole in one leaf."""

    def __init__(self, device: str) -> None:
        self.leaf = torch.nn.Parameter(torch.zeros(ROWS, DIM, device=device))

    def leaves(self) -> list[torch.nn.Parameter]:
        return [self.leaf]

    def shape_of(self, parts: list[Tensor], what: str) -> tuple[int, ...]:
        return tuple(parts[0].shape)


def test_adopted_state_lies_where_the_leaf_does_and_a_step_count_where_it_was() -> None:
    """torch keeps step counts on the CPU, so that a step needs no readback."""
    loaded = {"step": torch.tensor(3.0), "exp_avg": torch.ones(ROWS, DIM)}
    (part,) = split_loaded_state(cast(Any, OneLeaf("meta")), loaded, "state", [])
    assert {name: own.device.type for name, own in part.items()} == {"step": "cpu", "exp_avg": "meta"}


def test_an_empty_state_for_a_table_that_has_one_is_refused_and_changes_nothing() -> None:
    def run(group: Group) -> None:
        own: Any = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
        tilings = {"t": Tiling.of("t", ROWS, DIM, [(0, ROWS, 0, DIM, 0)])}
        shard_collection(own, tilings, group, group.split("route"), Topology(1, "cpu"))
        optimizer = KeyedOptimizerWrapper(dict(own.named_parameters()), lambda p: torch.optim.Adam(p))
        (name,) = dict(own.named_parameters())
        optimizer.init_state()
        saved = optimizer.state_dict()
        saved["state"] = {name: {}}
        with pytest.raises(ConfigError, match=rf"{name}.*exp_avg"):
            optimizer.load_state_dict(saved)
        assert "exp_avg" in optimizer.state_dict()["state"][name]

    run_virtual_ranks(1, run)


@pytest.mark.parametrize("dim", [1, DIM])
def test_state_with_a_last_dimension_of_one_and_numbers_are_loaded(dim: int) -> None:
    """Numbers per row come as a column from other libraries, and step counts as plain numbers."""

    def run(group: Group) -> None:
        own: Any = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, dim, "t", feature_names=["f"])])
        tilings = {"t": Tiling.of("t", ROWS, dim, [(0, ROWS, 0, dim, 0)])}
        shard_collection(own, tilings, group, group.split("route"), Topology(1, "cpu"))
        named = dict(own.named_parameters())
        optimizer = KeyedOptimizerWrapper(named, lambda p: torch.optim.Adam(p))
        optimizer.init_state()
        (name,) = named
        cells = torch.arange(7.0 * dim).view(ROWS, dim)
        state = {"step": 3, "exp_avg": cells[..., None], "exp_avg_sq": cells}
        optimizer.load_state_dict({"state": {name: state}})
        loaded = optimizer.state_dict()["state"][name]
        assert float(loaded["step"]) == 3.0
        assert torch.equal(loaded["exp_avg"], cells)
        assert torch.equal(loaded["exp_avg_sq"], cells)
        with pytest.raises(ConfigError, match=rf"exp_avg': got 2.0; expected a tensor of shape \(7, {dim}\)"):
            optimizer.load_state_dict({"state": {name: {**state, "exp_avg": 2.0}}})

    run_virtual_ranks(1, run)


def test_state_of_a_table_that_is_frozen_now_is_kept_for_later() -> None:
    def run(group: Group) -> None:
        own: Any = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
        tilings = {"t": Tiling.of("t", ROWS, DIM, [(0, ROWS, 0, DIM, 0)])}
        shard_collection(own, tilings, group, group.split("route"), Topology(1, "cpu"))
        own.requires_grad_(False)
        named = dict(own.named_parameters())
        optimizer = KeyedOptimizerWrapper(named, lambda p: torch.optim.Adam(p))
        (name,) = named
        for wrong in ("a word", torch.ones(2)):
            with pytest.raises(ConfigError, match=f"{name}.*expected a dict"):
                optimizer.load_state_dict({"state": {name: wrong}})
        optimizer.load_state_dict({"state": {name: {}}})
        assert optimizer.state_dict()["state"].get(name, {}) == {}
        optimizer.load_state_dict({"state": {name: {"exp_avg": torch.full((ROWS, DIM), 2.0)}}})
        assert optimizer.state_dict()["state"][name]["exp_avg"].eq(2.0).all()

    run_virtual_ranks(1, run)


def test_attached_and_frozen_leaves_wait_for_no_step() -> None:
    own = copy.deepcopy(BASE)
    attached, frozen, sparse, plain = own.parameters()
    apply_optimizer_in_backward(SGD(lr=0.1), [attached])
    frozen.requires_grad_(False)
    set_sparse_grad([sparse])
    assert [stepped_by_optimizer(p) for p in (attached, frozen, sparse, plain)] == [False, False, True, True]
    assert [gradient_layout(p) for p in (attached, frozen, sparse, plain)] == [
        torch.strided, torch.strided, torch.sparse_coo, torch.strided
    ]  # fmt: skip


def test_objects_beside_tiles_are_refused() -> None:
    def run(group: Group) -> None:
        own = table(sharded(group), "rows")
        beside = [torch.optim.SGD([leaf], lr=0.1) for leaf in own.leaves()]
        with pytest.raises(ConfigError, match="state of 't': got a SGD as state of each tile"):
            combine_parts(own, beside, "state of 't'")

    run_virtual_ranks(WORLD, run)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_of_tiles_is_made_once_also_by_an_optimizer_that_keeps_none(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper of SGD; momentum that was cleared is made again. Ranks hold 5, 5 and 4 leaves."""

    def run(group: Group) -> list[int]:
        own = sharded(group)
        named = dict(own.named_parameters())
        wrapped = KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum))
        made: list[int] = []
        real = wrapped._init
        monkeypatch.setattr(wrapped, "_init", lambda new, sparse: (made.append(len(new)), real(new, sparse)))
        tables = tables_by_name(named)
        for _ in range(2):
            wrapped._make_tiles_state(tables)
        wrapped.state.clear()
        wrapped._make_tiles_state(tables)
        return made

    for leaves, made in zip((5, 5, 4), run_virtual_ranks(WORLD, run), strict=True):
        assert made == [leaves, 0, leaves if momentum else 0]
