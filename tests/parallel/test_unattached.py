"""Sharded tables without an attached optimizer, stepped by any other: its state is the table's, under every plan."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import set_sparse_grad
from tilerec.optim.clipping import GradientClipping, GradientClippingOptimizer
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.positional import PositionalOptimizer
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch, split_batch
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
Named = dict[str, Any]

ROWS, DIM = 7, 6
TABLES = ["everywhere", "uneven", "rows", "columns", "two", "one", "some", "crossed"]
BY_ROWS = ["everywhere", "uneven", "rows", "one"]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
}


def tilings(size: int, turn: int) -> dict[str, Tiling]:
    """Under the name of each table a way to cut it, `turn` names further."""
    last = size - 1
    third = [(0, 3, 0, 6, 0), (3, 6, 0, 6, 1), (6, 7, 0, 6, 2)]
    tiles: dict[str, list[tuple[Any, ...]]] = {
        "everywhere": [(0, 7, 0, 6, tuple(range(size)))],
        "uneven": [(0, 5, 0, 6, 0), (5, 7, 0, 6, last)],
        "rows": [(0, 4, 0, 6, 0), (4, 7, 0, 6, 1)] if size == 2 else third,
        "columns": [(0, 7, 0, 3, 0), (0, 7, 3, 6, last)],
        "two": [(0, 7, 0, 2, 0), (0, 7, 2, 4, last), (0, 7, 4, 6, 0)],
        "one": [(0, 7, 0, 6, last)],
        "some": [(0, 3, 0, 6, (0, last)), (3, 7, 0, 3, last), (3, 7, 3, 6, 0)],
        "crossed": [(0, 3, 0, 2, 0), (3, 7, 0, 2, last), (0, 4, 2, 6, last), (4, 7, 2, 6, 0)],
    }
    cuts = list(tiles.values())
    return {name: Tiling.of(name, ROWS, DIM, cuts[(i + turn) % len(cuts)]) for i, name in enumerate(TABLES)}


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name], dtype=torch.float64) for name in names]
        )
        self.over = nn.Linear(DIM * len(names), 1, dtype=torch.float64)

    def forward(self, features: Any) -> Tensor:
        pooled = self.ebc(features).values()
        return cast(Tensor, self.over(pooled * pooled).sum())


def model(seed: int, names: list[str]) -> Model:
    torch.manual_seed(seed)
    return Model(names)


def wrapped(seed: int, turn: int, names: list[str] = TABLES) -> DistributedModelParallel:
    cuts = tilings(dist.get_world_size(), turn)
    return DistributedModelParallel(model(seed, names), plan={"ebc": {name: cuts[name] for name in names}})


def optimizer(module: nn.Module, kind: str) -> KeyedOptimizer:
    """One for the tables and one for the rest, as training code has it."""
    named = list(module.named_parameters())
    parts = [
        (
            who,
            KeyedOptimizerWrapper({n: p for n, p in named if n.startswith("ebc") == tables}, OPTIMIZERS[kind]),
        )
        for who, tables in (("tables", True), ("dense", False))
    ]
    return CombinedOptimizer([("tables", parts[0][1]), ("dense", GradientClippingOptimizer(parts[1][1]))])


def train(module: nn.Module, own: KeyedOptimizer, steps: range, names: list[str] = TABLES) -> None:
    """Global batches of 6 samples; a rank has its share of each."""
    size, rank = 1, 0
    if isinstance(module, DistributedModelParallel):
        size, rank = dist.get_world_size(), dist.get_rank()
    for step in steps:
        own.zero_grad()
        batch = random_batch(names, ROWS, 6, seed=step)
        local = split_batch(batch, [6 // size] * size)[rank]
        (module(local) * size).backward()
        own.step()


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def same(got: Any, want: Any, where: str = "") -> None:
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            same(got[key], want[key], f"{where} / {key}")
    elif isinstance(want, Tensor):
        assert got.shape == want.shape, where
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=where)
    else:
        assert got == want, where


def reference(kind: str, steps: int) -> tuple[Named, Named]:
    """Unsharded, uninterrupted."""
    module = model(0, TABLES)
    own = optimizer(module, kind)
    train(module, own, range(steps))
    return dict(module.state_dict()), own.state_dict()["state"]


# ------------------------------------------------------------------------------------------------------ checkpoints


def save(folder: str, kind: str) -> None:
    dmp = wrapped(0, 0)
    own = optimizer(dmp, kind)
    own.save_param_groups(True)
    train(dmp, own, range(3))
    dcp.save({"model": dmp.state_dict(), "optimizer": own.state_dict()}, checkpoint_id=folder)


def load(folder: str, kind: str, turn: int, want: tuple[Named, Named]) -> None:
    dmp = wrapped(5, turn)
    own = optimizer(dmp, kind)
    own.save_param_groups(True)
    if kind != "SGD":
        own.init_state()
    state = {"model": dmp.state_dict(), "optimizer": own.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    dmp.load_state_dict(state["model"])
    own.load_state_dict(state["optimizer"])
    train(dmp, own, range(3, 6))
    same(full_state_dict(dmp), want[0])
    same(whole(own.state_dict()["state"]), want[1])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_under_another_plan_and_world_size_as_if_it_had_never_stopped(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    want = reference(kind, 6)
    pool(2).run(save, str(tmp_path), kind)
    pool(3).run(load, str(tmp_path), kind, 3, want)
    pool(2).run(load, str(tmp_path), kind, 5, want)


def test_a_sharded_checkpoint_goes_on_in_the_unsharded_model(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(save, str(tmp_path), "Adam")
    module = model(5, TABLES)
    own = optimizer(module, "Adam")
    own.save_param_groups(True)
    own.init_state()
    state = {"model": module.state_dict(), "optimizer": own.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    module.load_state_dict(state["model"])
    own.load_state_dict(state["optimizer"])
    train(module, own, range(3, 6))
    want = reference("Adam", 6)
    same(dict(module.state_dict()), want[0])
    same(own.state_dict()["state"], want[1])


def load_file(file: bytes, want: tuple[Named, Named]) -> None:
    saved = torch.load(io.BytesIO(file), weights_only=True)
    dmp = wrapped(5, 2)
    own = optimizer(dmp, "Adam")
    dmp.load_state_dict(saved["model"])
    own.load_state_dict(saved["optimizer"])
    train(dmp, own, range(3, 6))
    same(full_state_dict(dmp), want[0])
    same(whole(own.state_dict()["state"]), want[1])
    # And from one plan straight into another.
    twin = wrapped(7, 4)
    theirs = optimizer(twin, "Adam")
    theirs.load_state_dict(own.state_dict())
    same(whole(theirs.state_dict()["state"]), want[1])


def test_a_file_of_the_unsharded_model_loads_before_the_first_step(pool: Pool) -> None:
    module = model(0, TABLES)
    own = optimizer(module, "Adam")
    train(module, own, range(3))
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": own.state_dict()}, file)
    pool(3).run(load_file, file.getvalue(), reference("Adam", 6))


def through_torch(folder: str, want: tuple[Named, Named]) -> None:
    dmp = wrapped(0, 0)
    own = optimizer(dmp, "Adam")
    train(dmp, own, range(3))
    dcp.save(
        {
            "model": dmp.state_dict(),
            "optimizer": get_optimizer_state_dict(dmp.module, PositionalOptimizer(own)),
        },
        checkpoint_id=folder,
    )
    other = wrapped(5, 3)
    theirs = optimizer(other, "Adam")
    state: Any = {
        "model": other.state_dict(),
        "optimizer": get_optimizer_state_dict(other.module, PositionalOptimizer(theirs)),
    }
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other.module, PositionalOptimizer(theirs), state["optimizer"])
    train(other, theirs, range(3, 6))
    same(full_state_dict(other), want[0])
    same(whole(theirs.state_dict()["state"]), want[1])
    # Whole tensors, as for a file of one process.
    entire = get_optimizer_state_dict(
        other.module, PositionalOptimizer(theirs), options=StateDictOptions(full_state_dict=True)
    )
    third = wrapped(7, 4)
    last = optimizer(third, "Adam")
    set_optimizer_state_dict(third.module, PositionalOptimizer(last), entire)
    same(whole(last.state_dict()["state"]), want[1])


def test_torchs_helpers_take_the_positional_face(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(through_torch, str(tmp_path), reference("Adam", 6))


# ------------------------------------------------------------------------------------------------------ the state dict


def entries(kind: str) -> list[Any]:
    """Of an optimizer over the tables alone: a rank may hold nothing at all of them."""
    dmp = wrapped(0, 0, ["one", "two"])
    tables = {name: p for name, p in dmp.named_parameters() if name.startswith("ebc")}
    own = KeyedOptimizerWrapper(tables, OPTIMIZERS[kind])
    own.save_param_groups(True)
    found: list[Any] = []
    for steps in (range(0), range(2)):
        train(dmp, own, steps, ["one", "two"])
        state = own.state_dict()
        found.append(
            {
                name: {slot: tuple(getattr(value, "shape", ())) for slot, value in slots.items()}
                for name, slots in state["state"].items()
            }
        )
        found.append([group["params"] for group in state["param_groups"]])
    return found


def test_every_rank_has_one_entry_per_table_of_the_tables_shape(pool: Pool) -> None:
    names = [f"ebc.embedding_bags.{table}.weight" for table in ("one", "two")]
    for kind, slots in {
        "Adam": {"step": (), "exp_avg": (7, 6), "exp_avg_sq": (7, 6)},
        "Adagrad": {"step": (), "sum": (7, 6)},
        "momentum": {"momentum_buffer": (7, 6)},
        "SGD": {},
    }.items():
        want = {name: slots for name in names if slots}
        for size in (2, 3):
            for found in pool(size).run(entries, kind):
                assert found == [want, [names], want, [names]]


def saved_shapes(sparse: bool) -> None:
    """Rows' state under cuts by rows, torch's and ours, and sparse gradients."""
    dmp = wrapped(0, 0, BY_ROWS)
    if sparse:
        set_sparse_grad([p for name, p in dmp.named_parameters() if name.startswith("ebc")])
    tables = {name: p for name, p in dmp.named_parameters() if name.startswith("ebc")}
    own = KeyedOptimizerWrapper(tables, (lambda p: torch.optim.SparseAdam(p)) if sparse else RowWiseAdagrad)
    train(dmp, own, range(2), BY_ROWS)
    module = model(0, BY_ROWS)
    if sparse:
        set_sparse_grad(module.ebc.parameters())
    named = {f"ebc.{name}": p for name, p in module.ebc.named_parameters()}
    want = KeyedOptimizerWrapper(named, (lambda p: torch.optim.SparseAdam(p)) if sparse else RowWiseAdagrad)
    train(module, want, range(2), BY_ROWS)
    same(whole(own.state_dict()), want.state_dict())
    twin = wrapped(3, 0, BY_ROWS)
    if sparse:
        set_sparse_grad([p for name, p in twin.named_parameters() if name.startswith("ebc")])
    theirs = KeyedOptimizerWrapper(
        {name: p for name, p in twin.named_parameters() if name.startswith("ebc")},
        (lambda p: torch.optim.SparseAdam(p)) if sparse else RowWiseAdagrad,
    )
    theirs.load_state_dict(want.state_dict())
    same(whole(theirs.state_dict()), want.state_dict())


@pytest.mark.parametrize("sparse", [False, True])
def test_state_per_row_and_of_sparse_gradients_equals_the_unsharded_models(pool: Pool, sparse: bool) -> None:
    for size in (2, 3):
        pool(size).run(saved_shapes, sparse)


class PerColumn(Optimizer):
    """Keeps a number per column of a table, as Adafactor does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["columns"] = torch.zeros(1, p.shape[1])


