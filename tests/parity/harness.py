"""Sharded equals unsharded: a case as data, its run on one rank, and how far two runs are apart.

Nouns
  case      tables, their tilings, ranks and hosts, an optimizer, the batches of every rank: all that a run needs
  run       three training steps of one module; `run_rank` on a rank, `run_unsharded` on the global batch
  record    what a run leaves: outputs per step, gradients of sample weights, and per table weights and state
  figures   the largest deviations of the ranks' records from the unsharded one

    sum over ranks of loss_r / W  =  loss of the global batch,   loss_r = W * sum(y_r^2)

Ranks may be threads or processes: this file imports nothing but tilerec, so that processes find it by its path.

Legend: W ranks, B samples, C columns of the output, N ids.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from tilerec.spec.plan import Wire
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.spec.tile import Tile, Tiling, ceil_chunks
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

# ---------------------------------------------------------------------------------------------------- what is tested

Hosts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TableCase:
    """A table, as all of a case's tables are written."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    data_type: DataType = DataType.FP32
    mean: bool = False


@dataclass(frozen=True)
class Case:
    """One comparison. `optimizer=None`: dense gradients, stepped by torch's SGD with momentum."""

    tables: tuple[TableCase, ...]
    tilings: Mapping[str, Tiling]
    hosts: Hosts
    optimizer: OptimizerSpec | None
    batch_sizes: tuple[int, ...]  # of each rank
    pooled: bool = True
    weighted: bool = False
    variable: bool = False
    exact: bool = False
    linear: bool = False  # loss with small whole gradients: no sum of them rounds
    on_bad_id: str = "error"
    bad_ids: bool = False
    frozen: tuple[str, ...] = ()
    fan_in: Mapping[str, float] = field(default_factory=dict)
    distinct: bool | None = None  # whether repeated ids travel once: `Wire`
    mean_length: float = 2.0
    steps: int = 3
    seed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.batch_sizes)

    @property
    def topology(self) -> Topology:
        return Topology(self.world_size, "cpu", hosts=self.hosts)


OPTIMIZERS: dict[str, OptimizerSpec | None] = {
    "none": None,
    "sgd": SGD(lr=0.1),
    "sgd_momentum": SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": Adagrad(lr=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1),
    "rowwise_adagrad_max_norm": RowWiseAdagrad(lr=0.1, weight_decay=0.01, max_norm=0.5),
    "adam": Adam(lr=0.01),
    "adamw": AdamW(lr=0.01, row_step=True),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.01, row_step=True),
    "lamb": LAMB(lr=0.01, weight_decay=0.01),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.01),
    "lars_sgd": LarsSGD(lr=0.1, weight_decay=0.01, trust_coefficient=0.5),
}
"""Every rule there is, and none."""


def aligned(tiling: Tiling) -> bool:
    """Whether all column blocks are cut at the same rows."""
    return len({block.cuts for block in tiling.blocks}) == 1


def adds_over_rows(spec: OptimizerSpec | None) -> bool:
    """Whether the rule needs sums over a whole row."""
    return spec is not None and spec.phases > 0


# ---------------------------------------------------------------------------------------------------- tilings

# Each is what its name says of a table `rows x dim`, the `i`-th of its module. Written out here, not taken from the
# library, so that the two can disagree.


def _cover(rows: int, dim: int, tiles: Sequence[tuple[int, int, int, int, Any]]) -> Tiling:
    return Tiling.of("t", rows, dim, tiles)


