"""Checkpoints: saved under one plan and world size, loaded bit for bit under any other, unsharded included."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.parallel.checkpoint_models import (
    DIM,
    ROWS,
    State,
    model,
    same,
    tilings,
    train,
    whole,
    wrapped,
)
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.fused import FusedOptimizer
from tilerec.optim.positional import PositionalOptimizer
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.sharding.tiled_tensor import TiledTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
# ----------------------------------------------------------------------------------------------------- save and load


def save(folder: str) -> tuple[dict[str, Tensor], State]:
    dmp = wrapped(0, 0)
    train(dmp)
    face = dmp.fused_optimizer
    dcp.save({"model": dmp.state_dict(), "optimizer": face.state_dict()}, checkpoint_id=f"{folder}/own")
    parts = get_state_dict(dmp.module, PositionalOptimizer(face))
    dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=f"{folder}/torch")
    return whole(dmp)


def load(folder: str, want: tuple[dict[str, Tensor], State], turn: int) -> None:
    dmp = wrapped(5, turn)
    train(dmp)
    face = dmp.fused_optimizer
    state = {"model": dmp.state_dict(), "optimizer": face.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/own")
    dmp.load_state_dict(state["model"])
    face.load_state_dict(state["optimizer"])
    same(whole(dmp), want)
    train(dmp)  # goes on
    parts = get_state_dict(dmp.module, PositionalOptimizer(face))
    state = dict(zip(("model", "optimizer"), parts, strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/torch")
    set_state_dict(
        dmp.module,
        PositionalOptimizer(face),
        model_state_dict=state["model"],
        optim_state_dict=cast(Any, state["optimizer"]),
    )
    same(whole(dmp), want)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[dict[str, Tensor], State]]:
    """A checkpoint of two ranks, and what is in it."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    first, second = pool(2).run(save, folder)
    same(first, second)
    return folder, first


@pytest.mark.parametrize(("size", "turn"), [(2, 1), (2, 3), (3, 0), (4, 2)])
def test_weights_and_state_load_under_another_tiling_and_another_world_size(
    pool: Pool, saved: tuple[str, Any], size: int, turn: int
) -> None:
    pool(size).run(load, *saved, turn)


