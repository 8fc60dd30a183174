"""Updates of tiles: the sum over ranks divided by W, once per row, the same bits on every replica.

Legend: W ranks, U distinct rows, D columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import (
    OPTIMIZERS,
    TILINGS,
    WORLDS,
    Case,
    TableCase,
    adds_over_rows,
    check,
    run_unsharded,
    run_virtual,
)
from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.replica_groups import ReplicaGroups
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sharding.update import with_moment_scale
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.table_rows import NonFiniteGradientError
from tilerec.testing.virtual import run_virtual_ranks

TABLE = torch.arange(80).view(20, 4) % 97.0


def columns(*cuts: int, owners: tuple[int, ...], size: int = 20) -> Tiling:
    edges = [0, *cuts]
    return Tiling.of("t", size, cuts[-1], [(0, size, a, b, r) for a, b, r in zip(edges, cuts, owners, strict=False)])


def attached(group: Group, tiling: Tiling, spec: OptimizerSpec, **kwargs: Any) -> Any:
    module = sharded(group, tiling, **kwargs)
    apply_optimizer_in_backward(spec, module.parameters())
    group.traffic.reset()
    return module


# ---------------------------------------------------------------------------------------------------- scale and count


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_of_all_ranks_are_summed_and_divided_by_their_number(size: int) -> None:
    """Rank r sends a gradient of r + 1: rows move by the mean of 1 … W."""

    def fn(group: Group) -> Tensor:
        module = attached(group, Tiling.of("t", 20, 4, [(0, 20, 0, 4, size - 1)]), SGD(lr=1.0))
        (module(batch_of([[3]])).values().sum() * (group.rank + 1)).backward()
        return module.embedding_bags["t"].weight.detach()

    got = torch.cat(run_virtual_ranks(size, fn))
    expected = TABLE.clone()
    expected[3] -= (size + 1) / 2
    assert torch.allclose(got, expected, rtol=0, atol=1e-6)


def test_a_row_moves_once_per_pass_whoever_asked_for_it() -> None:
    """Momentum 0.5: v = G on all tiles, on the same step number."""
    for name in ("row_wise", "column_wise", "data_parallel", "grid", "two_copies"):
        tiling = TILINGS[name](20, 4, WORLDS["2+2"], 0)

        def fn(group: Group, tiling: Tiling = tiling) -> list[tuple[Any, Tensor, Tensor]]:
            module = attached(group, tiling, SGD(lr=1.0, momentum=0.5), hosts=WORLDS["2+2"])
            for _ in range(2):
                module(batch_of([[3, 3], [3]])).values().sum().backward()
            table = module.embedding_bags["t"]
            return [
                (tile, rows.leaf.detach(), rows.state["momentum_buffer"])
                for tile, rows in zip(table.tiles, table.tile_rows, strict=False)
            ]

        expected, buffer = TABLE.clone(), torch.zeros(20, 4)
        expected[3] -= 3.0 + 4.5
        buffer[3] = 4.5
        for tiles in run_virtual_ranks(4, fn):
            for (r0, r1, c0, c1, _), leaf, velocity in tiles:
                assert torch.equal(leaf, expected[r0:r1, c0:c1])
                assert torch.equal(velocity, buffer[r0:r1, c0:c1])


def test_every_tile_counts_updates_also_those_that_no_id_touched() -> None:
    """Adam's t is the table's: a row that is touched first in step 3 is corrected for step 3."""

    def fn(group: Group) -> int:
        module = attached(group, rows(20, 4), Adam(lr=0.1))
        for _ in range(3):
            module(batch_of([[0]])).values().sum().backward()
        return int(module.embedding_bags["t"].rows.updates)

    assert run_virtual_ranks(4, fn) == [3] * 4


def test_a_forward_without_a_backward_blocks_no_update() -> None:
    def fn(group: Group) -> Tensor:
        module = attached(group, rows(20, 2), SGD(lr=1.0))
        module(batch_of([[5, 15]]))
        module(batch_of([[3, 13]])).values().sum().backward()
        return module.embedding_bags["t"].weight.detach()

    expected = TABLE.clone()
    expected[[3, 13]] -= 1.0
    assert torch.equal(torch.cat(run_virtual_ranks(2, fn)), expected)


def test_a_learning_rate_written_between_steps_holds_for_the_next() -> None:
    def fn(group: Group) -> Tensor:
        module = attached(group, columns(2, 4, owners=(0, 1)), SGD(lr=1.0))
        for lr in (1.0, 0.25, 0.0):
            for param_group in module.fused_optimizer.param_groups:
                param_group["lr"] = lr
            module(batch_of([[3]])).values().sum().backward()
        return module.embedding_bags["t"].weight.detach()

    expected = TABLE.clone()
    expected[3] -= 1.25
    assert torch.equal(torch.cat(run_virtual_ranks(2, fn), dim=1), expected)


def test_a_loss_scale_is_divided_out_beside_the_number_of_ranks() -> None:
    def fn(group: Group) -> Tensor:
        module = attached(group, rows(20, 2), SGD(lr=1.0, grad_scale=1024.0))
        (module(batch_of([[3, 13]])).values().sum() * 1024).backward()
        return module.embedding_bags["t"].weight.detach()

    expected = TABLE.clone()
    expected[[3, 13]] -= 1.0
    assert torch.equal(torch.cat(run_virtual_ranks(2, fn)), expected)


@pytest.mark.parametrize("mode", ["l2", "decoupled"])
def test_a_scaled_moment_keeps_the_loss_scale_and_the_decay(mode: Any) -> None:
    """One number 2.0, gradient 8 at a loss scale of 4, decay 0.5, moment scale 0.25, rate 0.1.

    l2: g' = 8/4 + 0.5*2 = 3, sum = 0.25*9, 2 - 0.1*3/1.5 = 1.8; decoupled: sum = 0.25*4, 2*(1 - 0.05) - 0.1*2/1 = 1.7.
    """
    spec = RowWiseAdagrad(lr=0.1, eps=0.0, grad_scale=4.0, weight_decay=0.5, weight_decay_mode=mode)
    module = EmbeddingBagCollection([EmbeddingBagConfig(1, 1, "t", feature_names=["a"])])
    table = module.embedding_bags["t"]
    with torch.no_grad():
        table.weight.fill_(2.0)
    apply_optimizer_in_backward(with_moment_scale(spec, 0.25), module.parameters())
    (module(batch_of([[0]])).values() * 8).sum().backward()
    assert table.weight.detach().item() == pytest.approx(1.8 if mode == "l2" else 1.7)
    assert float(table.rows.state["sum"]) == pytest.approx(2.25 if mode == "l2" else 1.0)


def test_only_row_wise_adagrad_has_a_moment_to_scale() -> None:
    adam, adagrad = Adam(lr=0.1), RowWiseAdagrad(lr=0.1)
    assert with_moment_scale(adam, 0.25) is adam
    assert with_moment_scale(adagrad, 1.0) is adagrad
    assert with_moment_scale(adagrad, 0.25).lr == pytest.approx(0.2)


def test_another_optimizer_keeps_the_marks_of_rows_that_teams_have_yet_to_average() -> None:
    def fn(group: Group) -> tuple[list[int], list[int]]:
        alone = group.partition("alone", ((0,), (1,)))
        teams = ReplicaGroups((0,), group.partition("axis", ((0, 1),)), ())
        module = attached(alone, Tiling.of("t", 20, 4, [(0, 20, 0, 4, 0)]), SGD(lr=1.0), teams=teams)
        module(batch_of([[3]])).values().sum().backward()
        (rows,) = module.embedding_bags["t"].tile_rows
        first = rows.touched.rows().tolist()
        apply_optimizer_in_backward(Adam(lr=0.1), module.parameters(), replace=True)
        module(batch_of([[7]])).values().sum().backward()
        return first, rows.touched.rows().tolist()

    assert run_virtual_ranks(2, fn) == [([3], [3, 7])] * 2


# ---------------------------------------------------------------------------------------------------- bytes


def test_rules_that_look_at_elements_tell_each_other_nothing() -> None:
    def fn(group: Group) -> set[str]:
        module = attached(group, columns(2, 4, owners=(0, 1)), Adam(lr=0.1))
        module(batch_of([[3], [13]])).values().sum().backward()
        return {sent.name for sent in group.traffic}

    assert run_virtual_ranks(2, fn) == [{"header", "ids", "rows", "gradients"}] * 2


@pytest.mark.parametrize(
    ("optimizer", "sums"),
    [
        ("rowwise_adagrad", 1),
        ("rowwise_adagrad_max_norm", 2),
        ("partial_rowwise_adam", 1),
        ("lamb", 2),
        ("partial_rowwise_lamb", 3),
        ("lars_sgd", 2),
    ],
)
def test_a_column_split_costs_four_bytes_per_row_and_sum(optimizer: str, sums: int) -> None:
    """U = 3 distinct rows over both ranks; and one number per row that says whether its gradient is finite."""
    spec = OPTIMIZERS[optimizer]
    assert spec is not None
    assert sum(spec.partials) == sums

    def fn(group: Group) -> tuple[int, int]:
        module = attached(group, columns(3, 4, owners=(1, 0)), spec)
        module(batch_of([[3, 13, 3]] if group.rank else [[13], [19]])).values().sum().backward()
        traffic = group.traffic
        return traffic["row sums"].total, traffic["row sums"].calls

    assert run_virtual_ranks(2, fn) == [(4 * 3 * (sums + 1), spec.phases)] * 2


def test_ranks_that_hold_nothing_of_a_tile_take_no_part_in_its_talk() -> None:
    """Rows [0, 10) on ranks 0 and 1, the others' columns on 2 and 3; rank 4 holds nothing."""
    tiles = [(0, 10, 0, 4, (0, 1)), (10, 20, 0, 2, 2), (10, 20, 2, 4, 3)]
    tiling = Tiling.of("t", 20, 4, [*tiles[:1], *tiles[1:]])

    def fn(group: Group) -> dict[str, tuple[int, ...]]:
        module = attached(group, tiling, SGD(lr=0.1))
        module(batch_of([[3], [13]])).values().sum().backward()
        own = {"header", "ids", "rows", "gradients"}
        return {sent.name: sent.bytes for sent in group.traffic if sent.name not in own}

    made = run_virtual_ranks(5, fn)
    assert made[4] == made[3] == made[2] == {}
    for rank in (0, 1):
        assert made[rank]
        assert all(count == 0 for line in made[rank].values() for peer, count in enumerate(line) if peer != 1 - rank)