def refused() -> None:
    dmp = wrapped(0, 0)
    named = dict(dmp.named_parameters())
    columns = {name: p for name, p in named.items() if ".columns." in name}
    with pytest.raises(ConfigError, match=r"RowWiseAdagrad.*columns.*attach"):
        KeyedOptimizerWrapper(columns, RowWiseAdagrad)
    uneven = {name: p for name, p in named.items() if ".uneven." in name}
    own = KeyedOptimizerWrapper(uneven, PerColumn)
    with pytest.raises(ConfigError, match=r"'columns' has shape \(1, 6\) beside a tile of shape"):
        own.state_dict()
    everywhere = {name: p for name, p in named.items() if ".everywhere." in name}
    assert KeyedOptimizerWrapper(everywhere, PerColumn).state_dict()  # every rank has it all
    half = KeyedOptimizerWrapper(
        {name: p for name, p in named.items() if name.endswith(".two.weight")}, OPTIMIZERS["Adam"]
    )
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match="got only some of the 2 tiles"):
            half.state_dict()
    adam = KeyedOptimizerWrapper(uneven, OPTIMIZERS["Adam"])
    state = adam.state_dict()
    before = whole(state)
    (name,) = uneven
    for slots, match in (
        ({**state["state"][name], "exp_avg": torch.zeros(5, 6)}, r"got shape \(5, 6\); expected.*\(7, 6\)"),
        ({**state["state"][name], "more": torch.zeros(7, 6)}, "also has"),
        (torch.zeros(7, 6), "expected a dict"),
    ):
        with pytest.raises(ConfigError, match=match):
            adam.load_state_dict({"state": {name: slots}})
    same(whole(adam.state_dict()), before)


