"""Rows and gradients in the number format of their table: sizes, hostile segments, and what a sharded step keeps.

Legend: W ranks, B samples.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tilerec.comms.codec import CODECS, codec
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sharding.wire import RowWire
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import Wire
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

NAMES = list(CODECS)


class Segment(NamedTuple):
    """Rows of one table."""

    name: str
    count: int
    width: int


HOSTILE = [
    [],
    [Segment("int8", 0, 3)],
    [Segment("int8", 1, 1)],
    [Segment("fp16", 1, 3), Segment("int8", 1, 3), Segment("fp32", 1, 3)],
    [Segment("int8", 1, 1), Segment("fp32", 1, 1), Segment("int8", 0, 7), Segment("bf16", 0, 1), Segment("fp16", 5, 1)],
    [Segment("int8", 2, 3), Segment("int8", 3, 1), Segment("fp32", 2, 257), Segment("int8", 1, 3)],
    [Segment("fp8", 2, 3), Segment("int8", 3, 1), Segment("fp32", 2, 5), Segment("fp8", 1, 257)],
    [Segment("fp32", 0, 3), Segment("bf16", 0, 1)],
]  # fmt: skip


def bound(name: str, rows: Tensor) -> Tensor:
    """The error that the codec's documentation admits, for rows `[count, width]`."""
    size = rows.double().abs()
    if name == "fp16":
        return torch.where(size >= 2**-14, size * 2**-11, 2**-25)
    if name == "bf16":
        return size * 2**-8
    if name == "int8":
        return (size.amax(1, keepdim=True) * (1 / 254 + 1e-6)).expand_as(size)
    if name == "fp8":
        return torch.maximum(size / 17, size.amax(1, keepdim=True) / 458_752) * (1 + 1e-6)
    return torch.zeros_like(size)