def test_a_rank_may_hear_sums_and_tell_none() -> None:
    """Columns [0, 2) on both ranks, [2, 20) on rank 1, which has all it needs: rank 0 has nobody to tell."""
    hosts = WORLDS["2"]
    tiling = Tiling.of("t", 10, 20, [(0, 10, 0, 2, (0, 1)), (0, 10, 2, 20, 1)])
    table = TableCase("t0", 10, 20, ("a",))
    case = Case((table,), {"t0": tiling}, hosts, OPTIMIZERS["rowwise_adagrad"], (3, 2))
    check(case, run_virtual(case))


def test_split_rows_of_float32_and_float64_tables_travel_in_their_own_precision() -> None:
    hosts = WORLDS["2"]
    tables = (TableCase("t0", 10, 20, ("a",)), TableCase("t1", 9, 6, ("b",), DataType.FP64))
    case = Case(
        tables, {t.name: TILINGS["column_wise"](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}, hosts,
        OPTIMIZERS["partial_rowwise_lamb"], (3, 2),
    )  # fmt: skip
    check(case, run_virtual(case))


# ---------------------------------------------------------------------------------------------------- many tables

CUT = [(0, 20, 0, 4, 0), (0, 20, 4, 8, 1)]


def many(
    group: Group,
    specs: dict[str, OptimizerSpec],
    tilings: dict[str, Tiling],
    bad: str = "",
    exact: bool = False,
) -> tuple[Any, dict[str, Tensor]]:
    """Tables of their own rules, one feature each, after one step; `bad`: row 3's gradient is infinite in column 0."""
    configs = [EmbeddingBagConfig(20, tilings[name].dim, name, feature_names=[name]) for name in specs]
    module: Any = EmbeddingBagCollection(configs)
    topology = Topology(group.size, "cpu")
    with torch.no_grad():
        for config in configs:
            values = torch.arange(20 * config.embedding_dim).view(20, -1) % 7
            module.embedding_bags[config.name].weight.copy_(values)
    shard_collection(module, tilings, group, group.split("route"), topology, exact=exact)
    for name, spec in specs.items():
        apply_optimizer_in_backward(spec, module.embedding_bags[name].parameters())
    group.traffic.reset()
    out = module(batch_of([[3], [13]] * len(specs), tuple(specs)))
    grads = {name: torch.linspace(-1, 1, out[name].numel()).view_as(out[name]) for name in specs}
    if bad and group.rank == 1:
        grads[bad][0, 0] = float("inf")
    failure = None
    try:
        torch.autograd.backward([out[name] for name in specs], [grads[name] for name in specs])
    except NonFiniteGradientError as error:
        failure = error
    return (group.traffic["row sums"].calls, failure), {
        name: module.embedding_bags[name].weight.detach() for name in specs
    }


def test_all_tables_share_one_message_a_phase_whatever_their_rules() -> None:
    """Three rules, two widths and one table alone on a rank: as many messages as the longest rule has phases."""
    specs = {
        "a": OPTIMIZERS["rowwise_adagrad"], "b": OPTIMIZERS["partial_rowwise_lamb"], "c": OPTIMIZERS["lamb"],
        "d": OPTIMIZERS["rowwise_adagrad"], "e": OPTIMIZERS["rowwise_adagrad"],
    }  # fmt: skip
    wide = [(0, 20, 0, 8, 1), (0, 20, 8, 24, 0)]
    tilings = {name: Tiling.of(name, 20, 8, CUT) for name in "abc"}
    tilings |= {"d": Tiling.of("d", 20, 24, wide), "e": Tiling.of("e", 20, 8, [(0, 20, 0, 8, 0)])}
    assert all(spec is not None for spec in specs.values())
    together = run_virtual_ranks(2, many, specs, tilings)
    assert [calls for (calls, _), _ in together] == [2, 2]
    for name, spec in specs.items():
        alone = run_virtual_ranks(2, many, {name: spec}, {name: tilings[name]})
        for (_, got), (_, want) in zip(together, alone, strict=True):
            assert torch.equal(got[name], want[name])


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_that_is_not_finite_is_skipped_in_its_table_alone(exact: bool) -> None:
    """Three tables of one rule; the second also has two column blocks on one rank."""
    spec = RowWiseAdagrad(lr=0.1, max_norm=0.5, non_finite="skip")
    tilings = {name: Tiling.of(name, 20, 8, CUT) for name in "ac"}
    tilings["b"] = Tiling.of("b", 20, 12, [(0, 20, 0, 3, 0), (0, 20, 3, 8, 1), (0, 20, 8, 12, 0)])
    specs = dict.fromkeys("abc", spec)
    whole = run_virtual_ranks(2, many, specs, tilings, "", exact)
    poisoned = run_virtual_ranks(2, many, specs, tilings, "b", exact)
    for (_, want), ((_, failure), got) in zip(whole, poisoned, strict=True):
        assert failure is None
        assert torch.equal(got["a"], want["a"])
        assert torch.equal(got["c"], want["c"])
        assert torch.equal(got["b"][13], want["b"][13])
        assert not torch.equal(got["b"][3], want["b"][3])
    (_, left), (_, right) = poisoned
    assert left["b"][3].tolist() == [float(i % 7) for i in range(36, 39)]
    assert right["b"][3].tolist() == [float(i % 7) for i in range(39, 44)]


def test_the_error_names_the_table_whose_gradient_is_not_finite_on_all_its_owners() -> None:
    specs = dict.fromkeys("abc", RowWiseAdagrad(lr=0.1))
    tilings = {name: Tiling.of(name, 20, 8, CUT) for name in "abc"}
    for (_, failure), _ in run_virtual_ranks(2, many, specs, tilings, "b"):
        assert "Table 'b'" in str(failure)
        assert "row 3 " in str(failure)


# ---------------------------------------------------------------------------------------------------- replicas


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "none"])
@pytest.mark.parametrize("tiling", ["data_parallel", "some_replicas", "two_copies"])
def test_replicas_keep_the_same_bits(tiling: str, optimizer: str) -> None:
    """`check` compares replicas bit by bit; three homes on two hosts, and sums that round."""
    hosts = WORLDS["2+1"]
    tables = (TableCase("t0", 9, 5, ("a", "b")), TableCase("t1", 6, 8, ("c",)))
    case = Case(
        tables, {t.name: TILINGS[tiling](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}, hosts,
        OPTIMIZERS[optimizer], (4, 2, 3), mean_length=5.0,
    )  # fmt: skip
    check(case, run_virtual(case))


# ---------------------------------------------------------------------------------------------------- not finite


def poisoned(group: Group, tiling: Tiling, spec: OptimizerSpec) -> tuple[list[Any], int]:
    """One step in which the gradient of row 3 is infinite in column 0 on rank 1, and that of row 13 is 1."""
    module = attached(group, tiling, spec)
    out = module(batch_of([[3], [13]])).values()
    grad = torch.ones_like(out)
    if group.rank == 1:
        grad[0, 0] = float("inf")
    out.backward(grad)
    table = module.embedding_bags["t"]
    return (
        [(tile, leaf.detach()) for tile, leaf in zip(table.tiles, table.leaves(), strict=False)],
        sum(rows.skipped_rows for rows in table.tile_rows),
    )


@pytest.mark.parametrize("optimizer", [name for name, spec in OPTIMIZERS.items() if adds_over_rows(spec)])
def test_a_row_that_is_not_finite_in_one_column_is_skipped_in_all(optimizer: str) -> None:
    spec = OPTIMIZERS[optimizer]
    assert spec is not None
    skipping = replace(spec, non_finite="skip")
    (left, _), (right, _) = run_virtual_ranks(2, poisoned, columns(2, 4, owners=(0, 1)), skipping)
    got = torch.cat([left[0][1], right[0][1]], dim=1)
    assert torch.equal(got[3], TABLE[3])
    assert bool((got[13] != TABLE[13]).all())
    assert bool(got.isfinite().all())


def test_a_row_that_is_not_finite_is_skipped_and_counted() -> None:
    spec = SGD(lr=1.0, non_finite="skip")
    (low, low_count), (high, high_count) = run_virtual_ranks(2, poisoned, rows(20, 2), spec)
    assert torch.equal(low[0][1], TABLE[:10])
    assert (low_count, high_count) == (1, 0)
    expected = TABLE[10:].clone()
    expected[3] -= 1.0
    assert torch.equal(high[0][1], expected)


def test_a_row_that_is_not_finite_is_skipped_on_all_replicas() -> None:
    spec = RowWiseAdagrad(lr=1.0, non_finite="skip")
    results = run_virtual_ranks(2, poisoned, Tiling.of("t", 20, 4, [(0, 20, 0, 4, (0, 1))]), spec)
    (((_, one),), one_count), (((_, other),), other_count) = results
    assert torch.equal(one, other)
    assert torch.equal(one[3], TABLE[3])
    assert (one_count, other_count) == (1, 1)


def test_a_row_that_is_not_finite_is_an_error_that_names_it() -> None:
    with pytest.raises(NonFiniteGradientError, match=r"Table 't'.*row 3 "):
        run_virtual_ranks(2, poisoned, rows(20, 2), SGD(lr=1.0))


@pytest.mark.parametrize("size", [1, 2])
def test_the_error_advises_about_other_ranks_where_there_are_any(size: int) -> None:
    def fn(group: Group) -> str:
        module = attached(group, Tiling.of("t", 20, 4, [(0, 20, 0, 4, 0)]), SGD(lr=1.0))
        try:
            (module(batch_of([[3]])).values().sum() * float("inf")).backward()
        except NonFiniteGradientError as error:
            return str(error)
        return ""

    text = run_virtual_ranks(size, fn)[0]
    assert "Table 't'" in text
    assert ("Only ranks that hold such a row raise this" in text) == (size > 1)


# ---------------------------------------------------------------------------------------------------- large batches


def test_long_bags_over_wide_rows_equal_unsharded() -> None:
    """257 columns, some 20 ids per bag, rows that every rank asks for many times; float64, as sums this long round."""
    hosts = WORLDS["2+2"]
    tables = (
        TableCase("t0", 5, 257, ("a",), DataType.FP64),
        TableCase("t1", 30, 1, ("b", "a"), DataType.FP64),
    )
    for name in ("grid", "row_wise", "data_parallel"):
        case = Case(
            tables, {t.name: TILINGS[name](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}, hosts,
            OPTIMIZERS["rowwise_adagrad"], (9, 8, 0, 7), mean_length=20.0,
        )  # fmt: skip
        check(case, run_virtual(case), run_unsharded(case))