def test_weights_and_state_load_into_the_unsharded_model(saved: tuple[str, Any]) -> None:
    folder, want = saved
    own = model(5)
    face = FusedOptimizer(own)
    state = {"model": own.state_dict(), "optimizer": face.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/own", no_dist=True)
    own.load_state_dict(state["model"])
    face.load_state_dict(state["optimizer"])
    same((own.state_dict(), face.state_dict()["state"]), want)


def load_from_unsharded(folder: str) -> None:
    reference = model(7)
    batch = random_batch(list(ROWS), list(ROWS.values()), 4, seed=3)
    reference(batch).backward()
    face = FusedOptimizer(reference)
    if dist.get_rank() == 0:
        dcp.save(
            {"model": reference.state_dict(), "optimizer": face.state_dict()},
            checkpoint_id=folder,
            no_dist=True,
        )
    dist.barrier()
    dmp = wrapped(1, 0)
    state = {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    dmp.load_state_dict(state["model"])
    dmp.fused_optimizer.load_state_dict(state["optimizer"])
    same(whole(dmp), (reference.state_dict(), face.state_dict()["state"]))


def test_a_checkpoint_of_the_unsharded_model_loads_into_the_sharded_one(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(load_from_unsharded, str(tmp_path / "unsharded"))


def saved_bytes(folder: str) -> int:
    rows, dim = 4096, 64
    own = EmbeddingBagCollection([EmbeddingBagConfig(rows, dim, "t", feature_names=["t"])])
    tiles = [(0, 1000, 0, dim, (0, 1)), (1000, rows, 0, 32, (0, 1)), (1000, rows, 32, dim, 1)]
    shard(own, plan={"t": Tiling.of("t", rows, dim, tiles)})
    dcp.save(own.state_dict(), checkpoint_id=folder)
    dist.barrier()
    return sum(path.stat().st_size for path in Path(folder).glob("*.distcp"))


def test_replicated_tiles_are_written_once(pool: Pool, tmp_path: Path) -> None:
    size = pool(2).run(saved_bytes, str(tmp_path / "once"))[0]
    assert 4096 * 64 * 4 <= size < 1.1 * 4096 * 64 * 4


# ------------------------------------------------------------------------------------------------------ the state dict


def shown() -> dict[str, str]:
    dmp = wrapped(0, 0)
    want = model(0).state_dict()
    state = dmp.state_dict()
    assert list(state) == list(want)
    for name, value in state.items():
        assert value.shape == want[name].shape
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, want[name]), name
    own = {p.data_ptr() for p in dmp.parameters()}
    for name, value in state.items():
        parts = value.pieces() if isinstance(value, TiledTensor) else []
        local = value.to_local() if isinstance(value, DTensor) and not parts else value
        for part in [part for _, part in parts] or [local]:
            assert not part.numel() or part.data_ptr() in own, name
    kinds = {name.split(".")[-2]: type(value).__name__ for name, value in state.items()}
    placements = {n.split(".")[-2]: str(v.placements) for n, v in state.items() if type(v) is DTensor}
    return {**kinds, **placements}


def test_every_rank_has_every_key_with_its_logical_shape_and_live_values(pool: Pool) -> None:
    tiled = dict.fromkeys(["uneven", "two", "one", "some", "rowsteps"], "TiledTensor")
    plain = dict.fromkeys(["everywhere", "sequence", "over"], "Tensor")
    shards = {"rows": str((Shard(0),)), "columns": str((Shard(1),))}
    for size in (2, 3, 4):
        if size == 4:  # 5 rows are cut 2, 2, 1, 0; 6 columns 2, 2, 2, 0, where torch would have [7, 0] on the last rank
            tiled["columns"] = "TiledTensor"
            del shards["columns"]
        for kinds in pool(size).run(shown):
            assert kinds == {**tiled, **plain, **shards}


def dtensors(size: int) -> None:
    """Any DTensor loads into any tiling."""
    dmp = wrapped(0, 0)
    table = torch.arange(42.0).view(7, 6)
    flat = init_device_mesh("cpu", (size,))
    state = dmp.state_dict()
    names = [name for name in state if name.startswith("ebc") and ROWS[name.split(".")[-2]] == 7]
    cases: list[tuple[DeviceMesh, list[Any]]] = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Replicate()]),
    ]
    square = init_device_mesh("cpu", (2, size // 2))
    cases += [(square, [Shard(0), Shard(1)]), (square, [Replicate(), Shard(0)])]
    for mesh, placements in cases:
        for name in names:
            state[name] = distribute_tensor(table.clone(), mesh, placements)
        dmp.load_state_dict(state)
        got = full_state_dict(dmp.module)
        assert all(torch.equal(got[name], table) for name in names)
        table = table + 1
    alone = DeviceMesh("cpu", [0])
    state[names[0]] = DTensor.from_local(table, alone, [Replicate()], run_check=False)
    with pytest.raises(ConfigError, match="on every rank"):
        dmp.load_state_dict(state)


def into_unsharded() -> None:
    """Weights and optimizer state in parts: named, with the next move, and nothing is written."""
    dmp, plain = wrapped(0, 0), model(0)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    state = dmp.state_dict()
    parts = [name for name, value in state.items() if hasattr(value, "full_tensor")]
    with pytest.raises(RuntimeError, match=r"whose parts lie on several ranks.*full_state_dict") as caught:
        plain.load_state_dict(state)
    assert all(f"got {name.rpartition('.')[2]}" in str(caught.value).replace(name, "weight") for name in parts)
    assert all(torch.equal(plain.state_dict()[name], before[name]) for name in parts)
    fused = plain.ebc.fused_optimizer  # type: ignore[union-attr]
    if fused.params:
        with pytest.raises(ConfigError, match="whose parts are on several ranks"):
            fused.load_state_dict(dmp.module.ebc.fused_optimizer.state_dict())  # type: ignore[union-attr]


def test_sharded_state_is_refused_by_an_unsharded_module(pool: Pool) -> None:
    pool(2).run(into_unsharded)


def test_dtensors_of_any_placement_load_into_any_tiling(pool: Pool) -> None:
    for size in (2, 4):
        pool(size).run(dtensors, size)


def tiled_tensors() -> None:
    rank = dist.get_rank()
    want = model(0).state_dict()["ebc.embedding_bags.uneven.weight"]
    dmp = wrapped(0, 0)
    state = dmp.state_dict()
    own = state["ebc.embedding_bags.uneven.weight"]
    assert isinstance(own, TiledTensor)
    assert own.shape == (7, 6)
    assert own.to_local().shape == ((5, 6), (2, 6))[rank]
    assert [str(rectangle) for rectangle, _ in own.pieces()] == [
        ("rows [0, 5) x columns [0, 6)", "rows [5, 7) x columns [0, 6)")[rank]
    ]
    assert not any(placement.is_shard() or placement.is_replicate() for placement in own.placements)
    assert "here: rows" in repr(own)
    # Copies, conversions and fills work on every rank's part.
    for made, value in (
        (own.clone(), want),
        (copy.deepcopy(own), want),
        (own.to(torch.float64), want.double()),
        (torch.zeros_like(own), torch.zeros_like(want)),
        (own.clone().fill_(3.0), torch.full_like(want, 3.0)),
        (own.clone().copy_(want + 1), want + 1),
        (own.detach(), want),
    ):
        assert isinstance(made, TiledTensor)
        assert torch.equal(made.full_tensor(), value)
    for placement in (Shard(0), Shard(1), Replicate()):
        plain = own.redistribute(placements=[placement])
        assert type(plain) is DTensor
        assert plain.placements == (placement,)
        assert torch.equal(plain.full_tensor(), want)
    two = state["ebc.embedding_bags.two.weight"]
    if rank == 0:
        with pytest.raises(ConfigError, match="2 rectangles"):
            two.to_local()
    for forbidden in (lambda: own + 1, lambda: torch.zeros(7, 6).copy_(own), lambda: own.sum()):
        with pytest.raises(ConfigError, match="full_tensor"):
            forbidden()
    with pytest.raises(pickle.PicklingError, match="full_state_dict"):
        pickle.dumps(own)
    steps = dmp.fused_optimizer.state_dict()["state"]["ebc.embedding_bags.one.weight"]["step"]
    assert isinstance(steps, TiledTensor)
    assert steps.shape == ()
    if rank == 1:
        assert steps.item() == 0


def test_a_tiled_tensor_claims_no_shard_and_refuses_what_it_cannot_do(pool: Pool) -> None:
    pool(2).run(tiled_tensors)


def torch_helpers() -> None:
    dmp = wrapped(0, 0)
    want = model(0).state_dict()
    full = get_model_state_dict(dmp.module, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(full[name], value) for name, value in want.items())
    off = get_model_state_dict(dmp.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert all(torch.equal(off[name], value) for name, value in want.items())
    moved = get_model_state_dict(dmp.module, options=StateDictOptions(cpu_offload=True))
    dmp.load_state_dict(moved)
    assert all(torch.equal(value, want[name]) for name, value in full_state_dict(dmp.module).items())


def test_torchs_options_for_whole_and_offloaded_state_dicts_work(pool: Pool) -> None:
    pool(2).run(torch_helpers)


def async_save(folder: str) -> None:
    dmp = wrapped(0, 0)
    train(dmp)
    want = whole(dmp)
    own = (want[0], {n: {s: v.clone() for s, v in slots.items()} for n, slots in want[1].items()})
    own[0].update({name: value.clone() for name, value in own[0].items()})
    state = {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}
    # A group of its own, as torch asks for: the model's gradients travel over the default one.
    pending = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    train(dmp)  # meanwhile
    cast(Any, pending).result()
    state = {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    dmp.load_state_dict(state["model"])
    dmp.fused_optimizer.load_state_dict(state["optimizer"])
    same(whole(dmp), own)


def test_an_asynchronous_save_keeps_the_values_of_its_moment(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(async_save, str(tmp_path / "async"))


def combined(folder: str, turn: int, want: dict[str, Any] | None) -> dict[str, Any]:
    """Tables and dense parameters in one optimizer, with its settings."""
    dmp = wrapped(turn, turn)
    dense = {name: p for name, p in dmp.named_parameters() if name.startswith("over")}
    both = CombinedOptimizer(
        [
            dmp.fused_optimizer,
            KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.1)),
        ]
    )
    both.save_param_groups(True)
    if want is None:
        both.param_groups[0]["lr"] = 0.25
        train(dmp)
        both.step()
        dcp.save({"optimizer": both.state_dict()}, checkpoint_id=folder)
    else:
        state = {"optimizer": both.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        both.load_state_dict(state["optimizer"])
    tables = dmp.fused_optimizer.full_state_dict()["state"]
    own = {name: {k: v.clone() for k, v in both.state_dict()["state"][name].items()} for name in dense}
    assert both.param_groups[0]["lr"] == 0.25
    if want is not None:
        same(({}, {**tables, **own}), ({}, want))
    return {**tables, **own}


def test_tables_and_dense_parameters_are_saved_in_one_optimizer(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "combined")
    want = pool(2).run(combined, folder, 0, None)[0]
    pool(4).run(combined, folder, 2, want)


def empty_face() -> None:
    torch.manual_seed(0)
    own = EmbeddingBagCollection([EmbeddingBagConfig(7, DIM, "t", feature_names=["t"])])
    shard(own, plan={"t": tilings(2)["uneven"]})
    face = ShardedFusedOptimizer(own)
    assert face.state_dict() == {"state": {}}
    face.load_state_dict({"state": {}})


def test_tables_without_an_optimizer_have_no_state(pool: Pool) -> None:
    pool(2).run(empty_face)
