"""2D parallelism with `sync="exact"` equals the unsharded module: every tiling of a sharding group, rule, form, layout.

A case's tilings are those of the whole world (`RankGrid.over_replicas`), so that replicas are compared bit by bit; what
the ranks are given is the plan of one sharding group.
"""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.parity import harness
from tests.parity.harness import FORMS, OPTIMIZERS, TILINGS, Case, Held, Hosts, Record
from tilerec.comms.group import Group
from tilerec.parallel.two_d.rank_grid import RankGrid
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"


@dataclass(frozen=True)
class World:
    """Ranks by host, and their sharding groups."""

    hosts: Hosts
    group_size: int
    across_hosts: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.size, self.group_size, self.across_hosts)

    @property
    def group_hosts(self) -> Hosts:
        return self.grid.hosts_of(0, Topology(self.size, "cpu", hosts=self.hosts))


WORLDS = {
    "4x1": World(((0, 1), (2, 3)), 1),
    "2x2": World(((0, 1), (2, 3)), 2),
    "2x2 across hosts": World(((0, 1), (2, 3)), 2, across_hosts=True),
    "1x4": World(((0, 2), (1, 3)), 4),
    "3x2": World(((0, 1, 2), (3, 4, 5)), 2),
    "2x3 across hosts": World(((0, 1, 2, 3, 4, 5),), 3, across_hosts=True),
    # Each group has two ranks on either host: rows of one host are added up before they cross, in every group.
    "2x4": World(((0, 1, 2, 3), (4, 5, 6, 7)), 4),
    "2x4 across hosts": World(((0, 1), (2, 3), (4, 5), (6, 7)), 4, across_hosts=True),
}

_BATCH_SIZES = {4: (5, 3, 0, 2), 6: (2, 0, 3, 1, 2, 2), 8: (1, 2, 0, 1, 2, 1, 0, 2)}