def test_state_that_tiles_cannot_be_put_together_to_is_refused_by_name(pool: Pool) -> None:
    pool(2).run(refused)


# --------------------------------------------------------------------------------------------------- state made early


def peeked(kind: str, want: Named) -> None:
    for peeks in (False, True):
        dmp = wrapped(0, 0)
        own = KeyedOptimizerWrapper(dict(dmp.named_parameters()), EARLY[kind])
        heard: list[str] = []
        own._optimizer.register_step_post_hook(lambda *_, heard=heard: heard.append("step"))
        if peeks:
            own.state_dict()
        assert not heard
        train(dmp, own, range(3))
        same(full_state_dict(dmp), want)


EARLY: dict[str, Callable[[Any], Optimizer]] = {
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1, lambd=0.1),
}


@pytest.mark.parametrize("kind", EARLY)
def test_a_state_dict_before_the_first_step_changes_no_step(pool: Pool, kind: str) -> None:
    module = model(0, TABLES)
    train(module, KeyedOptimizerWrapper(dict(module.named_parameters()), EARLY[kind]), range(3))
    pool(2).run(peeked, kind, dict(module.state_dict()))


def frozen(file: bytes, want: Named) -> None:
    saved = torch.load(io.BytesIO(file), weights_only=True)
    module = model(0, TABLES)
    for name in ("two", "some", "one"):
        module.ebc.embedding_bags[name].weight.requires_grad_(False)
    cuts = tilings(dist.get_world_size(), 1)
    dmp = DistributedModelParallel(module, plan={"ebc": cuts})
    own = optimizer(dmp, "Adam")
    assert {n for n in own.state_dict()["state"] if "ebc" in n} == {
        f"tables.ebc.embedding_bags.{name}.weight" for name in TABLES if name not in ("two", "some", "one")
    }
    own.load_state_dict(saved["optimizer"])
    same(whole(own.state_dict()["state"]), want)
    # And once more over what was adopted, now in place.
    own.load_state_dict(own.state_dict())
    twin = wrapped(5, 4)
    theirs = optimizer(twin, "Adam")
    theirs.load_state_dict(own.state_dict())
    same(whole(theirs.state_dict()["state"]), want)


