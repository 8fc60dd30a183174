"""How often the host waits for the GPU in a sharded step: once, in `route`.

Ranks are processes, or threads that share the GPU where there is no backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import real
from tests.cuda.sizes import size as size_of
from tests.cuda.waits import waits
from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WORLDS = pytest.mark.parametrize(("backend", "size"), [pytest.param("nccl", 1, marks=real), ("gloo", 1), ("gloo", 2)])
KINDS = ("pooled", "weighted", "sequences")
KEYS, ROWS = ["a", "b", "c"], 40


class Waits(NamedTuple):
    """Of one step."""

    route: int
    lookup: int
    combine: int
    backward: int


def sharded(kind: str) -> Any:
    torch.manual_seed(0)
    size = torch.distributed.get_world_size()
    plan = {"rows": row_wise(), "whole": table_wise(rank=size - 1)}
    if kind == "sequences":
        module: Any = EmbeddingCollection(
            [
                EmbeddingConfig(ROWS, 8, "rows", feature_names=["a", "b"]),
                EmbeddingConfig(ROWS, 8, "whole", feature_names=["c"]),
            ]
        )
    else:
        tables = [
            EmbeddingBagConfig(ROWS, 8, "rows", feature_names=["a", "b"]),
            EmbeddingBagConfig(ROWS, 12, "whole", feature_names=["c"]),
        ]
        if kind == "pooled":
            tables.append(EmbeddingBagConfig(ROWS, 16, "blocks", feature_names=["d", "e"], pooling=PoolingType.MEAN))
            plan["blocks"] = column_wise(ranks=list(range(size)))
        module = EmbeddingBagCollection(tables, is_weighted=kind == "weighted")
    apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())
    module = module.cuda()
    shard(module, plan=plan)
    return module


def batch(kind: str, step: int) -> KeyedJaggedTensor:
    """On the device, with what its reader knows of it."""
    rank = torch.distributed.get_rank()
    keys = [*KEYS, "d", "e"] if kind == "pooled" else KEYS
    features = random_batch(keys, ROWS, 3 + 2 * rank, seed=10 * step + rank, weighted=kind == "weighted")
    known = features.length_per_key()
    there = features.to("cuda")
    assert there.length_per_key() == known
    if kind == "weighted":
        there.weights().requires_grad_()
    return there


def steps(kind: str) -> Waits:
    """The waits of the third step."""
    module = sharded(kind)
    for step in range(3):
        features = batch(kind, step)
        routed, in_route = waits(lambda features=features: module.route(features))
        looked, in_lookup = waits(lambda routed=routed: module.lookup(routed))
        out, in_combine = waits(lambda looked=looked: module.combine(looked))
        del looked  # it could be combined again, so an update would keep the rows it has read
        values = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
        loss = torch.stack([value.square().sum() for value in values]).sum()
        _, in_backward = waits(loss.backward)
    return Waits(in_route, in_lookup, in_combine, in_backward)


@WORLDS
def test_a_step_waits_once_and_that_of_one_rank_not_at_all(backend: str, size: int) -> None:
    with Ranks(size, backend=backend, timeout_s=size_of(60, 600)) as ranks:
        for kind in KINDS:
            assert ranks.run(steps, kind) == [Waits(int(size > 1), 0, 0, 0)] * size, kind


def forward(group: Group, device: str, weighted: bool, steps: int) -> list[Tensor]:
    """Outputs of some of three batches, on two hosts of two ranks: they add up what they have of other hosts' bags."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a", "b"])], is_weighted=weighted)
    with torch.no_grad():
        module.embedding_bags["t"].weight.copy_(torch.arange(4.0 * ROWS).view(ROWS, 4))
    step = ROWS // 4
    tiling = Tiling.of("t", ROWS, 4, [(r * step, (r + 1) * step, 0, 4, r) for r in range(4)])
    module = module.to(device)
    topology = Topology(4, "cpu", hosts=[[0, 1], [2, 3]])
    shard_collection(module, {"t": tiling}, group, group.split("route"), topology)
    batches = [
        random_batch(KEYS, ROWS, size, seed=10 * size + group.rank, weighted=weighted).to(device) for size in (0, 1, 7)
    ]
    with torch.no_grad():
        return [module(features).values() for features in batches[:steps]]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_forward_on_two_hosts_waits_once_and_has_the_cpus_bits(weighted: bool) -> None:
    want = run_virtual_ranks(4, forward, "cpu", weighted, 3)
    _, before = waits(lambda: run_virtual_ranks(4, forward, "cuda", weighted, 0))
    got, waited = waits(lambda: run_virtual_ranks(4, forward, "cuda", weighted, 3))
    assert all(
        torch.equal(a.cpu(), b) for one, other in zip(got, want, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert waited - before == 4 * 3, "each rank, for each batch"


def beside(group: Group, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """The output of a batch that was routed on another stream, which was busy then, and of the same batch again."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a"])])
    with torch.no_grad():
        module.embedding_bags["t"].weight.copy_(torch.arange(4.0 * ROWS).view(ROWS, 4))
    module, side = module.cuda(), torch.cuda.Stream()
    shard_collection(module, {"t": tiling}, group, group.split("route"), Topology(2, "cpu"))
    features = random_batch(["a"], ROWS, 7, seed=group.rank).to("cuda")
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        routed = module.route(features)
        torch.cuda._sleep(50_000_000)
        twice = module.route(features)
    with torch.no_grad():
        return module(routed).values(), module(twice).values()


@pytest.mark.parametrize("copies", [False, True], ids=["ranges", "copies"])
def test_a_batch_may_be_routed_on_another_stream(copies: bool) -> None:
    half = ROWS // 2
    cut: list[Any] = [(0, ROWS, 0, 4, (0, 1))] if copies else [(0, half, 0, 4, 0), (half, ROWS, 0, 4, 1)]
    table = torch.arange(4.0 * ROWS).view(ROWS, 4)
    for rank, outs in enumerate(run_virtual_ranks(2, beside, Tiling.of("t", ROWS, 4, cut))):
        features = random_batch(["a"], ROWS, 7, seed=rank)
        bags = torch.tensor_split(table[features.values()], features.offsets()[1:-1])
        want = torch.stack([bag.sum(0) for bag in bags])
        assert all(torch.equal(out.cpu(), want) for out in outs)


def refused() -> tuple[str, list[float]]:
    """What a rank says of a batch with a bad id on rank 1, and the output of the step after it."""
    module = sharded("pooled")
    features = batch("pooled", 0)
    if torch.distributed.get_rank() == 1:
        features.values()[2] = ROWS
    with pytest.raises(InputError) as told:
        module(features)
    return str(told.value), module(batch("pooled", 1)).values().sum().reshape(1).tolist()


def test_an_id_that_only_the_device_has_seen_stops_all_ranks_and_the_next_step_works() -> None:
    with Ranks(2, backend="gloo", timeout_s=size_of(60, 600)) as ranks:
        (one, first), (other, second) = ranks.run(refused)
    assert one.startswith("Rank 1 refused its batch")
    assert other.startswith("Table 'rows': got id 40 of feature 'a' (position 2 ")
    assert first != second
