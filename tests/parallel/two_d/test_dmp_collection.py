"""`DMPCollection` on processes: TorchRec's face, loss curves in every layout, checkpoints from any layout into any."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.data_parallel import DataParallelWrapper
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.two_d.collection_config import DMPCollectionConfig
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

Pool = Callable[[int], Ranks]
ROWS = {"a": 60, "b": 30, "c": 20}
SAMPLES, STEPS = 8, 50 if os.environ.get("TILEREC_NIGHTLY") == "1" else 20


class Model(nn.Module):
    """Bags and a sequence under two optimizers, a dense layer on top; its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS[name], 8, name, feature_names=[name]) for name in ("a", "b")]
        )
        self.ec = EmbeddingCollection([EmbeddingConfig(ROWS["c"], 4, "c", feature_names=["c"])])
        self.over = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        rows = self.ec(features)["c"]
        owner = torch.repeat_interleave(torch.arange(len(labels)), rows.lengths())
        summed = torch.zeros(len(labels), 4).index_add(0, owner, rows.values())
        logits = self.over(torch.cat([self.ebc(features).values(), summed], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    made = Model()
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(made.ebc.parameters()))
    apply_optimizer_in_backward(Adam(lr=0.01), list(made.ec.parameters()))
    return made


def batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    features = random_batch(list(ROWS), ROWS, SAMPLES, exponent=1.05, seed=100 * step + rank)
    ids = features["a"]
    owner = torch.repeat_interleave(torch.arange(SAMPLES), ids.lengths())
    score = torch.zeros(SAMPLES).index_add(0, owner, (ids.values() % 2) * 2.0 - 1.0)
    return features, (score > 0).float()


PLAN: dict[str, Any] = {"ebc": {"a": row_wise(), "b": column_wise(ranks=[0])}, "ec": row_wise()}


def wrapped(size: int, seed: int = 0, **options: Any) -> DMPCollection:
    return DMPCollection(model(seed), "cpu", PLAN, 4, size, **options)


def steps(dmp: nn.Module, count: int, rank: int, first: int = 0) -> list[float]:
    own = [p for name, p in dmp.named_parameters() if name.startswith("over")]
    dense = torch.optim.SGD(own, lr=0.1)
    losses = []
    for step in range(first, first + count):
        dense.zero_grad()
        loss = dmp(*batch(rank, step))
        loss.backward()
        dense.step()
        losses.append(float(loss.detach()))
    return losses


def mean_over_ranks(losses: list[float]) -> list[float]:
    told = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(told)
    return (told / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def whole(dmp: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full_state_dict(dmp).items()}


def test_ranks_may_be_threads() -> None:
    whole_model = model()
    whole_model.over.requires_grad_(False)

    def run(group: Group) -> list[dict[str, Tensor]]:
        two_d = DMPCollection(copy.deepcopy(whole_model), "cpu", PLAN, 4, 2, global_pg=group)
        one_d = DistributedModelParallel(
            copy.deepcopy(whole_model), group, plan={"ebc": dict.fromkeys("ab", row_wise()), "ec": row_wise()}
        )
        for dmp in (two_d, one_d):
            dmp(*batch(group.rank, 0)).backward()
        return [full_state_dict(dmp) for dmp in (two_d, one_d)]

    for got, want in run_virtual_ranks(4, run):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value)


# ---------------------------------------------------------------------------------------------------- the face


def test_arguments_are_torchrecs_and_what_is_more_is_by_keyword() -> None:
    theirs = [
        "module", "device", "plan", "world_size", "sharding_group_size", "global_pg", "sharding_strategy",
        "node_group_size", "sharders", "init_data_parallel", "init_parameters", "data_parallel_wrapper",
        "use_inter_host_allreduce", "custom_all_reduce", "submodule_configs", "rs_awaitable_hook_module",
        "use_sharded_relay",
    ]  # fmt: skip
    ours = inspect.signature(DMPCollection).parameters
    assert list(ours)[: len(theirs)] == theirs
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    names = [
        "module",
        "plan",
        "sharding_group_size",
        "node_group_size",
        "use_inter_host_allreduce",
        "sharding_strategy",
    ]
    assert list(inspect.signature(DMPCollectionConfig).parameters) == names
    assert list(inspect.signature(DMPCollection.sync).parameters)[:2] == ["self", "include_optimizer_state"]


class Unwrapped(DataParallelWrapper):
    """Leaves the dense part as it is."""

    def wrap(self, dmp: Any, env: Any, device: Any) -> None:
        pass


def face() -> list[str]:
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dmp = wrapped(
            2, sharding_strategy="fully_sharded", use_sharded_relay=True, sync_interval=2, custom_all_reduce=print
        )  # fmt: skip
    said = [str(w.message) for w in seen]
    assert len(said) == 1
    for word in ("sharding_strategy", "use_sharded_relay", "sync_interval", "custom_all_reduce"):
        assert word in said[0]
    assert isinstance(dmp, DistributedModelParallel)
    assert dmp.device_mesh.mesh_dim_names == ("replicate", "shard")
    assert dmp.device_mesh.mesh.tolist() == [[0, 2], [1, 3]]
    assert dmp.device_mesh.get_local_rank("replicate") == rank % 2
    assert dmp.device_mesh.get_group("shard").size() == 2
    assert list(dmp.state_dict()) == list(model().state_dict())
    steps(dmp, 2, rank)
    dmp.sync()
    dmp.ensure_reduce_scatter_complete()
    assert dmp.unsynced_steps == 0
    with pytest.raises(ConfigError, match="world_size: got 2; expected 4, the number of ranks"):
        DMPCollection(model(), "cpu", None, 2, 2, dist.group.WORLD)
    with pytest.raises(ConfigError, match="got 'striped'"):
        wrapped(2, sharding_strategy="striped")
    with pytest.raises(ConfigError, match="got 3; expected a divisor of the world size 4"):
        wrapped(3)
    # Some ranks fail before others: all hear of it, nobody waits.
    with pytest.raises(
        ConfigError,
        match="got 3; expected a divisor of the world size 4" if rank == 1 else "differs between ranks",
    ):
        wrapped(3 if rank == 1 else 2)
    with pytest.raises(ConfigError, match="sync_interval: got 0" if rank == 1 else "differs between ranks"):
        wrapped(2, sync="average", sync_interval=0 if rank == 1 else 1)
    with pytest.raises(ConfigError, match="world_size: got 8; expected 4" if rank == 3 else "differs between ranks"):
        DMPCollection(model(), "cpu", PLAN, 8 if rank == 3 else 4, 2)
    # What concerns the dense part only must be alike, too: some ranks would wait in its first all-reduce.
    with pytest.raises(ConfigError, match=r"init_data_parallel is True on ranks 0, 2, 3 and False on rank 1"):
        wrapped(2, init_data_parallel=rank != 1)
    with pytest.raises(ConfigError, match=r"data_parallel_wrapper is 'DefaultData.* and 'Unwrapped' on rank 1"):
        wrapped(2, data_parallel_wrapper=Unwrapped() if rank == 1 else None)
    with pytest.warns(UserWarning, match="reduce_hook .sync='exact' exchanges gradients"):
        dmp.set_all_reduce_hook(print)
    assert str(DMPCollection(model(), "cpu", dmp.plan, 4, 2).plan) == str(dmp.plan)
    return str(dmp.plan).split("\n")[:5]


def test_the_face_is_that_of_distributed_model_parallel(pool: Pool) -> None:
    for lines in pool(4).run(face):
        assert lines == [
            "4 ranks = 2 replicas x 2 shards",
            "sharding groups  0,2 | 1,3  (each on one host)",
            "replica groups   0-1 | 2-3  (each on one host)",
            "replicas         exact: gradients of touched rows are exchanged before every update",
            "hosts below      as the machines are",
        ]


def submodules() -> None:
    configs = [DMPCollectionConfig(EmbeddingCollection, {"ec": table_wise(rank=3)}, 4, 2, True)]
    dmp = DMPCollection(
        model(), "cpu", {"ebc": row_wise()}, 4, 1, submodule_configs=configs, sync="average", sync_interval=1
    )
    text = str(dmp.plan)
    assert "4 ranks = 4 replicas x 1 shards" in text
    assert "4 ranks = 1 replicas x 4 shards" in text
    assert dmp.plan.others[0].tiling("ec", "c").ranks() == (3,)
    steps(dmp, 3, dist.get_rank())
    dmp.state_dict()
    with pytest.raises(ConfigError, match="class Linear"):
        DMPCollection(model(), "cpu", None, 4, 2, submodule_configs=[DMPCollectionConfig(nn.Linear, None, 2)])
    with pytest.raises(ConfigError, match="other configs have already"):
        DMPCollection(model(), "cpu", None, 4, 2, submodule_configs=[*configs, *configs])
    with pytest.raises(ConfigError, match="submodule_configs: got a int in it"):
        DMPCollection(model(), "cpu", None, 4, 2, submodule_configs=[3])
    with pytest.raises(ConfigError, match="expected a list of DMPCollectionConfigs"):
        DMPCollection(model(), "cpu", None, 4, 2, submodule_configs=configs[0])
    with pytest.raises(ConfigError, match="topology: got 3; expected a Topology"):
        DMPCollection(model(), "cpu", None, 4, 2, topology=3)


def test_modules_may_have_sharding_groups_of_their_own_size(pool: Pool) -> None:
    pool(4).run(submodules)


class Drawn(nn.Module):
    """A table on meta whose values a user's function makes; on rank 1 it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(12, 8, "a", feature_names=["a"], init_fn=self.read)], device="meta"
        )
        self.over = nn.Linear(8, 1)

    def read(self, weight: Tensor) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such file")
        weight.fill_(1.0)


def failing(sync: str) -> str:
    try:
        DMPCollection(Drawn(), "cpu", {"ebc": row_wise()}, 4, 2, sync=sync)
    except (OSError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_an_init_fn_that_fails_in_one_sharding_group_is_told_in_all(pool: Pool, sync: str) -> None:
    said = pool(4).run(failing, sync)
    assert said.pop(1) == "OSError: no such file"
    assert all("failed on rank 1 with OSError: no such file" in text for text in said)


# ---------------------------------------------------------------------------------------------------- loss curves


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 x 2": (2, {}),
    "4 x 1, exact": (1, {"exact": True}),
    "2 x 2, exact": (2, {"exact": True}),
    "1 x 4, exact": (4, {"exact": True}),
    "average 1": (2, {"sync": "average", "sync_interval": 1}),
    "average 4": (2, {"sync": "average", "sync_interval": 4}),
    "average 16": (2, {"sync": "average", "sync_interval": 16}),
}
"""Replicas x shards."""


def curve(layout: str) -> tuple[list[float], dict[str, Tensor]]:
    size, options = LAYOUTS[layout]
    dmp = wrapped(size, **options)
    losses = mean_over_ranks(steps(dmp, STEPS, dist.get_rank()))
    dmp.sync()
    return losses, whole(dmp)


def unsharded() -> tuple[list[float], dict[str, Tensor]]:
    module = model()
    dense = torch.optim.SGD(module.over.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        local = [batch(rank, step) for rank in range(4)]
        dense.zero_grad()
        loss = module(concat_batches([features for features, _ in local]), torch.cat([y for _, y in local]))
        loss.backward()
        dense.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in module.state_dict().items()}


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Of all weights together, as a share of how far training has moved them."""
    start = model().state_dict()
    far = sum(float((got[name].double() - value.double()).square().sum()) for name, value in want.items())
    moved = sum(float((start[name].double() - value.double()).square().sum()) for name, value in want.items())
    return float((far / moved) ** 0.5)


def test_loss_curves_of_every_layout(pool: Pool, record_property: Callable[[str, object], None]) -> None:
    losses, weights = unsharded()
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    curves: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    for name in LAYOUTS:
        curves[name], *others = pool(4).run(curve, name)
        for other in others:
            assert other[0] == curves[name][0]
            assert all(torch.equal(state, curves[name][1][key]) for key, state in other[1].items()), name
    found = {name: (losses_, distance(state, weights)) for name, (losses_, state) in curves.items()}
    for name, (own, far) in found.items():
        record_property(name, far)
        if not name.startswith("average"):
            assert own == pytest.approx(losses, abs=1e-6), name
            assert far < 1e-6, (name, far)
    # Bits: of three layouts, weights and losses.
    one, two, four = (curves[f"{name}, exact"] for name in ("4 x 1", "2 x 2", "1 x 4"))
    assert one[0] == two[0] == four[0]
    assert all(torch.equal(one[1][key], other[1][key]) for other in (two, four) for key in one[1])
    # Averaged: near, and the further the longer replicas train apart.
    far1, far4, far16 = (found[f"average {n}"][1] for n in (1, 4, 16))
    assert 1e-3 < far1 < far4 < far16 < 0.5
    for n in (1, 4, 16):
        assert sum(found[f"average {n}"][0][-10:]) == pytest.approx(sum(losses[-10:]), rel=0.1)


# ---------------------------------------------------------------------------------------------------- intervals, state


def intervals() -> list[int]:
    rank = dist.get_rank()
    dmp = wrapped(2, sync="average", sync_interval=3)
    after = []
    for step in range(7):
        steps(dmp, 1, rank, step)
        after.append(dmp.unsynced_steps)
    with torch.no_grad():  # an evaluation does not average: ranks may evaluate different numbers of batches
        dmp(*batch(rank, 9))
    assert dmp.unsynced_steps == after[-1]
    twin = copy.deepcopy(dmp)
    face = dmp.fused_optimizer
    face.state_dict()
    assert (dmp.unsynced_steps, twin.unsynced_steps) == (0, after[-1])
    twin.sync(include_optimizer_state=False)
    assert all(torch.equal(value, whole(twin)[name]) for name, value in whole(dmp).items())
    steps(dmp, 1, rank, 8)
    before = [p.detach().clone() for p in dmp.parameters()]
    dmp.sync()
    assert any(not torch.equal(value, p) for value, p in zip(before, dmp.parameters(), strict=True))
    # Whole state is that of all replicas, whoever asks for it.
    for step, ask in enumerate((lambda: whole(dmp), lambda: full_state_dict(dmp.module), face.full_state_dict)):
        steps(dmp, 1, rank, 10 + step)
        assert dmp.unsynced_steps == 1
        ask()
        assert dmp.unsynced_steps == 0
    return after


def test_the_forward_pass_after_n_updates_averages(pool: Pool) -> None:
    assert pool(4).run(intervals) == [[1, 2, 3, 1, 2, 3, 1]] * 4


def save(folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    rank = dist.get_rank()
    dmp = wrapped(2, sync="average")
    steps(dmp, 3, rank)
    assert dmp.unsynced_steps == 3
    face = dmp.fused_optimizer
    dcp.save({"model": dmp.state_dict(), "optimizer": face.state_dict()}, checkpoint_id=folder)
    assert dmp.unsynced_steps == 0, "replicas are made equal first"
    return whole(dmp), face.full_state_dict()["state"]


def load(folder: str, want: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    rank = dist.get_rank()
    dense_1d = DistributedModelParallel(model(2), plan=PLAN)
    for dmp in (
        wrapped(1, 1),
        wrapped(4, 1),
        wrapped(2, 1, use_inter_host_allreduce=True, sync="average"),
        dense_1d,
    ):
        face = dmp.fused_optimizer
        state = {"model": dmp.state_dict(), "optimizer": face.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        dmp.load_state_dict(state["model"])
        face.load_state_dict(state["optimizer"])
        assert all(torch.equal(value, want[0][name]) for name, value in whole(dmp).items())
        got = face.full_state_dict()["state"]
        assert got.keys() == want[1].keys()
        for name, slots in got.items():
            assert all(torch.equal(value, want[1][name][slot]) for slot, value in slots.items()), name
        steps(dmp, 1, rank, 5)  # goes on


def test_a_checkpoint_of_averaged_replicas_loads_into_any_layout(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = pool(4).run(save, folder)
    for weights, _ in saved:
        assert all(torch.equal(value, saved[0][0][name]) for name, value in weights.items())
    pool(4).run(load, folder, saved[0])