def test_frozen_tables_adopt_the_state_they_had_while_they_trained(pool: Pool) -> None:
    module = model(0, TABLES)
    own = optimizer(module, "Adam")
    train(module, own, range(2))
    file = io.BytesIO()
    torch.save({"optimizer": own.state_dict()}, file)
    for size in (2, 3):
        pool(size).run(frozen, file.getvalue(), own.state_dict()["state"])


# ----------------------------------------------------------------------------------------------------------- clipping


def clipped(p: float, sparse: bool, want: tuple[float, Named]) -> None:
    dmp = wrapped(0, 0)
    if sparse:
        set_sparse_grad([q for name, q in dmp.named_parameters() if name.startswith("ebc")])
    own = GradientClippingOptimizer(
        KeyedOptimizerWrapper(dict(dmp.named_parameters()), OPTIMIZERS["SGD"]),
        GradientClipping.NORM, max_gradient=0.5, norm_type=p, enable_global_grad_clip=True,
    )  # fmt: skip
    norms: list[float] = []
    for step in range(3):
        train(dmp, own, range(step, step + 1))
        norms.append(float(cast(Tensor, own.last_total_grad_norm)))
    torch.testing.assert_close(norms, want[0], rtol=1e-6, atol=0)
    same(full_state_dict(dmp), want[1])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_the_norm_of_sharded_gradients_is_that_of_the_unsharded_model(pool: Pool, p: float, sparse: bool) -> None:
    module = model(0, TABLES)
    own = KeyedOptimizerWrapper(dict(module.named_parameters()), OPTIMIZERS["SGD"])
    norms = []
    for step in range(3):
        own.zero_grad()
        module(random_batch(TABLES, ROWS, 6, seed=step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, p)))
        own.step()
    for size in (2, 3):
        pool(size).run(clipped, p, sparse, (norms, dict(module.state_dict())))