def case_of(tiling: str, form: str, optimizer: str, world: World) -> tuple[Case, dict[str, Tiling]]:
    """A case of the world, and the tilings of one sharding group that it is of."""
    mean, spec, hosts = form.endswith("mean"), OPTIMIZERS[optimizer], world.group_hosts
    tables = (
        harness.TableCase("t0", 10, 4, ("a", "b"), mean=mean),
        harness.TableCase("t1", 7, 3, ("c",), mean=mean),
        harness.TableCase("t2", 17, 20, ("d", "a"), mean=mean),
    )
    own = {t.name: TILINGS[tiling](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}
    if harness.adds_over_rows(spec):
        own = {
            t.name: own[t.name] if harness.aligned(own[t.name]) else harness.two_tiles(t.rows, t.dim, hosts, i)
            for i, t in enumerate(tables)
        }  # fmt: skip
    case = Case(
        tables, {name: world.grid.over_replicas(name, t) for name, t in own.items()}, world.hosts, spec,
        _BATCH_SIZES[world.size], pooled=form != "sequence", weighted=form.startswith("weighted"),
    )  # fmt: skip
    return case, own


def run_rank(group: Group, case: Case, own: dict[str, Tiling], world: World, base: Any) -> Record:
    """`harness.run_rank` in 2D."""
    module = copy.deepcopy(base)
    config = GroupConfig({"": own}, world.group_size, across_hosts=world.across_hosts)
    settings = ReplicaSettings("exact", exact=case.exact)
    shard_2d(module, lambda: ([config], {}), group, settings, case.topology)
    local = harness.batches(case, group.rank)
    seen = harness._train(case, module, local, float(case.world_size))
    held = {
        t.config.name: [
            Held(tile, leaf.detach(), leaf.grad, dict(rows.state))
            for tile, leaf, rows in zip(t.tiles, t.leaves(), t.tile_rows, strict=False)
        ]
        for t in module._leaves.tables
    }
    return Record(seen, [b.weights().grad for b in local] if case.weighted else [], held, module.clamped_ids)


def run(case: Case, own: dict[str, Tiling], world: World) -> list[Record]:
    return run_virtual_ranks(world.size, run_rank, case, own, world, harness.build(case))


Marks = tuple[str, str, str, str]


def covering() -> list[Marks]:
    """Every tiling with every other optimizer, every optimizer with every other tiling; forms and worlds dealt."""
    worlds = list(WORLDS)
    return [
        (tiling, FORMS[(i + j) % len(FORMS)], optimizer, worlds[(5 * i + 3 * j) // 2 % len(worlds)])
        for i, tiling in enumerate(TILINGS)
        for j, optimizer in enumerate(OPTIMIZERS)
        if (i + j) % 2 == 0
    ]


def test_the_subset_meets_every_tiling_optimizer_form_and_world() -> None:
    chosen = covering()
    for axis, names in enumerate((TILINGS, FORMS, OPTIMIZERS, WORLDS)):
        assert {marks[axis] for marks in chosen} == set(names)
    assert len({(marks[0], marks[3]) for marks in chosen}) > len(chosen) * 3 // 4
    assert len({(marks[2], marks[3]) for marks in chosen}) > len(chosen) * 3 // 4


@pytest.mark.parametrize("marks", covering(), ids="-".join)
def test_exact_replicas_equal_the_unsharded_module(marks: Marks) -> None:
    tiling, form, optimizer, name = marks
    case, own = case_of(tiling, form, optimizer, WORLDS[name])
    harness.check(case, run(case, own, WORLDS[name]))


@pytest.mark.parametrize(
    "marks",
    [
        ("row_wise", "weighted_mean", "lamb", "2x2"),
        ("column_wise", "sum", "rowwise_adagrad_max_norm", "2x2 across hosts"),
        ("data_parallel", "sequence", "adam", "2x2"),
        ("some_replicas", "mean", "partial_rowwise_lamb", "2x4"),
        ("mixed", "sum", "none", "4x1"),
        ("grid", "weighted", "adagrad", "2x4 across hosts"),
    ],
    ids="-".join,
)
def test_exact_bits_do_not_depend_on_replicas(marks: Marks) -> None:
    """Against every table on one rank of the same world, in one dimension; and, but for scales, unsharded."""
    tiling, form, optimizer, name = marks
    world = WORLDS[name]
    case, own = case_of(tiling, form, optimizer, world)
    case = replace(case, exact=True)
    one_rank = {t.name: harness.table_wise(t.rows, t.dim, case.hosts, i) for i, t in enumerate(case.tables)}
    plain = replace(case, tilings=one_rank)
    got, want = run(case, own, world), harness.run_virtual(plain)
    for mine, theirs in zip(got, want, strict=True):
        for step, step_want in zip(mine.outputs, theirs.outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, step_want, strict=True))
    whole, whole_want = harness.assemble(case, got), harness.assemble(plain, want)
    assert whole.keys() == whole_want.keys()
    assert [key for key in whole if not torch.equal(whole[key], whole_want[key])] == []
    figures = harness.check(case, got)
    if not form.endswith("mean"):
        assert figures.same_outputs
        assert all(figures.same.values()), figures


def traffic_of(group: Group, case: Case, own: dict[str, Tiling], world: World, base: Any) -> dict[str, list[int]]:
    run_rank(group, case, own, world, base)
    return {line.name: list(line.bytes) for line in group.traffic}


@pytest.mark.parametrize("name", ["2x2", "2x2 across hosts", "2x4"])
def test_ids_and_rows_stay_in_their_sharding_group_and_gradients_go_to_replicas(name: str) -> None:
    world = WORLDS[name]
    case, own = case_of("row_wise", "sum", "rowwise_adagrad", world)
    sent = run_virtual_ranks(world.size, traffic_of, case, own, world, harness.build(case))
    for rank, lines in enumerate(sent):
        mine = set(world.grid.sharding_groups[world.grid.team_of(rank)])
        same = set(world.grid.replica_groups[world.grid.member_of(rank)])
        for what in ("ids", "rows", "gradients", *(["rows in host"] if name == "2x4" else [])):
            assert {peer for peer, count in enumerate(lines[what]) if count} <= mine, what
        assert {peer for peer, count in enumerate(lines["replica gradients"]) if count} <= same


@pytest.mark.nightly
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.skipif(not NIGHTLY, reason="the whole product takes minutes: make parity")
@pytest.mark.timeout(1200)
def test_the_whole_product_of_exact_replicas(tiling: str) -> None:
    for form, optimizer, world in itertools.product(FORMS, OPTIMIZERS, WORLDS.values()):
        case, own = case_of(tiling, form, optimizer, world)
        harness.check(case, run(case, own, world))