def check(segments: list[Segment], every: list[str], dtype: torch.dtype, seed: int = 0) -> None:
    """Rows of the segments arrive in order, within their bounds, over a wire of the announced size."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(s.count, s.width, generator=generator, dtype=dtype) for s in segments]
    rows = torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else torch.empty(0, dtype=dtype)
    counts, widths = [s.count for s in segments], [s.width for s in segments]
    own = RowWire([s.name for s in segments], every, dtype)
    sizes = own.sizes(counts, widths)
    wire = own.encode(rows, counts, widths)
    assert wire.dtype == own.wire_dtype
    assert wire.dim() == 1
    assert wire.numel() == sum(sizes)
    for s, size in zip(segments, sizes, strict=True):
        assert size * wire.itemsize == s.count * codec(s.name).row_bytes(s.width, dtype)
    # It arrives in memory of its own.
    arrived = own.decode(wire.clone(), counts, widths)
    assert arrived.dtype == dtype
    assert arrived.shape == rows.shape
    for s, sent, got in zip(segments, pieces, arrived.split([s.count * s.width for s in segments]), strict=True):
        if s.count:
            slack = 0 if dtype is torch.float32 or s.name == "fp32" else sent.abs() * 2**-23
            error = (got.view(s.count, s.width).double() - sent.double()).abs()
            assert (error <= bound(s.name, sent) + slack).all(), s


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("segments", HOSTILE, ids=str)
def test_rows_of_mixed_formats_arrive_in_order_and_within_their_bounds(
    segments: list[Segment], dtype: torch.dtype
) -> None:
    check(segments, NAMES, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_format_arrive_within_their_bounds(name: str, dtype: torch.dtype) -> None:
    for segments in HOSTILE:
        check([s._replace(name=name) for s in segments], [name, name], dtype)


@hypothesis.given(
    st.lists(
        st.builds(Segment, st.sampled_from(NAMES), st.integers(0, 4), st.sampled_from([1, 2, 3, 5, 16])),
        max_size=7,
    ),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 100),
)
def test_any_mixture_arrives(segments: list[Segment], dtype: torch.dtype, seed: int) -> None:
    check(segments, NAMES, dtype, seed)


def test_a_mixture_is_bytes_even_where_a_rank_has_one_format_or_no_rows() -> None:
    for names in ([], ["int8"], ["fp32", "fp32"]):
        own = RowWire(names, ["fp32", "int8"], torch.float32)
        assert own.wire_dtype == torch.uint8
        assert not own.plain
        assert own.sizes([2] * len(names), [3] * len(names)) == [2 * codec(name).row_bytes(3) for name in names]


def test_one_format_travels_as_its_own_numbers() -> None:
    assert RowWire([], ["fp16", "fp16"], torch.float32).wire_dtype == torch.float16
    assert RowWire(["int8"], ["int8"], torch.float64).wire_dtype == torch.int8
    for every in ([], ["fp32", "fp32"]):
        own = RowWire([], every, torch.float64)
        assert own.plain
        assert own.wire_dtype == torch.float64


def test_infinity_and_nan_are_seen_on_the_other_side() -> None:
    bad = torch.tensor([float("nan"), float("inf"), 1.0, 2.0])
    own = RowWire(NAMES, NAMES, torch.float32)
    counts, widths = [1] * len(NAMES), [4] * len(NAMES)
    rows = own.decode(own.encode(bad.repeat(len(NAMES)), counts, widths), counts, widths).view(-1, 4)
    for name, row in zip(NAMES, rows, strict=True):
        assert row.isnan().all() if name in ("int8", "fp8") else torch.equal(row.isfinite(), bad.isfinite())


# -- sharded collections ----------------------------------------------------------------------------------------

W = 3
ROWS = {"a": 12, "b": 9, "c": 5}
DIMS = {"a": 8, "b": 3, "c": 1}
SIZES = [4, 0, 3]


def collection(bags: bool, data_type: DataType = DataType.FP32) -> EmbeddingBagCollection | EmbeddingCollection:
    torch.manual_seed(1)
    if bags:
        return EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS[t], DIMS[t], t, feature_names=[f"f{t}"], data_type=data_type) for t in ROWS]
        )
    return EmbeddingCollection(
        [EmbeddingConfig(ROWS[t], DIMS[t], t, feature_names=[f"f{t}"], data_type=data_type) for t in ROWS]
    )


TILES = {
    "tables": {
        "a": [(0, 12, 0, 8, 0)],
        "b": [(0, 9, 0, 3, 1)],
        "c": [(0, 5, 0, 1, 2)],
    },
    "rows and columns": {
        "a": [(0, 12, 0, 5, 2), (0, 12, 5, 8, 0)],
        "b": [(0, 1, 0, 3, 0), (1, 5, 0, 3, 1), (5, 9, 0, 3, 2)],
        "c": [(0, 2, 0, 1, 1), (2, 5, 0, 1, 0)],
    },
}


def batches() -> list[KeyedJaggedTensor]:
    """One per rank; rank 1 has no samples."""
    keys = [f"f{t}" for t in ROWS]
    rows = list(ROWS.values())
    return [random_batch(keys, rows, size, mean_length=2.0, empty=0.3, seed=rank) for rank, size in enumerate(SIZES)]


def flat_of(output: object) -> list[Tensor]:
    """The output of each table, [rows, dim]."""
    if isinstance(output, dict):
        return [output[f"f{t}"].values() for t in ROWS]
    return [output[f"f{t}"] for t in ROWS]  # type: ignore[index]


def train(bags: bool, tiles: dict[str, list[tuple[int, ...]]], wires: dict[str, Wire] | None, data_type: DataType):
    """One step of each rank with the loss `sum(output * c)`: outputs, c, the weights after it, and the traffic."""
    base = collection(bags, data_type)
    apply_optimizer_in_backward(SGD(lr=1.0), list(base.parameters()))
    tilings = {t: Tiling.of(t, ROWS[t], DIMS[t], tiles[t]) for t in ROWS}  # type: ignore[arg-type]
    local = batches()

    def step(group: Group):
        module = copy.deepcopy(base)
        # A host per rank: no sums inside hosts, which would travel as they are.
        topology = Topology(W, "cpu", hosts=[[rank] for rank in range(W)])
        shard_collection(module, tilings, group, group.split("route"), topology, wires=wires)
        outputs = flat_of(module(local[group.rank]))
        generator = torch.Generator().manual_seed(10 + group.rank)
        coefficients = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]
        group.traffic.reset()
        torch.cat([(out * c).reshape(-1) for out, c in zip(outputs, coefficients, strict=True)]).sum().mul(W).backward()
        weights = {t: torch.zeros(ROWS[t], DIMS[t], dtype=base_dtype) for t in ROWS}
        for table in module._leaves.tables:  # type: ignore[union-attr]
            for tile, leaf in zip(table.tiles, table.leaves(), strict=False):
                weights[table.config.name][tile.r0 : tile.r1, tile.c0 : tile.c1] = leaf.detach()
        return [out.detach() for out in outputs], coefficients, weights, group.traffic["gradients"]

    base_dtype = next(base.parameters()).dtype
    ranks = run_virtual_ranks(W, step)
    weights = {t: sum(rank[2][t] for rank in ranks) for t in ROWS}
    return base, local, [r[0] for r in ranks], [r[1] for r in ranks], weights, [r[3] for r in ranks]


def pieces(bags: bool, batch: KeyedJaggedTensor, table: str) -> list[Tensor]:
    """The ids of each row of the output: of each bag, or of each id."""
    jagged = batch[f"f{table}"]
    if bags:
        return list(jagged.values().split(jagged.lengths().tolist()))
    return list(jagged.values()[:, None])


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("bags", [True, False], ids=["bags", "ids"])
@pytest.mark.parametrize(
    "names",
    [["fp16"] * 3, ["bf16"] * 3, ["int8"] * 3, ["fp32", "int8", "bf16"], ["int8", "fp16", "fp32"]],
    ids="-".join,
)
def test_outputs_and_updates_are_within_the_formats_bounds(names: list[str], bags: bool, tiles: str) -> None:
    cover = TILES[tiles]
    wires = {t: Wire(name, name) for t, name in zip(ROWS, names, strict=True)}
    base, local, outputs, coefficients, weights, _ = train(bags, cover, wires, DataType.FP32)
    tables = base.embedding_bags if bags else base.embeddings
    rounded = False
    for i, (t, name) in enumerate(zip(ROWS, names, strict=True)):
        weight = tables[t].weight.detach().double()
        after, allowed = weight.clone(), torch.zeros_like(weight)
        for home in range(W):
            own = pieces(bags, local[home], t)
            exact = torch.stack([weight[ids].sum(0) for ids in own]) if own else weight[:0]
            error = torch.zeros_like(exact)
            back = torch.zeros_like(exact)
            gradient = coefficients[home][i].double()
            for r0, r1, c0, c1, _ in cover[t]:
                if not own:
                    continue
                part = torch.stack([weight[ids[(ids >= r0) & (ids < r1)], c0:c1].sum(0) for ids in own])
                error[:, c0:c1] += bound(name, part)
                back[:, c0:c1] = bound(name, gradient[:, c0:c1])
            slack = 1e-6 * (1 + exact.abs())
            got = outputs[home][i].double()
            assert ((got - exact).abs() <= error + slack).all()
            if name != "fp32":
                rounded |= bool(((got - exact).abs() > slack).any())
            for row, ids in enumerate(own):
                after.index_add_(0, ids, -gradient[row].expand(len(ids), -1))
                allowed.index_add_(0, ids, back[row].expand(len(ids), -1))
        assert ((weights[t].double() - after).abs() <= allowed + 1e-5).all()
        assert not torch.equal(weights[t].double(), weight), "the step did something"
    assert rounded, "the wire did something"


@pytest.mark.parametrize("names", [["fp16"] * 3, ["int8"] * 3, ["fp32", "int8", "bf16"]], ids="-".join)
def test_float64_tables_keep_their_dtype_under_every_format(names: list[str]) -> None:
    wires = {t: Wire(name, name) for t, name in zip(ROWS, names, strict=True)}
    base, local, outputs, _, _, _ = train(True, TILES["tables"], wires, torch.float64)  # type: ignore[arg-type]
    exact = flat_of(base(concat_batches(local)))
    for i, name in enumerate(names):
        got = torch.cat([outputs[home][i] for home in range(W)])
        assert got.dtype == torch.float64
        slack = exact[i].detach().abs() * 2**-22 if name != "fp32" else 1e-12
        assert ((got - exact[i].detach()).abs() <= bound(name, exact[i].detach()) + slack).all()


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    ("bags", "distinct"), [(True, None), (False, False), (False, True)], ids=["bags", "ids", "distinct"]
)
@pytest.mark.parametrize(
    "wires",
    [
        dict.fromkeys(ROWS, Wire()),
        dict.fromkeys(ROWS, Wire("fp16", "fp16")),
        dict.fromkeys(ROWS, Wire("bf16", "fp32")),
        dict.fromkeys(ROWS, Wire("int8", "int8")),
        {"a": Wire("int8", "bf16"), "b": Wire("fp32", "int8"), "c": Wire("fp16", "fp16")},
        {"a": Wire("bf16", "fp32")},
    ],
    ids=["fp32", "fp16", "bf16-fp32", "int8", "mixed", "one table"],
)
def test_bytes_are_those_of_the_rows_that_must_travel(
    wires: dict[str, Wire], bags: bool, distinct: bool | None, tiles: str
) -> None:
    cover = TILES[tiles]
    local = batches()
    wires = {t: replace(wires.get(t, Wire()), distinct=distinct) for t in ROWS}
    rows, gradients = torch.zeros(W, W, dtype=torch.int64), torch.zeros(W, W, dtype=torch.int64)
    for t in ROWS:
        wire = wires[t]
        for r0, r1, c0, c1, owner in cover[t]:
            for home in range(W):
                # Only rows with something in them travel.
                sent = pieces(bags, local[home], t)
                sent = list(local[home][f"f{t}"].values().unique()[:, None]) if distinct else sent
                count = sum(int(((ids >= r0) & (ids < r1)).any()) for ids in sent)
                rows[owner, home] += count * codec(wire.forward).row_bytes(c1 - c0)
                gradients[home, owner] += count * codec(wire.backward).row_bytes(c1 - c0)
    rows.fill_diagonal_(0)
    gradients.fill_diagonal_(0)
    base = collection(bags)
    tilings = {t: Tiling.of(t, ROWS[t], DIMS[t], cover[t]) for t in ROWS}

    def step(group: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
        module = copy.deepcopy(base)
        topology = Topology(W, "cpu", hosts=[[rank] for rank in range(W)])
        shard_collection(module, tilings, group, group.split("route"), topology, wires=wires)
        torch.cat([out.reshape(-1) for out in flat_of(module(local[group.rank]))]).sum().backward()
        assert group.traffic["rows"].calls == group.traffic["gradients"].calls == 1
        return group.traffic["rows"].bytes, group.traffic["gradients"].bytes

    for rank, (forward, backward) in enumerate(run_virtual_ranks(W, step)):
        assert list(forward) == rows[rank].tolist()
        assert list(backward) == gradients[rank].tolist()
    assert rows.sum() > 0


def test_exact_sums_refuse_a_wire_that_rounds() -> None:
    tilings = {t: Tiling.of(t, ROWS[t], DIMS[t], TILES["tables"][t]) for t in ROWS}

    def ask(group: Group) -> None:
        with pytest.raises(ConfigError, match="Table 'b': exact=True needs the same bits under every plan"):
            shard_collection(
                collection(True),
                tilings,
                group,
                group,
                Topology(W, "cpu"),
                exact=True,
                wires={"b": Wire("bf16")},
            )

    run_virtual_ranks(W, ask)