def _column_cuts(dim: int, parts: int) -> list[int]:
    """Uneven, and no multiples of 8 where there is a choice."""
    cuts = sorted({0, dim, *(min(dim - 1, max(1, dim * k // parts + k % 2)) for k in range(1, parts))})
    return [c for c in cuts if 0 <= c <= dim]


def _rows_over(rows: int, c0: int, c1: int, ranks: Sequence[int]) -> list[tuple[int, int, int, int, Any]]:
    cuts = ceil_chunks(rows, len(ranks))
    return [(a, b, c0, c1, rank) for a, b, rank in zip(cuts, cuts[1:], ranks, strict=False)]


def table_wise(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    ranks = [r for host in hosts for r in host]
    return _cover(rows, dim, [(0, rows, 0, dim, ranks[(2 * i + 1) % len(ranks)])])


def data_parallel(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    return _cover(rows, dim, [(0, rows, 0, dim, tuple(sorted(r for host in hosts for r in host)))])


def column_wise(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    ranks = [r for host in hosts for r in host]
    cuts = _column_cuts(dim, len(ranks) + 1)
    return _cover(
        rows,
        dim,
        [(0, rows, a, b, ranks[(i + k) % len(ranks)]) for k, (a, b) in enumerate(pairwise(cuts))],
    )


def row_wise(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    ranks = [r for host in hosts for r in host]
    return _cover(rows, dim, _rows_over(rows, 0, dim, ranks if i % 2 else ranks[::-1]))


def table_row_wise(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    return _cover(rows, dim, _rows_over(rows, 0, dim, hosts[i % len(hosts)]))


def table_column_wise(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    host = hosts[(i + 1) % len(hosts)]
    cuts = _column_cuts(dim, len(host))
    return _cover(rows, dim, [(0, rows, a, b, host[k]) for k, (a, b) in enumerate(pairwise(cuts))])


def grid(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    cuts = _column_cuts(dim, len(hosts))
    tiles = [tile for h, (a, b) in enumerate(pairwise(cuts)) for tile in _rows_over(rows, a, b, hosts[h])]
    return _cover(rows, dim, tiles)


def uneven(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    """Rows in a small, a large and a middling range; where there are more ranks, some hold nothing."""
    ranks = [r for host in hosts for r in host]
    cuts = sorted({0, min(rows, 1 + i), max(1, rows - 2), rows})
    return _cover(
        rows,
        dim,
        [(a, b, 0, dim, ranks[(k + i) % len(ranks)]) for k, (a, b) in enumerate(pairwise(cuts))],
    )


def two_tiles(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    """A checkerboard of 2 x 2: two ranks hold two rectangles each that do not touch."""
    ranks = sorted(r for host in hosts for r in host)
    one, other = ranks[0], ranks[-1]
    r, c = max(1, rows // 3), max(1, dim // 2)
    tiles = [(0, r, 0, c, one), (r, rows, 0, c, other), (0, r, c, dim, other), (r, rows, c, dim, one)]
    return _cover(rows, dim, [t for t in tiles if t[0] < t[1] and t[2] < t[3]])


def staggered(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    """Column blocks cut at different rows."""
    ranks = [r for host in hosts for r in host]
    c, a, b = max(1, dim // 2), max(1, rows // 3), max(1, rows // 2)
    tiles = [
        (0, a, 0, c, ranks[0]), (a, rows, 0, c, ranks[-1]), (0, b, c, dim, ranks[0]),
        (b, rows, c, dim, ranks[1 % len(ranks)]),
    ]  # fmt: skip
    return _cover(rows, dim, [t for t in tiles if t[0] < t[1] and t[2] < t[3]])


def some_replicas(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    """The first rows on the first and the last rank, the others on one rank."""
    ranks = sorted(r for host in hosts for r in host)
    cut = max(1, rows // 2)
    tiles = [
        (0, cut, 0, dim, tuple(sorted({ranks[0], ranks[-1]}))),
        (cut, rows, 0, dim, ranks[i % len(ranks)]),
    ]
    return _cover(rows, dim, [t for t in tiles if t[0] < t[1]])


def two_copies(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    """2D: every host holds all columns, cut over its ranks; its siblings on other hosts hold the same."""
    ranks = sorted(r for host in hosts for r in host)
    width = min(len(host) for host in hosts)
    cuts = _column_cuts(dim, width) if i % 2 else [0, dim]
    if i % 2:
        teams = [tuple(sorted(host[k % len(host)] for host in hosts)) for k in range(len(cuts) - 1)]
        return _cover(rows, dim, [(0, rows, a, b, teams[k]) for k, (a, b) in enumerate(pairwise(cuts))])
    if len(hosts) == 1:
        half = len(ranks) // 2 or 1
        teams = [tuple(sorted({ranks[k], ranks[(k + half) % len(ranks)]})) for k in range(half)]
    else:
        teams = [tuple(sorted(host[k] for host in hosts)) for k in range(width)]
    return _cover(rows, dim, _rows_over(rows, 0, dim, teams))


def mixed(rows: int, dim: int, hosts: Hosts, i: int) -> Tiling:
    """Another tiling for every table of the module."""
    kinds = (row_wise, data_parallel, column_wise, grid, table_wise)
    return kinds[i % len(kinds)](rows, dim, hosts, i)


TILINGS = {
    make.__name__: make
    for make in (
        data_parallel, table_wise, column_wise, row_wise, table_row_wise, table_column_wise, grid, uneven, two_tiles,
        staggered, some_replicas, two_copies, mixed,
    )
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Held:
    """What a rank has of a tile after a run."""

    tile: Tile
    weight: Tensor
    grad: Tensor | None
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Record:
    """What a run leaves. Outputs: per step, pooled `[B, C]`, or per slot `[N, D]`."""

    outputs: list[list[Tensor]]
    weight_grads: list[Tensor | None]
    held: dict[str, list[Held]]
    clamped: int


def build(case: Case) -> Any:
    """The unsharded module, the same every time."""
    torch.manual_seed(case.seed)
    if case.pooled:
        module: Any = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    t.rows, t.dim, t.name, t.data_type, t.features,
                    pooling=PoolingType.MEAN if t.mean else PoolingType.SUM,
                )
                for t in case.tables
            ],
            is_weighted=case.weighted,
            on_bad_id=case.on_bad_id,
        )  # fmt: skip
    else:
        module = EmbeddingCollection(
            [EmbeddingConfig(t.rows, t.dim, t.name, t.data_type, t.features) for t in case.tables],
            on_bad_id=case.on_bad_id,
        )
    tables = module.embedding_bags if case.pooled else module.embeddings
    for name in case.frozen:
        tables[name].weight.requires_grad_(False)
    if case.optimizer is not None:
        live = [table.weight for name, table in tables.items() if name not in case.frozen]
        if live:
            apply_optimizer_in_backward(case.optimizer, live)
    return module


def batches(case: Case, rank: int) -> list[KeyedJaggedTensor]:
    """A rank's batch of every step. Bags of no, one and several ids; the last step brings no id to every other key."""
    rows: dict[str, int] = {}
    for table in case.tables:
        for feature in table.features:
            rows[feature] = min(rows.get(feature, table.rows), table.rows)
    keys = sorted(rows)
    made = []
    for step in range(case.steps):
        batch = random_batch(
            keys, rows, case.batch_sizes[rank], mean_length=case.mean_length, weighted=case.weighted,
            variable=case.variable, seed=1000 * case.seed + 100 * rank + step,
            values_dtype=torch.int32 if step == 1 else torch.int64,
        )  # fmt: skip
        if case.bad_ids and batch.values().numel():
            batch.values()[::3] += 1000
            batch.values()[1::3] -= 1000
        if case.weighted:
            batch.weights().requires_grad_()
        made.append(batch)
    return made


def outputs(case: Case, module: Any, features: KeyedJaggedTensor) -> list[Tensor]:
    """What the module says: one `[B, C]`, or per slot `[N, D]`."""
    out = module(features)
    return [out.values()] if case.pooled else [jagged.values() for jagged in out.values()]


def loss(case: Case, out: Sequence[Tensor], scale: float) -> Tensor:
    """`scale * sum(y^2)`; linear cases `scale * sum(c y)` with c = -1, 0, 1, 2 by column."""
    if case.linear:
        total = sum((y.double() * (torch.arange(y.shape[-1]) % 4 - 1.0)).sum() for y in out)
    else:
        total = sum(y.double().square().sum() for y in out)
    assert isinstance(total, Tensor)
    return total * scale


def _train(case: Case, module: Any, own: Sequence[KeyedJaggedTensor], scale: float) -> list[list[Tensor]]:
    """Three steps; outputs of each. Without an attached optimizer torch's own steps the leaves."""
    live = [p for p in module.parameters() if p.requires_grad]
    dense = None
    if case.optimizer is None and live:
        dense = torch.optim.SGD(live, lr=0.05, momentum=0.5, foreach=False)
    seen = []
    for features in own:
        out = outputs(case, module, features)
        seen.append([y.detach().clone() for y in out])
        loss(case, out, scale).backward()
        if dense is not None:
            dense.step()
            if features is not own[-1]:
                dense.zero_grad(set_to_none=True)
    return seen


def run_unsharded(case: Case) -> Record:
    """The specification: one module, the concatenated batches. Gradients of sample weights lie on the local batches."""
    module = build(case)
    local = [batches(case, rank) for rank in range(case.world_size)]
    seen = _train(case, module, [concat_batches(list(step)) for step in zip(*local, strict=True)], 1.0)
    tables = module.embedding_bags if case.pooled else module.embeddings
    held = {
        t.name: [
            Held(
                Tile(0, t.rows, 0, t.dim, (0,)), tables[t.name].weight.detach(), tables[t.name].weight.grad,
                dict(tables[t.name].rows.state),
            )
        ]
        for t in case.tables
    }  # fmt: skip
    grads = [batch.weights().grad for rank in local for batch in rank] if case.weighted else []
    return Record(seen, grads, held, module.clamped_ids)


def run_rank(group: Group, case: Case, base: Any = None) -> Record:
    """The same on one of W ranks. `base`: a built module to copy, where ranks share the random generator."""
    module = build(case) if base is None else copy.deepcopy(base)
    shard_collection(
        module, case.tilings, group, group.split("route"), case.topology, exact=case.exact, fan_in=case.fan_in,
        wires=dict.fromkeys(case.tilings, Wire(distinct=case.distinct)),
    )  # fmt: skip
    own = batches(case, group.rank)
    seen = _train(case, module, own, float(case.world_size))
    held = {
        t.config.name: [
            Held(tile, leaf.detach(), leaf.grad, dict(rows.state))
            for tile, leaf, rows in zip(t.tiles, t.leaves(), t.tile_rows, strict=False)
        ]
        for t in module._leaves.tables
    }
    return Record(seen, [b.weights().grad for b in own] if case.weighted else [], held, module.clamped_ids)


def run_process(case: Case) -> Record:
    """`run_rank` in a process of a gloo group."""
    return run_rank(ProcessGroupComms(), case)


def run_virtual(case: Case, timeout_s: float = 60.0) -> list[Record]:
    """`run_rank` on W threads."""
    return run_virtual_ranks(case.world_size, run_rank, case, build(case), timeout_s=timeout_s)


# ---------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Figures:
    """Largest deviations; `same` per table: weights, gradients and state have the same bits."""

    outputs: float  # over 1 + the largest element of the row
    sample_weights: float  # gradients of sample weights, over 1 + the largest of the batch
    weights: float  # over 1 + the largest element of the row
    weights_per_lr: float  # over the learning rate
    median_per_lr: float
    # Over 1 + the largest element of the table's: a sum of gradients that cancel keeps the rounding of its terms.
    state: float
    same_outputs: bool
    same: Mapping[str, bool]


def _relative(got: Tensor, want: Tensor, largest: float | None = None) -> float:
    """max |a - b| / (1 + max |row of b|), or / (1 + largest); NaN, where only one has it, is infinitely far."""
    if got.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    if want.dim() < 2:
        scale = want.abs()
    else:
        scale = want.abs().amax(dim=1, keepdim=True)
    if largest is not None:
        scale = torch.full_like(scale, largest)
    far = ((got - want).abs() / (1 + scale)).nan_to_num(nan=float("inf"))
    return float(far.max())


def compare(case: Case, ranks: Sequence[Record], whole: Record) -> Figures:
    """How far the ranks' records are from the unsharded one.

    Also asserts what has no tolerance: shapes, types, state names, covers, and that replicas have the same bits.
    """
    lr = case.optimizer.lr if case.optimizer is not None else 1.0
    out = sample = weights = per_lr = median = state = 0.0
    same_outputs, same = True, {t.name: True for t in case.tables}
    for step in range(case.steps):
        local = [batches(case, rank)[step] for rank in range(case.world_size)]
        for k, want in enumerate(whole.outputs[step]):
            if case.pooled:
                sizes = list(case.batch_sizes)
            else:
                feature = [f for t in case.tables for f in t.features][k]
                sizes = [batch[feature].values().numel() for batch in local]
            for rank, piece in enumerate(want.split(sizes)):
                got = ranks[rank].outputs[step][k]
                assert got.shape == piece.shape and got.dtype == piece.dtype  # noqa: PT018
                out = max(out, _relative(got, piece))
                same_outputs &= torch.equal(got, piece)
    for position, want_grad in enumerate(whole.weight_grads):
        rank, step = divmod(position, case.steps)
        got_grad = ranks[rank].weight_grads[step]
        if want_grad is None or want_grad.numel() == 0:
            continue
        assert got_grad is not None
        # Sample weights are each rank's own: their gradients are of the rank's own loss.
        sample = max(sample, _relative(got_grad[None], case.world_size * want_grad[None]))
    for t in case.tables:
        (full,) = whole.held[t.name]
        covered = torch.zeros(t.rows, t.dim, dtype=torch.int64)
        seen: dict[Tile, Held] = {}
        lags: list[Tensor] = []
        for rank, record in enumerate(ranks):
            for held in record.held[t.name]:
                tile = held.tile
                assert rank in tile.owners
                if tile in seen:
                    assert torch.equal(held.weight, seen[tile].weight), f"replicas of {t.name} {tile} differ"
                    for name, value in held.state.items():
                        assert torch.equal(value, seen[tile].state[name]), f"state of {t.name} {tile} differs"
                    continue
                seen[tile] = held
                covered[tile.r0 : tile.r1, tile.c0 : tile.c1] += 1
                want = full.weight[tile.r0 : tile.r1, tile.c0 : tile.c1]
                assert held.weight.shape == want.shape and held.weight.dtype == want.dtype  # noqa: PT018
                weights = max(weights, _relative(held.weight, want))
                lags.append((held.weight.double() - want.double()).abs().reshape(-1) / max(lr, 1e-30))
                same[t.name] &= torch.equal(held.weight, want)
                if full.grad is not None:
                    assert held.grad is not None
                    want_dense = full.grad[tile.r0 : tile.r1, tile.c0 : tile.c1]
                    state = max(state, _relative(held.grad, want_dense))
                    same[t.name] &= torch.equal(held.grad, want_dense)
                else:
                    assert held.grad is None
                assert held.state.keys() == full.state.keys()
                for name, value in held.state.items():
                    wanted = full.state[name]
                    if wanted.dim() == 2:
                        wanted = wanted[tile.r0 : tile.r1, tile.c0 : tile.c1]
                    elif wanted.dim() == 1:
                        wanted = wanted[tile.r0 : tile.r1]
                    assert value.shape == wanted.shape and value.dtype == wanted.dtype, name  # noqa: PT018
                    largest = float(full.state[name].abs().max()) if full.state[name].numel() else 0.0
                    state = max(state, _relative(value, wanted, largest))
                    same[t.name] &= torch.equal(value, wanted)
        assert bool((covered == 1).all()), f"the ranks' tiles of {t.name} cover it once"
        every = torch.cat(lags)
        per_lr = max(per_lr, float(every.max()))
        median = max(median, float(every.median()))
    return Figures(out, sample, weights, per_lr, median, state, same_outputs, same)


def assemble(case: Case, ranks: Sequence[Record]) -> dict[str, Tensor]:
    """Whole tables and their state, by `<table>.<name>`, from the ranks' tiles."""
    whole: dict[str, Tensor] = {}
    for t in case.tables:
        for record in ranks:
            for held in record.held[t.name]:
                r0, r1, c0, c1, _ = held.tile
                for name, value in {"weight": held.weight, **held.state}.items():
                    shape = (t.rows, t.dim)[: value.dim()]
                    full = whole.setdefault(f"{t.name}.{name}", value.new_zeros(shape))
                    if value.dim() == 2:
                        full[r0:r1, c0:c1] = value
                    elif value.dim() == 1:
                        full[r0:r1] = value
                    else:
                        full.copy_(value)
    return whole


def keeps_order(case: Case, table: TableCase) -> bool:
    """Whether no sum of this table's run is reordered and no scale rounds, so that bits must be equal.

    Tiles have one owner (replicas add their own sums first), every id travels, rows are whole where the rule adds over
    them, bags are whole (or there are none), a mean is not divided at another place, and W is a power of two.
    """
    tiling = case.tilings[table.name]
    return (
        case.world_size & (case.world_size - 1) == 0
        and not tiling.replicated
        and tiling.head is None
        and (case.pooled or case.distinct is False or case.world_size == 1)
        and not (adds_over_rows(case.optimizer) and len(tiling.blocks) > 1)
        and not (case.pooled and any(len(block.owners) > 1 for block in tiling.blocks))
        and not table.mean
    )


def check(case: Case, ranks: Sequence[Record], whole: Record | None = None) -> Figures:
    """Assert that the ranks equal the unsharded module, as closely as their optimizer allows."""
    whole = run_unsharded(case) if whole is None else whole
    figures = compare(case, ranks, whole)
    double = all(t.data_type is DataType.FP64 for t in case.tables)
    # Of a table with few rows, sums of forty numbers that partly cancel, for three steps.
    bound = 1e-12 if double else 4e-6
    assert figures.outputs <= bound, figures
    # Each is a sum of D products, and fp32 whatever the tables are.
    assert figures.sample_weights <= 2e-6, figures
    assert figures.state <= bound, figures
    kinds = (Adam, AdamW, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB)
    if isinstance(case.optimizer, kinds) and not double:
        assert figures.weights_per_lr <= 1e-3, figures
        assert figures.median_per_lr <= 1e-5, figures
    else:
        assert figures.weights <= bound, figures
    for table in case.tables:
        if keeps_order(case, table):
            assert figures.same[table.name], f"no sum of {table.name} is reordered, yet bits differ: {figures}"
    if all(keeps_order(case, table) for table in case.tables):
        assert figures.same_outputs, figures
    return figures


# ---------------------------------------------------------------------------------------------------- tabled cases

WORLDS: dict[str, Hosts] = {
    "1": ((0,),),
    "2": ((0, 1),),
    "1+1": ((0,), (1,)),
    "3": ((0, 1, 2),),
    "2+1": ((0, 1), (2,)),
    "4": ((0, 1, 2, 3),),
    "2+2": ((0, 2), (1, 3)),
}
"""Ranks by host; in the last one neighbours are not on one host."""

FORMS = ("sum", "mean", "weighted", "weighted_mean", "sequence")

_BATCH_SIZES = {1: (6,), 2: (5, 3), 3: (4, 0, 3), 4: (5, 3, 0, 2)}


@functools.cache
def tabled(tiling: str, form: str, optimizer: str, world: str) -> Case:
    """A case of the product: three tables, one of them read by two features, one feature read by two tables."""
    hosts, mean = WORLDS[world], form.endswith("mean")
    tables = (
        TableCase("t0", 10, 4, ("a", "b"), mean=mean),
        TableCase("t1", 7, 3, ("c",), mean=mean),
        TableCase("t2", 17, 20, ("d", "a"), mean=mean),
    )
    make, spec = TILINGS[tiling], OPTIMIZERS[optimizer]
    tilings = {t.name: make(t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}
    if adds_over_rows(spec):  # refused where column blocks are cut at different rows; another test covers it
        tilings = {
            t.name: tilings[t.name] if aligned(tilings[t.name]) else two_tiles(t.rows, t.dim, hosts, i)
            for i, t in enumerate(tables)
        }
    return Case(
        tables, tilings, hosts, spec, _BATCH_SIZES[sum(map(len, hosts))], pooled=form != "sequence",
        weighted=form.startswith("weighted"),
    )  # fmt: skip


def with_type(case: Case, data_type: DataType) -> Case:
    """The case with all tables of another type."""
    return replace(case, tables=tuple(replace(t, data_type=data_type) for t in case.tables))