def scaled() -> tuple[bool, bool]:
    """One gradient overflows, in a table that lies on the last rank alone."""
    dmp = wrapped(0, 0, ["one"])
    own = KeyedOptimizerWrapper(dict(dmp.named_parameters()), OPTIMIZERS["SGD"])
    scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
    moved = []
    for step in range(2):
        before = [p.detach().clone() for p in dmp.parameters()]
        own.zero_grad()
        scaler.scale(dmp(random_batch(["one"], ROWS, 3, seed=step))).backward()
        table = next(p for p in dmp.parameters() if p.dim() == 2)
        if not step and table.grad is not None and len(table):
            table.grad[0, 0] = float("inf")
        scaler.step(own)
        scaler.update()
        moved.append(not all(torch.equal(p, b) for p, b in zip(dmp.parameters(), before, strict=True)))
    return moved[0], moved[1]


def test_torchs_sharded_grad_scaler_skips_a_step_on_all_ranks(pool: Pool) -> None:
    assert pool(2).run(scaled) == [(False, True)] * 2


# ------------------------------------------------------------------------------------------------------ whole weights


def full() -> dict[str, Tensor]:
    dmp = wrapped(0, 0)
    model(3, TABLES).load_state_dict(full_state_dict(dmp), strict=True)
    assert any(type(part) is nn.parallel.DistributedDataParallel for part in dmp.children())
    return full_state_dict(dmp)


def test_the_full_state_of_a_wrapped_model_is_the_unsharded_models_by_name_and_value(pool: Pool) -> None:
    want = model(0, TABLES).state_dict()
    for size in (2, 3):
        for got in pool(size).run(full):
            assert list(got) == list(want)
            same(got, dict(want))
