"""Repeated ids travel once: outputs keep their bits, gradients their sums, and refusals their words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import TILINGS, WORLDS
from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel import full_state_dict
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches
from tilerec.testing.virtual import run_virtual_ranks

HOSTS = WORLDS["2+2"]
DIMS = {"t0": 12, "t1": 24, "t2": 12}
READS = {"t0": ["a", "b"], "t1": ["c"], "t2": ["d"]}


def collection(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "sequence":
        return EmbeddingCollection([EmbeddingConfig(20, DIMS[t], t, feature_names=READS[t]) for t in DIMS])
    pooling = {"t0": PoolingType.SUM, "t1": PoolingType.MEAN, "t2": PoolingType.SUM}
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(20, DIMS[t], t, feature_names=READS[t], pooling=pooling[t]) for t in DIMS]
    )


def batch(kind: str, rank: int) -> KeyedJaggedTensor:
    """Keys "a" and "c" have at most one id per bag, "b" one, "d" some bags of several; rank 3 has no samples."""
    generator = torch.Generator().manual_seed(rank)
    samples = 0 if rank == 3 else 17
    if kind == "sequence":
        lengths = torch.randint(0, 5, (4, samples), generator=generator)
    else:
        most = torch.tensor([2, 2, 2, 4])[:, None]
        lengths = (torch.rand(4, samples, generator=generator) * most).long()
        lengths[1] = 1
    ids = torch.randint(0, 6, (int(lengths.sum()),), generator=generator)
    if kind != "variable":
        return KeyedJaggedTensor(["a", "b", "c", "d"], ids, lengths=lengths.reshape(-1))
    inverse = torch.arange(samples).repeat(4, 1)
    return KeyedJaggedTensor(
        ["a", "b", "c", "d"], ids, lengths=lengths.reshape(-1), stride_per_key_per_rank=[[samples]] * 4,
        inverse_indices=(["a", "b", "c", "d"], inverse),
    )  # fmt: skip


def values_of(out: Any) -> Tensor:
    if isinstance(out, dict):
        return torch.cat([part.values().reshape(-1) for part in out.values()])
    return out.values()


def coefficients(out: Tensor, rank: int) -> Tensor:
    return torch.rand(out.shape, generator=torch.Generator().manual_seed(100 + rank))


def stepped(
    kind: str, tiling: str, distinct: bool | None, **options: Any
) -> list[tuple[Tensor, dict[str, Tensor], int]]:
    """One SGD step on four ranks: outputs, whole tables, and bytes of rows and gradients that a rank sent."""
    base = collection(kind)
    apply_optimizer_in_backward(SGD(lr=0.5), list(base.parameters()))
    tilings = {t: TILINGS[tiling](20, dim, HOSTS, i) for i, (t, dim) in enumerate(DIMS.items())}

    def fn(group: Group) -> tuple[Tensor, dict[str, Tensor], int]:
        module = copy.deepcopy(base)
        wires = dict.fromkeys(DIMS, Wire(distinct=distinct))
        topology = Topology(group.size, "cpu", hosts=HOSTS)
        shard_collection(module, tilings, group, group.split("route"), topology, wires=wires)
        group.traffic.reset()
        out = values_of(module(batch(kind, group.rank)))
        (out * coefficients(out, group.rank)).sum().backward()
        sent = sum(own.total for own in group.traffic if own.name in ("rows", "gradients"))
        return out.detach(), full_state_dict(module), sent

    return run_virtual_ranks(4, fn)


@pytest.mark.parametrize("kind", ["pooled", "variable", "sequence"])
@pytest.mark.parametrize("tiling", TILINGS)
def test_a_step_equals_the_unsharded_one(tiling: str, kind: str) -> None:
    base = collection(kind)
    apply_optimizer_in_backward(SGD(lr=0.5), list(base.parameters()))
    wanted = [values_of(copy.deepcopy(base)(batch(kind, rank))) for rank in range(4)]
    outs = [values_of(base(batch(kind, rank))) for rank in range(4)]
    torch.autograd.backward([(out * coefficients(out, rank)).sum() / 4 for rank, out in enumerate(outs)])
    weights = base.state_dict()
    for distinct in (True, None):
        for rank, (out, whole, _) in enumerate(stepped(kind, tiling, distinct)):
            torch.testing.assert_close(out, wanted[rank].detach(), rtol=1e-6, atol=1e-6)
            for name, value in whole.items():
                torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["pooled", "variable", "sequence"])
def test_outputs_keep_their_bits_and_fewer_bytes_travel(kind: str) -> None:
    for tiling in ("table_wise", "row_wise", "column_wise", "grid"):
        for once, each in zip(stepped(kind, tiling, True), stepped(kind, tiling, False), strict=True):
            assert torch.equal(once[0], each[0])
            assert once[2] < each[2] or each[2] == 0


@pytest.mark.parametrize("repeats", [2, 20])
def test_counts_decide_where_a_plan_does_not(repeats: int) -> None:
    """40 ids of which 2 or 20 are repetitions: too few to save time, or enough."""
    ids = [*range(40 - repeats), *range(repeats)]

    def fn(group: Group, distinct: bool | None) -> int:
        module = sharded(group, rows(40, 2), wires={"t": Wire(distinct=distinct)})
        group.traffic.reset()
        module(batch_of([[i] for i in ids]))
        return int(group.traffic["rows"].total)

    each, once, counted = (sum(run_virtual_ranks(2, fn, distinct)) for distinct in (False, True, None))
    assert once < each
    assert counted == (each if repeats == 2 else once)


def test_sample_weights_and_exact_sums_send_every_id() -> None:
    def fn(group: Group, exact: bool) -> tuple[int, bool]:
        wires = {"t": Wire(distinct=None if exact else True)}
        module = sharded(group, rows(20, 2), weighted=not exact, exact=exact, wires=wires)
        plain = batch_of([[3], [3], [13], [13], [13], [3]])
        weights = None if exact else torch.ones(6)
        group.traffic.reset()
        module(KeyedJaggedTensor(["a"], plain.values(), weights, lengths=plain.lengths()))
        return int(group.traffic["rows"].total), module.exchange.distinct is None

    for exact in (True, False):
        assert run_virtual_ranks(2, fn, exact) == [(3 * 4 * 4, exact)] * 2


def test_a_bad_id_is_named_with_its_own_position() -> None:
    def fn(group: Group) -> str:
        module = sharded(group, rows(20, 2), wires={"t": Wire(distinct=True)})
        with pytest.raises(InputError) as caught:
            module(batch_of([[3], [3], [3], [20 if group.rank else 4]]))
        return str(caught.value)

    other, own = run_virtual_ranks(2, fn)
    assert "id 20" in own
    assert "3" in own.partition("position")[2]
    assert "Rank 1" in other


def test_a_frozen_table_and_a_dense_gradient_have_their_gradients() -> None:
    features = [batch("pooled", rank) for rank in range(4)]
    base = collection("pooled")
    base.embedding_bags["t1"].weight.requires_grad_(False)
    whole = copy.deepcopy(base)
    (whole(concat_batches(features[:3])).values().sum() / 4).backward()
    tilings = {t: TILINGS["row_wise"](20, dim, HOSTS, 0) for t, dim in DIMS.items()}

    def fn(group: Group) -> None:
        module = copy.deepcopy(base)
        wires = dict.fromkeys(DIMS, Wire(distinct=True))
        topology = Topology(group.size, "cpu", hosts=HOSTS)
        shard_collection(module, tilings, group, group.split("route"), topology, wires=wires)
        module(features[group.rank]).values().sum().backward()
        for t in DIMS:
            (tile,) = (tile for table in module._leaves.tables if table.config.name == t for tile in table.tiles)
            leaf = module.get_parameter(f"embedding_bags.{t}.weight")
            if t == "t1":
                assert leaf.grad is None
            else:
                wanted = whole.embedding_bags[t].weight.grad[tile.r0 : tile.r1]
                torch.testing.assert_close(leaf.grad, wanted, rtol=1e-5, atol=1e-5)

    run_virtual_ranks(4, fn)


def test_columns_of_a_row_skip_a_gradient_that_is_not_finite_together() -> None:
    """Id 3 occurs twice, one occurrence with an infinite gradient in one column; both owners leave the row alone."""
    tiling = Tiling.of("t", 20, 4, [(0, 20, 0, 2, 0), (0, 20, 2, 4, 1)])

    def fn(group: Group) -> tuple[Tensor, Tensor]:
        module = sharded(group, tiling, wires={"t": Wire(distinct=True)})
        apply_optimizer_in_backward(SGD(lr=1.0, non_finite="skip"), module.parameters())
        (before,) = full_state_dict(module).values()
        out = module(batch_of([[3], [3], [5]])).values()
        grad = torch.ones_like(out)
        grad[0, 0] = float("inf")
        out.backward(grad)
        (after,) = full_state_dict(module).values()
        return before, after

    for before, after in run_virtual_ranks(2, fn):
        assert torch.equal(after[3], before[3])
        assert torch.equal(after[5], before[5] - 1)


def test_a_plan_keeps_the_choice() -> None:
    for distinct in (True, False, None):
        own = ParameterSharding(ShardingType.ROW_WISE, wire=Wire("bf16", "fp32", distinct=distinct))
        assert ParameterSharding.from_json("t", own.to_json()) == own
    with pytest.raises(ConfigError, match="distinct"):
        Wire(distinct="often")  # type: ignore[arg-type]
